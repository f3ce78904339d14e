"""The doctor's report on mixtures of experts."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.compat import tree_rows
from tests.kits.engine import tiny
from tests.kits.learner import make_learner, moved
from TrainingFactory.apps.doctor.checks import check_routers
from TrainingFactory.apps.doctor.examination import examine
from TrainingFactory.assembly.router_check import measure_router_mismatch
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.runs.diagnosis import Diagnosis
from TrainingFactory.runs.tracking import PlainLines
from TrainingFactory.sampling import NativeEngine


def measure_changed_routes(sampled: Any, trained: Any) -> float | None:
    async def measure() -> float | None:
        engine = NativeEngine(sampled, slots=2, max_length=256)
        try:
            return await measure_router_mismatch(engine, make_learner(trained), tree_rows()[0])
        finally:
            await engine.close()

    return asyncio.run(measure())


@torch.no_grad()
def test_routes_of_equal_and_of_different_weights() -> None:
    model = tiny("moe").eval()
    assert measure_changed_routes(model, model) == 0
    other = moved(copy.deepcopy(model), 1)
    ids = torch.tensor([[tree_rows()[0].token_ids[-1], *tree_rows()[0].token_ids]])
    chosen = []
    for either in (model, other):  # by the model's own outputs, one row without an engine
        logits = either(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
        chosen.append([set(map(int, token.topk(2).indices)) for layer in logits for token in layer])
    expected = sum(one != two for one, two in zip(*chosen, strict=True)) / len(chosen[0])
    assert expected > 0
    assert measure_changed_routes(model, other) == pytest.approx(expected)
    assert measure_changed_routes(tiny(), tiny()) is None


def test_large_difference_is_a_finding() -> None:
    small, large = Diagnosis(), Diagnosis()
    check_routers(small, 0.01)
    check_routers(large, 0.3)
    assert not small.findings and [finding.name for finding in large.findings] == ["router_mismatch"]
    assert "1.00%" in small.facts["routers"]


def test_dry_run_reports_experts_and_routers(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    model = tiny("moe", vocab_size=len(tokenizer))
    model.config.router_aux_loss_coef = 0.02
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.max_position_embeddings = 2048
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = TrainingConfig(
        model={"name": str(tmp_path), "max_length": 1024},
        environment={"environment_id": "calculator", "max_turns": 2},
        sampling={"max_tokens": 8},
        reward={"type": "rule_based", "options": {"rule": "numeric"}},
        training={"batch_size": 2, "group_size": 2},
    )
    facts = examine(config, PlainLines()).facts
    assert facts["experts"] == "4 in each of 2 layers; auxiliary loss with coefficient 0.02"
