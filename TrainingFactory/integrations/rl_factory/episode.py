"""Environments of single episodes whose reward is computed by a user's RL-Factory `Env`."""

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
    DataItem,
    EpisodeBatch,
    JudgeWorkers,
    MessageTokenizer,
)
from TrainingFactory.integrations.rl_factory.tool_manager import EpisodeTools, format_tagged_text
from TrainingFactory.protocols import Episode as AnyEpisode
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.rewards.adapt import Unscored, as_finite, call_function, short_repr
from TrainingFactory.rewards.judge.judges import AskJudge
from TrainingFactory.rollout.scoring import OpenEpisode
from TrainingFactory.tools.timeouts import OutOfTime, run_within
from TrainingFactory.types import Message, Reward, Step, Task


class EnvEpisode(ToolEnvironment):
    """Tool environment of one episode with a copy of the user's `Env`; each run makes a subclass."""

    env: Any  # an `Env`; its module imports this one
    _batch: EpisodeBatch | None = None

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
        super().__init__(task, tools, timeout=self.env.tool_timeout)
        self.env = copy.copy(self.env)
        self._batch_lock = asyncio.Lock()

    async def step(self, message: Message) -> Step:
        """Process a turn with the `step` of the user's `Env`, or call the tools if the `Env` has none."""
        env = self.env
        if not env.overrides(STEP):
            return await super().step(message)
        turn_text = format_tagged_text(message)
        episode_tools = env._tools = EpisodeTools(self, {turn_text: message})
        result = await call_function(env.step, [turn_text], MessageTokenizer())
        if not isinstance(result, tuple) or len(result) != 4:
            expected_lists = "four lists: next_obs, dones, valid_action, is_tool"
            raise ValueError(f"step returned {short_repr(result)}. Return {expected_lists}.")
        [observation], [is_done], [is_valid], [is_tool] = (_unwrap_item(entries, STEP) for entries in result)
        replies = [] if is_done else _make_replies(observation, message)
        signals = {"valid_action": float(is_valid), "is_tool": float(is_tool)}
        return Step(replies, done=bool(is_done), tool_results=episode_tools.results, signals=signals)

    async def reward(self, episode: AnyEpisode) -> Reward:
        batch, env = await self._verify_batch(episode), self.env
        is_heldout = batch.meta_info["validate"]
        if env.overrides(SCORE):
            return await self._compute_score(batch, None, None)
        if not (env.overrides(RULES) or env.is_enabled("use_process_reward")):
            name = type(env).__name__
            raise Unscored(f"{name} is scored by a judge. Remove {{type: environment}} from the reward.")
        options = {"if_val": is_heldout} if env.accepts(RULES, if_val=is_heldout) else {}
        result = await call_function(env._compute_score_with_rules, batch, self._tokenizer, **options)
        outcome, steps = self._split_rewards(result, RULES)
        reward_parts = {"rules": outcome + sum(steps)}
        if env.is_enabled("use_process_reward") and not is_heldout:
            rewards = [0.0 if value != value else value for value in await self._compute_step_rewards()]
            steps = [step + reward for step, reward in zip(steps, rewards, strict=True)] if steps else rewards
            reward_parts["steps"] = sum(rewards)
        return Reward(outcome, steps, reward_parts)

    async def _compute_score(
        self, batch: EpisodeBatch, workers: JudgeWorkers | None, tokenizer: Any
    ) -> Reward:
        """Call the `Env`'s `compute_score` as RL-Factory's reward manager does."""
        env, is_heldout = self.env, batch.meta_info["validate"]
        uses_steps = env.is_enabled("use_process_reward") and not is_heldout
        if uses_steps:
            batch.add_step_rewards(await self._compute_step_rewards())
        arguments = workers, tokenizer, self._tokenizer, batch
        result = await call_function(
            env.compute_score, *arguments, if_val=is_heldout, use_process_reward=uses_steps
        )
        outcome, steps = self._split_rewards(result, SCORE)
        return Reward(outcome, steps, {"rules" if workers is None else "judge": outcome + sum(steps)})

    async def _verify_batch(self, episode: AnyEpisode) -> EpisodeBatch:
        """Return the episode in verl's form, verified once for all rules and judges that score it."""
        async with self._batch_lock:
            if self._batch is None:
                assert isinstance(episode, OpenEpisode), "a finished episode"
                self._tokenizer: Any = getattr(episode.chat, "tokenizer", None)
                if self._tokenizer is None:
                    raise Unscored("the chat format of the episode has no tokenizer to decode it")
                data_item = DataItem(episode.trajectory, episode.heldout)
                self._turn_texts = data_item.decode_turns(self._tokenizer)
                messages = (turn.message for turn in episode.trajectory.turns)
                self.env._tools = EpisodeTools(self, dict(zip(self._turn_texts, messages, strict=True)))
                if self.env.is_enabled("use_verify_tool"):
                    await self._verify(data_item)
                self._batch = EpisodeBatch(data_item)
        return self._batch

    async def _verify(self, data_item: DataItem) -> None:
        source, truth, extra = data_item.scoring_inputs
        if not isinstance(truth, dict):
            raise Unscored(
                f"task {self.task.id}: ground_truth is {short_repr(truth)}. It must be an object, because the result "
                "of verify_tool is stored in it as verified_results."
            )
        timeout, text = self.env.verify_timeout, "\n".join(self._turn_texts)
        try:
            result = await run_within(
                timeout, call_function(self.env.verify_tool, source, text, truth, extra)
            )
        except OutOfTime:
            message = f"verify_tool took longer than {timeout:g} s (environment.options.verify_timeout)"
            raise Unscored(message) from None
        truth["verified_results"] = result

    async def _compute_step_rewards(self) -> list[float]:
        """Return the reward of each turn (NaN: none), scored one by one, so that turns do not affect each other."""
        reward_lists = [
            _unwrap_item(await call_function(self.env.get_step_reward, [turn_text]), STEPS)
            for turn_text in self._turn_texts
        ]
        return [reward if reward != reward else as_finite(reward, STEPS) for [reward] in reward_lists]

    def _split_rewards(self, result: Any, method: str) -> tuple[float, list[float]]:
        """Split a method's result for one item into outcome and step rewards. One number is the outcome. One number per
        turn are the step rewards of all turns but the last, then the outcome. One number more than turns are the step
        rewards of all turns, then the outcome."""
        [scores] = _unwrap_item(result, method)
        rewards = [as_finite(number, method) for number in (scores if _is_sequence(scores) else [scores])]
        num_turns = len(self._turn_texts)
        if len(rewards) not in (1, num_turns, num_turns + 1):
            raise Unscored(
                f"{method} returned {len(rewards)} numbers for an episode of {num_turns} turns. Return one number, or "
                "one for each turn."
            )
        *steps, outcome = rewards
        return outcome, [*steps, 0.0][:num_turns] if steps else []


