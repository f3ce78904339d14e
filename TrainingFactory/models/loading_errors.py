"""One-line messages for errors while loading a model: the missing or damaged file, and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

# Errors that transformers, tokenizers, safetensors and gguf raise for files that they cannot read. Tokenizers has no
# exception class of its own, and corrupt numbers can raise any Python error.
LOADING_ERRORS = (Exception,)
RECOPY_ADVICE = "copy or download it again"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "tokenization_*.py")


@contextmanager
def explain_errors(problem: str, location: str, options: dict[str, Any], filename: str) -> Iterator[None]:
    """Convert errors of the block, except device errors, to a one-line ValueError: problem, file, cause, remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except LOADING_ERRORS as error:
        if "allocate memory" in str(error):
            raise
        raise ValueError(f"{problem}: {_describe_cause(error, location, options, filename)}") from error


def find_local_folder(location: str, options: dict[str, Any]) -> Path:
    """Return the folder of a model's files: a local folder, or the hub's cache if it has the model."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(location)
    if not folder.is_dir():
        cached_path = try_to_load_from_cache(location, "config.json", revision=options.get("revision"))
        folder = Path(cached_path).parent if isinstance(cached_path, str) else folder
    return folder


def _describe_cause(error: Exception, location: str, options: dict[str, Any], filename: str) -> str:
    """Return the cause of a loading error and its remedy. Name the missing or damaged file if there is one; otherwise
    quote the library's error for the file `filename`."""
    if isinstance(error, ImportError):
        return _get_first_line(error)
    if (gguf_name := options.get("gguf_file")) is not None:
        gguf_file = Path(location, gguf_name)
        return f"{gguf_file} is damaged or has an unknown format ({_get_first_line(error)}): {RECOPY_ADVICE}"
    folder = find_local_folder(location, options)
    if damage_text := describe_damaged_file(folder):
        return damage_text
    patterns = TOKENIZER_FILES if filename == "tokenizer.json" and folder.is_dir() else ()
    if patterns and not any(file for pattern in patterns for file in folder.glob(pattern)):
        return (
            f"{folder} has no tokenizer (such as tokenizer.json): copy the model's tokenizer files into it, or write "
            "them with tokenizer.save_pretrained"
        )
    is_unsupported = "trust_remote_code" in str(error) or "model type" in str(error)
    if is_unsupported or isinstance(error, OSError):  # the files may be intact
        return _get_first_line(error)
    return f"{folder / filename} is damaged or does not fit the other files ({_get_first_line(error)}): {RECOPY_ADVICE}"


def describe_damaged_file(folder: Path) -> str | None:
    """Return an error text for the first unreadable file of a folder; None if all files are readable."""
    for path in sorted(folder.glob("*")):
        if damage := find_damage(path):
            return f"{path} is damaged ({damage}): {RECOPY_ADVICE}"
    return None


def find_damage(path: Path) -> str | None:
    """Return the error of reading a JSON or safetensors file; None if it can be read."""
    try:
        if path.suffix == ".json" and path.is_file():
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        return _get_first_line(error)
    return None


def _get_first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if "ignore_mismatched_sizes" in line:
        return "the shapes of the weights listed above differ from config.json"
    if isinstance(error, LookupError | AttributeError | TypeError):  # whose texts do not explain the error
        line = f"{type(error).__name__}: {line}"
    # Transformers names the option in a later line, under its own name.
    return f"{line} model.trust_remote_code=true runs it" if "trust_remote_code" in str(error) else line
