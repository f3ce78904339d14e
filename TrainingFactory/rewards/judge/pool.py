"""One judge at several endpoints, for a pool. What they may spend is meant for all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from TrainingFactory.options import make_from
from TrainingFactory.rewards.model_judge import model_judge


def judges_at(
    base_url: str | Sequence[str], options: Mapping[str, Any], workers: int | None = None
) -> list[Any]:
    """Return a judge for each worker, to be closed by the caller; `options` are those of `model_judge`. Workers at one
    address share their judge."""
    urls = [base_url] if isinstance(base_url, str) else list(base_url)
    if not urls or not all(isinstance(url, str) for url in urls) or len(set(urls)) < len(urls):
        raise ValueError(f"base_url is {base_url!r:.100}; it must be an address, or a list of different ones")
    count = len(urls) if workers is None else workers
    if count < len(urls):
        raise ValueError(f"num_workers is {count}, but base_url has {len(urls)} addresses")
    options = dict(options)
    options.setdefault("concurrency", 8 * -(-count // len(urls)))  # of a judge that several workers share
    judges: list[Any] = []
    for url in urls:
        judges.append(make_from(model_judge, options | {"base_url": url}, "a model judge"))
        options["cache"] = judges[0].client.cache  # opened once, and closed with the first
    spent = [judge.client.usage for judge in judges]
    for judge in judges:
        judge.client.spent = spent
    return [judges[number % len(urls)] for number in range(count)]
