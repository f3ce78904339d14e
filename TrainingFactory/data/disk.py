"""Atomic writes of files and folders, which survive a killed process or a power cut, and safe reads."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHECKSUM_FILE = "SHA256SUMS"  # in the format of `sha256sum -c`
# Training state of a checkpoint: large, and only needed to resume. Earlier versions wrote the second name.
TRAINING_STATE_FILES = ("learner/state.safetensors", "learner.safetensors")
MAX_FILE_BYTES = 16 << 20  # bytes, of a file read as a whole
MAX_LINE_BYTES = 64 << 20  # bytes
# Do not block on a FIFO and do not follow symbolic links. Windows has neither flag.
SAFE_OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


def sync(*paths: Path) -> None:
    """Flush files and folders to disk, so that no file is empty after a power cut."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular_file(path: Path, mode: str = "rb") -> IO[Any]:
    """Open a file in a folder to which other programs may have written. Raise ValueError for a FIFO, device or
    directory, and for a symbolic link to a target outside the folder."""
    resolved_path = path.resolve() if path.is_symlink() else path
    if resolved_path != path and not resolved_path.is_relative_to(path.parent.resolve()):
        raise ValueError(
            f"{path} is a link to a file outside its folder. Replace it with a copy of the file."
        )
    opener = lambda file_name, flags: os.open(file_name, flags | SAFE_OPEN_FLAGS, 0o644)  # noqa: E731
    file = open(resolved_path, mode, opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file. Remove it.")
    return file


def read_small_file(path: Path) -> bytes:
    """Return the content of a small file. Raise ValueError like `open_regular_file` and over `MAX_FILE_BYTES`."""
    with open_regular_file(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes.")
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, including line ends; no lines if it does not exist. Raise ValueError like
    `open_regular_file`, and for lines over `MAX_LINE_BYTES`."""
    if not os.path.lexists(path):
        return
    with open_regular_file(path) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{path} has a line of more than {MAX_LINE_BYTES} bytes.")
            yield line


@contextmanager
def name_file_on_error(path: Path) -> Iterator[None]:
    """Add the file name to an OSError, because the system's own message for a full disk has none."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written ({error.strerror or error})") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, through a temporary file next to it."""
    partial_file = path.with_name(f".{path.name}.part")
    with name_file_on_error(path):
        partial_file.write_text(text, encoding="utf-8", errors="surrogatepass", newline="\n")
        sync(partial_file)
        os.replace(partial_file, path)
        sync(path.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder. Rename it first, so that nobody mistakes a partly deleted folder for a complete one."""
    if folder.exists():
        temporary_folder = folder.with_name(f".{folder.name.removeprefix('.')}.gone")
        shutil.rmtree(temporary_folder, ignore_errors=True)
        os.rename(folder, temporary_folder)
        shutil.rmtree(temporary_folder)


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file in a folder to `CHECKSUM_FILE`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{digest_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / CHECKSUM_FILE).write_text("".join(lines), encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the recorded digests by file. Folders of earlier versions have none."""
    if not (folder / CHECKSUM_FILE).is_file():
        return {}
    lines = (folder / CHECKSUM_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def delete_training_state(folder: Path) -> None:
    """Delete the training state of a checkpoint. Its digest is removed first: a kill in between leaves a file without a
    digest, never a digest without its file."""
    state_files = [folder / name for name in TRAINING_STATE_FILES if (folder / name).exists()]
    if state_files and (checksums := read_checksums(folder)):
        remaining_lines = (
            f"{digest}  {name}\n" for name, digest in checksums.items() if name not in TRAINING_STATE_FILES
        )
        write_atomically(folder / CHECKSUM_FILE, "".join(remaining_lines))
    for path in state_files:
        path.unlink()


def find_modified_files(folder: Path, ignored: Collection[str] = ()) -> list[str]:
    """Return the files that are missing or no longer match their recorded digests, except those in `ignored`."""
    digests = {n: digest for n, digest in read_checksums(folder).items() if n not in ignored}
    unmodified_files = {
        n for n, digest in digests.items() if (folder / n).is_file() and digest_file(folder / n) == digest
    }
    return sorted(digests.keys() - unmodified_files)


def digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
