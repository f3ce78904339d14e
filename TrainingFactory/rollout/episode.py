"""One episode: turns, reward, close. Whatever happens in the environment, a trajectory comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from TrainingFactory.common.texts import describe, valid_text
from TrainingFactory.common.user_code import place_of
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import ChatFormat, Environment, RewardFunction, SamplingSession
from TrainingFactory.rollout.scoring import Episode, score, scoring_failed
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.timeouts import Clock, OutOfTime, SelfCancelled, at_once, never_waits, within
from TrainingFactory.types import (
    Completion,
    Message,
    SamplersLost,
    SamplingParams,
    Status,
    Step,
    Task,
    ToolFailure,
    Trajectory,
    Turn,
)

log = logging.getLogger(__name__)
LARGE_TEXT = 50_000  # characters; tokenising so many takes longer than going to a thread


@dataclass(slots=True, frozen=True)
class EpisodeRules:
    """Holds what the episodes of an engine have in common."""

    environment: Callable[[Task], Environment]
    chat: ChatFormat
    params: SamplingParams
    reward: RewardFunction | None = None
    max_turns: int = 8
    timeout: float = 300.0  # seconds for the turns, and again for the reward, and again for closing
    max_reply_tokens: int = 1024
    runtime: ToolRuntime | None = None
    clock: Clock | None = None  # counts the seconds of the turns; None: the clock of the machine


@dataclass(eq=False)
class _Over(Exception):
    """The episode ends here, for this reason."""

    status: Status
    error: str | None = None


@dataclass(slots=True)
class _foreign:  # a generator would take three times as long
    """Around other people's code: what it raises ends its own episode and nothing else."""

    what: str
    caught: type[Exception] = Exception

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ToolFailure):
            raise _Over("tool_failure", f"{self.what}: {error}") from error
        # What samples inside the environment may be lost: that ends the run.
        if isinstance(error, (self.caught, SystemExit)) and not isinstance(error, SamplersLost):
            log.info("%s failed", self.what, exc_info=True)
            raise _Over("error", f"{self.what}{place_of(error)} raised {describe(error)}") from error


