"""Episodes that fork at the end of a turn into several continuations of the same conversation.

A decision to fork depends only on the path so far, never on timing or on other paths. So do member numbers, seeds and
budgets: the same episodes result whatever the order in which they are played.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from TrainingFactory.common.texts import describe
from TrainingFactory.common.user_code import locate_error
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Environment
from TrainingFactory.rollout.episode import EpisodeRun, ForkFailed
from TrainingFactory.rollout.group_scoring import gather_or_cancel
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.recording import EpisodeKey, Recorder
from TrainingFactory.tools.timeouts import OutOfTime, SelfCancelled, run_within
from TrainingFactory.types import Completion, SamplersLost, Step, Trajectory, Turn

log = logging.getLogger(__name__)
Player = Callable[[EpisodeRun], Coroutine[Any, Any, None]]
ForkMethod = Literal["own", "fresh", "replay"]


@dataclass(slots=True, frozen=True)
class Branching:
    """Rules for forking episodes (`training.branching`): after which turns, into how many continuations, and up to
    which limits."""

    at: Literal["tool_result", "turns", "entropy", "function"] = "tool_result"
    continuations: int = 2  # of one fork, the episode itself included
    max_forks: int = 2  # along one path
    every: int = 1  # fork only after turns whose number is a multiple of it
    turns: Sequence[int] = ()  # at=turns: numbers of the turns, from 1
    entropy: float = 1.0  # at=entropy: least entropy of the turn, in nats per token
    function: Callable[[Sequence[Turn]], bool] | None = None  # at=function
    max_episodes: int | None = None  # per task
    max_tokens: int | None = None  # sampled tokens per task beyond which no path forks
    replay: bool = True  # repeat the steps of an environment that cannot fork
    timeout: float = 60.0  # seconds for a fork of an environment, or for repeating its steps
    in_waves: bool = False  # forks start together when all earlier episodes of the batch have ended

    def forks_after(self, turns: Sequence[Turn]) -> bool:
        """Return whether an episode with these turns forks after the last one, if its budget allows."""
        num_turns, turn = sum(not turn.summary for turn in turns), turns[-1]
        if num_turns % self.every:
            return False
        if self.at == "turns":
            return num_turns in self.turns
        if self.at == "tool_result":
            return bool(turn.tool_results)
        if self.at == "entropy":
            return estimate_entropy(turn.completion) >= self.entropy
        assert self.function is not None
        return bool(self.function(turns))


def estimate_entropy(completion: Completion) -> float:
    """Return the mean of -log p over the sampled tokens: an unbiased estimate of their mean entropy, in nats."""
    return -sum(completion.logprobs) / len(completion.logprobs)


def compute_share(total: int | None, num_shares: int, index: int) -> int | None:
    """Return share `index` of `num_shares` equal shares of a total; the first shares get the remainder."""
    return None if total is None else total // num_shares + (index < total % num_shares)


@dataclass(slots=True)
class PathBudget:
    """Budget of one path through a tree of forked episodes: its shares of the task's `max_episodes` and `max_tokens`,
    and its number of forks so far."""

    max_leaves: int | None  # leaves that the path may still end in; None: no limit
    tokens: int | None  # sampled tokens left
    num_forks: int = 0  # so far
    num_counted_turns: int = 0  # turns whose tokens are subtracted

    def count_turns(self, turns: Sequence[Turn]) -> None:
        """Subtract the sampled tokens of the turns since the last call from the remaining tokens."""
        if self.tokens is not None:
            self.tokens -= sum(len(turn.completion.token_ids) for turn in turns[self.num_counted_turns :])
        self.num_counted_turns = len(turns)

    def allows(self, num_continuations: int, turn_tokens: int) -> bool:
        """Return whether the remaining budget gives each of the continuations one episode and `turn_tokens`
        tokens."""
        has_episodes = self.max_leaves is None or self.max_leaves >= num_continuations
        return has_episodes and (self.tokens is None or self.tokens >= num_continuations * turn_tokens)

    def divide(self, n: int) -> list[PathBudget]:
        """Return one budget per continuation of a fork: an equal share of the remaining episodes and tokens."""
        return [
            PathBudget(
                compute_share(self.max_leaves, n, i),
                compute_share(self.tokens, n, i),
                self.num_forks + 1,
                self.num_counted_turns,
            )
            for i in range(n)
        ]


def is_stateless(environment: Environment) -> bool:
    """Return whether no step can change the environment's state: it is a plain tool environment, and all its tools are
    pure."""
    if not isinstance(environment, ToolEnvironment) or type(environment).step is not ToolEnvironment.step:
        return False
    return all(getattr(tool, "options", ToolOptions()).pure for tool in environment.executor.tools)


def choose_fork_method(environment: Environment, may_replay: bool) -> ForkMethod | None:
    """Return how to fork an environment: "own" calls its `fork`; "fresh" makes another one, because it has no state;
    "replay" makes another one and repeats the steps. None: it cannot fork. An environment whose tools have a session
    per episode does not use `fork`, because `fork` does not copy the state of the session."""
    fork = getattr(environment, "fork", ...)
    if fork is None:
        return None
    if is_stateless(environment):
        return "fresh"
    has_sessions = isinstance(environment, ToolEnvironment) and environment.executor.has_session_state
    if fork is not ... and not has_sessions:
        return "own"
    return "replay" if may_replay else None


@dataclass(slots=True)
class ForkPoint:
    """Start of a forked episode, after the turns that it shares with its parent."""

    prompt_ids: list[int]  # of the next turn
    turn_keys: list[EpisodeKey]  # key under which the tool calls of each shared turn are recorded
    num_batches: int  # tool batches of the shared turns
    method: ForkMethod
    timeout: float

    async def restore_environment(self, run: EpisodeRun, environment: Environment) -> list[int]:
        """Restore the environment's state at the fork; return the prompt of the next turn."""
        if self.method == "own":
            return list(self.prompt_ids)
        try:
            await run_within(self.timeout, self._replay_shared_turns(run, environment))
        except ForkFailed:
            raise
        except OutOfTime:
            raise ForkFailed(f"rebuilding the environment took longer than {self.timeout:g} s") from None
        except SamplersLost:
            raise
        except (Exception, SelfCancelled, SystemExit) as error:  # the environment is user code
            location = locate_error(error)
            raise ForkFailed(f"rebuilding the environment{location} raised {describe(error)}") from error
        return list(self.prompt_ids)

    async def _replay_shared_turns(self, run: EpisodeRun, environment: Environment) -> None:
        """Reset a fresh environment, and step it through the shared turns unless it is stateless."""
        executor = environment.executor if isinstance(environment, ToolEnvironment) else None
        if executor is not None:
            run.attach(executor, environment)
        if await environment.reset() != run.trajectory.prompt:
            raise ForkFailed("a second reset of the task gives another prompt")
        if self.method == "replay":
            for index, turn in enumerate(run.trajectory.turns):
                if turn.summary:  # the environment did not get it
                    continue
                if executor is not None:
                    executor.use_key(self.turn_keys[index], records=False)
                _check_replayed_step(index, turn, await environment.step(copy.deepcopy(turn.message)), run)
        if executor is not None:
            executor.use_key(run.key, batches=self.num_batches)


