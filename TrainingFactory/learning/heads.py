"""Scalar heads, one number per token: a critic's value estimate or a reward model's score of the text so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

HEAD_FILE = "scalar_head.safetensors"
REWARD_MODEL_FILE = "reward_model.json"


class ScalarHead(nn.Module):
    """A linear layer to one output, in float32 and initialised to zero. `model_info` is written to
    reward_model.json."""

    def __init__(
        self, hidden_size: int, device: torch.device | str = "cpu", model_info: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.model_info = model_info
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the scalar of each hidden state: [M, D] -> [M]"""
        # Not `squeeze`, which returns a view: FSDP registers its backward hooks on the output tensor.
        return nn.functional.linear(states.float(), self.weight, self.bias).sum(-1)


def make_head(causal_lm: Any, model_info: dict[str, Any] | None = None) -> ScalarHead:
    return ScalarHead(causal_lm.config.get_text_config().hidden_size, causal_lm.device, model_info)


def save_head(folder: Path, model_info: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / HEAD_FILE)
    (folder / REWARD_MODEL_FILE).write_text(json.dumps(model_info, indent=1), encoding="utf-8")


def load_head(folder: Path, causal_lm: Any) -> ScalarHead:
    """Load the head stored in a reward model's checkpoint folder."""
    head = make_head(causal_lm)
    head.load_state_dict(load_file(folder / HEAD_FILE, device=str(causal_lm.device)))
    return head
