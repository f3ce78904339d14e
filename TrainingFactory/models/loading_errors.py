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
def explained_errors(problem: str, source: str, options: dict[str, Any], component: str) -> Iterator[None]:
    """Convert errors of the block, except device errors, to a one-line ValueError: problem, file, cause, remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except LOADING_ERRORS as error:
        if "allocate memory" in str(error):
            raise
        raise ValueError(f"{problem}: {_describe_cause(error, source, options, component)}") from error


def local_folder(source: str, options: dict[str, Any]) -> Path:
    """Return the folder of a model's files: a local folder, or the hub's cache if it has the model."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    if not folder.is_dir():
        cached = try_to_load_from_cache(source, "config.json", revision=options.get("revision"))
        folder = Path(cached).parent if isinstance(cached, str) else folder
    return folder


def _describe_cause(error: Exception, source: str, options: dict[str, Any], component: str) -> str:
    """Return the cause of a loading error and its remedy. Name the missing or damaged file if there is one; otherwise
    quote the library's error for the file `component`."""
    if isinstance(error, ImportError):
        return _first_line(error)
    if (name := options.get("gguf_file")) is not None:
        file = Path(source, name)
        return f"{file} is damaged or has an unknown format ({_first_line(error)}): {RECOPY_ADVICE}"
    folder = local_folder(source, options)
    if damaged := describe_damaged_file(folder):
        return damaged
    patterns = TOKENIZER_FILES if component == "tokenizer.json" and folder.is_dir() else ()
    if patterns and not any(file for pattern in patterns for file in folder.glob(pattern)):
        return (
            f"{folder} has no tokenizer (such as tokenizer.json): copy the model's tokenizer files into it, or write "
            "them with tokenizer.save_pretrained"
        )
    unsupported = "trust_remote_code" in str(error) or "model type" in str(error)
    if unsupported or isinstance(error, OSError):  # the files may be intact
        return _first_line(error)
    return f"{folder / component} is damaged or does not fit the other files ({_first_line(error)}): {RECOPY_ADVICE}"


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
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if "ignore_mismatched_sizes" in line:
        return "the shapes of the weights listed above differ from config.json"
    if isinstance(error, LookupError | AttributeError | TypeError):  # whose texts do not explain the error
        line = f"{type(error).__name__}: {line}"
    # Transformers names the option in a later line, under its own name.
    return f"{line} model.trust_remote_code=true runs it" if "trust_remote_code" in str(error) else line
