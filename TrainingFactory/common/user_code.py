"""Import of a user's Python files, and errors in them reported by file and line."""

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

from TrainingFactory.common.texts import describe, format_message

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
LIB_FOLDERS = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
_import_lock = threading.RLock()  # reentrant, because a file may load another one
_loaded_modules: dict[Path, tuple[tuple[int, int], ModuleType]] = {}  # path -> ((mtime, size), module)
_sibling_modules: dict[Path, dict[str, ModuleType]] = {}  # folder -> modules that clash with loaded ones


def is_file_name(name: str) -> bool:
    """Return whether a name is a Python file (`weather.py`, `weather.py:Weather`), not a name in the catalog."""
    return name.partition(".py:")[0].endswith(".py") or ".py:" in name


def split_name(name: str) -> tuple[str, str]:
    """Split `file.py:member` into file and member ("" if there is none)."""
    file_name, _, member_name = name.rpartition(":") if ".py:" in name else (name, "", "")
    return file_name, member_name


def import_user_file(kind: str, name: str) -> tuple[ModuleType, Path, str]:
    """Import `file.py` or `file.py:member`. Return the module, its path and the member ("" if there is none)."""
    file_name, member = split_name(name)
    path = Path(file_name).expanduser()
    if not path.is_file():
        search_hint = "" if path.is_absolute() else f" in {Path.cwd()}, nor next to the config file"
        raise ValueError(f"{kind} {name!r}: there is no file {path}{search_hint}")
    with _import_lock:
        return _import_file(path), path, member


def load_objects(kind: str, name: str) -> tuple[Path, str, list[Any]]:
    """Import `file.py` or `file.py:member`. Return path, member name, and the member alone or all definitions."""
    module, path, member = import_user_file(kind, name)
    if member and member not in vars(module):
        raise ValueError(f"{path} does not define {member!r}")
    return path, member, [vars(module)[member]] if member else list_definitions(module)


def list_definitions(module: ModuleType) -> list[Any]:
    """Return the objects that a module defines itself, without imported objects."""
    return [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]


def _import_file(path: Path) -> ModuleType:
    """Import a file once per process, so that all callers share its classes. Reimport it after a change."""
    path = path.resolve()
    file_status = path.stat()
    stamp = (file_status.st_mtime_ns, file_status.st_size)
    if path in _loaded_modules and _loaded_modules[path][0] == stamp:
        return _loaded_modules[path][1]
    # The digest separates files with the same name in different folders.
    module_name = f"tfactory_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs, because dataclasses and type hints look it up there
    try:
        with _import_siblings(path.parent):
            spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise as_value_error(error) from error
    _loaded_modules[path] = (stamp, module)
    return module


@contextmanager
def _import_siblings(folder: Path) -> Iterator[None]:
    """Let a file import its siblings. Installed packages take precedence: a sibling json.py does not shadow json.
    Modules that are already loaded from elsewhere under the name of a sibling are hidden inside the block and restored
    after it."""
    paths = list(sys.path)
    lib_paths = [entry for entry in paths if entry.startswith(LIB_FOLDERS)]
    sys.path[:] = [*lib_paths, str(folder), *(entry for entry in paths if entry not in lib_paths)]
    sibling_names = {file.stem for file in folder.iterdir()} - {PACKAGE_FOLDER.name, *sys.stdlib_module_names}
    loaded_names = sibling_names & sys.modules.keys()
    shadowed = {name for name in loaded_names if not _is_inside(sys.modules[name], (folder, *LIB_FOLDERS))}
    hidden_modules = _pop_modules(shadowed)
    sys.modules.update(_sibling_modules.get(folder, {}))
    try:
        yield
    finally:
        sys.path[:] = paths if str(folder) in paths else [*paths, str(folder)]  # for imports inside functions
        _sibling_modules.setdefault(folder, {}).update(_pop_modules(shadowed))
        sys.modules.update(hidden_modules)


def _is_inside(module: ModuleType, folders: tuple[str | Path, ...]) -> bool:
    file = Path(getattr(module, "__file__", None) or "/")
    return any(file.is_relative_to(folder) for folder in folders)


def _pop_modules(top_names: Collection[str]) -> dict[str, ModuleType]:
    """Remove the modules with these names and their submodules from sys.modules, and return them."""
    module_names = [name for name in sys.modules if name.partition(".")[0] in top_names]
    return {name: sys.modules.pop(name) for name in module_names}


def as_value_error(error: BaseException) -> ValueError:
    """Convert an exception of a user's code to a ValueError with file and line. Return this package's own ValueErrors
    unchanged."""
    if isinstance(error, ValueError) and has_plain_message(error):
        return error
    frames = find_user_frames(error)
    location = f"{frames[-1].file}:{frames[-1].line}: " if frames else ""
    return ValueError(f"{location}{type(error).__name__}: {error}")


@dataclass(slots=True, frozen=True)
class Frame:
    file: str
    line: int
    function: str  # qualified name


def find_user_frames(error: BaseException) -> list[Frame]:
    """Return the traceback's frames in the user's code, innermost last."""
    return [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_qualname.rpartition("<locals>.")[2])
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((str(PACKAGE_FOLDER), "<", *LIB_FOLDERS))
    ]


def locate_error(error: BaseException) -> str:
    """Return the error's innermost location in the user's code, such as ` (rewards.py:12)`, or ""."""
    frames = find_user_frames(error)
    return f" ({Path(frames[-1].file).name}:{frames[-1].line})" if frames else ""


def describe_failure(error: BaseException, subject: str = "") -> str:
    """Describe in one line who failed (default: the user's reward function), where and why."""
    frames, is_plain = find_user_frames(error), has_plain_message(error)
    if not frames and not subject:
        return (format_message(error) if is_plain else "") or describe(error)
    reason = f": {format_message(error)}" if is_plain else f" raised {describe(error)}"
    return f"{subject or f'the reward {frames[0].function}'}{locate_error(error)}{reason}"


def has_plain_message(error: BaseException) -> bool:
    """Return whether the message is clear without the exception's type: for this package's own exceptions, and for a
    ValueError that its code raised."""
    if type(error).__module__.partition(".")[0] == PACKAGE_FOLDER.name:
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    file_name = frames[-1][0].f_code.co_filename if frames else ""
    return isinstance(error, ValueError) and Path(file_name).is_relative_to(PACKAGE_FOLDER)
