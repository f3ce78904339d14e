"""Which options of the algorithms are refused, in which words, and what each algorithm needs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.kits.algorithm import made
from tests.kits.run import small, train
from TrainingFactory.algorithms.correction import Correction
from TrainingFactory.algorithms.dpo import DPO
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.reward_model import RewardModel
from TrainingFactory.algorithms.rft import RFT
from TrainingFactory.config import load_config
from TrainingFactory.config.algorithms import GRPOSection

# The first option of each is named in the error.
WRONG: dict[str, list[dict[str, Any]]] = {
    "grpo": [
        {"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": 0.0}, {"kl": -0.1}, {"entropy": -1.0}, {"refill": -1},
        {"constant_length": 0}, {"overlong_penalty": -1.0}, {"advantage": "gae"},
        {"overlong_buffer": 9, "overlong_length": 8}, {"scale_rewards": True, "advantage": "reinforce_plus_plus"},
        {"scale_rewards": True, "advantage": "reinforce_plus_plus_baseline"}, {"clip_dual": 1.0}, {"refill_by": "luck"},
        {"credit": "token"}, {"normalization": "none"}, {"loss_kind": "ppo"}, {"ratio": "turn"},
        {"kl_estimator": "k4"},
    ],
    "ppo": [
        {"clip": 1.0}, {"gamma": 1.1}, {"lam": -0.1}, {"value_clip": 0.0}, {"value_weight": 0.0}, {"kl": -0.1},
        {"entropy": -1.0}, {"clip_dual": 0.5}, {"critic_warmup": -1},
    ],
    "dpo": [
        {"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": 0.1, "loss_kind": "hinge"},
        {"reference": "precomputed", "loss_kind": "orpo"},
    ],
    "kto": [{"beta": 0.0}, {"desirable_weight": 0.0}, {"undesirable_weight": 0.0}],
    "rft": [{"best_of": 0}],
    "reward_model": [
        {"center": -1.0}, {"kind": "both"}, {"margin": True, "kind": "process"}, {"center": 0.1, "kind": "process"},
        {"threshold": 0.5}, {"threshold": float("nan"), "kind": "process"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, every in WRONG.items() for options in every]
)
def test_wrong_options_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        made(name, **options)


def test_a_policy_that_would_never_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"critic_warmup=6 of training.max_steps=6"):
        train(small(tmp_path, training={"algorithm": "ppo"}, ppo={"critic_warmup": 6}), "a")


def test_the_config_has_the_same_options_and_defaults() -> None:
    assert GRPO(**GRPOSection().model_dump()) == GRPO()
    assert {*GRPOSection.model_fields, "correction"} == {field.name for field in fields(GRPO)}


def test_the_published_recipes_are_those_of_their_authors(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms" / "grpo.md").read_text(encoding="utf-8")
    table = page.partition("## Published variants")[2].partition("##")[0]
    rows = [
        line.strip("| ").split(" | ")
        for line in table.splitlines()
        if line.startswith("|") and line.count("`") == 2
    ]
    recipes: dict[str, GRPO] = {}
    for name, options in rows:
        (tmp_path / "recipe.yaml").write_text(f"grpo: {{{options.strip('`')}}}", encoding="utf-8")
        recipes[name] = GRPO(**load_config(tmp_path / "recipe.yaml").grpo.model_dump())
    scaled = {name for name, recipe in recipes.items() if recipe.scale_rewards}
    assert scaled == {"GRPO", "DAPO", "GSPO", "CISPO"}
    assert {name for name, recipe in recipes.items() if recipe.clip_high == 0.2} == {"GRPO", "Dr. GRPO"}
    assert recipes["DAPO"].refill_by == "outcome"
    assert recipes["REINFORCE++"].advantage == "reinforce_plus_plus"
    assert recipes["REINFORCE++-baseline"].advantage == "reinforce_plus_plus_baseline"


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        (GRPO(), {"lengths"}),
        (GRPO(kl=0.1), {"reference", "lengths"}),
        (GRPO(correction=Correction()), {"old", "lengths"}),
        (GRPO(correction=Correction(level="sequence")), {"old"}),
        (GRPO(ratio="sequence"), set()),
        (RFT(), {"lengths"}),
        (RFT(correction=Correction()), {"old", "lengths"}),
        (RFT(correction=Correction(level="sequence")), {"old"}),
        (PPO(), {"values"}),
        (PPO(correction=Correction()), {"values", "old"}),
        (PPO(kl=0.1, kl_in="reward"), {"values", "reference"}),
        *((DPO(kind), {"reference"}) for kind in ("sigmoid", "ipo", "hinge", "robust")),
        *((DPO(kind), set()) for kind in ("orpo", "simpo")),
        (RewardModel(), {"scores"}),
        (RewardModel("process"), {"scores"}),
    ],
)
def test_what_is_needed(algorithm: Any, needs: set[str]) -> None:
    assert algorithm.needs == needs
