"""Content-addressed store of model files: the folder `DIGEST/` holds one complete model. Equal models are stored once.

Files are copied (as copy-on-write clones if the file system supports them), not hard-linked: a hard link shares its
bytes with the run's checkpoint, so that damage to one would damage the other. Folders are renamed to their digest in a
transaction of the database; folders that no version uses are removed with the next registration or deletion."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from TrainingFactory.data.disk import (
    CHECKSUM_FILE,
    TRAINING_STATE_FILES,
    digest_file,
    find_modified_files,
    read_checksums,
    sync,
    write_checksums,
)

try:
    import fcntl
except ImportError:  # Windows: without a lock, folders being written look like leftovers
    fcntl = None

# Files of a checkpoint that do not belong to the model; PEFT writes an empty README.md.
EXCLUDED = (*TRAINING_STATE_FILES, "learner.json", "state.json", CHECKSUM_FILE, "README.md")
WEIGHTS_SUFFIX = ".safetensors"
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
MODEL_SUFFIXES = (WEIGHTS_SUFFIX, ".json", ".txt", ".model", ".jinja", ".tiktoken")


def list_model_files(folder: Path) -> list[Path]:
    """Return the files of a model: safetensors weights, config and tokenizer."""
    files = (path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES and path.name not in EXCLUDED)
    return sorted(path for path in files if path.is_file())


def combine_digests(checksums: dict[str, str]) -> str:
    """Return the digest of a model from the digests of its files by name."""
    lines = "".join(f"{digest}  {file_name}\n" for file_name, digest in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def read_digest(folder: Path) -> str | None:
    """Return the digest of a model from its checksum file, without reading weights; None if a checksum is missing."""
    sums, names = read_checksums(folder), {path.name for path in list_model_files(folder)}
    return combine_digests({name: sums[name] for name in names}) if names and names <= sums.keys() else None


class ModelStore:
    """Folder of stored models, each in a subfolder named by its digest."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_model_folder(self, digest: str) -> Path:
        return self.path / digest

    @contextlib.contextmanager
    def open_temporary_folder(self) -> Iterator[Path]:
        """Yield a new temporary folder, locked until it is renamed or removed. Enter this context in a transaction of
        the database."""
        self.path.mkdir(parents=True, exist_ok=True)
        folder = self.path / f".part-{uuid4().hex}"
        folder.mkdir()
        lock_descriptor = os.open(folder, os.O_RDONLY) if fcntl is not None else None
        try:
            if lock_descriptor is not None:
                fcntl.flock(lock_descriptor, fcntl.LOCK_EX)  # pyright: ignore[reportOptionalMemberAccess]
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock_descriptor is not None:
                os.close(lock_descriptor)

    def copy(self, folder: Path, temp_folder: Path, checksums: dict[str, str]) -> None:
        """Copy the files to the temporary folder, verify their digests and flush them; raise OSError on failure."""
        try:
            for name, digest in checksums.items():
                _copy_file(folder / name, temp_folder / name)
                if digest_file(temp_folder / name) != digest:
                    raise ValueError(f"{folder / name} changed during the copy. Register the model again")
                os.chmod(temp_folder / name, 0o444)
            write_checksums(temp_folder)
            sync(*temp_folder.iterdir(), temp_folder)
        except OSError as error:
            raise OSError(
                f"cannot copy {folder} to {self.path}: {error.strerror}. Nothing registered"
            ) from error

    def publish(self, temp_folder: Path, digest: str) -> None:
        """Rename the temporary folder to its digest unless an intact copy exists; a damaged copy is replaced. Call it
        in a transaction."""
        if not self.find_damage(digest):
            return
        if os.path.lexists(self.get_model_folder(digest)):
            os.rename(self.get_model_folder(digest), temp_folder.with_name(f".gone-{uuid4().hex}"))
        os.rename(temp_folder, self.get_model_folder(digest))
        sync(self.path)

    def remove_unused_models(self, used_digests: set[str]) -> int:
        """Remove models that are not in `used_digests` and folders that killed processes left; return the freed
        bytes. Call it in a transaction, so that no other process is about to use one of them."""
        freed_bytes = 0
        for folder in self.path.iterdir() if self.path.is_dir() else ():
            if folder.name in used_digests:
                continue
            if folder.is_symlink():
                folder.unlink()
            elif folder.is_dir() and not _is_in_use(folder):
                removed_folder = folder.with_name(f".gone-{uuid4().hex}")
                os.rename(folder, removed_folder)
                freed_bytes += sum(file.lstat().st_size for file in removed_folder.iterdir())
                shutil.rmtree(removed_folder, ignore_errors=True)
        return freed_bytes

    def find_damage(self, digest: str) -> list[str]:
        """Return the problems of a stored model: missing, changed and unexpected files. Empty: it is intact."""
        folder = self.get_model_folder(digest)
        try:
            problems = [f"{folder / name} is missing or changed" for name in find_modified_files(folder)]
            paths = sorted(folder.iterdir())
            unexpected_names = {path.name for path in paths} - read_checksums(folder).keys() - {CHECKSUM_FILE}
            stored_digest = read_digest(folder)
        except (FileNotFoundError, NotADirectoryError):  # another process may remove it at the same time
            return [f"{folder} is missing"]
        problems += [f"{path} is a link, not a copy" for path in paths if path.is_symlink()]
        problems += [f"{folder / name} does not belong to the model" for name in sorted(unexpected_names)]
        if not problems and stored_digest != digest:
            problems = [f"{folder / CHECKSUM_FILE} does not match the digest {digest[:12]}"]
        return problems


