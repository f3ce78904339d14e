"""The environment of one episode, whose reward is what an `Env` of RL-Factory makes of it."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.integrations.rl_factory.data import Data, DataItem, JudgeTokenizer, judge_messages
from TrainingFactory.integrations.rl_factory.tool_manager import EpisodeTools
from TrainingFactory.protocols import Episode as AnyEpisode
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.rewards.adapt import Unscored, as_float, called, shown
from TrainingFactory.rewards.judge.judges import Ask
from TrainingFactory.rollout.scoring import Episode
from TrainingFactory.tools.waiting import OutOfTime, within
from TrainingFactory.types import Reward, Task


class EnvEpisode(ToolEnvironment):
    """Plays as every environment with tools does; a subclass of it has the run's `Env`."""

    env: ClassVar[Any]  # an `Env`, which imports this module

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
        super().__init__(task, tools, timeout=self.env.tool_timeout)
        self._lock = asyncio.Lock()
        self._found: _Scored | None = None

    async def reward(self, episode: AnyEpisode) -> Reward:
        scored = await self._scored(episode)
        return await scored.by_rules()

    async def _scored(self, episode: AnyEpisode) -> _Scored:
        """Return the episode as the methods see it; verified once, also where rules and a judge are asked."""
        async with self._lock:
            if self._found is None:
                assert isinstance(episode, Episode), "an episode that was played"
                scored = _Scored(self.env, episode)
                await scored.verify()
                self._found = scored
        return self._found


class JudgedEpisode(EnvEpisode):
    """Writes the prompts of a judge."""

    async def ask_judge(self, episode: AnyEpisode, ask: Ask) -> Reward:
        scored = await self._scored(episode)
        return await scored.by_judge(ask)


class _Scored:
    """A copy of the `Env` for one episode, and the data that its methods get."""

    def __init__(self, env: Any, episode: Episode) -> None:
        self.tokenizer: Any = getattr(episode.chat, "tokenizer", None)
        if self.tokenizer is None:
            raise Unscored("there is no tokenizer to read the episode with")
        self.env, self.episode = copy.copy(env), episode
        self.turns = len(episode.trajectory.turns)
        self.item = DataItem(episode.trajectory, episode.heldout)
        self.data = Data(self.item)
        self.texts = self.item.texts(self.tokenizer)
        self.env._tools = EpisodeTools(episode, self.texts, asyncio.get_running_loop())

    async def verify(self) -> None:
        if not self.env.verifies:
            return
        source, truth, extra = self.item.about
        if not isinstance(truth, dict):
            raise Unscored(
                f"task {self.episode.task.id}: ground_truth is {shown(truth)}; it must be an object, because what "
                "verify_tool finds is put into it as verified_results"
            )
        limit = self.env.verify_timeout
        try:
            found = await within(
                limit, called(self.env.verify_tool, source, self.item.text(self.tokenizer), truth, extra)
            )
        except OutOfTime:
            raise Unscored(
                f"verify_tool took longer than {limit:g} s (environment.options.verify_timeout)"
            ) from None
        truth["verified_results"] = found

    async def by_rules(self) -> Reward:
        env, heldout = self.env, self.episode.heldout
        if not env.scores:
            name = type(env).__name__
            raise Unscored(f"{name} leaves scoring to a judge; take {{type: environment}} out of the reward")
        rules = env._compute_score_with_rules
        more = {"if_val": heldout} if takes_if_val(inspect.signature(rules)) else {}
        found = await called(rules, self.data, self.tokenizer, **more)
        outcome, steps = self._by_turn(found, "_compute_score_with_rules")
        parts = {"rules": outcome + sum(steps)}
        if env.rewards_steps and not heldout:
            earned = [await self._step(text) for text in self.texts]
            steps = [one + more for one, more in zip(steps, earned, strict=True)] if steps else earned
            parts["steps"] = sum(earned)
        return Reward(outcome, steps, parts)

    async def _step(self, text: str) -> float:
        """Ask about one turn alone: what it earns is fixed when it ends, whatever comes after it."""
        found = await called(self.env.get_step_reward, [text])
        [value] = _listed(found, 1, "get_step_reward")
        return 0.0 if value != value else as_float(value, "get_step_reward")  # NaN is RL-Factory's "none"

    async def by_judge(self, ask: Ask) -> Reward:
        env, (source, truth, extra) = self.env, self.item.about
        found = await called(env.get_prompt_for_reward, JudgeTokenizer(self.tokenizer), self.data)
        [prompts] = _listed(found, 1, "get_prompt_for_reward")
        prompts = [prompts] if isinstance(prompts, str) else prompts

        def read(text: str) -> float:
            value = env._compute_single_score_with_reward_rollout_wg(source, text, truth, extra)
            return as_float(value, "_compute_single_score_with_reward_rollout_wg")

        own = read if env.writes("_compute_single_score_with_reward_rollout_wg") else None
        scores = await asyncio.gather(*(ask(judge_messages(prompt), own) for prompt in prompts))
        outcome, steps = self._by_turn([scores], "get_prompt_for_reward")
        return Reward(outcome, steps, {"judge": outcome + sum(steps)})

    def _by_turn(self, found: Any, who: str) -> tuple[float, list[float]]:
        """Return outcome and steps of one item: a number or one in a list is the outcome, one for each turn are the
        steps before the last, which is the outcome."""
        [value] = _listed(found, 1, who)
        several = _listed(value, None, who) if _is_list(value) else [value]
        values = [as_float(each, who) for each in several]
        if len(values) not in (1, self.turns):
            raise Unscored(
                f"{who} gave {len(values)} numbers for an episode of {self.turns} turns; it must give one, or one "
                "for each turn"
            )
        *steps, outcome = values
        return outcome, [*steps, 0.0] if steps else []


def takes_if_val(signature: inspect.Signature) -> bool:
    return any(
        each.name == "if_val" or each.kind == each.VAR_KEYWORD for each in signature.parameters.values()
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def _listed(value: Any, length: int | None, who: str) -> list[Any]:
    found = list(value) if _is_list(value) else []
    if not found or (length is not None and len(found) != length):
        wanted = "a list with one entry for each item" if length else "at least one number"
        raise Unscored(f"{who} gave {shown(value)}; it must give {wanted}")
    return found
