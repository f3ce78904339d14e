"""A user's own Python files: imported, and what goes wrong in them told by file and line."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from TrainingFactory.common.texts import describe, message_of

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
_loading = threading.RLock()  # a file may load another one
_loaded: dict[Path, tuple[tuple[int, int], ModuleType]] = {}  # with when it was written, and its length
_beside: dict[Path, dict[str, ModuleType]] = {}  # modules of a folder whose names are taken by others


def is_file_name(name: str) -> bool:
    """Tell files (`weather.py`, `weather.py:Weather`) from names in the catalog."""
    return name.partition(".py:")[0].endswith(".py") or ".py:" in name


def split_name(name: str) -> tuple[str, str]:
    """Split `file.py:wanted` into the file and what is wanted of it ("": not said)."""
    file, _, wanted = name.rpartition(":") if ".py:" in name else (name, "", "")
    return file, wanted


def opened(kind: str, name: str) -> tuple[ModuleType, Path, str]:
    """Import `file.py` or `file.py:wanted`; return the module, its path, and what is wanted of it ("": not said)."""
    file, wanted = split_name(name)
    path = Path(file).expanduser()
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}, nor beside the config if one names it"
        raise ValueError(f"{kind} {name!r}: there is no file {path}{where}")
    with _loading:
        return _imported(path), path, wanted


def chosen(kind: str, name: str) -> tuple[Path, str, list[Any]]:
    """Import `file.py` or `file.py:wanted`; return its path, what is wanted, and that alone or all that it defines."""
    module, path, wanted = opened(kind, name)
    if wanted and wanted not in vars(module):
        raise ValueError(f"{path} has no {wanted!r}")
    return path, wanted, [vars(module)[wanted]] if wanted else defined(module)


def defined(module: ModuleType) -> list[Any]:
    """Return what was written in the file itself, not imported by it."""
    return [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]


def _imported(path: Path) -> ModuleType:
    """Import a file once in a process, so that what it defines is the same for all who ask; again when it changed."""
    path = path.resolve()
    state = path.stat()
    stamp = (state.st_mtime_ns, state.st_size)
    if path in _loaded and _loaded[path][0] == stamp:
        return _loaded[path][1]
    # Files of one name in several folders are several modules.
    name = f"tfactory_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and type hints look themselves up there
    try:
        with _siblings(path.parent):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # foreign code
        raise told(error) from error
    _loaded[path] = (stamp, module)
    return module


@contextmanager
def _siblings(folder: Path) -> Iterator[None]:
    """Let a file import what lies beside it, after what is installed: a json.py there replaces nothing. Modules of the
    same names that came from elsewhere are not seen meanwhile, and are there again afterwards."""
    path = list(sys.path)
    installed = [each for each in path if each.startswith(INSTALLED)]
    sys.path[:] = [*installed, str(folder), *(each for each in path if each not in installed)]
    beside = {each.stem for each in folder.iterdir()} - {PACKAGE.name, *sys.stdlib_module_names}
    taken = {
        name for name in beside & sys.modules.keys() if not _lies_in(sys.modules[name], (folder, *INSTALLED))
    }
    aside = _take(taken)
    sys.modules.update(_beside.get(folder, {}))
    try:
        yield
    finally:
        sys.path[:] = path if str(folder) in path else [*path, str(folder)]  # for imports inside functions
        _beside.setdefault(folder, {}).update(_take(taken))
        sys.modules.update(aside)


def _lies_in(module: ModuleType, folders: tuple[str | Path, ...]) -> bool:
    file = Path(getattr(module, "__file__", None) or "/")
    return any(file.is_relative_to(folder) for folder in folders)


def _take(names: Collection[str]) -> dict[str, ModuleType]:
    """Remove modules, and those inside them, from the loaded ones."""
    found = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in found}


def told(error: BaseException) -> ValueError:
    """Turn what a user's code raised into one line with the place; keep a ValueError of ours as it is."""
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
    """Return the frames in a user's code, the innermost last: neither ours nor in an installed package."""
    return [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_qualname.rpartition("<locals>.")[2])
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((str(PACKAGE), "<", *INSTALLED))
    ]


def place_of(error: BaseException) -> str:
    """Return ` (rewards.py:12)`, the innermost place in a user's code; "" where there is none."""
    own = own_frames(error)
    return f" ({Path(own[-1].file).name}:{own[-1].line})" if own else ""


def failure(error: BaseException, who: str = "") -> str:
    """Say in one line who failed (by default the user's function that we called), where and of what."""
    own, plain = own_frames(error), is_plain(error)
    if not own and not who:
        return (message_of(error) if plain else "") or describe(error)
    told_as = f": {message_of(error)}" if plain else f" raised {describe(error)}"
    return f"{who or f'the reward {own[0].function}'}{place_of(error)}{told_as}"


def is_plain(error: BaseException) -> bool:
    """Tell exceptions whose text says everything: one of ours, or a ValueError that our code raised."""
    if type(error).__module__.partition(".")[0] == PACKAGE.name:
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    last = frames[-1][0].f_code.co_filename if frames else ""
    return isinstance(error, ValueError) and Path(last).is_relative_to(PACKAGE)
