"""Composite checkpoints: models with a vision or audio part, of which the text part is loaded as a causal LM, unless
the run needs the vision part."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from TrainingFactory.common.texts import pluralize

# Pattern of a weight name in a composite checkpoint -> prefix in the causal LM, as `from_pretrained` takes them.
TEXT_NAME_PATTERNS = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
# Text model without a causal LM class in transformers -> model type that computes the same for text. The rotary
# sections of these models separate time, height and width, which are equal for text.
EQUIVALENT_TEXT_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
TRANSFORMERS_LOGGER = "transformers.modeling_utils"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
TRAINED_WITH_VISION_KEY = "trained_with_vision"  # key in it that a run sets
NO_AUDIO_NOTE = (
    "model {name}: loaded without its audio part. Checkpoints and exported models do not contain it"
)
PEFT_PREFIX = "base_model.model."  # of all names in an adapter's file


def is_composite(config: Any) -> bool:
    """Return whether a transformers config describes a model with a text part and other parts."""
    sub_configs = getattr(type(config), "sub_configs", {})
    has_own_causal_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return "text_config" in sub_configs and len(sub_configs) > 1 and not has_own_causal_class


def make_text_options(name: str, config: Any) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` loads only the text part of a composite model. Raise ValueError
    if transformers has no class for it."""
    return {"config": _make_text_config(name, config), "key_mapping": dict(TEXT_NAME_PATTERNS)}


