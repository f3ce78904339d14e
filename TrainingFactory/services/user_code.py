"""Environments and tools from a user's Python file. Everything that can be wrong with it is told by file and line."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools import FunctionTool
from TrainingFactory.tools.adapt import as_tool

PACKAGE = Path(__file__).resolve().parent.parent
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))


def is_file_name(name: str) -> bool:
    """`weather.py` and `weather.py:Weather` are files; anything else is a name in the catalog."""
    return name.partition(".py:")[0].endswith(".py") or ".py:" in name


def environment_from_file(name: str) -> type[ToolEnvironment]:
    """The environment class in `weather.py`, or the one named in `weather.py:Weather`."""
    module, path, wanted = _opened("environment", name)
    if wanted:
        return _named(module, path, wanted)
    found = [value for value in _defined(module) if _is_environment(value)]
    if not found:
        raise ValueError(f"{path} defines no environment: a class that inherits from ToolEnvironment")
    if len(found) > 1:
        names = ", ".join(f"{path}:{value.__name__}" for value in found)
        raise ValueError(f"{path} defines several environments; say which: {names}")
    return found[0]


def tools_from_file(name: str) -> list[Tool | ToolSource]:
    """All `@tool` functions of `mytools.py`, or the one named in `mytools.py:lookup`, which may also be a plain
    typed function."""
    module, path, wanted = _opened("tool", name)
    if wanted:
        value: Any = vars(module).get(wanted)
        if value is None:
            raise ValueError(f"{path} has no {wanted!r}")
        return [as_tool(value)]
    found = [value for value in _defined(module) if isinstance(value, FunctionTool)]
    if not found:
        raise ValueError(f"{path} defines no tool: put @tool (from TrainingFactory.tools) over a function")
    return list(found)


def _opened(kind: str, name: str) -> tuple[ModuleType, Path, str]:
    """The module of `file.py` or `file.py:wanted`, its path, and what is wanted of it ("": not said)."""
    file, _, wanted = name.rpartition(":") if ".py:" in name else (name, "", "")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"{kind} {name!r}: there is no file {path}")
    return _imported(path), path, wanted


def _defined(module: ModuleType) -> list[Any]:
    """What was written in the file itself, not imported by it."""
    return [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]


def _named(module: ModuleType, path: Path, wanted: str) -> type[ToolEnvironment]:
    value: Any = vars(module).get(wanted)
    if value is None:
        raise ValueError(f"{path} has no {wanted!r}")
    if not _is_environment(value):
        raise ValueError(f"{wanted} in {path} is no environment: a class that inherits from ToolEnvironment")
    return value


def _is_environment(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, ToolEnvironment)


def _imported(path: Path) -> ModuleType:
    path = path.resolve()
    if str(path.parent) not in sys.path:
        # A user's file may import what lies beside it; last, so that a json.py there replaces nothing.
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"tfactory_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs: dataclasses and type hints look themselves up there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # foreign code
        raise told(error) from error
    return module


def told(error: BaseException) -> ValueError:
    """What a user's code raised, as one line with the place; a ValueError of ours as it is."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(PACKAGE):
        return error
    # The last frame that is neither ours nor inside an installed package is what the user can mend.
    own = [frame for frame in frames if not frame.filename.startswith((str(PACKAGE), "<", *INSTALLED))]
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return ValueError(f"{place}{type(error).__name__}: {error}")
