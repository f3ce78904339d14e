"""Episodes whose turns ms-swift samples. TrainingFactory provides everything else: tools, limits, timeouts and the
reward."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from TrainingFactory.assembly.endpoint_rollouts import MAX_LENGTH, ClosedSession, TextFormat
from TrainingFactory.models.chat import TemplateChatFormat
from TrainingFactory.protocols import Environment
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.timeouts import PausableClock
from TrainingFactory.types import Completion, Finish, Message, ToolSpec, Trajectory, Turn


class SampledTurn(NamedTuple):
    """Turn sampled by ms-swift; `prefix_ids`, such as an empty thought, belong to the prompt."""

    prefix_ids: list[int]
    token_ids: list[int]  # empty if the engine reports only text
    text: str
    finish: Finish


class SwiftFormat(TextFormat):
    """Parses turns that ms-swift samples. It renders no prompts, because ms-swift does."""

    def __init__(self, chat: TemplateChatFormat) -> None:
        self.chat = chat
        self.stop_ids = tuple(chat.stop_ids)

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        return self.chat.parse(token_ids, prompt_ids, tools)

    def truncate(self, text: str, max_tokens: int) -> str:
        return self.chat.truncate(text, max_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.chat.decode(token_ids)


class SwiftEpisode(EpisodeRun):
    """Episode that gets its turns from ms-swift; `begin` and `advance` return when it needs a turn or has ended."""

    def __init__(self, rules: EpisodeSettings, chat: SwiftFormat, trajectory: Trajectory) -> None:
        # The limits of an episode measure the environment, not the time in which ms-swift samples other episodes.
        self._clock = PausableClock()
        rules = dataclasses.replace(rules, chat=chat, clock=self._clock)
        episode_key = EpisodeKey(0, trajectory.task.id, trajectory.member)
        super().__init__(rules, trajectory, ClosedSession(), MAX_LENGTH, lambda turn: 0, episode_key)
        self._chat = chat
        self._turn_needed_event = asyncio.Event()
        self._turn_queue: asyncio.Queue[SampledTurn] = asyncio.Queue()
        self._run_task: asyncio.Task[Trajectory] | None = None

    @property
    def is_over(self) -> bool:
        return self._run_task is not None and self._run_task.done()

    async def begin(self) -> None:
        """Reset the environment, which sets `trajectory.prompt` and `trajectory.tools`."""
        self._run_task = asyncio.create_task(self.run())
        await self._wait_until_turn_needed(self._run_task)

    async def advance(self, turn: SampledTurn) -> None:
        """Process a sampled turn in the environment, and score the episode if it ends."""
        assert self._run_task is not None and not self._run_task.done()
        self._turn_needed_event.clear()
        self._turn_queue.put_nowait(turn)
        await self._wait_until_turn_needed(self._run_task)

    async def abandon(self) -> None:
        """Cancel an episode that ms-swift does not finish."""
        if self._run_task is not None and not self._run_task.done():
            self._run_task.cancel()
            await asyncio.wait({self._run_task})

    async def _wait_until_turn_needed(self, task: asyncio.Task[Trajectory]) -> None:
        event_task = asyncio.create_task(self._turn_needed_event.wait())
        await asyncio.wait({task, event_task}, return_when=asyncio.FIRST_COMPLETED)
        event_task.cancel()
        if task.done():
            task.result()  # raises what is not an error of the episode

    async def _play_turns(self, environment: Environment) -> None:
        await self._render_first_prompt(environment)
        for turn_number in range(self.rules.max_turns):
            sample = await self._await_next_turn()
            tools = self.trajectory.tools
            if sample.token_ids:
                message = self._chat.parse(sample.token_ids, sample.prefix_ids, tools)
            else:
                message = self._chat.chat.parse_text(sample.text, tools)
            for index, call in enumerate(message.tool_calls):
                call.id = call.id or f"call_{turn_number}_{index}"
            # ms-swift keeps the log-probs; nothing here reads them.
            completion = Completion(sample.token_ids, [0.0] * len(sample.token_ids), sample.finish)
            turn = Turn(sample.prefix_ids, completion, message)
            self.trajectory.turns.append(turn)
            if sample.finish == "length":
                return self._end_episode("truncated", None)
            await self._step_environment(environment, turn)
        return self._end_episode("max_turns", None)

    async def _await_next_turn(self) -> SampledTurn:
        self._clock.pause()
        self._turn_needed_event.set()
        try:
            return await self._turn_queue.get()
        finally:
            self._clock.resume()

    def _check_prompt_chain(self) -> None:
        """Skip the check of the base class, because ms-swift renders the prompts."""
