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

from TrainingFactory.endpoint import BY_HOST
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.checks import check_choice
from TrainingFactory.rewards.judge.base import Judge, Judgement
from TrainingFactory.rewards.judge.checks import check_over_zero, check_request, check_section
from TrainingFactory.rewards.judge.client import Budget, JudgeClient
from TrainingFactory.rewards.judge.endpoints import AnthropicEndpoint, JudgeModel, OpenAIEndpoint
from TrainingFactory.rewards.judge.groups import PairJudge, RankingJudge
from TrainingFactory.rewards.judge.prompts import (
    GROUP,
    PAIR,
    RUBRIC,
    SINGLE,
    JudgePrompt,
    answer_text,
    trajectory_text,
)
from TrainingFactory.rewards.judge.verdicts import JsonVerdict, Score, Verdict, YesNo
from TrainingFactory.tools.builtin.making import call_with
from TrainingFactory.tools.cache.cache import ToolCache
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
    for name_of, value, example in (
        ("options", options, "temperature: 0"),
        ("verdict_options", verdict_options, "low: 1, high: 5"),
    ):
        if value is not None:
            check_section(name_of, value, example)
    check_choice("verdict", verdict, VERDICTS)
    kind = {"pairwise": PAIR, "ranking": GROUP}.get(verdict, SINGLE)
    if opponents is not None and kind != PAIR:
        raise ValueError(f"opponents is for the verdict pairwise, not for {verdict}")
    here = isinstance(model, JudgeModel)
    asked = model if here else _endpoint(api, base_url, model, api_key_env, timeout, options or {})
    prompt = JudgePrompt(template, rubric, kind, reference, reasoning)
    read = _verdict(verdict, verdict_options or {})
    shared: dict[str, Any] = {"samples": samples, "vote": vote, "name": name}
    shared |= {"judge_unfinished": judge_unfinished, "fence_seed": fence_seed}
    limits: dict[str, Any] = {"concurrency": concurrency, "rate": rate, "retries": retries, "pause": pause}
    client = JudgeClient(asked, **limits, budget=_budget(budget))
    made: ModelJudge | PairJudge | RankingJudge
    if kind == PAIR:
        made = PairJudge(client, prompt, opponents=opponents, **shared)
    elif read is None:
        made = RankingJudge(client, prompt, **shared)
    else:
        made = ModelJudge(client, prompt, read, **shared)
    client.keep_in(cache)  # a file is opened when nothing else can be wrong
    return made


def _budget(budget: Any) -> Budget | None:
    if budget is None or isinstance(budget, Budget):
        return budget
    if type(budget) in (int, float):
        raise ValueError(f"budget is {budget!r}; write budget: {{max_requests: {budget!r}}}")
    check_section("budget", budget, "max_requests: 1000")
    return call_with(Budget, budget, "the judge's budget")


def _endpoint(
    api: str, base_url: Any, model: Any, api_key_env: str | None, timeout: float, options: Mapping[str, Any]
) -> JudgeModel:
    check_choice("api", api, APIS)
    check_over_zero("timeout", timeout)
    if base_url == "":
        raise ValueError("a judge needs base_url, the address of its endpoint: http://localhost:8000/v1")
    if not isinstance(base_url, str):
        raise ValueError(f"base_url is {base_url!r:.100}; it must be one address: http://localhost:8000/v1")
    if not isinstance(model, str) or not model.strip():
        raise ValueError(f"model is {model!r:.60}; it must be the name that the judge has at {base_url}")
    check_request(options)
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
