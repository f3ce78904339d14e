"""Readable error messages for out-of-memory and lost-device errors, in place of torch's traceback."""

from __future__ import annotations

import re

from TrainingFactory.types import SamplersLost

_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|XPU|MPS backend)( error:)? out of memory|_ALLOC_FAILED|can't allocate memory"
)
_DEVICE_ERROR = re.compile(r"(CUDA|HIP|cuDNN) error|Triton Error \[")
_TORCH_HINTS = re.compile(r"\s*(\n|Of the allocated memory|If reserved but).*", re.DOTALL)  # for developers
SAVE_MEMORY = (
    "To save memory, lower training.token_budget, set training.gradient_checkpointing=true or lower sampling.slots; "
    "a resumed run reads these from its config.yaml. A new run can also use a smaller model.max_length, "
    "lora.enabled=true or training.optimizer=adamw_8bit. tfactory doctor CONFIG estimates the memory needed, and "
    "nvidia-smi shows the memory used by other processes"
)
CHECK_DEVICE = (
    "Check with nvidia-smi whether the device is still available, or choose another one, such as model.device=cuda:1; "
    "a resumed run reads this from its config.yaml. If the error repeats, CUDA_LAUNCH_BLOCKING=1 and --debug show the "
    "failing line"
)


def describe_device_failure(error: BaseException) -> str | None:
    """Return a message with a remedy if the error is a device failure, here or in a worker process; else None."""
    is_from_worker = type(error) is OSError and error.errno is None
    message = str(error) if is_from_worker or isinstance(error, RuntimeError | SamplersLost) else ""
    detail = _TORCH_HINTS.sub("", message) if isinstance(error, RuntimeError) else " ".join(message.split())
    for pattern, problem, remedy in (
        (_OUT_OF_MEMORY, "the device has too little memory", SAVE_MEMORY),
        (_DEVICE_ERROR, "the device failed", CHECK_DEVICE),
    ):
        if pattern.search(message):
            return f"{problem}: {detail.rstrip('.')}. {remedy}"
    return None
