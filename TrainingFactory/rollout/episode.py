"""One episode: turns, reward, close. Errors of the environment end the episode; a trajectory is always returned."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from TrainingFactory.common.images import LIMITS, as_text, shift_images
from TrainingFactory.common.texts import describe, replace_surrogates
from TrainingFactory.common.user_code import locate_error
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import ChatFormat, Environment, RewardFunction, SamplingSession
from TrainingFactory.rollout import folding
from TrainingFactory.rollout.scoring import OpenEpisode, format_error, score
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.timeouts import (
    OutOfTime,
    PausableClock,
    SelfCancelled,
    never_waits,
    run_inline,
    run_within,
)
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
IMAGES_AS_TEXT = "images/as_text"  # signal of a turn: images that its model did not see
LARGE_TEXT_CHARS = 50_000  # characters from which tokenizing takes longer than switching to a thread


@dataclass(slots=True, frozen=True)
class EpisodeSettings:
    """Settings shared by all episodes of a rollout engine."""

    make_environment: Callable[[Task], Environment]
    chat: ChatFormat
    params: SamplingParams
    reward: RewardFunction | None = None
    max_turns: int = 8
    timeout: float = 300.0  # `episode_timeout`: seconds each for the turns, for the reward and for closing
    max_reply_tokens: int = 1024
    runtime: ToolRuntime | None = None
    clock: PausableClock | None = None  # measures the turns; None: the system clock
    folding: folding.Folding | None = None  # None: a conversation is never folded


@dataclass(eq=False)
class _Stop(Exception):
    """Raised to end the episode with this status and error."""

    status: Status
    error: str | None = None


class ForkFailed(Exception):
    """Raised if the environment of a forked episode cannot be brought into the state of the fork. The episode is
    dropped."""


class EpisodeStart(Protocol):
    """Interface for the start of a forked episode; implemented by `ForkPoint` in `rollout/branching.py`."""

    async def restore_environment(self, run: EpisodeRun, environment: Environment) -> list[int]:
        """Restore the environment's state at the fork and return the prompt of the next turn, or raise ForkFailed."""
        ...


@dataclass(slots=True)
class _UserCodeGuard:  # three times as fast as a generator-based context manager
    """Context manager around user code: an exception ends only its own episode."""

    activity: str  # what the code does, or whose it is
    caught_errors: type[Exception] = Exception

    def __enter__(self) -> None: ...

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        if isinstance(error, ToolFailure):
            raise _Stop("tool_failure", f"{self.activity}: {error}") from error
        # SamplersLost passes: an environment may use a sampler itself, and losing it ends the run.
        if isinstance(error, (self.caught_errors, SystemExit)) and not isinstance(error, SamplersLost):
            log.info("%s failed", self.activity, exc_info=True)
            raise _Stop("error", f"{self.activity}{locate_error(error)} raised {describe(error)}") from error


# Entered on every turn, so they are made once.
_STATE_GUARD = _UserCodeGuard("the environment's state")
_STEP_GUARD = _UserCodeGuard("the environment's step")
_TEMPLATE_GUARD = _UserCodeGuard("the chat template", ValueError)


