"""What a run has made, loaded by transformers and PEFT alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from TrainingFactory.assembly.export import export
from TrainingFactory.cli.app import app
from TrainingFactory.learning.checkpoints import save_checkpoint
from TrainingFactory.learning.heads import make_head
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import load_model

IDS = torch.tensor([[5, 17, 300, 42, 7, 7, 250, 11]])
LEARNER = {"learner", "learner.json", "state.json"}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


def whole(folder: Path, **options: Any) -> Any:
    loaded = load_model("builtin:tiny", seed=3, device="cpu")
    learner = Learner(loaded.model, OptimizerOptions(learning_rate=1e-3), **options)
    save_checkpoint(folder, learner, loaded.tokenizer, {})
    return loaded.model


def adapted(base: Path, folder: Path, **options: Any) -> Any:
    """An adapter that says something else than its base."""
    loaded = load_model(str(base), device="cpu")
    model: Any = add_lora(loaded.model, r=4, alpha=8, **options)
    noise = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.2, generator=noise)
    save_checkpoint(folder, Learner(model, OptimizerOptions(learning_rate=1e-3)), loaded.tokenizer, {})
    return model


def test_a_whole_model_without_the_state_of_training(tmp_path: Path) -> None:
    model = whole(tmp_path / "checkpoint")
    done = export(str(tmp_path / "checkpoint"), tmp_path / "out")
    assert done.kind == "model" and not LEARNER & {path.name for path in done.path.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(done.path)
    assert torch.equal(logits(loaded), logits(model))
    assert AutoTokenizer.from_pretrained(done.path).chat_template
    half = AutoModelForCausalLM.from_pretrained(
        export(str(tmp_path / "checkpoint"), tmp_path / "half", dtype="bfloat16").path
    )
    assert half.dtype == torch.bfloat16
    wanted = logits(model)
    assert float((logits(half) - wanted).abs().max()) < 0.05 * float(wanted.abs().max())


@pytest.mark.parametrize(
    "options", [{}, {"dora": True}, {"rslora": True, "target_modules": ["q_proj", "up_proj"]}]
)
def test_an_adapter_merged_and_not(tmp_path: Path, options: dict[str, Any]) -> None:
    base = whole(tmp_path / "base")
    model = adapted(tmp_path / "base", tmp_path / "checkpoint", **options)
    wanted = logits(model)
    assert float((wanted - logits(base)).abs().max()) > 0.1
    merged = export(str(tmp_path / "checkpoint"), tmp_path / "merged", merge=True)
    found = AutoModelForCausalLM.from_pretrained(merged.path)
    assert not (merged.path / "adapter_config.json").exists() and found.dtype == torch.float32
    torch.testing.assert_close(logits(found), wanted, rtol=1e-4, atol=1e-4)
    small = export(str(tmp_path / "checkpoint"), tmp_path / "adapter")
    assert small.kind == "adapter" and not LEARNER & {path.name for path in small.path.iterdir()}
    for loader in (AutoModelForCausalLM, AutoPeftModelForCausalLM):
        torch.testing.assert_close(logits(loader.from_pretrained(small.path)), wanted, rtol=1e-5, atol=1e-5)


def test_a_reward_model_keeps_its_head_and_a_critic_goes(tmp_path: Path) -> None:
    causal = load_model("builtin:tiny", device="cpu").model
    whole(tmp_path / "critic", head=make_head(causal))
    critic = export(str(tmp_path / "critic"), tmp_path / "a")
    assert not critic.reward_model and not (critic.path / "scalar_head.safetensors").exists()
    whole(tmp_path / "judge", head=make_head(causal, {"kind": "outcome", "base": "builtin:tiny"}))
    judge = export(str(tmp_path / "judge"), tmp_path / "b")
    assert judge.reward_model
    for name in ("scalar_head.safetensors", "reward_model.json"):
        assert (judge.path / name).read_bytes() == (tmp_path / "judge" / name).read_bytes()


def test_mistakes(tmp_path: Path) -> None:
    whole(tmp_path / "checkpoint")
    checkpoint = str(tmp_path / "checkpoint")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for name, out, options, text in [
        (checkpoint, "full", {}, "already exists"),
        (checkpoint, "out", {"merge": True}, "nothing to merge"),
        (str(tmp_path / "nothing"), "out", {}, "there is no such run or model"),
    ]:
        with pytest.raises(ValueError, match=text):
            export(name, tmp_path / out, **options)
    loaded = load_model("builtin:tiny", device="cpu")
    model = add_lora(loaded.model, r=4)
    save_checkpoint(tmp_path / "own", Learner(model, OptimizerOptions()), loaded.tokenizer, {})
    config = tmp_path / "own" / "adapter_config.json"
    about = json.loads(config.read_text()) | {"base_model_name_or_path": "builtin:tiny"}
    config.write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"belongs to a built-in model.*export it merged"):
        export(str(tmp_path / "own"), tmp_path / "out")
    with pytest.raises(ValueError, match="dtype is for whole models"):
        export(str(tmp_path / "own"), tmp_path / "out", dtype="bfloat16")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint", "full", "own"]  # nothing half done


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole(tmp_path / "checkpoint")
    assert app(["export", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"wrote the model of {tmp_path / 'checkpoint'} to {tmp_path / 'out'}" in said
    assert "AutoModelForCausalLM.from_pretrained" in said and "tfactory eval" in said
