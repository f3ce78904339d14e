"""Rewards by the place where they are written: `rewards.py:score`, or `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.user_code import defined, is_file_name, opened, split_name, told
from TrainingFactory.rewards.adapt import Adapted, as_reward

KIND = "reward"


def load_reward(target: str, options: Mapping[str, Any] | None = None) -> Adapted:
    """Return the reward that is named; with `options`, what the function that is named makes of them."""
    found = find_callable(target)
    return as_reward(found if options is None else found(options))


def find_callable(target: str) -> Callable[..., Any]:
    """Return what is named; raise ValueError if it is nothing to call."""
    found = _found(target)
    if not callable(found):
        raise ValueError(f"{target} is {found!r:.60} ({type(found).__name__}); it must be a function")
    return found


def with_whole_path(target: str) -> str:
    """Return the same target for a process in any folder."""
    if not is_file_name(target):
        return target
    file, name = split_name(target)
    return f"{Path(file).expanduser().resolve()}:{name}".removesuffix(":")


def _found(target: str) -> Any:
    if is_file_name(target):
        module, path, name = opened(KIND, target)
        return _named(module, str(path), name)
    place, colon, name = target.partition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(
            f"{target!r} names no reward; write rewards.py:score or package.module:function (for a model that judges: "
            "its name with base_url, the address of an endpoint that has it)"
        )
    try:
        module = import_module(place)
    except ModuleNotFoundError as error:
        raise ValueError(f"{KIND} {target!r}: {error}; for a file write its name with .py") from error
    except (Exception, SystemExit) as error:  # foreign code
        raise told(error) from error
    return _named(module, place, name)


def _named(module: ModuleType, where: str, name: str) -> Any:
    found = vars(module)
    if name in found:
        return found[name]
    names = [value.__name__ for value in defined(module) if inspect.isroutine(value)]
    has = did_you_mean(nearest(name, names)) or f"; it has {', '.join(names) or 'none'}"
    raise ValueError(f"{where} has no function {name!r}{has}")