def make_vision_options(config: Any) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` loads a vision-language model without its audio part, because
    the audio part would take memory and never run. The result is {} if the model has no audio part."""
    if config.model_type != "gemma4" or config.audio_config is None:
        return {}
    audioless_config = copy.deepcopy(config)
    audioless_config.audio_config = None
    return {"config": audioless_config}


def _make_text_config(name: str, config: Any) -> Any:
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    text_config = copy.deepcopy(config.get_text_config())
    if text_config.model_type in EQUIVALENT_TEXT_TYPES:
        settings = {key: value for key, value in text_config.to_dict().items() if key != "model_type"}
        rope = settings.get("rope_parameters") or {}
        settings["rope_parameters"] = {key: rope[key] for key in rope if not key.startswith("mrope")}
        text_config = AutoConfig.for_model(EQUIVALENT_TEXT_TYPES[text_config.model_type], **settings)
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"model {name!r}: model_type {config.model_type} is a composite model, and transformers "
            f"{transformers.__version__} has no causal LM class for its text part ({text_config.model_type}). Set "
            "model.name to a text model, or to a family of docs/REAL_MODELS.md#composite-models"
        )
    # The whole model's settings, which config.json has at its top level.
    text_config.tie_word_embeddings = bool(
        getattr(config, "tie_word_embeddings", False) or getattr(text_config, "tie_word_embeddings", False)
    )
    for key in ("eos_token_id", "dtype", "quantization_config"):
        if (value := getattr(config, key, None)) is not None:
            setattr(text_config, key, value)
    quantization = getattr(text_config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "fp8":
        text_config.quantization_config = quantization | {"dequantize": True}  # FP8 weights cannot be trained
    for key in ("bos_token_id", "pad_token_id"):
        if getattr(text_config, key, None) is None:
            setattr(text_config, key, getattr(config, key, None))
    return text_config


def detach_from_composite(model: Any) -> None:
    """Turn a loaded text part into an independent model: `save_pretrained` then uses the weight names of the model's
    own class, and the config states whether its embeddings are tied."""
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions  # `save_pretrained` would restore the composite names
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.config.tie_word_embeddings = is_tied


def describe_text_part(name: str, config: Any, model: Any, folder: Path, unloaded_keys: Iterable[str]) -> str:
    """Return a note that names the loaded part of a composite model and the weights in its files that were not loaded.
    `unloaded_keys` are the renamed weights that transformers did not load."""
    unloaded_names = set(unloaded_keys)
    loaded_names = set(model.state_dict())
    tensor_counts, param_counts = Counter[str](), Counter[str]()
    for key, param_count in _read_weight_sizes(folder):
        text_name = to_text_name(key)
        is_other_part = text_name == key and key not in loaded_names
        if is_other_part or text_name in unloaded_names:
            part = key.removeprefix("model.").split(".")[0]
            tensor_counts[part] += 1
            param_counts[part] += param_count
    part_descriptions = [
        f"{part} ({pluralize(tensor_counts[part], 'tensor')}, {_format_count(param_counts[part])} parameters)"
        for part in sorted(tensor_counts)
    ]
    return (
        f"model {name}: loaded the text part of {_get_class_name(config)} as {type(model).__name__}. Left out: "
        f"{', '.join(part_descriptions) or 'nothing'}. Checkpoints and exported models contain only the text part"
    )


def to_text_name(key: str) -> str:
    """Rename a weight of a composite checkpoint as `from_pretrained` does with TEXT_NAME_PATTERNS."""
    for pattern, prefix in TEXT_NAME_PATTERNS.items():
        key = re.sub(pattern, prefix, key)
    return key


def make_adapter_options(folder: Path) -> dict[str, Any]:
    """Return the arguments with which PEFT loads an adapter of a composite model into its text part. The result is {}
    if the adapter already uses the module names of the text part."""
    from peft import PeftConfig

    modules = _read_adapted_modules(folder)
    text_modules = {to_text_name(module) for module in modules}
    if text_modules == modules:
        return {}
    config: Any = PeftConfig.from_pretrained(str(folder))
    config.target_modules = text_modules
    return {"config": config, "key_mapping": dict(TEXT_NAME_PATTERNS)}


def find_missing_modules(model: Any, options: dict[str, Any]) -> list[str]:
    """Return the adapter's target modules that the text part lacks, such as modules of a vision part."""
    target_names = options["config"].target_modules if options else set()
    return sorted(target_names - {name for name, _ in model.named_modules()})


def rename_adapter(folder: Path, config: Any) -> None:
    """Rename the modules in the files of a text part's adapter to the module names of the composite model, because vLLM
    ignores weights of unknown modules."""
    rename = _make_renamer(config)
    weights = {
        PEFT_PREFIX + rename(key.removeprefix(PEFT_PREFIX)): weight
        for key, weight in load_file(folder / ADAPTER_WEIGHTS_FILE).items()
    }
    save_file(weights, folder / ADAPTER_WEIGHTS_FILE, {"format": "pt"})
    config_file = folder / "adapter_config.json"
    adapter_config = json.loads(config_file.read_text(encoding="utf-8"))
    # Whole names: the suffixes of layers in the vision part may be the same.
    adapter_config["target_modules"] = sorted(_read_adapted_modules(folder))
    config_file.write_text(json.dumps(adapter_config, indent=2), encoding="utf-8")


def _read_adapted_modules(folder: Path) -> set[str]:
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, "pt") as weights:
        names = [key.removeprefix(PEFT_PREFIX) for key in weights.keys()]  # noqa: SIM118  (not a mapping)
    return {re.split(r"\.lora_", name)[0] for name in names if ".lora_" in name}


def _make_renamer(config: Any) -> Callable[[str], str]:
    """Return a function that renames a weight of the text part to its name in the composite model."""
    from transformers import AutoModelForImageTextToText, PreTrainedModel

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(copy.deepcopy(config))
    text_config = model.config.get_text_config()
    prefix, text_model = next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and module.config is text_config
    )
    has_head = text_model.get_output_embeddings() is not None  # then it has the same names as the causal LM

    def rename(name: str) -> str:
        return f"{prefix}.{name}" if has_head else re.sub(r"^model\.", f"{prefix}.", name)

    return rename


def was_trained_with_vision(folder: str) -> bool:
    """Return whether the model or adapter in this folder was trained by a run with its vision part loaded. Exported and
    registered models count too."""
    processor_file = Path(folder).expanduser() / IMAGE_PROCESSOR_FILE
    if not processor_file.is_file():
        return False
    is_checkpoint = processor_file.with_name("learner.json").is_file()
    return is_checkpoint or TRAINED_WITH_VISION_KEY in json.loads(processor_file.read_text(encoding="utf-8"))


def read_image_processor(location: str, options: dict[str, Any]) -> Any:
    """Return the image processor of a vision-language model."""
    from transformers import AutoImageProcessor

    # With the backend "pil", which needs no torchvision.
    return AutoImageProcessor.from_pretrained(location, backend="pil", **options)


def read_processor_template(location: str, options: dict[str, Any]) -> str | None:
    """Return the chat template that a model stores with its processor instead of its tokenizer; None if there is
    none."""
    from transformers.utils.hub import cached_file

    for filename in ("chat_template.json", "processor_config.json"):
        template_file = cached_file(
            location, filename, revision=options.get("revision"), _raise_exceptions_for_missing_entries=False
        )
        if template_file is not None:
            template = json.loads(Path(template_file).read_text(encoding="utf-8")).get("chat_template")
            if isinstance(template, str):
                return template
    return None


@contextmanager
def hide_expected_warnings() -> Iterator[None]:
    """Hide transformers' warnings about a text part: the table of unloaded weights (unless it also lists invalid
    weights), and the warning about tied weights in the config, which `detach_from_composite` corrects."""

    def is_shown(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" in text:
            return any(status in text for status in ("MISMATCH", "CONVERSION"))
        return "tied weights mapping and config" not in text

    logger = logging.getLogger(TRANSFORMERS_LOGGER)
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def _read_weight_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of the weights in a model's folder, from the headers of its files."""
    filenames = ["model.safetensors"]
    if not (folder / filenames[0]).is_file():
        index_text = (folder / "model.safetensors.index.json").read_text(encoding="utf-8")
        filenames = sorted(set(json.loads(index_text)["weight_map"].values()))
    for filename in filenames:
        with safe_open(folder / filename, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118  (not a mapping)
                yield key, math.prod(weights.get_slice(key).get_shape())


def _get_class_name(config: Any) -> str:
    return (getattr(config, "architectures", None) or [config.model_type])[0]


def _format_count(count: int) -> str:
    for divisor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= divisor:
            return f"{count / divisor:.3g}{unit}"
    return str(count)
