"""Loading of models and tokenizers by hub id, local path, GGUF file, short name or `builtin:tiny`."""

from __future__ import annotations

import functools
import gc
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from TrainingFactory.models import composite
from TrainingFactory.models.adapters import attach_adapter
from TrainingFactory.models.dtypes import DTYPES, convert_weights, pick_device, pick_dtype
from TrainingFactory.models.loading_errors import RECOPY_ADVICE, explained_errors, local_folder
from TrainingFactory.models.model_files import (
    cache_gguf_reader,
    check_hub,
    locate_model,
    read_config,
    read_tokenizer,
)
from TrainingFactory.models.names import BUILTINS, resolve_model_name
from TrainingFactory.models.quantization import check_quantization, keep_trainable, quantization_options
from TrainingFactory.models.templates import set_chat_template
from TrainingFactory.models.tiny import builtin_model, builtin_tokenizer
from TrainingFactory.models.untrained_tags import remove_untrained_tags

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

Options = dict[str, Any]  # keyword arguments of transformers' `from_pretrained`


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


class PretrainedParts(NamedTuple):
    """Model, tokenizer and image processor, as loaded from the files of a checkpoint."""

    model: Any
    tokenizer: Any
    notes: tuple[str, ...] = ()  # on parts that were not loaded
    image_processor: Any = None


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
    """Load a model. The options are those of the config's section `model`. `seed` determines the weights of the
    built-in model. `vision`: load the vision part too; None: only if the model is built in or was trained with its
    vision part."""
    target = resolve_model_name(name)
    check_quantization(quantization, target)
    _freeze_imports()
    if not sys.stderr.isatty():  # progress bars make a log unreadable
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    if target in BUILTINS:
        model, tokenizer, image_processor = builtin_model(target, revision or str(seed))
        pretrained = PretrainedParts(model, tokenizer, image_processor=image_processor)
    else:
        options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        quantized = quantization_options(quantization, torch_dtype, torch_device)
        weight_options = {"dtype": torch_dtype, **quantized}
        with_vision = composite.was_trained_with_vision(adapter or target) if vision is None else vision
        pretrained = _load_pretrained(name, target, options, weight_options, with_vision)
    tokenizer, image_processor = pretrained.tokenizer, pretrained.image_processor
    model = pretrained.model
    if quantization == "none":
        model = convert_weights(model, torch_device, torch_dtype)
    else:  # transformers has loaded the weights onto their device, and their dtype is fixed
        keep_trainable(model)
    model_vision: Vision | None = None
    if image_processor is not None:
        from TrainingFactory.models.vision import open_vision

        model_vision = open_vision(model, image_processor, tokenizer, image_tokens)
    model = model.eval()
    if adapter is not None:
        model = attach_adapter(model, adapter, has_all_parts=image_processor is not None)
    _check_finite(name, model)
    notes = pretrained.notes + remove_untrained_tags(name, model, tokenizer)
    set_chat_template(tokenizer, chat_template, adapter)
    return LoadedModel(target, model, tokenizer, notes, model_vision)


