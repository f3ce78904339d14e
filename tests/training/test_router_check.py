"""The metric of router mismatch in runs: measured every N steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kits.engine import tiny
from tests.kits.run import Parity, rows, small, train
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.runs.folder import METRICS
from TrainingFactory.training.preflight import check_config


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), make_tiny_tokenizer()
    model = tiny("moe", vocab_size=len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.max_position_embeddings = 2048
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def config(folder: Path, model: str | None, **training: Any) -> TrainingConfig:
    options: dict[str, Any] = {"training": {"max_steps": 3} | training}
    if model is not None:
        options["model"] = {"name": model, "max_length": 512}
    return small(folder, **options)


def test_the_metric_appears_every_n_steps_only_if_it_is_set(tmp_path: Path, mixture: str) -> None:
    plain = rows(train(config(tmp_path, mixture), "plain", environment=Parity).run / METRICS)
    checked = rows(
        train(config(tmp_path, mixture, router_check_every=2), "checked", environment=Parity).run / METRICS
    )
    assert [row.get("router_mismatch") for row in plain] == [None] * 3
    assert [row.get("router_mismatch") for row in checked] == [0.0, None, 0.0]  # float32 on one device


def test_runs_that_cannot_be_measured_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router_check_every is 2, but the model has no experts"):
        train(config(tmp_path, None, router_check_every=2), "dense", environment=Parity)
    ahead = config(tmp_path, None, router_check_every=2)
    optimization = ahead.optimization.model_copy(update={"async_rollout": True})
    with pytest.raises(ValueError, match=r"optimization\.async_rollout samples during the measurement"):
        check_config(ahead.model_copy(update={"optimization": optimization}), False)
