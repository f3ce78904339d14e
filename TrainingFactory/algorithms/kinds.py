"""Describe every algorithm without importing torch: where its class is, and how a run has to feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from TrainingFactory.protocols import Algorithm

if TYPE_CHECKING:
    from TrainingFactory.data.examples import Form


@dataclass(slots=True, frozen=True)
class Kind:
    home: str  # module:class in this package
    samples: bool = False  # learns from episodes that it samples itself, and takes no dataset
    form: Callable[[Any], Form] | None = None  # of the rows it learns from, by the options of its section
    demonstrations: bool = False  # can learn from what an environment's expert plays
    least_group: Callable[[Any], int] = lambda _: (
        1
    )  # episodes of a task that it compares, by the same options
    least_rows: int = 1  # examples that a mini-batch needs


KINDS = {
    "sft": Kind("sft:SFT", form=lambda _: "sft", demonstrations=True),
    "grpo": Kind("grpo:GRPO", samples=True, least_group=lambda o: 1 + (o.advantage != "reinforce_plus_plus")),
    "ppo": Kind("ppo:PPO", samples=True),
    "rft": Kind("rft:RFT", samples=True),
    "dpo": Kind("dpo:DPO", form=lambda _: "dpo"),
    "kto": Kind("kto:KTO", form=lambda _: "kto", least_rows=2),
    "reward_model": Kind(
        "reward_model:RewardModel", form=lambda options: "prm" if options.kind == "process" else "rm"
    ),
}


def make_algorithm(name: str, options: dict[str, Any]) -> Algorithm:
    """Make the algorithm of that name; its options are the arguments of its class."""
    module, _, kind = KINDS[name].home.partition(":")
    return getattr(import_module(f"TrainingFactory.algorithms.{module}"), kind)(**options)
