"""Episodes whose assistant messages come from a script instead of a model: demonstrations for SFT. They run through
the same code as sampled episodes, so that their tokens have the same layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from TrainingFactory.protocols import AnyReward, ChatFormat, Environment, SamplingSession
from TrainingFactory.rewards.adapt import as_group_reward
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.rollout.folding import Folding
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Completion, Message, SamplingParams, Trajectory


class _ScriptSession:
    """A sampling session that returns the script's messages, each taken from the iterator only when its turn comes."""

    def __init__(self, messages: Iterable[Message], chat: ChatFormat, environment: Environment) -> None:
        self._messages = iter(messages)
        self._chat, self._environment = chat, environment

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        message = next(self._messages, None)
        if message is None:
            raise ValueError("the script ended before the episode: its last message must end the episode")
        token_ids = self._chat.write(message, prompt_ids, [tool.spec for tool in self._environment.tools])
        return Completion(token_ids, [0.0] * len(token_ids), "stop")

    def fork(self) -> SamplingSession:
        raise NotImplementedError("scripted episodes do not fork")

    def close(self) -> None: ...


async def play(
    environment: Environment,
    chat: ChatFormat,
    script: Iterable[Message],
    *,
    reward: AnyReward | None = None,
    max_turns: int = 64,
    timeout: float = 300.0,
    max_reply_tokens: int = 1024,
    max_length: int = 1_000_000,
    runtime: ToolRuntime | None = None,
    key: EpisodeKey | None = None,
    folding: Folding | None = None,
) -> Trajectory:
    """Play the script in the environment and return the scored episode; its log-probs are 0. With `folding` of kind
    summary, the script has a message for every summary."""
    params = SamplingParams(stop_ids=chat.stop_ids)
    group_reward: Any = as_group_reward(reward)  # called with a group of one episode
    settings = EpisodeSettings(
        lambda _: environment,
        chat,
        params,
        group_reward or reward,
        max_turns,
        timeout,
        max_reply_tokens,
        runtime,
        folding=folding,
    )
    trajectory = Trajectory(environment.task, group=f"script/{environment.task.id}")
    return await EpisodeRun(
        settings, trajectory, _ScriptSession(script, chat, environment), max_length, seed_of=int, key=key
    ).run()
