"""Configs, examples, notebooks and documentation pages beside the package: at the root of a checkout, and inside the
package in a wheel. `tfactory new` copies them into the current folder, under the paths that they have in a checkout, so
that the commands in the documentation work unchanged."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from TrainingFactory.common.options import did_you_mean, nearest

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
WHEEL_FOLDER = PACKAGE_FOLDER / "starters"  # written by setup.py
STARTER_FOLDERS = {"config": "configs", "example": "examples", "notebook": "notebooks"}
MAX_SUMMARY_CHARS = 90  # characters of a line in the list
# Other files and folders that a starter reads, relative to the root.
COMPANION_FILES = {
    "configs/qwen3_grpo.yaml": (
        "tools/search.json",
        "examples/search_server.py",
        "examples/search_r1/corpus.jsonl",
    ),
    "examples/search_server.py": ("examples/search_r1/corpus.jsonl",),
    "examples/retrieval_server.py": ("examples/search_r1/corpus.jsonl",),
    "examples/search_r1": ("examples/search_server.py", "examples/retrieval_server.py"),
    "notebooks/own_tools_and_reward.ipynb": ("examples/own_agent/model",),
    "notebooks/episodes_and_credit.ipynb": ("examples/own_agent/model",),
}


@dataclass(slots=True, frozen=True)
class Starter:
    """A file or folder that `tfactory new` copies; all paths are relative to `find_starter_root()`."""

    kind: str
    name: str
    path: PurePosixPath
    summary: str  # one line
    files: tuple[PurePosixPath, ...]

    @property
    def command(self) -> str:
        """Return the command that runs the copied starter: from its own text, else the usual one for its kind."""
        if self.kind == "notebook":
            return f"jupyter lab {self.path}"
        if self.kind == "config" or self.path.suffix == "":
            return f"tfactory train {self.files[0]}"
        text = (find_starter_root() / self.path).read_text(encoding="utf-8")
        match = re.search(rf"^\s*(python {re.escape(str(self.path))}[^#\n]*)", text, re.MULTILINE)
        return match[1].strip() if match else f"python {self.path}"

    @property
    def is_template(self) -> bool:
        """Return True if the starter refers to files that the user still has to write."""
        return self.path.parent.name == "templates"


def find_starter_root() -> Path:
    return WHEEL_FOLDER if WHEEL_FOLDER.is_dir() else PACKAGE_FOLDER.parent


def list_starters(kind: str) -> list[Starter]:
    """Return all starters of a kind, sorted by name, with templates after configs that run."""
    root = find_starter_root()
    folder = root / STARTER_FOLDERS[kind]
    if kind == "config":
        paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*/*.yaml"))]
    elif kind == "notebook":
        paths = sorted(folder.glob("*.ipynb"))
    else:
        paths = sorted(path for path in folder.glob("[!._]*") if path.is_dir() or path.suffix == ".py")
    return [_read_starter(kind, path, root) for path in paths]


def _read_starter(kind: str, path: Path, root: Path) -> Starter:
    files = [path]
    if path.is_dir():
        files = [
            file for file in sorted(path.rglob("*")) if file.is_file() and "__pycache__" not in file.parts
        ]
        files.sort(key=lambda file: file != path / "config.yaml")  # the config comes first
    relative_files = [PurePosixPath(file.relative_to(root).as_posix()) for file in files]
    relative_path = PurePosixPath(path.relative_to(root).as_posix())
    return Starter(kind, path.stem, relative_path, _read_summary(files[0]), tuple(relative_files))


def _list_files(path: Path) -> list[Path]:
    """Return the file itself, or all files of a folder."""
    if path.is_file():
        return [path]
    return [file for file in sorted(path.rglob("*")) if file.is_file() and "__pycache__" not in file.parts]


def _read_summary(path: Path) -> str:
    """Return the first sentence of a file's opening comment, docstring or heading."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        text = " ".join(line for line in lines if not line.startswith("configs/"))
    elif path.suffix == ".py":
        text = text.partition('"""')[2].partition('"""')[0].partition("\n\n")[0]
    else:
        text = text.partition('"# ')[2].partition('"')[0].removesuffix("\\n")
    sentence = re.split(r"(?<=\.)\s", " ".join(text.split()))[0]
    if len(sentence) > MAX_SUMMARY_CHARS:
        sentence = re.split(r"[:;] ", sentence)[0]
    return sentence.replace("Copy this: ", "template: ").rstrip(".:")


def find_starter(kind: str, name: str) -> Starter:
    """Return a starter by its name, with or without folder and suffix; raise ValueError with the closest match."""
    starters_by_name = {starter.name: starter for starter in list_starters(kind)}
    for starter in starters_by_name.values():
        if name in (starter.name, starter.path.name, str(starter.path)):
            return starter
    stem = PurePosixPath(name).stem
    hint = did_you_mean(nearest(stem, starters_by_name)) or f"; tfactory new {kind} lists all names"
    raise ValueError(f"There is no {kind} {name!r}{hint}")


def copy_starter(starter: Starter, out: Path | None = None) -> list[Path]:
    """Copy a starter and the files that it reads; return the paths written. `out` renames a single file. Never
    overwrite: raise ValueError if one of the starter's files exists with other content, or if all exist."""
    root = find_starter_root()
    target_paths = {file: Path(file) for file in starter.files} if out is None else {starter.path: out}
    existing_files = {file: path for file, path in target_paths.items() if path.exists()}
    differing_paths = [
        path for file, path in existing_files.items() if not _has_same_content(root / file, path)
    ]
    if differing_paths or existing_files == target_paths:
        path = [*differing_paths, *existing_files.values()][0]
        hint = ", or choose another file with --out" if starter.kind == "config" else ""
        raise ValueError(f"{path} exists already and is not overwritten. Rename or delete it{hint}")
    for name in COMPANION_FILES.get(str(starter.path), ()):
        target_paths |= {
            PurePosixPath(file.relative_to(root).as_posix()): file.relative_to(root)
            for file in _list_files(root / name)
        }
    missing_paths = {file: path for file, path in target_paths.items() if not path.exists()}
    for file, target_path in missing_paths.items():
        target_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, target_path)
    return list(missing_paths.values())


def _has_same_content(original_path: Path, copied_file: Path) -> bool:
    return copied_file.is_file() and copied_file.read_bytes() == original_path.read_bytes()


def find_create_command(path: Path) -> str | None:
    """Return the `tfactory new` command that creates a missing config file; None if no starter creates it."""
    configs_by_file = {starter.path.name: starter for starter in list_starters("config")}
    for starter in [*list_starters("example"), *configs_by_file.values()]:
        if PurePosixPath(path.as_posix()) in starter.files:
            return f"tfactory new {starter.kind} {starter.name}"
    if path.name in configs_by_file:
        return f"tfactory new config {configs_by_file[path.name].name} --out {path}"
    return None


def find_docs(name: str) -> str:
    """Return the path of a documentation page for the user: `docs/NAME` in a checkout, else its path in the installed
    package."""
    if not WHEEL_FOLDER.is_dir():
        return f"docs/{name}"
    pages: Sequence[Path] = sorted((WHEEL_FOLDER / "docs").rglob(name))
    return str(pages[0]) if pages else f"docs/{name}"