def _check_replayed_step(turn_index: int, turn: Turn, step: Step, run: EpisodeRun) -> None:
    replayed_results = [(result.ok, result.error, result.content) for result in step.tool_results]
    recorded_results = [(result.ok, result.error, result.content) for result in turn.tool_results]
    if replayed_results != recorded_results or run.truncate(step.replies) != turn.replies or step.done:
        raise ForkFailed(f"the replies to turn {turn_index + 1} differ when its calls are repeated")


def _collect_turn_keys(run: EpisodeRun) -> list[EpisodeKey]:
    """Return, for each turn, the key under which its tool calls are recorded: the key of the episode that sampled the
    turn."""
    shared_keys = run.fork_start.turn_keys if isinstance(run.fork_start, ForkPoint) else []
    return [*shared_keys, *[run.key] * (len(run.trajectory.turns) - len(shared_keys))]


@dataclass(slots=True)
class EpisodeForest:
    """The episodes of one batch, by group. A group grows when one of its episodes forks. `seed_functions[i]`
    maps the member and the turn to the sampling seed of a turn in group i."""

    branching: Branching
    groups: list[list[EpisodeRun]]
    seed_functions: Sequence[Callable[[int, int], int]]
    warn: Callable[[str], None]
    recorder: Recorder | None = None
    num_dropped: int = 0  # continuations whose environment could not be forked
    _budgets: dict[EpisodeRun, PathBudget] = field(default_factory=dict)
    _group_indices: dict[EpisodeRun, int] = field(default_factory=dict)
    _root_counts: list[int] = field(default_factory=list)  # number of roots of each group
    _fork_starters: dict[EpisodeRun, Callable[[EpisodeRun], None]] = field(default_factory=dict)
    _queued_forks: list[EpisodeRun] = field(default_factory=list)  # forks that start with the next wave

    def __post_init__(self) -> None:
        self._root_counts = [len(group) for group in self.groups]
        for group_index, group in enumerate(self.groups):
            for root_index, run in enumerate(group):
                max_episodes = compute_share(self.branching.max_episodes, len(group), root_index)
                max_tokens = compute_share(self.branching.max_tokens, len(group), root_index)
                self._add_run(run, group_index, PathBudget(max_episodes, max_tokens))

    def _add_run(self, run: EpisodeRun, group_index: int, budget: PathBudget) -> None:
        self._budgets[run], self._group_indices[run] = budget, group_index
        run.after_turn = functools.partial(self._fork_after_turn, run)

    @property
    def runs(self) -> list[EpisodeRun]:
        return [run for group in self.groups for run in group]

    async def play_group(self, group_index: int, player: Player) -> None:
        """Play the episodes of the group `group_index`, and all episodes forked from them."""
        await gather_or_cancel([self._play_with_forks(run, player) for run in list(self.groups[group_index])])

    async def play_in_waves(self, player: Player) -> None:
        """Play the batch in waves: first the unforked episodes, then the episodes forked in the previous wave, and so
        on. Open sessions and start episodes in a fixed order."""
        wave = self.runs
        while wave:
            await gather_or_cancel([player(run) for run in wave])
            wave, self._queued_forks = self._queued_forks, []
            wave.sort(key=lambda run: (self._group_indices[run], run.trajectory.member))
            for run in wave:
                run.open_fork()

    async def _play_with_forks(self, run: EpisodeRun, player: Player) -> None:
        """Play an episode and the episodes forked from it, which run in separate tasks as soon as there is room. Wait
        until all have ended. While it waits for its forks, the episode uses no slot of the concurrency limit."""
        children: list[asyncio.Task[None]] = []
        self._fork_starters[run] = lambda child: children.append(
            asyncio.ensure_future(self._play_with_forks(child, player))
        )
        try:
            await player(run)
            await asyncio.gather(*children)
        except BaseException:
            for task in children:
                task.cancel()
            await asyncio.gather(*children, return_exceptions=True)
            raise

    # -- called at the end of a turn

    async def _fork_after_turn(self, run: EpisodeRun, environment: Environment, ids: list[int]) -> None:
        """Fork the episode if `branching` selects its last turn and its budget and limits allow a fork. `ids` is the
        prompt of its next turn."""
        budget, branching = self._budgets[run], self.branching
        budget.count_turns(run.trajectory.turns)
        if not self._may_fork(run, budget, ids):
            return
        if not self._wants_fork(run):
            return
        method = choose_fork_method(environment, branching.replay)
        if method is None:
            class_name = type(environment).__name__
            self.warn(f"{class_name} cannot fork: it has no `fork` method. Its episodes are not branched")
            return
        budgets = budget.divide(branching.continuations)
        self._budgets[run] = budgets[0]
        for i in range(1, branching.continuations):
            await self._fork_continuation(run, environment, ids, method, i, budget.num_forks, budgets[i])

    def _may_fork(self, run: EpisodeRun, budget: PathBudget, prompt_ids: list[int]) -> bool:
        settings, branching = run.rules, self.branching
        return (
            budget.num_forks < branching.max_forks
            and run.num_turns < settings.max_turns
            and len(prompt_ids) < run.max_length
            and budget.allows(branching.continuations, settings.params.max_tokens)
        )

    def _wants_fork(self, run: EpisodeRun) -> bool:
        try:
            return self.branching.forks_after(list(run.trajectory.turns))
        except Exception as error:  # the function is user code
            self.warn(
                f"training.branching.function{locate_error(error)} raised {describe(error)}. The episode is not forked"
            )
            return False

    async def _fork_continuation(
        self,
        run: EpisodeRun,
        environment: Environment,
        prompt_ids: list[int],
        method: ForkMethod,
        branch_index: int,
        num_earlier_forks: int,
        budget: PathBudget,
    ) -> None:
        """Create continuation number `branch_index` of a fork, and start or queue it. Drop it if its environment cannot
        be forked. `num_earlier_forks` counts the forks along the path."""
        parent, group_index = run.trajectory, self._group_indices[run]
        num_roots, num_continuations = self._root_counts[group_index], self.branching.continuations
        # The digits of a path's forks, in base `continuations`, make its number: the same whatever the timing.
        member = parent.member + num_roots * branch_index * num_continuations**num_earlier_forks
        fork_key = run.key._replace(member=member)
        drop_reason = None if self.recorder is None else self.recorder.find_dropped_fork(fork_key)
        try:
            if drop_reason is not None:
                raise ForkFailed(drop_reason)
            forked_environment = await self._fork_environment(environment) if method == "own" else None
        except ForkFailed as error:
            self._record_dropped_fork(fork_key, str(error))
            return
        trajectory = Trajectory(
            parent.task, parent.group, member, parent.prompt, parent.tools, list(parent.turns),
            parent=parent.member, fork_turn=len(parent.turns),
        )  # fmt: skip
        num_batches = environment.executor.num_batches if isinstance(environment, ToolEnvironment) else 0
        start = ForkPoint(prompt_ids, _collect_turn_keys(run), num_batches, method, self.branching.timeout)
        if isinstance(forked_environment, ToolEnvironment) and isinstance(environment, ToolEnvironment):
            forked_environment.executor.continue_from(environment.executor, fork_key, forked_environment)
        seed_of = functools.partial(self.seed_functions[group_index], member)
        child = run.fork(trajectory, seed_of, start, forked_environment)
        self._add_run(child, group_index, budget)
        self.groups[group_index].append(child)
        if self.branching.in_waves:
            self._queued_forks.append(child)
        else:
            child.open_fork()
            self._fork_starters[run](child)

    async def _fork_environment(self, environment: Environment) -> Environment:
        """Return the result of `environment.fork()`; raise ForkFailed if it is not an independent environment."""
        method, timeout = f"{type(environment).__name__}.fork", self.branching.timeout
        try:
            if isinstance(environment, ToolEnvironment):
                await environment.executor.catch_up()  # a copy would lack calls that the cache answered
            fork = await run_within(timeout, _call_fork(environment))
        except OutOfTime:
            raise ForkFailed(f"{method} took longer than {timeout:g} s") from None
        except SamplersLost:
            raise
        except (Exception, SelfCancelled, SystemExit) as error:  # user code
            raise ForkFailed(f"{method}{locate_error(error)} raised {describe(error)}") from error
        is_shared = fork is environment or (
            isinstance(environment, ToolEnvironment)
            and (not isinstance(fork, ToolEnvironment) or fork.executor is environment.executor)
        )
        if is_shared or not callable(getattr(fork, "step", None)):
            raise ForkFailed(
                f"{method} returned no independent environment. Make one with type(self)(self.task) and copy the state"
            )
        return fork

    def _record_dropped_fork(self, key: EpisodeKey, reason: str) -> None:
        self.num_dropped += 1
        if self.recorder is not None:
            self.recorder.record_dropped_fork(key, reason)
        self.warn(f"A fork was dropped: {reason}")

    def finish(self) -> list[list[Trajectory]]:
        """Return the episodes of each group by member, without dropped forks."""
        for run in self.runs:
            if run.drop_reason is not None:
                self._record_dropped_fork(run.key, run.drop_reason)
        return [
            sorted(
                (run.trajectory for run in group if run.drop_reason is None),
                key=lambda trajectory: trajectory.member,
            )
            for group in self.groups
        ]


async def _call_fork(environment: Any) -> Any:
    fork = environment.fork()
    return await fork if inspect.isawaitable(fork) else fork
