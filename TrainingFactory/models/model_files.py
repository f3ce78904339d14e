"""Location of a model's files by hub id, folder, GGUF file, package or short name, and reading of its config."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from TrainingFactory.common.options import UnknownNameError, did_you_mean, nearest
from TrainingFactory.models import composite
from TrainingFactory.models.encoding import decodes_unchanged
from TrainingFactory.models.loading_errors import LOADING_ERRORS, find_damage
from TrainingFactory.models.names import SUPPORTED_MODELS, TINY_IDS
from TrainingFactory.models.weight_parts import SPLIT_WEIGHTS, join_parts

MAX_LAYERS = 10_000  # a larger number in config.json is corrupt


def locate_model(name: str, resolved_name: str) -> tuple[str, dict[str, Any]]:
    """Return the hub id or folder for transformers, and for a GGUF file its name as the option `gguf_file`."""
    if resolved_name.startswith("package:"):
        resolved_name = str(_find_gguf_in_package(name, resolved_name.removeprefix("package:")))
    path = Path(resolved_name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {name!r}: file {path} does not exist")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model {name!r}: folder {path} has no config.json, so it contains no model")
        return str(path), {}
    if resolved_name.startswith((".", "/", "~")) or path.is_file() or resolved_name.count("/") != 1:
        raise UnknownNameError(
            name, f"model {name!r}: no such folder, hub id (owner/name) or short name{_suggest_name(name)}"
        )
    return resolved_name, {}


def _find_gguf_in_package(name: str, package: str) -> Path:
    if package in SPLIT_WEIGHTS:
        return join_parts(name, package)
    spec = importlib.util.find_spec(package)
    folders = [Path(location) for location in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.rglob("*.gguf"))]
    if not files:
        raise ValueError(f"model {name!r} is part of a package: pip install {package.replace('_', '-')}")
    return files[0]


def _suggest_name(name: str) -> str:
    match = nearest(name, [*SUPPORTED_MODELS, *TINY_IDS], cutoff=0.5)
    return did_you_mean(match and repr(match)) or f"; short names are: {', '.join(SUPPORTED_MODELS)}"


def check_hub(name: str, hub_id: str, revision: str) -> None:
    """Raise UnknownNameError if the model is not cached and the hub is unreachable. The check takes one round of the
    hub library's retries; loading would take one round for each file."""
    from huggingface_hub import errors, hf_hub_download

    try:
        hf_hub_download(hub_id, "config.json", revision=revision)
    except errors.LocalEntryNotFoundError as error:
        raise UnknownNameError(
            name,
            f"model {name!r}: {hub_id} is not in this machine's Hugging Face cache, and the hub cannot be reached (no "
            "connection, or HF_HUB_OFFLINE is set). Download the model on a connected machine, copy it here, and set "
            "model.name to its folder",
        ) from error
    except LOADING_ERRORS:  # transformers has better error texts for missing and gated models
        return


def read_config(location: str, options: dict[str, Any]) -> Any:
    """Return the model's config. Raise an error if config.json is corrupt, and ValueError if it names more than
    MAX_LAYERS layers or if generation_config.json is corrupt, because transformers would silently skip that file."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(location, **options)
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:  # they would take hours and all memory
        raise ValueError(f"num_hidden_layers is {num_layers}, more than {MAX_LAYERS}")
    if damage := find_damage(Path(location, "generation_config.json")):
        raise ValueError(damage)
    return config


def read_tokenizer(location: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(location, **options)
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers have none
    if "gguf_file" in options:
        _check_merges(backend, options["gguf_file"])
        return tokenizer
    if backend is not None and not decodes_unchanged(backend):
        # Transformers rebuilds some tokenizers from the class in their config, which may contradict tokenizer.json.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(location, **options)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = composite.read_processor_template(location, options)
    return tokenizer


def _check_merges(backend: Any, file: str) -> None:
    """Raise ValueError if transformers built a Unigram tokenizer from a GGUF file. Language models have BPE tokenizers;
    transformers 5.17 builds Gemma's as Unigram, which splits text differently from the model's training."""
    if type(getattr(backend, "model", None)).__name__ == "Unigram":
        from transformers import __version__

        raise ValueError(
            f"transformers {__version__} builds the wrong kind of tokenizer (Unigram instead of BPE) from {file}: it "
            "would split text differently from the model's training. Install transformers 5.19 or newer"
        )


@contextmanager
def cache_gguf_reader() -> Iterator[None]:
    """Cache the reader of a GGUF file and its table of names. Without the cache transformers reads the file again for
    tokenizer, config and weights, and builds the table for each part of the model, which takes half of the loading
    time."""
    import gguf

    functions: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in functions.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(gguf, name, function)
