"""A model that judges episodes.

```python
judge = model_judge(base_url="http://localhost:8000/v1", model="Qwen/QwQ-32B", api_key_env=None, rubric="...")
reward = await judge(episode)
```

No verdict, whatever the reason, raises: the episode is then dropped and counted, never paid a zero.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.checks import check_choice, check_number
from TrainingFactory.rewards.judge_base import Judge, Judgement
from TrainingFactory.rewards.judge_client import Budget, JudgeClient
from TrainingFactory.rewards.judge_endpoints import AnthropicEndpoint, JudgeModel, OpenAIEndpoint
from TrainingFactory.rewards.judge_groups import PairJudge, RankingJudge
from TrainingFactory.rewards.judge_prompts import (
    GROUP,
    PAIR,
    RUBRIC,
    SINGLE,
    JudgePrompt,
    answer_text,
    trajectory_text,
)
from TrainingFactory.rewards.judge_verdicts import JsonVerdict, Score, Verdict, YesNo, check_vote
from TrainingFactory.tools.making import call_with
from TrainingFactory.tools.model_tools import BY_HOST
from TrainingFactory.tools.tool_cache import ToolCache
from TrainingFactory.types import Reward, Trajectory

APIS = {"openai": OpenAIEndpoint, "anthropic": AnthropicEndpoint}
SINGLE_VERDICTS = {"score": Score, "yes_no": YesNo, "json": JsonVerdict}
VERDICTS = (*SINGLE_VERDICTS, "pairwise", "ranking")


class ModelJudge(Judge):
    """Judges every episode by itself. One that did not come to its own end, or ended without having said or done
    anything that the judge is shown, gets 0 without asking, unless `judge_unfinished`."""

    kind = SINGLE

    def __init__(
        self,
        client: JudgeClient,
        prompt: JudgePrompt | None = None,
        verdict: Verdict | None = None,
        **options: Any,
    ) -> None:
        super().__init__(client, prompt, **options)
        self.verdict: Verdict = verdict or Score()

    async def __call__(self, episode: Episode) -> Reward:
        trajectory = episode.trajectory
        return self._paid(0.0 if self.failed(trajectory) else (await self.judge(trajectory)).value)

    async def judge(self, trajectory: Trajectory, repeat: int = 0) -> Judgement:
        """`repeat` tells several judgements of one trajectory apart, for which the cache would give one answer."""
        values = self.prompt.values(
            trajectory.task,
            conversation=trajectory_text(trajectory, self.prompt.reasoning),
            answer=answer_text(trajectory),
        )
        return await self._samples(values, self.verdict.instruction, self.verdict.read, repeat)


def model_judge(
    *,
    model: str | JudgeModel,
    base_url: str = "",
    api: str = "openai",
    api_key_env: str | None = BY_HOST,
    timeout: float = 60.0,
    options: Mapping[str, Any] | None = None,
    verdict: str = "score",
    verdict_options: Mapping[str, Any] | None = None,
    template: str = "",
    rubric: str = RUBRIC,
    reference: bool = False,
    reasoning: bool = False,
    samples: int = 1,
    vote: str = "mean",
    name: str = "judge",
    judge_unfinished: bool = False,
    fence_seed: int | None = None,
    opponents: int | None = None,
    concurrency: int | None = 8,
    rate: float | None = None,
    retries: int = 3,
    pause: float = 0.5,
    cache: ToolCache | str | Path | None = None,
    budget: Mapping[str, Any] | Budget | None = None,
) -> ModelJudge | PairJudge | RankingJudge:
    """A judge from plain options; everything wrong with them is a ValueError here. `model` is a name at `base_url`,
    or a `JudgeModel` such as `SampledJudge(sampler, chat, params, name)`. `verdict`: score, yes_no, json (with
    `verdict_options`), pairwise (with `opponents`) or ranking. `api_key_env`: the variable that holds the key; None:
    no key; left out: OPENAI_API_KEY for https://api.openai.com, ANTHROPIC_API_KEY for https://api.anthropic.com, and
    no key for any other address."""
    check_choice("verdict", verdict, VERDICTS)
    kind = {"pairwise": PAIR, "ranking": GROUP}.get(verdict, SINGLE)
    if opponents is not None and kind != PAIR:
        raise ValueError(f"opponents is for the verdict pairwise, not for {verdict}")
    named = isinstance(model, str)
    asked = _endpoint(api, base_url, model, api_key_env, timeout, options or {}) if named else model
    prompt = JudgePrompt(template, rubric, kind, reference, reasoning)
    read = _verdict(verdict, verdict_options or {})
    spending = call_with(Budget, budget, "the judge's budget") if isinstance(budget, Mapping) else budget
    shared: dict[str, Any] = {"samples": samples, "vote": vote, "name": name}
    shared |= {"judge_unfinished": judge_unfinished, "fence_seed": fence_seed}
    check_vote(vote, samples)  # before the cache is opened
    client = JudgeClient(
        asked,
        concurrency=concurrency,
        rate=rate,
        retries=retries,
        pause=pause,
        cache=cache,
        budget=spending,
    )
    if kind == PAIR:
        return PairJudge(client, prompt, opponents=opponents, **shared)
    return (
        RankingJudge(client, prompt, **shared) if read is None else ModelJudge(client, prompt, read, **shared)
    )


def _endpoint(
    api: str, base_url: Any, model: str, api_key_env: str | None, timeout: float, options: Any
) -> JudgeModel:
    check_choice("api", api, APIS)
    check_number("timeout", timeout)
    if not model or not base_url or not isinstance(base_url, str):
        raise ValueError(
            "a judge needs base_url and model, for instance http://localhost:8000/v1 and its name"
        )
    if not isinstance(options, Mapping):
        raise ValueError(f"options is {options!r:.60}; it must be a section such as temperature: 0")
    endpoint = APIS[api](base_url, model, api_key_env=api_key_env, timeout=timeout, options=options)
    if endpoint.api_key_env is not None and not os.environ.get(endpoint.api_key_env):
        raise ValueError(
            f"the environment variable {endpoint.api_key_env}, which holds the key for {endpoint.host}, is not set; "
            "set it, name another one with api_key_env, or give api_key_env: null if the judge needs no key"
        )
    return endpoint


def _verdict(name: str, options: Mapping[str, Any]) -> Verdict | None:
    if name in SINGLE_VERDICTS:
        return call_with(SINGLE_VERDICTS[name], options, f"the verdict {name}")
    if options:
        raise ValueError(f"the verdict {name} has no options, but verdict_options are {sorted(options)}")
    return None
