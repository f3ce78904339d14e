"""Where the episodes of a step come from: sampled now, or demonstrations that exist. Which tasks a step takes is a
function of the seed and the step, so that a resumed run goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from TrainingFactory.data.conversations import Conversation
from TrainingFactory.protocols import ChatFormat, EnvironmentFactory, Episode, RewardFunction, Sampler
from TrainingFactory.rollout import AsyncRolloutEngine, play, rollout_metrics
from TrainingFactory.rollout.scoring import score
from TrainingFactory.rollout.seeds import turn_seed
from TrainingFactory.tools.tape import EpisodeKey
from TrainingFactory.types import Message, Reward, Step, Task, ToolResult, ToolSpec, Trajectory

Groups = list[list[Trajectory]]
Publish = Callable[[], Sampler]  # the newest weights, ready to be sampled from


class Order:
    """Batches of numbers below `size`: every number once an epoch, shuffled by the seed and the epoch."""

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.steps_per_epoch = -(-size // batch_size)
        self._epoch, self._shuffled = -1, list[int]()

    def batch(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._shuffled = sorted(
                range(self.size), key=lambda n: turn_seed(self.seed, epoch, f"{n}", -1, -1)
            )
            self._epoch = epoch
        return self._shuffled[place * self.batch_size : (place + 1) * self.batch_size]


class Source(Protocol):
    @property
    def order(self) -> Order: ...
    def ids(self, step: int) -> list[str]:
        """Of the tasks that the step takes."""
        ...

    def groups(self, step: int, publish: Publish) -> Groups: ...
    def metrics(self, groups: Groups, seconds: float) -> dict[str, float]:
        """Of these episodes, which it took so many seconds to get."""
        ...

    def unusable(self, groups: Groups) -> str | None:
        """Why nothing at all can be learned from these episodes, or None."""
        ...


class RewardClock:
    """The reward, timed. Seconds add up over episodes that run side by side."""

    def __init__(self, reward: RewardFunction | None) -> None:
        self._reward = reward
        self.seconds = 0.0

    async def score(self, episode: Episode) -> Reward:
        started = time.perf_counter()
        try:
            return await score(episode, self._reward)  # type: ignore[arg-type]
        finally:
            self.seconds += time.perf_counter() - started


class SampledEpisodes:
    """`group_size` episodes of each task of the step, by the newest weights."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Order,
        rollouts: AsyncRolloutEngine,
        group_size: int,
        clock: RewardClock,
    ) -> None:
        self.tasks, self.order, self.rollouts, self.group_size = tasks, order, rollouts, group_size
        self.clock = clock  # the one that the rollouts score by

    def ids(self, step: int) -> list[str]:
        return [self.tasks[number].id for number in self.order.batch(step)]

    def groups(self, step: int, publish: Publish) -> Groups:
        self.clock.seconds = 0.0
        tasks = [self.tasks[number] for number in self.order.batch(step)]
        return self.rollouts.rollout(tasks, publish(), self.group_size, step)

    def metrics(self, groups: Groups, seconds: float) -> dict[str, float]:
        """`accuracy` is the share of scored episodes whose outcome is over 0. `tools` and `reward` seconds add up
        over episodes that run side by side; `tools_share` is the part of the episodes' time that tools took."""
        episodes = [trajectory for group in groups for trajectory in group]
        metrics = rollout_metrics(episodes)
        outcomes = [trajectory.reward.outcome for trajectory in episodes if trajectory.reward is not None]
        if outcomes:
            metrics["accuracy"] = sum(outcome > 0 for outcome in outcomes) / len(outcomes)
        metrics["episodes/failed"] = metrics["episodes/error"] + metrics["episodes/tool_failure"]
        tools = sum(result.seconds for t in episodes for turn in t.turns for result in turn.tool_results)
        spent = sum(trajectory.seconds for trajectory in episodes)
        return metrics | {
            "seconds/tools": tools,
            "seconds/reward": self.clock.seconds,
            "tools_share": tools / spent if spent else 0.0,
            "tokens_per_second": metrics["sampled_tokens"] / seconds,
        }

    def unusable(self, groups: Groups) -> str | None:
        episodes = [trajectory for group in groups for trajectory in group]
        if any(trajectory.reward is not None for trajectory in episodes):
            return None
        reasons = Counter(trajectory.error or "no reason given" for trajectory in episodes)
        return f"none of {len(episodes)} episodes could be scored, mostly: {reasons.most_common(1)[0][0]}"


