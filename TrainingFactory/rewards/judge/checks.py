"""Options of a judge, checked when it is made. Messages name the option, its value and what it may be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.cache.stores import IN_REDIS

OF_REQUESTS = (
    "model",
    "messages",
    "stream",
)  # not for users to set: a judge sets them, and reads whole replies


def check_over_zero(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number over 0")


def check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {least} or more")


def check_section(name: str, value: Any, example: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r:.60}; it must be a section such as {name}: {{{example}}}")


def check_request(options: Mapping[str, Any]) -> None:
    """What goes into every request."""
    if own := [name for name in OF_REQUESTS if name in options]:
        raise ValueError(f"options.{own[0]} is set by the judge itself; leave it out")
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"options is {options!r:.100}, which cannot be sent as JSON ({error})") from None


def open_cache(cache: Any) -> ToolCache | None:
    """One that is handed in stays what it is; a file is opened, in a folder that must be there."""
    if cache is None or isinstance(cache, ToolCache):
        return cache
    if not isinstance(cache, str | Path) or not str(cache).strip():
        raise ValueError(f"cache is {cache!r}; it must be the path of a file such as judged.sqlite")
    if not IN_REDIS.match(str(cache)):
        cache = Path(cache).expanduser()
        if not cache.parent.is_dir():
            raise ValueError(f"cache is {str(cache)!r}, but there is no folder {cache.parent}; make it first")
    return ToolCache(cache)
