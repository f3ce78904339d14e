"""The small functions of `hello_agents.rl.utils`."""

from __future__ import annotations

from typing import Any

from TrainingFactory.integrations.hello_agents.trainers import TrainingConfig, setup_training_environment

__all__ = [
    "TrainingConfig", "check_trl_installation", "format_training_time", "get_device_info",
    "get_installation_guide", "print_training_summary", "setup_training_environment",
]  # fmt: skip


def check_trl_installation() -> bool:
    """Return true: training here needs no TRL."""
    return True


def get_installation_guide() -> str:
    return "pip install training-factory"


def format_training_time(seconds: float) -> str:
    """Return a time such as 1h 2m 3s."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    shown = f"{hours}h {minutes}m " if hours else f"{minutes}m " if minutes else ""
    return f"{shown}{rest}s"


def get_device_info() -> dict[str, Any]:
    import torch

    there = torch.cuda.is_available()
    name = torch.cuda.get_device_name(0) if there else None
    return {"cuda_available": there, "cuda_device_count": torch.cuda.device_count(), "cuda_device_name": name}


def print_training_summary(
    algorithm: str, model_name: str, dataset_name: str, num_epochs: int, output_dir: str
) -> None:
    print(f"{algorithm}: {model_name}, {dataset_name}, {num_epochs} epochs -> {output_dir}")
