"""One judge at several endpoints, for a pool. What they may spend is meant for all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from TrainingFactory.rewards.judge.client import open_cache
from TrainingFactory.rewards.model_judge import model_judge
from TrainingFactory.tools.builtin.making import call_with


def judges_at(
    base_url: str | Sequence[str], options: Mapping[str, Any], held: ExitStack, workers: int | None = None
) -> list[Any]:
    """A judge for each worker; `options` are those of `model_judge`. Workers at one address share their judge. What
    must be closed goes to `held`."""
    urls = [base_url] if isinstance(base_url, str) else list(base_url)
    if not urls or not all(isinstance(url, str) for url in urls) or len(set(urls)) < len(urls):
        raise ValueError(f"base_url is {base_url!r:.100}; it must be an address, or a list of different ones")
    count = len(urls) if workers is None else workers
    if count < len(urls):
        raise ValueError(f"num_workers is {count}, but base_url has {len(urls)} addresses")
    options = dict(options)
    options.setdefault("concurrency", 8 * -(-count // len(urls)))  # of a judge that several workers share
    if isinstance(cache := options.get("cache"), str | Path):
        call_with(
            model_judge, options | {"base_url": urls[0], "cache": None}, "a model judge"
        )  # is all right?
        options["cache"] = opened = open_cache(cache)
        held.callback(opened.close)
    judges: list[Any] = []
    for url in urls:
        judges.append(call_with(model_judge, options | {"base_url": url}, "a model judge"))
        held.callback(lambda judge=judges[-1]: asyncio.run(judge.close()))
    spent = [judge.client.usage for judge in judges]
    for judge in judges:
        judge.client.spent = spent
    return [judges[number % len(urls)] for number in range(count)]
