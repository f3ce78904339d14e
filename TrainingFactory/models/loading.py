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
from TrainingFactory.models.loading_errors import RECOPY_ADVICE, explain_errors, find_local_folder
from TrainingFactory.models.model_files import (
    cache_gguf_reader,
    check_hub,
    locate_model,
    read_config,
    read_tokenizer,
)
from TrainingFactory.models.names import TINY_IDS, resolve_model_name
from TrainingFactory.models.quantization import check_quantization, keep_trainable, make_quantization_options
from TrainingFactory.models.templates import set_chat_template
from TrainingFactory.models.tiny import make_builtin_model, make_builtin_tokenizer
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
        eos_ids = None if config is None else config.eos_token_id
        if eos_ids is None:
            return ()
        return tuple(eos_ids) if isinstance(eos_ids, list) else (eos_ids,)


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
    resolved_name = resolve_model_name(name)
    check_quantization(quantization, resolved_name)
    _freeze_imports()
    if not sys.stderr.isatty():  # progress bars make a log unreadable
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    if resolved_name in TINY_IDS:
        model, tokenizer, image_processor = make_builtin_model(resolved_name, revision or str(seed))
        pretrained_parts = PretrainedParts(model, tokenizer, image_processor=image_processor)
    else:
        options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        quantization_kwargs = make_quantization_options(quantization, torch_dtype, torch_device)
        weight_options = {"dtype": torch_dtype, **quantization_kwargs}
        loads_vision = (
            composite.was_trained_with_vision(adapter or resolved_name) if vision is None else vision
        )
        pretrained_parts = _load_pretrained(name, resolved_name, options, weight_options, loads_vision)
    tokenizer, image_processor = pretrained_parts.tokenizer, pretrained_parts.image_processor
    model = pretrained_parts.model
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
    notes = pretrained_parts.notes + remove_untrained_tags(name, model, tokenizer)
    set_chat_template(tokenizer, chat_template, adapter)
    return LoadedModel(resolved_name, model, tokenizer, notes, model_vision)


def load_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load only the tokenizer. `name` is a model name as in `load_model`, or a folder that contains a tokenizer."""
    resolved_name = resolve_model_name(name)
    if resolved_name in TINY_IDS:
        return make_builtin_tokenizer(resolved_name)
    folder = Path(resolved_name).expanduser()
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    location, options = (str(folder), {}) if has_tokenizer else locate_model(name, resolved_name)
    options |= {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    with explain_errors(
        f"the tokenizer of {name!r} could not be loaded", location, options, "tokenizer.json"
    ):
        return read_tokenizer(location, options)


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
    weight_ranges = torch.stack([torch.stack(torch.aminmax(param)).float() for param in weights.values()])
    are_finite = weight_ranges.isfinite().all(dim=1).tolist()
    invalid_keys = [key for key, is_finite in zip(weights, are_finite, strict=True) if not is_finite]
    if invalid_keys:
        others_note = f" and {len(invalid_keys) - 1} others" if len(invalid_keys) > 1 else ""
        advice = "download or export the model again"
        if model.dtype == torch.float16:
            advice += ", or set model.dtype=bfloat16, whose range is larger"
        raise ValueError(
            f"model {name!r}: weight {invalid_keys[0]}{others_note} has NaN or infinite values; {advice}"
        )


def read_composite_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the config of a composite model. Return None for other models, and for hub ids that are not cached on this
    machine."""
    location, options = locate_model(name, resolve_model_name(name))
    options |= {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    if "gguf_file" in options or not (find_local_folder(location, options) / "config.json").is_file():
        return None
    with explain_errors(f"the config of {name!r} could not be read", location, options, "config.json"):
        config = read_config(location, options)
    return config if composite.is_composite(config) else None


def read_stored_dtype(name: str, revision: str | None = None, trust_remote_code: bool = False) -> torch.dtype:
    """Return the dtype of the stored weights; float32 if the config does not name one."""
    from transformers import AutoConfig

    resolved_name = resolve_model_name(name)
    if resolved_name in TINY_IDS:
        return torch.float32
    location, options = locate_model(name, resolved_name)
    options |= {"revision": revision, "trust_remote_code": trust_remote_code}
    with explain_errors(f"the config of {name!r} could not be read", location, options, "config.json"):
        config = AutoConfig.from_pretrained(location, **options)
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32


def _load_pretrained(
    name: str, resolved_name: str, options: Options, weight_options: Options, vision: bool
) -> PretrainedParts:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    location, gguf_options = locate_model(name, resolved_name)
    options |= gguf_options
    if location == resolved_name and not Path(location).exists():
        check_hub(name, resolved_name, options["revision"])
    if gguf_options:
        gguf_file = Path(location, gguf_options["gguf_file"])
        num_bytes = gguf_file.stat().st_size
        size_text = f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
        print(f"Reading {gguf_file} ({size_text}) ...", file=sys.stderr, flush=True)
    else:  # safetensors only: other weight files are pickles, which execute code when they are read
        weight_options["use_safetensors"] = True
    problem = f"model {name!r} could not be loaded" + ("" if location == name else f" from {location!r}")
    explain_load_errors = partial(explain_errors, problem, location, options)
    config: Any = None  # of a composite model
    with cache_gguf_reader() if gguf_options else nullcontext():
        if not gguf_options:
            with explain_load_errors("config.json"):
                full_config = read_config(location, options)
            config = full_config if composite.is_composite(full_config) else None
        if vision and getattr(config, "vision_config", None) is None:
            raise ValueError(
                f"model {name!r} has no vision part; remove model.vision, or name a vision-language model"
            )
        part_options: Options = {}  # for a part of a composite model
        if config is not None:
            part_options = (
                composite.make_vision_options(config) if vision else composite.make_text_options(name, config)
            )
        with explain_load_errors("tokenizer.json"):
            tokenizer = read_tokenizer(location, options)
        image_processor = None
        if vision:
            with explain_load_errors(composite.IMAGE_PROCESSOR_FILE):
                image_processor = composite.read_image_processor(location, options)
        hide_warnings = nullcontext() if config is None else composite.hide_expected_warnings()
        auto_class: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        with explain_load_errors("config.json"), hide_warnings:  # or the weights, if they do not match it
            loaded_pair: Any = auto_class.from_pretrained(
                location, output_loading_info=True, **options, **weight_options, **part_options
            )
    model, loading_report = loaded_pair
    missing_weights = sorted(loading_report["missing_keys"])
    if missing_weights:  # transformers would continue with random weights
        raise ValueError(
            f"model {name!r}: {len(missing_weights)} weights are missing from {location!r}, the first is "
            f"{missing_weights[0]}; {RECOPY_ADVICE}"
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
    folder = find_local_folder(location, options)
    note = composite.describe_text_part(name, config, model, folder, loading_report["unexpected_keys"])
    return PretrainedParts(model, tokenizer, (note,))
