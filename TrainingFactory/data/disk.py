"""Files and folders that are whole or not there, whenever a process is killed or the power goes."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

SUMS = "SHA256SUMS"  # as `sha256sum -c` reads it
# What a checkpoint holds to train on, which is large and no part of the model; the second as earlier versions wrote it.
STATE = ("learner/state.safetensors", "learner.safetensors")
MAX_FILE = 16 << 20  # bytes of a file that is read as a whole
MAX_LINE = 64 << 20  # bytes
# Neither wait for the other end of a FIFO nor follow a link. Windows has neither flag.
CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


def sync(*paths: Path) -> None:
    """Bring files and folders to the disk: after a power cut no name must stand for an empty file."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: Path, mode: str = "rb") -> IO[Any]:
    """Open a file of a folder that others may have written; raise ValueError for a FIFO, a device, a directory, and
    a link that leads out of the folder."""
    target = path.resolve() if path.is_symlink() else path
    if target != path and not target.is_relative_to(path.parent.resolve()):
        raise ValueError(
            f"{path} is a link to a file outside its folder. Replace it with a copy of the file."
        )
    opener = lambda name, flags: os.open(name, flags | CAREFUL, 0o644)  # noqa: E731
    file = open(target, mode, opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file. Remove it.")
    return file


def read_whole(path: Path) -> bytes:
    """Return the content of a small file; raise ValueError as `open_regular` does, and for a larger one."""
    with open_regular(path) as file:
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise ValueError(f"{path} is larger than {MAX_FILE} bytes.")
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; none if it does not exist. Raise ValueError as `open_regular` does,
    and for a line over `MAX_LINE` bytes."""
    if not os.path.lexists(path):
        return
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise ValueError(f"{path} has a line of more than {MAX_LINE} bytes.")
            yield line


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that could not be written: of a full disk the system itself names none."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written ({error.strerror or error})") from error


def write_aside(path: Path, text: str) -> None:
    """Write a file aside first: what was there is whole until what comes is."""
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        part.write_text(text, encoding="utf-8", errors="surrogatepass", newline="\n")
        sync(part)
        os.replace(part, path)
        sync(path.parent)


def remove(folder: Path) -> None:
    """Take the name away first, so that half a folder is never taken for a whole one."""
    if folder.exists():
        gone = folder.with_name(f".{folder.name.removeprefix('.')}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(folder, gone)
        shutil.rmtree(gone)


def write_sums(folder: Path) -> None:
    """Write down the digest of every file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{file_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str]:
    """Return the digests that were written down, by file; none where an earlier version wrote the folder."""
    if not (folder / SUMS).is_file():
        return {}
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def drop_state(folder: Path) -> None:
    """Remove from a checkpoint what only training needs. Its digest goes first: a kill in between leaves a file without
    a digest, never a digest without its file."""
    present = [folder / name for name in STATE if (folder / name).exists()]
    if present and (sums := read_sums(folder)):
        kept = (f"{digest}  {name}\n" for name, digest in sums.items() if name not in STATE)
        write_aside(folder / SUMS, "".join(kept))
    for path in present:
        path.unlink()


def changed(folder: Path, but: Collection[str] = ()) -> list[str]:
    """Return the files that are missing or not as they were when their digests were written; none without digests.
    The files `but` are not looked at."""
    sums = {name: digest for name, digest in read_sums(folder).items() if name not in but}
    whole = {n for n, digest in sums.items() if (folder / n).is_file() and file_digest(folder / n) == digest}
    return sorted(sums.keys() - whole)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