def read_model_checksums(folder: Path) -> dict[str, str]:
    """Return the digests of a model's files. Raise ValueError if a file is damaged or missing, there are no safetensors
    weights, or a file is a link out of the folder, which may expose an unrelated file. Links of a hub cache, from
    `snapshots/REVISION` to the `blobs` beside it, are allowed."""
    if damaged_files := find_modified_files(folder, ignored=TRAINING_STATE_FILES):
        raise ValueError(
            f"{folder} is damaged: {', '.join(damaged_files)}: missing or different from {CHECKSUM_FILE}"
        )
    files = list_model_files(folder)
    if not any(path.suffix == WEIGHTS_SUFFIX for path in files):
        raise ValueError(
            f"{folder} has no {WEIGHTS_SUFFIX} weights. Convert the model: other formats can run code"
        )
    root = folder.resolve()
    allowed_folders = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in files:
        if not any((link_target := path.resolve()).is_relative_to(parent) for parent in allowed_folders):
            raise ValueError(
                f"{path} is a link to {link_target}, outside of the model's folder. If that file belongs to the model, "
                "copy the folder with cp -rL and register the copy"
            )
    recorded_checksums = read_checksums(folder)
    return {path.name: recorded_checksums.get(path.name) or digest_file(path) for path in files}


def _is_in_use(path: Path) -> bool:
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


def _copy_file(source_path: Path, target_path: Path) -> None:
    """Copy a file, as a copy-on-write clone if the file system supports it."""
    with source_path.open("rb") as source_file, target_path.open("wb") as target_file:
        remaining_bytes = os.fstat(source_file.fileno()).st_size
        while remaining_bytes and hasattr(os, "copy_file_range"):
            try:
                copied_bytes = os.copy_file_range(source_file.fileno(), target_file.fileno(), remaining_bytes)
            except OSError as error:
                if error.errno in DISK_FULL_ERRORS:
                    raise
                break  # not supported between these two file systems
            if not copied_bytes:
                break
            remaining_bytes -= copied_bytes
        if remaining_bytes:
            source_file.seek(target_file.seek(0, os.SEEK_END))
            shutil.copyfileobj(source_file, target_file, 1 << 20)
