"""Models by content: `DIGEST/` in the store holds the files of one model, whole or not there.

Files are copied (shared blocks where the file system has them), not hard-linked: a link has the bytes of the run's own
checkpoint, so that whatever damages one damages the other, and a model that was released must not change. Equal models
are stored once. Folders get their names inside a transaction of the database, and one that no version names is
cleared away the next time something is stored or deleted."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from TrainingFactory.data.disk import STATE, SUMS, changed, file_digest, read_sums, sync, write_sums

try:
    import fcntl
except ImportError:  # not on Windows: there what a killed process left is removed with the next one
    fcntl = None

# What a checkpoint holds beside the model; the last is PEFT's empty page.
TRAINING = (*STATE, "learner.json", "state.json", SUMS, "README.md")
WEIGHTS = ".safetensors"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
SUFFIXES = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken")


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model: its weights as safetensors, its config, its tokenizer."""
    found = (path for path in folder.iterdir() if path.suffix in SUFFIXES and path.name not in TRAINING)
    return sorted(path for path in found if path.is_file())


def digest_of(sums: dict[str, str]) -> str:
    """Return the digest of a model, from those of its files by name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def stated_digest(folder: Path) -> str | None:
    """Return the digest of the model in a folder, as the digests of its files were written down; None without any."""
    sums, names = read_sums(folder), {path.name for path in model_files(folder)}
    return digest_of({name: sums[name] for name in names}) if names and names <= sums.keys() else None


class Store:
    """A folder of models by digest."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, digest: str) -> Path:
        return self.path / digest

    @contextlib.contextmanager
    def part(self) -> Iterator[Path]:
        """Yield a new folder to write into, which is marked as in use while it is there; call it in a transaction."""
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.path / f".part-{uuid4().hex}"
        part.mkdir()
        held = os.open(part, os.O_RDONLY) if fcntl is not None else None
        try:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_EX)  # pyright: ignore[reportOptionalMemberAccess]
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)
            if held is not None:
                os.close(held)

    def copy(self, source: Path, part: Path, sums: dict[str, str]) -> None:
        """Write the files aside, on the disk and compared with their digests; raise OSError where there is no room."""
        try:
            for name, digest in sums.items():
                _copy(source / name, part / name)
                if file_digest(part / name) != digest:
                    raise ValueError(f"{source / name} changed while it was copied; register it again")
                os.chmod(part / name, 0o444)
            write_sums(part)
            sync(*part.iterdir(), part)
        except OSError as error:
            raise OSError(
                f"{source} could not be copied to {self.path}: {error.strerror}; nothing was registered"
            ) from error

    def name(self, part: Path, digest: str) -> None:
        """Give what was written aside its name, unless an equal model has it; a damaged one goes. Call it in a
        transaction."""
        if not self.damage(digest):
            return
        if os.path.lexists(self.folder(digest)):
            os.rename(self.folder(digest), part.with_name(f".gone-{uuid4().hex}"))
        os.rename(part, self.folder(digest))
        sync(self.path)

    def sweep(self, used: set[str]) -> int:
        """Remove the models that nothing names, and what killed processes left; call it in a transaction, so that none
        is about to be named. Return the bytes that are free again."""
        freed = 0
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.name in used:
                continue
            if path.is_symlink():
                path.unlink()
            elif path.is_dir() and not _in_use(path):
                gone = path.with_name(f".gone-{uuid4().hex}")
                os.rename(path, gone)
                freed += sum(file.lstat().st_size for file in gone.iterdir())
                shutil.rmtree(gone, ignore_errors=True)
        return freed

    def damage(self, digest: str) -> list[str]:
        """Return what is wrong with a stored model: files that are missing or changed, or not named by it."""
        folder = self.folder(digest)
        try:
            wrong = [f"{folder / name} is missing or changed" for name in changed(folder)]
            paths = sorted(folder.iterdir())
            extra = {path.name for path in paths} - read_sums(folder).keys() - {SUMS}
            stated = stated_digest(folder)
        except (FileNotFoundError, NotADirectoryError):  # another process may sweep it away meanwhile
            return [f"{folder} is missing"]
        wrong += [f"{path} is a link, not a copy" for path in paths if path.is_symlink()]
        wrong += [f"{folder / name} does not belong there" for name in sorted(extra)]
        if not wrong and stated != digest:
            wrong = [f"{folder / SUMS} is not that of model {digest[:12]}"]
        return wrong


def sums_of(folder: Path) -> dict[str, str]:
    """Return the digests of a model's files as they are now; raise ValueError where it is not whole, has no weights as
    safetensors, or has links to files elsewhere, which need not be the model's. Links of a hub cache, from
    `snapshots/REVISION` to `blobs` beside it, are the model's own."""
    if files := changed(folder, but=STATE):
        raise ValueError(f"{folder} is damaged: {', '.join(files)}: missing or not as {SUMS} says")
    files = model_files(folder)
    if not any(path.suffix == WEIGHTS for path in files):
        raise ValueError(
            f"{folder} has no weights as {WEIGHTS} files; others may run code when they are read"
        )
    root = folder.resolve()
    inside = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in files:
        if not any((target := path.resolve()).is_relative_to(place) for place in inside):
            raise ValueError(
                f"{path} is a link to {target}, outside of the model's folder. If that file belongs to the model, "
                "register a copy of the folder that has the file itself: cp -rL"
            )
    stated = read_sums(folder)
    return {path.name: stated.get(path.name) or file_digest(path) for path in files}


def _in_use(path: Path) -> bool:
    if fcntl is None or not path.name.startswith(".part-"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _copy(source: Path, target: Path) -> None:
    """Copy a file, sharing its blocks where the file system can."""
    with source.open("rb") as read, target.open("wb") as write:
        left = os.fstat(read.fileno()).st_size
        while left and hasattr(os, "copy_file_range"):
            try:
                done = os.copy_file_range(read.fileno(), write.fileno(), left)
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise
                break  # not between these two file systems
            if not done:
                break
            left -= done
        if left:
            read.seek(write.seek(0, os.SEEK_END))
            shutil.copyfileobj(read, write, 1 << 20)
