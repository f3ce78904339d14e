"""Episodes that a function plays instead of a model. They have messages and rewards, but no tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from TrainingFactory.assembly.endpoint_rollouts import ClosedSession, TextFormat
from TrainingFactory.common.user_code import load_objects
from TrainingFactory.protocols import Environment, EnvironmentFactory
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.types import Completion, Message, SamplingParams, Task, Trajectory, Turn

# Returns the model's next message; raises StopIteration if it has none.
Player = Callable[[Sequence[Message]], Message]
MakePlayer = Callable[[Environment, Task], Player]
JUNK_REPLY = "I do not know."


class PlayedEpisode(EpisodeRun):
    """Episode whose turns come from a player function instead of a model. It ends with status max_turns when the player
    has no further message."""

    def __init__(self, rules: EpisodeSettings, task: Task, make_player: MakePlayer) -> None:
        trajectory = Trajectory(task, group=f"check/{task.id}")
        super().__init__(rules, trajectory, ClosedSession(), max_length=2**31, seed_of=int)
        self._make_player = make_player

    async def _play_turns(self, environment: Environment) -> None:
        await self._render_first_prompt(environment)
        player = self._make_player(environment, self.trajectory.task)
        messages = list(self.trajectory.prompt)
        for turn_index in range(self.rules.max_turns):
            try:
                message = player(messages)
            except StopIteration:
                break
            for call_index, call in enumerate(message.tool_calls):
                call.id = call.id or f"call_{turn_index}_{call_index}"
            turn = Turn([], Completion([], [], "stop"), message)
            self.trajectory.turns.append(turn)
            await self._step_environment(environment, turn)
            messages += [message, *turn.replies]
        self._end_episode("max_turns", None)


async def play(
    environment: EnvironmentFactory, task: Task, make_player: MakePlayer, max_turns: int
) -> Trajectory:
    rules = EpisodeSettings(environment, TextFormat(), SamplingParams(), max_turns=max_turns)
    return await PlayedEpisode(rules, task, make_player).run()


def make_junk_player(environment: Environment, task: Task) -> Player:
    return lambda _: Message("assistant", JUNK_REPLY)


def replay(trajectory: Trajectory) -> MakePlayer:
    """Return a player that repeats the model's messages of an earlier episode."""
    return lambda _, __: _make_scripted_player(iter([turn.message for turn in trajectory.turns]))


def find_reference(environment: Any, tasks: Sequence[Task], reference: str | None) -> MakePlayer | None:
    """Return the reference player: the user's function `solve` (FILE.py:FUNCTION), the environment's expert, or the
    answers of the tasks; None if there is none."""
    if reference is not None:
        path, _, [*functions] = load_objects("reference", reference)
        if len(functions) != 1 or not callable(functions[0]):
            raise ValueError(f"name one function in {path}: --reference {path}:FUNCTION")
        return lambda _, task: partial(_call_solver, functions[0], task)
    if hasattr(environment, "expert"):
        return lambda instance, _: _make_scripted_player(iter(instance.expert()))  # type: ignore[attr-defined]
    if all(task.answer is not None for task in tasks):
        return lambda _, task: _make_scripted_player(iter([Message("assistant", str(task.answer))]))
    return None


def _make_scripted_player(messages: Iterator[Message]) -> Player:
    return lambda _: next(messages)


def _call_solver(
    solve: Callable[[Sequence[Message], Task], Any], task: Task, messages: Sequence[Message]
) -> Message:
    reply = solve(messages, task)
    return reply if isinstance(reply, Message) else Message("assistant", str(reply))
