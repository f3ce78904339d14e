"""An evaluation that has ended keeps no model: a recipe evaluates eight times in one process."""

import gc
import weakref
from pathlib import Path

import pytest

from TrainingFactory.assembly import sampler
from TrainingFactory.config import TrainingConfig
from TrainingFactory.evaluation.rollouts import Rollouts


def test_an_ended_evaluation_keeps_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = list[weakref.ref[object]]()
    load = sampler.load

    def remembering(*args, **kwargs):
        loaded = load(*args, **kwargs)
        models.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(sampler, "load", remembering)
    config = TrainingConfig.model_validate(
        {
            "model": {"name": "builtin:tiny"},
            "environment": {"environment_id": "calculator", "max_turns": 1},
            "data": {"count": 1},
            "sampling": {"max_tokens": 4},
            "logging": {"output_dir": str(tmp_path)},
        }
    )
    rollouts = [Rollouts(config, tmp_path / f"{number}.jsonl") for number in range(2)]
    for rollout in rollouts:
        assert not rollout.run().interrupted
    gc.collect()
    assert len(models) == 2
    assert [model() for model in models] == [None, None]
