"""A user's own Python file, imported. Everything that can be wrong with it is told by file and line."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

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
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(PACKAGE):
        return error
    # The last frame that is neither ours nor inside an installed package is what the user can mend.
    own = [frame for frame in frames if not frame.filename.startswith((str(PACKAGE), "<", *INSTALLED))]
    place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return ValueError(f"{place}{type(error).__name__}: {error}")