class EpisodeRun:
    """`max_length` is the sampler's; `seed_of` gives the seed of a turn; `key` says whose its recorded calls are."""

    def __init__(
        self,
        rules: EpisodeRules,
        trajectory: Trajectory,
        session: SamplingSession,
        max_length: int,
        seed_of: Callable[[int], int],
        key: EpisodeKey | None = None,
    ) -> None:
        self.rules, self.trajectory, self.session = rules, trajectory, session
        self.max_length, self.seed_of = max_length, seed_of
        self.key = key or EpisodeKey(0, trajectory.task.id, trajectory.member)
        self.environment: Environment | None = None  # open from `play` to `close`
        self._ended = False
        self.left = 0.0  # when it gave the sampler its place back

    async def run(self) -> Trajectory:
        started = time.perf_counter()
        try:
            await self.play()
            await self._score()
        finally:
            await self.close()
        self.trajectory.seconds = time.perf_counter() - started
        return self.trajectory

    async def play(self) -> None:
        """Play all turns. The environment stays open for the reward."""
        started = time.perf_counter()
        try:
            with _foreign("making the environment"):
                self.environment = self.rules.environment(self.trajectory.task)
            await within(self.rules.timeout, self._turns(self.environment), self.rules.clock)
        except _Over as over:
            self._end(over.status, over.error)
        except OutOfTime:
            self._end("error", f"the episode took longer than {self.rules.timeout:g} s")
        except SelfCancelled:
            self._end("error", "the environment cancelled its own episode")
        self._check()
        self.trajectory.seconds = time.perf_counter() - started

    def _check(self) -> None:
        for turn, following in pairwise(self.trajectory.turns):
            so_far = turn.prompt_ids + turn.completion.token_ids
            assert following.prompt_ids[: len(so_far)] == so_far, "a prompt must continue what was sampled"

    def leave(self) -> None:
        """Give the sampler its place back, once."""
        if not self.left:
            self.left = time.perf_counter()
            self.session.close()

    def episode(self) -> Episode | None:
        """Return what a reward sees; None if the episode failed, so that nothing is known of what it is worth."""
        trajectory, environment = self.trajectory, self.environment
        if environment is None or trajectory.status in ("error", "tool_failure") or not trajectory.turns:
            return None
        if isinstance(environment, ToolEnvironment):
            executor = environment.executor
        else:  # it runs its calls in a way of its own; those of the reward go by ours
            executor = self._attached(AsyncToolExecutor(environment.tools), environment)
        heldout = isinstance(self.key.step, str)
        return Episode(trajectory, environment, executor, self.rules.chat, heldout)

    async def _turns(self, environment: Environment) -> None:
        """Play turns until `_Over` is raised."""
        ids = await self._first_prompt(environment)
        for number in range(self.rules.max_turns):
            completion = await self._sample(ids, number)
            message = self.rules.chat.parse(completion.token_ids, ids, self.trajectory.tools)
            turn = Turn(ids, completion, message)
            for index, call in enumerate(turn.message.tool_calls):
                call.id = call.id or f"call_{number}_{index}"
            self.trajectory.turns.append(turn)
            if completion.finish == "length":
                raise _Over("truncated")  # no stop token was sampled, and none is made up
            ids = await self._step(environment, turn)
        raise _Over("max_turns")

    async def _first_prompt(self, environment: Environment) -> list[int]:
        with _foreign("the environment's tools and reset"):
            if isinstance(environment, ToolEnvironment):
                self._attached(environment.executor, environment)
            self.trajectory.tools = [tool.spec for tool in environment.tools]
            self.trajectory.prompt = _all_messages("reset", await environment.reset())
        with _foreign("the chat template", ValueError):
            prompt, tools, render = self.trajectory.prompt, self.trajectory.tools, self.rules.chat.render
            return await in_thread(render, prompt, tools) if _large(prompt) else render(prompt, tools)

    async def _sample(self, ids: list[int], number: int) -> Completion:
        room = self.max_length - len(ids)
        if room < 1:
            text = f"the prompt of turn {number} has {len(ids)} tokens, the sampler takes {self.max_length}"
            raise _Over("truncated", text)
        if self._ended:  # given up while the environment ignored its cancelling
            raise asyncio.CancelledError
        max_tokens = min(self.rules.params.max_tokens, room)
        params = dataclasses.replace(self.rules.params, seed=self.seed_of(number), max_tokens=max_tokens)
        completion = await self.session.sample(list(ids), params)  # the sampler's own: ours is trained on
        assert completion.token_ids, "a turn has at least one token"
        assert (completion.finish == "stop") == (completion.token_ids[-1] in params.stop_ids), "forged stop"
        return completion

    async def _step(self, environment: Environment, turn: Turn) -> list[int]:
        """Let the environment answer; return the prompt of the next turn."""
        with _foreign("the environment's step"):
            step = await environment.step(turn.message)
            if not isinstance(step, Step):
                raise TypeError(f"step must return a Step, not {type(step).__name__}")
            replies = _all_messages("step", step.replies)
        if self._ended:
            raise asyncio.CancelledError
        large = _large(replies)
        turn.replies = await in_thread(self._cut, replies) if large else self._cut(replies)
        turn.tool_results = list(step.tool_results)
        turn.signals = dict(step.signals)
        # What follows would be judged by what was lost: a model must not learn to avoid tools because a server died.
        if lost := [result for result in turn.tool_results if result.error == "unavailable"]:
            raise _Over("tool_failure", lost[0].content)
        if step.done:
            raise _Over("done")
        with _foreign("the chat template", ValueError):
            extend, so_far = self.rules.chat.extend, turn.prompt_ids + turn.completion.token_ids
            more = await in_thread(extend, turn, turn.replies) if large else extend(turn, turn.replies)
            return so_far + more

    def _cut(self, replies: Sequence[Message]) -> list[Message]:
        """Cut replies that are too long, in their content, before the template sees them."""
        cut, limit = self.rules.chat.cut, self.rules.max_reply_tokens
        return [dataclasses.replace(each, content=cut(valid_text(each.content), limit)) for each in replies]

    async def _score(self) -> None:
        trajectory = self.trajectory
        try:
            if (episode := self.episode()) is None:
                return
            with episode.executor.part("reward"):
                scoring = score(episode, self.rules.reward)
                trajectory.reward = await within(self.rules.timeout, scoring)
        except OutOfTime:
            trajectory.error = f"scoring took longer than {self.rules.timeout:g} s"
        except SamplersLost:
            raise
        except Exception as error:  # rewards are foreign code
            log.info("scoring task %s failed", trajectory.task.id, exc_info=True)
            trajectory.error = scoring_failed(error)

    async def close(self) -> None:
        """Close the environment, once."""
        environment, self.environment = self.environment, None
        if environment is None:
            return

        async def close() -> None:
            with _foreign("the environment's close"):
                await environment.close()

        code = getattr(environment.close, "__code__", None)
        try:
            at_once(close()) if code and never_waits(code) else await within(self.rules.timeout, close())
        except (_Over, OutOfTime, SelfCancelled) as error:  # too late to spoil the episode
            log.warning("task %s: the environment did not close: %r", self.trajectory.task.id, error)
        finally:  # whatever the environment does, its sessions are given back
            if isinstance(environment, ToolEnvironment) and environment.executor.holds_sessions:
                with contextlib.suppress(OutOfTime, SelfCancelled):
                    await within(self.rules.timeout, environment.executor.close())

    def _attached(self, executor: AsyncToolExecutor, environment: Environment) -> AsyncToolExecutor:
        if (runtime := self.rules.runtime) is not None:
            scope = None if runtime.cache is None else _scope(environment, self.trajectory.task)
            executor.attach(runtime, self.key, scope, environment)
        return executor

    def _end(self, status: Status, error: str | None) -> None:
        self._ended = True
        self.trajectory.status = status
        self.trajectory.error = error


def _scope(environment: Environment, task: Task) -> str:
    """Name what the state of an environment begins with: all of the task, because ids repeat in other data."""
    return digest(repr([type(environment).__qualname__, task]))


def _large(messages: Sequence[Message]) -> bool:
    """Tell whether the texts are so large that the event loop would wait, so that they go to a thread."""
    return sum([len(message.content) for message in messages]) >= LARGE_TEXT


def _all_messages(method: str, messages: list[Message]) -> list[Message]:
    if not isinstance(messages, list) or [each for each in messages if not isinstance(each, Message)]:
        raise TypeError(f"{method} must give a list of Message, not {str(messages)[:60]}")
    return messages
