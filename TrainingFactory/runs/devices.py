"""Say in words that a device failed, and what to do about it: torch itself says it in a traceback."""

from __future__ import annotations

import re

from TrainingFactory.types import SamplersLost

_MEMORY = re.compile(
    r"(CUDA|HIP|XPU|MPS backend)( error:)? out of memory|_ALLOC_FAILED|can't allocate memory"
)
_FAILED = re.compile(r"(CUDA|HIP|cuDNN) error|Triton Error \[")
_REST = re.compile(r"\s*(\n|Of the allocated memory|If reserved but).*", re.DOTALL)  # for those who program
LESS = (
    "Less is needed with a smaller training.token_budget, training.gradient_checkpointing=true and fewer "
    "sampling.slots, which a run that goes on takes from its config.yaml; in a new one also with a smaller "
    "model.max_length, lora.enabled=true or training.optimizer=adamw_8bit. tfactory doctor CONFIG estimates it, and "
    "nvidia-smi shows what other processes take"
)
GONE = (
    "nvidia-smi tells whether the device is still there; another one is named by model.device=cuda:1, which a run that "
    "goes on takes from its config.yaml. Where the same comes again, CUDA_LAUNCH_BLOCKING=1 and --debug show the line"
)


def device_failure(error: BaseException) -> str | None:
    """Say what happened to the device, also to that of another process, and what to do; None where it is not that."""
    told_by_another = type(error) is OSError and error.errno is None
    text = str(error) if told_by_another or isinstance(error, RuntimeError | SamplersLost) else ""
    said = _REST.sub("", text) if isinstance(error, RuntimeError) else " ".join(text.split())
    for pattern, what, remedy in (
        (_MEMORY, "the device has too little memory", LESS),
        (_FAILED, "the device failed", GONE),
    ):
        if pattern.search(text):
            return f"{what}: {said.rstrip('.')}. {remedy}"
    return None
