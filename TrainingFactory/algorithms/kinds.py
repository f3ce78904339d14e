"""Table of the algorithms with their classes and data requirements. Reading it does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from TrainingFactory.protocols import Algorithm

if TYPE_CHECKING:
    from TrainingFactory.data.examples import Form


@dataclass(slots=True, frozen=True)
class AlgorithmKind:
    class_path: str  # module:class in this package
    samples: bool = False  # on-policy: trains on episodes that it samples, not on a dataset
    get_form: Callable[[Any], Form] | None = None  # dataset format, by the algorithm's section
    accepts_demonstrations: bool = False  # can train on demonstrations by the environment's expert
    # Smallest group of episodes per task, depending on the algorithm's config section.
    get_min_group: Callable[[Any], int] = lambda _: 1
    min_rows: int = 1  # smallest mini-batch, in examples


KINDS = {
    "sft": AlgorithmKind("sft:SFT", get_form=lambda _: "sft", accepts_demonstrations=True),
    "grpo": AlgorithmKind(
        "grpo:GRPO",
        samples=True,
        get_min_group=lambda options: 1 + (options.advantage != "reinforce_plus_plus"),
    ),
    "ppo": AlgorithmKind("ppo:PPO", samples=True),
    "rft": AlgorithmKind("rft:RFT", samples=True),
    "dpo": AlgorithmKind("dpo:DPO", get_form=lambda _: "dpo"),
    "kto": AlgorithmKind("kto:KTO", get_form=lambda _: "kto", min_rows=2),
    "reward_model": AlgorithmKind(
        "reward_model:RewardModel", get_form=lambda options: "prm" if options.kind == "process" else "rm"
    ),
}


def make_algorithm(name: str, options: dict[str, Any]) -> Algorithm:
    """Return the named algorithm; `options` are the keyword arguments of its class."""
    module_name, _, class_name = KINDS[name].class_path.partition(":")
    return getattr(import_module(f"TrainingFactory.algorithms.{module_name}"), class_name)(**options)