class _Demonstrations:
    """What exists is usable, and its rewards say nothing about the model."""

    def metrics(self, groups: Groups, seconds: float) -> dict[str, float]:
        turns = sum(len(trajectory.turns) for group in groups for trajectory in group)
        return {"demonstrations": len(groups), "turns": turns / len(groups)}

    def unusable(self, groups: Groups) -> str | None:
        return None


class ExpertEpisodes(_Demonstrations):
    """The environment's own expert plays the tasks of the step."""

    def __init__(self, tasks: Sequence[Task], order: Order, environment: EnvironmentFactory, chat: ChatFormat,
                 limits: dict[str, Any]) -> None:  # fmt: skip
        self.tasks, self.order, self.environment, self.chat, self.limits = (
            tasks,
            order,
            environment,
            chat,
            limits,
        )

    def ids(self, step: int) -> list[str]:
        return [self.tasks[number].id for number in self.order.batch(step)]

    def groups(self, step: int, publish: Publish) -> Groups:
        async def play_all() -> list[Trajectory]:
            tasks = (self.tasks[number] for number in self.order.batch(step))
            return list(await asyncio.gather(*(self._play(task, step) for task in tasks)))

        return [[checked_demonstration(trajectory)] for trajectory in asyncio.run(play_all())]

    async def _play(self, task: Task, step: int) -> Trajectory:
        environment: Any = self.environment(task)
        key = EpisodeKey(step, task.id, 0)
        return await play(environment, self.chat, environment.expert(), key=key, **self.limits)


class RecordedEpisodes(_Demonstrations):
    """Conversations from a file, written by this model's own template; tokens that were sampled stay."""

    def __init__(
        self, conversations: Sequence[Conversation], order: Order, chat: Any, limits: dict[str, Any]
    ) -> None:
        self.conversations, self.order, self.chat, self.limits = conversations, order, chat, limits

    def ids(self, step: int) -> list[str]:
        return [self.conversations[number].id for number in self.order.batch(step)]

    def groups(self, step: int, publish: Publish) -> Groups:
        async def play_all() -> list[Trajectory]:
            chosen = (self.conversations[number] for number in self.order.batch(step))
            return [await self._replay(conversation) for conversation in chosen]

        return [[checked_demonstration(trajectory)] for trajectory in asyncio.run(play_all())]

    async def _replay(self, conversation: Conversation) -> Trajectory:
        if conversation.recorded is not None and self._speaks(conversation.recorded):
            return conversation.recorded
        environment = Recording(conversation)
        return await play(
            environment, self.chat, self._script(conversation), reward=_no_reward, **self.limits
        )

    def _speaks(self, trajectory: Trajectory) -> bool:
        """Whether the recorded tokens are those of this model's tokenizer and template."""
        first = trajectory.turns[0]
        try:
            rendered = self.chat.render(trajectory.prompt, trajectory.tools)
        except ValueError:
            return False
        return rendered == first.prompt_ids and all(
            self.chat.parse(turn.completion.token_ids).content == turn.message.content
            for turn in trajectory.turns
        )

    def _script(self, conversation: Conversation) -> Iterable[Message]:
        """Texts are read as the model's own first, so that tags in them become the real tokens."""
        for message in conversation.messages:
            if message.role == "assistant":
                plain = not message.tool_calls and message.reasoning is None
                yield self.chat.parse_text(message.content) if plain else message


class Recording:
    """A conversation that exists, as an environment: it answers what was answered."""

    def __init__(self, conversation: Conversation) -> None:
        self.task = Task(conversation.id, "")
        self.tools = [_ShownTool(spec) for spec in conversation.tools]
        self._rest = list(conversation.messages)

    async def reset(self) -> list[Message]:
        return self._before_the_assistant()

    async def step(self, message: Message) -> Step:
        self._rest.pop(0)
        return Step(self._before_the_assistant(), done=not self._rest)

    async def close(self) -> None: ...

    def _before_the_assistant(self) -> list[Message]:
        replies = []
        while self._rest and self._rest[0].role != "assistant":
            replies.append(self._rest.pop(0))
        return replies


class _ShownTool:
    """A tool of a recording: shown to the model, never run."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        raise AssertionError("a recording calls no tools")


async def _no_reward(episode: Episode) -> Reward:
    return Reward(0.0)


def checked_demonstration(trajectory: Trajectory) -> Trajectory:
    if trajectory.status in ("error", "tool_failure") or not trajectory.turns:
        name, why = trajectory.task.id, trajectory.error or trajectory.status
        raise ValueError(f"demonstration {name} cannot be played: {why}")
    return trajectory