class JudgedEpisode(EnvEpisode):
    """An episode whose `Env` writes the prompts of a judge."""

    async def ask_judge(self, episode: AnyEpisode, ask_judge: AskJudge) -> Reward:
        batch = await self._verify_batch(episode)
        tokenizer = MessageTokenizer(self._tokenizer)
        return await self._compute_score(batch, JudgeWorkers(ask_judge, tokenizer), tokenizer)


def _make_replies(observation: Any, turn: Message) -> list[Message]:
    """Convert the observation of a `step` to messages: tool replies if the turn called tools, else a user message."""
    tool_calls = turn.tool_calls
    if isinstance(observation, str):
        role = "tool" if tool_calls else "user"
        messages = getattr(observation, "messages", [Message(role, observation)])
    else:
        messages = MessageTokenizer().apply_chat_template(observation).messages
    tool_replies = (message for message in messages if message.role == "tool")
    for call, message in zip(tool_calls, tool_replies, strict=False):
        message.tool_call_id, message.name = call.id, call.name
    return messages


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def _unwrap_item(result: Any, method: str) -> list[Any]:
    """Return a method's result for a batch of one item as a list with one entry."""
    entries = list(result) if _is_sequence(result) else []
    if len(entries) != 1:
        raise Unscored(f"{method} returned {short_repr(result)}. Return a list with one entry for each item.")
    return entries
