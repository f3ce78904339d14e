"""Loading of rewards by import path: `rewards.py:score` or `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.user_code import (
    as_value_error,
    import_named,
    is_file_name,
    list_definitions,
    split_name,
)
from TrainingFactory.rewards.adapt import AdaptedReward, as_reward

KIND = "reward"


def load_reward(target: str, options: Mapping[str, Any] | None = None) -> AdaptedReward:
    """Load the reward at the import path `target`; with `options`, call the factory at that path."""
    function = find_callable(target)
    return as_reward(function if options is None else function(options))


def find_callable(target: str) -> Callable[..., Any]:
    """Return the callable at `target`; raise ValueError if it does not exist or is not callable."""
    function = _resolve_target(target)
    if not callable(function):
        raise ValueError(f"{target} is {function!r:.60} ({type(function).__name__}); it must be a function")
    return function


def with_absolute_path(target: str) -> str:
    """Return the target with an absolute file path, for a process in any working directory."""
    if not is_file_name(target):
        return target
    file, name = split_name(target)
    return f"{Path(file).expanduser().resolve()}:{name}".removesuffix(":")


def _resolve_target(target: str) -> Any:
    if is_file_name(target):
        module, path, name = import_named(KIND, target)
        return _find_function(module, str(path), name)
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name.isidentifier():
        raise ValueError(
            f"invalid reward {target!r}; write rewards.py:score or package.module:function (for a judge model, also "
            "set base_url to the address of its endpoint)"
        )
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{KIND} {target!r}: {error}; to load a file, write its name with .py") from error
    except (Exception, SystemExit) as error:  # user code
        raise as_value_error(error) from error
    return _find_function(module, module_name, name)


def _find_function(module: ModuleType, location: str, name: str) -> Any:
    members = vars(module)
    if name in members:
        return members[name]
    functions = [member.__name__ for member in list_definitions(module) if inspect.isroutine(member)]
    hint = did_you_mean(nearest(name, functions)) or f"; it has {', '.join(functions) or 'none'}"
    raise ValueError(f"{location} has no function {name!r}{hint}")