def load_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load only the tokenizer. `name` is a model name as in `load_model`, or a folder that contains a tokenizer."""
    target = resolve_model_name(name)
    if target in BUILTINS:
        return builtin_tokenizer(target)
    folder = Path(target).expanduser()
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    source, options = (str(folder), {}) if has_tokenizer else locate_model(name, target)
    options |= {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    with explained_errors(
        f"the tokenizer of {name!r} could not be loaded", source, options, "tokenizer.json"
    ):
        return read_tokenizer(source, options)


@functools.cache
def _freeze_imports() -> None:
    """Exclude the half a million permanent objects of torch and transformers from garbage collection, because scanning
    them costs 0.2 s per full collection, in the middle of a step."""
    import transformers.generation  # noqa: F401  # loaded lazily by the first model otherwise

    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)  # the default scans the live episodes of a step again and again


def _check_finite(name: str, model: Any) -> None:
    """Raise ValueError if a weight is NaN or infinite. Takes one pass over the weights and one device
    synchronization."""
    weights = {key: param.detach() for key, param in model.named_parameters() if param.numel()}
    weights = {key: param for key, param in weights.items() if param.dtype in DTYPES.values()}
    if not weights:
        return
    bounds = torch.stack([torch.stack(torch.aminmax(param)).float() for param in weights.values()])
    are_finite = bounds.isfinite().all(dim=1).tolist()
    invalid_keys = [key for key, is_finite in zip(weights, are_finite, strict=True) if not is_finite]
    if invalid_keys:
        others_note = f" and {len(invalid_keys) - 1} others" if len(invalid_keys) > 1 else ""
        advice = "download or export the model again"
        if model.dtype == torch.float16:
            advice += ", or set model.dtype=bfloat16, whose range is larger"
        raise ValueError(
            f"model {name!r}: weight {invalid_keys[0]}{others_note} has NaN or infinite values; {advice}"
        )


def composite_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the config of a composite model. Return None for other models, and for hub ids that are not cached on this
    machine."""
    source, options = locate_model(name, resolve_model_name(name))
    options |= {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    if "gguf_file" in options or not (local_folder(source, options) / "config.json").is_file():
        return None
    with explained_errors(f"the config of {name!r} could not be read", source, options, "config.json"):
        config = read_config(source, options)
    return config if composite.is_composite(config) else None


def stored_dtype(name: str, revision: str | None = None, trust_remote_code: bool = False) -> torch.dtype:
    """Return the dtype of the stored weights; float32 if the config does not name one."""
    from transformers import AutoConfig

    target = resolve_model_name(name)
    if target in BUILTINS:
        return torch.float32
    source, options = locate_model(name, target)
    options |= {"revision": revision, "trust_remote_code": trust_remote_code}
    with explained_errors(f"the config of {name!r} could not be read", source, options, "config.json"):
        config = AutoConfig.from_pretrained(source, **options)
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32


def _load_pretrained(
    name: str, target: str, options: Options, weight_options: Options, vision: bool
) -> PretrainedParts:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    source, gguf_options = locate_model(name, target)
    options |= gguf_options
    if source == target and not Path(source).exists():
        check_hub(name, target, options["revision"])
    if gguf_options:
        file = Path(source, gguf_options["gguf_file"])
        size = file.stat().st_size
        size_text = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        print(f"Reading {file} ({size_text}) ...", file=sys.stderr, flush=True)
    else:  # safetensors only: other weight files are pickles, which execute code when they are read
        weight_options["use_safetensors"] = True
    explain = partial(
        explained_errors, f"model {name!r} could not be loaded from {source!r}", source, options
    )
    config: Any = None  # of a composite model
    with cache_gguf_reader() if gguf_options else nullcontext():
        if not gguf_options:
            with explain("config.json"):
                whole_config = read_config(source, options)
            config = whole_config if composite.is_composite(whole_config) else None
        if vision and getattr(config, "vision_config", None) is None:
            raise ValueError(
                f"model {name!r} has no vision part; remove model.vision, or name a vision-language model"
            )
        part_options: Options = {}  # for a part of a composite model
        if config is not None:
            part_options = (
                composite.vision_options(config) if vision else composite.loading_options(name, config)
            )
        with explain("tokenizer.json"):
            tokenizer = read_tokenizer(source, options)
        image_processor = None
        if vision:
            with explain(composite.IMAGE_PROCESSOR):
                image_processor = composite.read_image_processor(source, options)
        hide_warnings = nullcontext() if config is None else composite.hide_expected_warnings()
        auto_class: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        with explain("config.json"), hide_warnings:  # or the weights, if they do not match it
            loaded: Any = auto_class.from_pretrained(
                source, output_loading_info=True, **options, **weight_options, **part_options
            )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would continue with random weights
        raise ValueError(
            f"model {name!r}: {len(missing)} weights are missing from {source!r}, the first is {missing[0]}; "
            f"{RECOPY_ADVICE}"
        )
    if gguf_options:
        # The weights of a GGUF file are dequantized, and these attributes would prevent saving them.
        del model.config.quantization_config
        model.hf_quantizer = None
    if vision:
        notes = (composite.NO_AUDIO_NOTE.format(name=name),) if part_options else ()
        return PretrainedParts(model, tokenizer, notes, image_processor)
    if config is None:
        return PretrainedParts(model, tokenizer)
    composite.detach_from_composite(model)
    folder = local_folder(source, options)
    note = composite.describe_text_part(name, config, model, folder, report["unexpected_keys"])
    return PretrainedParts(model, tokenizer, (note,))
