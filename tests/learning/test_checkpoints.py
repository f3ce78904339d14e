"""A learner comes back from disk bit for bit, and never into another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kits.engine import VOCABULARY, tiny
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.disk import write_checksums
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning import checkpoints
from TrainingFactory.learning.checkpoints import load_checkpoint, save_checkpoint
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import LoadedModel, load_model
from TrainingFactory.models.tiny import make_tiny_model, make_tiny_tokenizer
from TrainingFactory.types import Sample


def make(name: Any = "adamw", seed: int = 0, lora: int = 0) -> tuple[LoadedModel, Learner]:
    loaded = load_model("builtin:tiny", seed=seed, dtype="float32")
    if lora:
        loaded.model = add_lora(loaded.model, r=lora, seed=seed)
    return loaded, Learner(loaded.model, OptimizerOptions(name, learning_rate=1e-3))


def learn(learner: Learner, *numbers: int) -> None:
    for number in numbers:
        ids = [(7 * place + number) % VOCABULARY for place in range(20)]
        zeros = [0.0] * 20
        row = Sample(ids, [False] + [True] * 19, zeros, zeros, zeros, [0] * 20)
        learner.update(make_batch([row]), SFT().loss)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in learner.model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "lora", "dtype"),
    [("adamw", 0, "float32"), ("muon", 0, "float32"), ("adamw", 0, "bfloat16"), ("adamw", 4, "float32")],
)
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: Any, lora: int, dtype: str) -> None:
    def make(seed: int) -> Learner:
        model: Any = tiny(seed=seed).to(getattr(torch, dtype))
        model = add_lora(model, r=lora, seed=seed) if lora else model
        return Learner(model, OptimizerOptions(name, learning_rate=1e-3))

    learner = make(0)
    learn(learner, 1, 2, 3)
    save_checkpoint(tmp_path / "c", learner, make_tiny_tokenizer(), {"mine": 1})
    learn(learner, 4, 5)
    other = make(0 if lora else 5)
    assert load_checkpoint(tmp_path / "c", other) == {"mine": 1}
    assert other.steps == 3
    learn(other, 4, 5)
    ours, theirs = weights(learner), weights(other)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_checkpoint_is_a_model(tmp_path: Path) -> None:
    loaded, learner = make()
    learn(learner, 1)
    save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {})
    endings = {path.suffix for path in (tmp_path / "c").iterdir()}
    assert endings == {".json", ".safetensors", ".jinja", ""}  # no pickles
    again = load_model(str(tmp_path / "c"), dtype="float32")
    state = again.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.model.state_dict().items())
    assert again.tokenizer("hello Oslo").input_ids == loaded.tokenizer("hello Oslo").input_ids
    assert again.stop_ids == loaded.stop_ids


def test_with_an_adapter_only_the_adapter_is_saved(tmp_path: Path) -> None:
    loaded, learner = make(lora=4)
    learn(learner, 1, 2)
    save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {})
    assert not (tmp_path / "c" / "model.safetensors").exists()
    assert all("lora_" in key for key in load_file(tmp_path / "c" / "adapter_model.safetensors"))
    again = load_model("builtin:tiny", adapter=str(tmp_path / "c"), dtype="float32", device="cpu")
    ids = torch.arange(10)[None]
    loaded.model.eval()
    assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    loaded, learner = make()
    learn(learner, 1)
    save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {})
    smaller = Learner(make_tiny_model(500, 0, 1), OptimizerOptions("adamw", learning_rate=1e-3))
    before = weights(smaller)
    wrong = r"embed_tokens.weight is \[\d+, 128\] in it and \[500, 128\] in the model"
    with pytest.raises(ValueError, match=wrong):
        load_checkpoint(tmp_path / "c", smaller)
    assert all(torch.equal(before[key], value) for key, value in weights(smaller).items())
    with pytest.raises(ValueError, match=r"lora_A.* is not trained in it and \[4, \d+\] in the model"):
        load_checkpoint(tmp_path / "c", make(lora=4)[1])
    with pytest.raises(ValueError, match="trained with AdamW, this run uses AdamW and Muon"):
        load_checkpoint(tmp_path / "c", make("muon")[1])


def test_an_adapter_fits_its_own_base_only(tmp_path: Path) -> None:
    loaded, learner = make(lora=4)
    save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {})
    with pytest.raises(ValueError, match="base model with other weights"):
        load_checkpoint(tmp_path / "c", make(lora=4, seed=3)[1])


def test_the_state_where_earlier_versions_wrote_it(tmp_path: Path) -> None:
    loaded, learner = make()
    save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {"step": 7})
    assert [path.name for path in (tmp_path / "c").glob("*.safetensors")] == ["model.safetensors"]
    (tmp_path / "c" / "learner" / "state.safetensors").rename(tmp_path / "c" / "learner.safetensors")
    (tmp_path / "c" / "learner").rmdir()
    (tmp_path / "c" / "SHA256SUMS").unlink()
    write_checksums(tmp_path / "c")
    other = make(seed=3)[1]
    assert load_checkpoint(tmp_path / "c", other) == {"step": 7}
    pairs = zip(learner.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_folders_that_are_none(tmp_path: Path) -> None:
    loaded, learner = make()
    with pytest.raises(ValueError, match=r"not a checkpoint: .*learner.json"):
        load_checkpoint(tmp_path, learner)
    save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {})
    (tmp_path / "c" / "learner" / "state.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"is damaged: .*SHA256SUMS: learner/state.safetensors"):
        load_checkpoint(tmp_path / "c", learner)
    (tmp_path / "c" / "SHA256SUMS").unlink()  # as earlier versions wrote it
    with pytest.raises(ValueError, match=r"Cannot read .*learner/state.safetensors"):
        load_checkpoint(tmp_path / "c", learner)
    (tmp_path / "c" / "learner.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load_checkpoint(tmp_path / "c", learner)


def test_a_failed_write_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, learner = make()
    save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {"n": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match=r"Could not write .*: No space left"):
        save_checkpoint(tmp_path / "c", learner, loaded.tokenizer, {"n": 2})
    assert load_checkpoint(tmp_path / "c", learner) == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
