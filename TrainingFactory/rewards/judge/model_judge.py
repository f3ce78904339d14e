"""Construction of judges from options. A judge without a verdict raises: the episode is then dropped and counted, never
rewarded with zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import JsonValue, validate_call

from TrainingFactory.common.endpoints.budget import Budget
from TrainingFactory.common.endpoints.names import Api, check_key, make_endpoint
from TrainingFactory.common.endpoints.transport import KEY_BY_HOST
from TrainingFactory.common.options import (
    STRICT,
    Count,
    InvalidOption,
    NotNegative,
    OptionError,
    Positive,
    Text,
    ZeroOrMore,
    from_mapping,
    make_from,
)
from TrainingFactory.rewards.judge.client import JudgeClient
from TrainingFactory.rewards.judge.endpoints import JudgeModel
from TrainingFactory.rewards.judge.judges import ModelJudge, PairJudge, RankingJudge
from TrainingFactory.rewards.judge.prompts import BASE_RUBRIC, GROUP, PAIR, SINGLE, JudgePrompt
from TrainingFactory.rewards.judge.verdicts import (
    JsonVerdict,
    PairwiseVerdict,
    RankingVerdict,
    ScoreVerdict,
    Vote,
    YesNoVerdict,
)
from TrainingFactory.tools.cache.cache import ToolCache

VerdictName = Literal["score", "yes_no", "json", "pairwise", "ranking"]
VERDICT_TYPES: dict[VerdictName, Callable[..., Any]] = {
    "score": ScoreVerdict,
    "yes_no": YesNoVerdict,
    "json": JsonVerdict,
    "pairwise": PairwiseVerdict,
    "ranking": RankingVerdict,
}
PROMPT_FIELDS = {"pairwise": PAIR, "ranking": GROUP}


@validate_call(config=STRICT)
def model_judge(
    *,
    model: Text | JudgeModel,
    base_url: str = "",
    api: Api = "openai",
    api_key_env: str | None = KEY_BY_HOST,
    timeout: Positive = 60.0,
    options: Mapping[str, JsonValue] | None = None,
    verdict: VerdictName = "score",
    verdict_options: Mapping[str, Any] | None = None,
    template: str = "",
    rubric: Text = BASE_RUBRIC,
    reference: bool = False,
    reasoning: bool = False,
    samples: Count = 1,
    vote: Vote = "mean",
    name: Text = "judge",
    judge_unfinished: bool = False,
    images: ZeroOrMore = 0,
    fence_seed: int | None = None,
    opponents: Count | None = None,
    concurrency: Count | None = 8,
    rate: Positive | None = None,
    retries: ZeroOrMore = 3,
    pause: NotNegative = 0.5,
    cache: ToolCache | Text | Path | None = None,
    budget: Annotated[Mapping[str, Any] | Budget | None, from_mapping(Budget, "the judge's budget")] = None,
) -> ModelJudge | PairJudge | RankingJudge:
    """Return a judge; docs/JUDGES.md describes the options."""
    if opponents is not None and verdict != "pairwise":
        raise OptionError(InvalidOption("opponents", f"requires verdict pairwise; verdict is {verdict}"))
    if images and verdict in ("pairwise", "ranking"):
        raise OptionError(InvalidOption("images", f"a judge with the verdict {verdict} gets no images"))
    try:
        verdict_reader = make_from(VERDICT_TYPES[verdict], verdict_options or {}, f"the verdict {verdict}")
    except OptionError as error:
        raise error.with_prefix("verdict_options") from None
    prompt = JudgePrompt(template, rubric, PROMPT_FIELDS.get(verdict, SINGLE), reference, reasoning)
    if isinstance(model, str):
        model = make_endpoint(
            model=model, api=api, base_url=base_url, api_key_env=api_key_env, timeout=timeout, options=options
        )
        check_key(model)
    client = JudgeClient(
        model=model,
        concurrency=concurrency,
        rate=rate,
        retries=retries,
        pause=pause,
        cache=cache,  # creates a file, so it comes after all other checks
        budget=budget or Budget(),  # type: ignore[arg-type]  # `from_mapping` has converted a mapping
    )
    judge_options: dict[str, Any] = {"client": client, "prompt": prompt, "samples": samples, "vote": vote}
    judge_options |= {"name": name, "judge_unfinished": judge_unfinished, "fence_seed": fence_seed}
    if verdict == "pairwise":
        return PairJudge(opponents=opponents, **judge_options)
    if verdict == "ranking":
        return RankingJudge(**judge_options)
    return ModelJudge(verdict=verdict_reader, images=images, **judge_options)


def make_judges(
    base_url: str | Sequence[str], options: Mapping[str, Any], num_workers: int | None = None
) -> list[Any]:
    """Return one judge per worker of a pool. Workers are assigned to the addresses in turn and share one budget."""
    urls = [base_url] if isinstance(base_url, str) else list(base_url)
    if not urls or not all(isinstance(url, str) for url in urls) or len(set(urls)) < len(urls):
        raise ValueError(f"base_url is {base_url!r:.100}; it must be an address or a list of distinct ones")
    total = len(urls) if num_workers is None else num_workers
    if total < len(urls):
        raise ValueError(f"num_workers is {total}, but base_url has {len(urls)} addresses; raise num_workers")
    options = dict(options)
    options.setdefault("concurrency", 8 * -(-total // len(urls)))  # 8 per worker that shares the judge
    judges: list[Any] = []
    for url in urls:
        judges.append(make_from(model_judge, {"base_url": url, **options}, "a model judge"))
        options["cache"] = judges[0].client.cache  # shared: opened once, closed with the first judge
    usages = [judge.client.usage for judge in judges]
    for judge in judges:
        judge.client.counted_usages = usages
    return [judges[index % len(urls)] for index in range(total)]
