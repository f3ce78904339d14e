"""A user's own Python file, imported. Everything that can be wrong with it is told by file and line."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from TrainingFactory.tools.texts import describe, message_of

PACKAGE = Path(__file__).resolve().parent.parent
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))


def is_file_name(name: str) -> bool:
    """`weather.py` and `weather.py:Weather` are files; anything else is a name in the catalog."""
    return name.partition(".py:")[0].endswith(".py") or ".py:" in name


def split_name(name: str) -> tuple[str, str]:
    """The file of `file.py` or `file.py:wanted`, and what is wanted of it ("": not said)."""
    file, _, wanted = name.rpartition(":") if ".py:" in name else (name, "", "")
    return file, wanted


def opened(kind: str, name: str) -> tuple[ModuleType, Path, str]:
    """The module of `file.py` or `file.py:wanted`, its path, and what is wanted of it ("": not said)."""
    file, wanted = split_name(name)
    path = Path(file).expanduser()
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}, nor beside the config if one names it"
        raise ValueError(f"{kind} {name!r}: there is no file {path}{where}")
    return _imported(path), path, wanted


def defined(module: ModuleType) -> list[Any]:
    """What was written in the file itself, not imported by it."""
    return [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]


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
    if isinstance(error, ValueError) and is_plain(error):
        return error
    own = own_frames(error)
    place = f"{own[-1].file}:{own[-1].line}: " if own else ""
    return ValueError(f"{place}{type(error).__name__}: {error}")


@dataclass(slots=True, frozen=True)
class Frame:
    file: str
    line: int
    function: str  # with its class


def own_frames(error: BaseException) -> list[Frame]:
    """Those in a user's code, the innermost last: neither ours nor in an installed package."""
    return [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_qualname.rpartition("<locals>.")[2])
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((str(PACKAGE), "<", *INSTALLED))
    ]


def place_of(error: BaseException) -> str:
    """` (rewards.py:12)`, the innermost place in a user's code; nothing where there is none."""
    own = own_frames(error)
    return f" ({Path(own[-1].file).name}:{own[-1].line})" if own else ""


def failure(error: BaseException, who: str = "") -> str:
    """Who failed, where and of what, in one line. `who`: a name for it, else the function of the user's that we called.
    Exceptions of ours are told by their text alone."""
    own, plain = own_frames(error), is_plain(error)
    if not own and not who:
        return (message_of(error) if plain else "") or describe(error)
    told_as = f": {message_of(error)}" if plain else f" raised {describe(error)}"
    return f"{who or f'the reward {own[0].function}'}{place_of(error)}{told_as}"


def is_plain(error: BaseException) -> bool:
    """Whether the text says everything: an exception of ours, or a ValueError that our code raised."""
    if type(error).__module__.partition(".")[0] == PACKAGE.name:
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    last = frames[-1][0].f_code.co_filename if frames else ""
    return isinstance(error, ValueError) and Path(last).is_relative_to(PACKAGE)
