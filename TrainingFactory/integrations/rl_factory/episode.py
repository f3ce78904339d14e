"""The environment of one episode, whose reward is what an `Env` of RL-Factory makes of it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Sequence
from typing import Any

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.integrations.rl_factory.data import (
    RULES,
    SCORE,
    STEP,
    STEPS,
    Data,
    DataItem,
    JudgeWorkers,
    MessageTokenizer,
)
from TrainingFactory.integrations.rl_factory.tool_manager import EpisodeTools, response_text
from TrainingFactory.protocols import Episode as AnyEpisode
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.rewards.adapt import Unscored, as_float, called, shown
from TrainingFactory.rewards.judge.judges import Ask
from TrainingFactory.rollout.scoring import Episode
from TrainingFactory.tools.timeouts import OutOfTime, within
from TrainingFactory.types import Message, Reward, Step, Task


class EnvEpisode(ToolEnvironment):
    """Plays as every environment with tools does; a subclass of it has the run's `Env`, of which each has a copy."""

    env: Any  # an `Env`, which imports this module
    _data: Data | None = None

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
        super().__init__(task, tools, timeout=self.env.tool_timeout)
        self.env, self._lock = copy.copy(self.env), asyncio.Lock()

    async def step(self, message: Message) -> Step:
        """Answer a turn by the `step` that the subclass has written, for a batch of one; else call its tools."""
        env = self.env
        if not env.writes(STEP):
            return await super().step(message)
        text = response_text(message)
        tools = env._tools = EpisodeTools(self, {text: message})
        found = await called(env.step, [text], MessageTokenizer())
        if not isinstance(found, tuple) or len(found) != 4:
            raise ValueError(
                f"step gave {shown(found)}; it must give four lists: next_obs, dones, valid_action, is_tool"
            )
        [said], [done], [valid], [is_tool] = (_listed(each, STEP) for each in found)
        replies = [] if done else _replies(said, message)
        signals = {"valid_action": float(valid), "is_tool": float(is_tool)}
        return Step(replies, done=bool(done), tool_results=tools.results, signals=signals)

    async def reward(self, episode: AnyEpisode) -> Reward:
        data, env = await self._verified(episode), self.env
        heldout = data.meta_info["validate"]
        if env.writes(SCORE):
            return await self._scored(data, None, None)
        if not (env.writes(RULES) or env.uses("use_process_reward")):
            name = type(env).__name__
            raise Unscored(f"{name} leaves scoring to a judge; take {{type: environment}} out of the reward")
        more = {"if_val": heldout} if env.fits(RULES, if_val=heldout) else {}
        found = await called(env._compute_score_with_rules, data, self._tokenizer, **more)
        outcome, steps = self._by_turn(found, RULES)
        parts = {"rules": outcome + sum(steps)}
        if env.uses("use_process_reward") and not heldout:
            earned = [0.0 if value != value else value for value in await self._earned()]
            steps = [one + more for one, more in zip(steps, earned, strict=True)] if steps else earned
            parts["steps"] = sum(earned)
        return Reward(outcome, steps, parts)

    async def _scored(self, data: Data, workers: JudgeWorkers | None, tokenizer: Any) -> Reward:
        """Return what `compute_score` gives, called as RL-Factory's reward manager does."""
        env, heldout = self.env, data.meta_info["validate"]
        steps = env.uses("use_process_reward") and not heldout
        if steps:
            data.add_step_rewards(await self._earned())
        given = workers, tokenizer, self._tokenizer, data
        found = await called(env.compute_score, *given, if_val=heldout, use_process_reward=steps)
        outcome, steps = self._by_turn(found, SCORE)
        return Reward(outcome, steps, {"rules" if workers is None else "judge": outcome + sum(steps)})

    async def _verified(self, episode: AnyEpisode) -> Data:
        """Return the episode as the methods see it; verified once, also where rules and a judge are asked."""
        async with self._lock:
            if self._data is None:
                assert isinstance(episode, Episode), "an episode that was played"
                self._tokenizer: Any = getattr(episode.chat, "tokenizer", None)
                if self._tokenizer is None:
                    raise Unscored("there is no tokenizer to read the episode with")
                item = DataItem(episode.trajectory, episode.heldout)
                self._texts = item.texts(self._tokenizer)
                messages = (turn.message for turn in episode.trajectory.turns)
                self.env._tools = EpisodeTools(self, dict(zip(self._texts, messages, strict=True)))
                if self.env.uses("use_verify_tool"):
                    await self._verify(item)
                self._data = Data(item)
        return self._data

    async def _verify(self, item: DataItem) -> None:
        source, truth, extra = item.about
        if not isinstance(truth, dict):
            raise Unscored(
                f"task {self.task.id}: ground_truth is {shown(truth)}; it must be an object, because what verify_tool "
                "finds is put into it as verified_results"
            )
        limit, text = self.env.verify_timeout, "\n".join(self._texts)
        try:
            found = await within(limit, called(self.env.verify_tool, source, text, truth, extra))
        except OutOfTime:
            told = f"verify_tool took longer than {limit:g} s (environment.options.verify_timeout)"
            raise Unscored(told) from None
        truth["verified_results"] = found

    async def _earned(self) -> list[float]:
        """Ask about each turn alone: what it earns is fixed when it ends, whatever comes after it. NaN is none."""
        found = [_listed(await called(self.env.get_step_reward, [text]), STEPS) for text in self._texts]
        return [value if value != value else as_float(value, STEPS) for [value] in found]

    def _by_turn(self, found: Any, who: str) -> tuple[float, list[float]]:
        """Return outcome and steps of one item: a number or one in a list is the outcome, one for each turn are the
        steps before the last, which is the outcome; with one more, every turn has a step."""
        [value] = _listed(found, who)
        values = [as_float(each, who) for each in (value if _is_list(value) else [value])]
        turns = len(self._texts)
        if len(values) not in (1, turns, turns + 1):
            raise Unscored(
                f"{who} gave {len(values)} numbers for an episode of {turns} turns; it must give one, or one for each "
                "turn"
            )
        *steps, outcome = values
        return outcome, [*steps, 0.0][:turns] if steps else []


class JudgedEpisode(EnvEpisode):
    """Writes the prompts of a judge."""

    async def ask_judge(self, episode: AnyEpisode, ask: Ask) -> Reward:
        data = await self._verified(episode)
        tokenizer = MessageTokenizer(self._tokenizer)
        return await self._scored(data, JudgeWorkers(ask, tokenizer), tokenizer)


def _replies(said: Any, turn: Message) -> list[Message]:
    """Return what a `step` has said as messages: of the tools that the turn has called, else of the user."""
    calls = turn.tool_calls
    if isinstance(said, str):
        role = "tool" if calls else "user"
        found = getattr(said, "messages", [Message(role, said)])
    else:
        found = MessageTokenizer().apply_chat_template(said).messages
    answers = (message for message in found if message.role == "tool")
    for call, message in zip(calls, answers, strict=False):
        message.tool_call_id, message.name = call.id, call.name
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def _listed(value: Any, who: str) -> list[Any]:
    """Return what was given for the one item, in its list."""
    found = list(value) if _is_list(value) else []
    if len(found) != 1:
        raise Unscored(f"{who} gave {shown(value)}; it must give a list with one entry for each item")
    return found
