"""Loading of LoRA adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from TrainingFactory.common.texts import pluralize
from TrainingFactory.models import composite
from TrainingFactory.models.loading_errors import explain_errors


def attach_adapter(model: Any, adapter_folder: str, has_all_parts: bool = False) -> Any:
    """Load a LoRA adapter into the model. `has_all_parts`: false if the model may be only the text part of a composite
    model, whose adapters have other module names."""
    from peft import PeftModel

    folder = Path(adapter_folder).expanduser()
    for filename in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / filename).is_file():
            raise ValueError(f"model.adapter {adapter_folder!r}: the folder has no {filename}")
    problem = f"model.adapter {adapter_folder!r} does not fit the model"
    explain_load_errors = partial(explain_errors, problem, str(folder), {}, "adapter_config.json")
    with explain_load_errors():
        peft_options = {} if has_all_parts else composite.make_adapter_options(folder)
    if missing_modules := composite.find_missing_modules(model, peft_options):
        raise ValueError(
            f"{problem}: it changes {pluralize(len(missing_modules), 'module')} that the text part does not have, such "
            f"as {missing_modules[0]}. Train it on the language model alone"
        )
    with explain_load_errors():
        return set_adapter_dtype(
            PeftModel.from_pretrained(model, str(folder), **peft_options).eval(), model.dtype
        )


def set_adapter_dtype(peft_model: Any, dtype: torch.dtype) -> Any:
    """Convert the adapter to bfloat16 if the model is in bfloat16, because otherwise each layer would store its input
    in both dtypes; else to float32, because float16 loses small gradients."""
    for name, param in peft_model.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(dtype if dtype == torch.bfloat16 else torch.float32)
    return peft_model