class EpisodeRun:
    """Plays and scores one episode. `seed_of` maps a turn to its seed; `key` identifies recorded tool calls."""

    def __init__(
        self,
        rules: EpisodeSettings,
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
        self.context: folding.Context | None = None  # None until the first prompt, or without folding
        self._has_ended = False
        self.session_closed_at = 0.0  # time at which the sampling session was closed
        # Called with the environment and the next prompt after every turn that continues; None: does not fork.
        self.after_turn: Callable[[Environment, list[int]], Awaitable[None]] | None = None
        self.fork_start: EpisodeStart | None = None  # of a forked episode
        self.drop_reason: str | None = None  # why a forked episode was not played

    def fork(
        self,
        trajectory: Trajectory,
        seed_of: Callable[[int], int],
        start: EpisodeStart,
        environment: Environment | None,
    ) -> EpisodeRun:
        """Return an episode that continues after the turns of this one. `environment` is a copy of this episode's
        environment; None: `start` restores the state in a new environment. The new episode shares this one's sampling
        session until `open_fork`."""
        key = self.key._replace(member=trajectory.member)
        child = EpisodeRun(self.rules, trajectory, self.session, self.max_length, seed_of, key)
        child.fork_start, child.environment = start, environment
        child.context = None if self.context is None else self.context.copy()
        return child

    def open_fork(self) -> None:
        """Open the sampling session of a forked episode."""
        self.session = self.session.fork()

    @property
    def num_turns(self) -> int:
        """Return the number of turns so far, without summaries of the conversation."""
        return sum(not turn.summary for turn in self.trajectory.turns)

    async def run(self) -> Trajectory:
        start_time = time.perf_counter()
        try:
            await self.play()
            await self._score_episode()
        finally:
            await self.close()
        self.trajectory.seconds = time.perf_counter() - start_time
        return self.trajectory

    async def play(self) -> None:
        """Play all turns. The environment stays open for the reward."""
        start_time = time.perf_counter()
        try:
            if self.environment is None:
                with _UserCodeGuard("making the environment"):
                    self.environment = self.rules.make_environment(self.trajectory.task)
            await run_within(self.rules.timeout, self._play_turns(self.environment), self.rules.clock)
        except _Stop as stop:
            self._end_episode(stop.status, stop.error)
        except ForkFailed as error:
            self.drop_reason = str(error)
            self._end_episode("error", self.drop_reason)
        except OutOfTime:
            self._end_episode(
                "error",
                f"the episode took longer than {self.rules.timeout:g} s (environment.episode_timeout)",
            )
        except SelfCancelled:
            self._end_episode("error", "the environment cancelled its own episode")
        self._check_prompt_chain()
        self.trajectory.seconds = time.perf_counter() - start_time

    def _check_prompt_chain(self) -> None:
        for turn, next_turn in pairwise(self.trajectory.turns):
            if next_turn.fold is not None:
                continue
            previous_ids = turn.prompt_ids + turn.completion.token_ids
            assert next_turn.prompt_ids[: len(previous_ids)] == previous_ids, (
                "a prompt must extend the sampled tokens"
            )

    def close_session(self) -> None:
        """Close the sampling session. Further calls do nothing."""
        if not self.session_closed_at:
            self.session_closed_at = time.perf_counter()
            self.session.close()

    def make_open_episode(self) -> OpenEpisode | None:
        """Return the reward function's input; None if the episode failed, because then it cannot be scored."""
        trajectory, environment = self.trajectory, self.environment
        if environment is None or trajectory.status in ("error", "tool_failure") or not trajectory.turns:
            return None
        if isinstance(environment, ToolEnvironment):
            executor = environment.executor
        else:  # the environment runs its calls itself; the reward's calls need an executor
            executor = self.attach(AsyncToolExecutor(environment.tools), environment)
        is_heldout = isinstance(self.key.step, str)
        return OpenEpisode(trajectory, environment, executor, self.rules.chat, is_heldout)

    async def _play_turns(self, environment: Environment) -> None:
        """Play turns until `_Stop`, which ends the episode, is raised."""
        if self.fork_start is None:
            ids = await self._render_first_prompt(environment)
        else:
            ids = await self.fork_start.restore_environment(self, environment)
        fold_kind: str | None = None
        for _ in range(self.num_turns, self.rules.max_turns):
            if self.rules.folding is not None:
                ids, fold_kind = await self._fold_prompt(ids, self.rules.folding)
            turn = await self._sample_turn(ids)
            turn.state = _get_state_name(environment)
            if fold_kind is not None:
                self._record_fold_kind(turn, fold_kind)
            if turn.completion.finish == "length":
                raise _Stop("truncated")  # no stop token was sampled, and none is added
            ids = await self._step_environment(environment, turn)
            if self.after_turn is not None:
                await self.after_turn(environment, ids)
        raise _Stop("max_turns")

    async def _sample_turn(self, ids: list[int], max_tokens: int | None = None) -> Turn:
        turn_index = len(self.trajectory.turns)
        completion = await self._sample_completion(ids, turn_index, max_tokens)
        message = self.rules.chat.parse(completion.token_ids, ids, self.trajectory.tools)
        turn = Turn(ids, completion, message)
        for call_index, call in enumerate(turn.message.tool_calls):
            call.id = call.id or f"call_{turn_index}_{call_index}"
        self.trajectory.turns.append(turn)
        return turn

    def _record_fold_kind(self, turn: Turn, fold_kind: str) -> None:
        turn.fold = fold_kind
        if self.context is not None and not self.context.has_task:
            turn.signals[folding.TASK_LOST] = 1.0

    async def _fold_prompt(self, ids: list[int], rules: folding.Folding) -> tuple[list[int], str | None]:
        """Return the prompt of the next turn, and the kind of its fold (None: the prompt is not folded)."""
        if self.context is None:
            if len(ids) > rules.limit:
                raise _Stop("error", folding.format_first_prompt_error(len(ids), rules))
            self.context = folding.Context.begin(self.trajectory.prompt, ids)
            return ids, None
        self.context.add(self.trajectory.turns[-1])
        if len(ids) <= rules.limit:
            return ids, None
        if self.context.num_folds < rules.max_folds:
            context = await self._fold_context(rules)
            if context is not self.context:
                self.context = context
                with _TEMPLATE_GUARD:
                    render_args = (context, self.rules.chat, self.trajectory.tools)
                    folded_ids = await in_thread(folding.render_context, *render_args)
                if len(folded_ids) >= self.max_length:
                    error_text = folding.format_too_long_error(len(folded_ids), self.max_length, rules)
                    raise _Stop("truncated", error_text)
                return folded_ids, rules.fold
        if len(ids) >= self.max_length:
            num_folds = self.context.num_folds
            error_text = folding.format_no_fold_error(len(ids), self.max_length, num_folds, rules)
            raise _Stop("truncated", error_text)
        return ids, None

    async def _fold_context(self, settings: folding.Folding) -> folding.Context:
        assert self.context is not None
        if settings.fold != "summary":
            with _UserCodeGuard(f"folding the conversation ({folding.KEY})"):
                return await folding.fold(self.context, settings)
        last_turn = self.trajectory.turns[-1]
        with _TEMPLATE_GUARD:
            ids = await in_thread(folding.render_request, last_turn, settings.template, self.rules.chat)
        if len(ids) >= self.max_length:
            raise _Stop("truncated", folding.format_no_room_error(len(ids), self.max_length, settings))
        turn = await self._sample_turn(ids, settings.summary_tokens)
        turn.summary = True
        turn.message.tool_calls.clear()  # nothing executes them
        return folding.with_summary(self.context, turn.message.content)

    async def _render_first_prompt(self, environment: Environment) -> list[int]:
        with _UserCodeGuard("the environment's tools and reset"):
            if isinstance(environment, ToolEnvironment):
                self.attach(environment.executor, environment)
            self.trajectory.prompt = _check_messages("reset", await environment.reset())
            self.trajectory.tools = [tool.spec for tool in environment.tools]  # `reset` may set them
        with _TEMPLATE_GUARD:
            prompt, tools, render = self.trajectory.prompt, self.trajectory.tools, self.rules.chat.render
            return (
                await in_thread(render, prompt, tools)
                if _are_messages_large(prompt)
                else render(prompt, tools)
            )

    async def _sample_completion(
        self, ids: list[int], turn_index: int, max_tokens: int | None = None
    ) -> Completion:
        tokens_left = self.max_length - len(ids)
        if tokens_left < 1:
            error = f"the prompt of turn {turn_index} has {len(ids)} tokens, the limit is {self.max_length}"
            raise _Stop("truncated", error)
        if self._has_ended:  # timed out, and the environment ignored the cancellation
            raise asyncio.CancelledError
        max_tokens = min(max_tokens or self.rules.params.max_tokens, tokens_left)
        params = self.rules.params.for_turn(max_tokens, self.seed_of(turn_index))
        completion = await self.session.sample(list(ids), params)  # a copy, because `ids` is trained on
        assert completion.token_ids, "the sampler returned no token"
        assert (completion.finish == "stop") == (completion.token_ids[-1] in params.stop_ids), (
            "wrong finish reason"
        )
        return completion

    async def _step_environment(self, environment: Environment, turn: Turn) -> list[int]:
        """Step the environment and return the prompt of the next turn."""
        with _STEP_GUARD:
            step = await environment.step(turn.message)
            if not isinstance(step, Step):
                raise TypeError(f"step must return a Step, not {type(step).__name__}")
            replies = _check_messages("step", step.replies)
        if self._has_ended:
            raise asyncio.CancelledError
        is_large = _are_messages_large(replies)
        turn.replies = await in_thread(self.truncate, replies) if is_large else self.truncate(replies)
        turn.tool_results = list(step.tool_results)
        turn.signals.update(step.signals)
        if not self.rules.chat.sees_images and (num_images := _count_images(replies)):
            turn.signals[IMAGES_AS_TEXT] = num_images
        # End the episode without a reward: a model must not learn to avoid tools because a server was down.
        if unavailable_results := [result for result in turn.tool_results if result.error == "unavailable"]:
            raise _Stop("tool_failure", unavailable_results[0].content)
        if step.done:
            raise _Stop("done")
        with _TEMPLATE_GUARD:
            render, previous_ids = self.rules.chat.extend, turn.prompt_ids + turn.completion.token_ids
            reply_ids = (
                await in_thread(render, turn, turn.replies) if is_large else render(turn, turn.replies)
            )
            return previous_ids + reply_ids

    def truncate(self, replies: Sequence[Message]) -> list[Message]:
        """Truncate the contents of replies to `max_reply_tokens`, before they are rendered. A model that reads only
        text gets placeholders for images."""
        chat, max_tokens = self.rules.chat, self.rules.max_reply_tokens
        truncated_replies: list[Message] = []
        for reply in replies:
            text, images = reply.content, reply.images
            if images and not chat.sees_images:
                announce_placeholders()
                text, images = as_text(text, images), []
            short_text = chat.truncate(replace_surrogates(text), max_tokens)
            truncated_replies.append(
                reply.with_content(short_text, shift_images(images, text, short_text) if images else [])
            )
        return truncated_replies

    async def _score_episode(self) -> None:
        trajectory = self.trajectory
        try:
            if (episode := self.make_open_episode()) is None:
                return
            with episode.executor.measure("reward"):
                score_coroutine = score(episode, self.rules.reward)
                trajectory.reward = await run_within(self.rules.timeout, score_coroutine)
        except OutOfTime:
            trajectory.error = f"scoring took longer than {self.rules.timeout:g} s"
        except SamplersLost:
            raise
        except Exception as error:  # rewards are user code
            log.info("scoring task %s failed", trajectory.task.id, exc_info=True)
            trajectory.error = format_error(error)

    async def close(self) -> None:
        """Close the environment. Further calls do nothing."""
        environment, self.environment = self.environment, None
        if environment is None:
            return

        async def close() -> None:
            with _UserCodeGuard("the environment's close"):
                await environment.close()

        close_code = getattr(environment.close, "__code__", None)
        try:
            run_inline(close()) if close_code and never_waits(close_code) else await run_within(
                self.rules.timeout, close()
            )
        except (_Stop, OutOfTime, SelfCancelled) as error:  # the episode is complete and stays valid
            log.warning("task %s: closing the environment failed: %r", self.trajectory.task.id, error)
        finally:  # even then release the tools' sessions
            if isinstance(environment, ToolEnvironment) and environment.executor.holds_sessions:
                with contextlib.suppress(OutOfTime, SelfCancelled):
                    await run_within(self.rules.timeout, environment.executor.close())

    def attach(self, executor: AsyncToolExecutor, environment: Environment) -> AsyncToolExecutor:
        if (runtime := self.rules.runtime) is not None:
            cache_scope = None if runtime.cache is None else _hash_state(environment, self.trajectory.task)
            executor.attach(runtime, self.key, cache_scope, environment)
        return executor

    def _end_episode(self, status: Status, error: str | None) -> None:
        self._has_ended = True
        self.trajectory.status = status
        self.trajectory.error = error


@functools.cache
def announce_placeholders() -> None:
    """Log once that the model gets placeholders instead of images."""
    log.warning(
        "tools return images, but the model reads only text: it gets placeholders such as [image 640x480]. "
        "Metric: %s", IMAGES_AS_TEXT,
    )  # fmt: skip


def _get_state_name(environment: Environment) -> str | None:
    """Return the environment's name of its current state; None if the state has no name."""
    with _STATE_GUARD:
        state = getattr(environment, "state", None)
    return state if isinstance(state, str) else None


def _hash_state(environment: Environment, task: Task) -> str:
    """Return the tool cache's key of an environment's initial state. Hashes the whole task: ids are not unique."""
    return digest(repr([type(environment).__qualname__, task]))


def _are_messages_large(messages: Sequence[Message]) -> bool:
    """Return whether tokenizing the messages would block the event loop, so that it should run in a thread."""
    return sum([len(message.content) for message in messages]) >= LARGE_TEXT_CHARS


def _count_images(messages: Sequence[Message]) -> int:
    return sum([len(message.images) for message in messages])


def _check_messages(method: str, messages: list[Message]) -> list[Message]:
    if not isinstance(messages, list) or [item for item in messages if not isinstance(item, Message)]:
        raise TypeError(f"{method} must return a list of Message, not {str(messages)[:60]}")
    counts = [len(message.images) for message in messages if message.images]
    if counts and (num_images := sum(counts) if method == "step" else max(counts)) > LIMITS.max_per_turn:
        raise ValueError(f"{method} returned {num_images} images; a turn has at most {LIMITS.max_per_turn}")
    return messages
