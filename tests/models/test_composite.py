"""Composite models, of which the text part is loaded, trained and exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.kits.composite import save_composite
from tests.kits.run import Quiet, small, train
from TrainingFactory.assembly.export import export
from TrainingFactory.learning.checkpoints import save_checkpoint
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import load_model
from TrainingFactory.models.loading import read_stored_dtype
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.runs.folder import NOTES_KEY, RunFolder

IDS = torch.tensor([[5, 17, 300, 42, 7, 7, 250, 11, 600, 601, 602, 5, 90, 91, 17]])  # longer than the windows


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits.float()


def rewrite(folder: Path, **keys: Any) -> None:
    """Change keys of a folder's config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def slow(*families: str) -> list[Any]:
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "gemma4", "qwen3_5", "llama4"),
        *slow("mistral3", "mistral3 of Mistral Small", "qwen2_5_vl", "qwen3_vl"),
        *slow("llava", "internvl", "smolvlm", "lfm2_vl"),
    ],
)
def test_the_text_part_computes_what_the_composite_model_does(tmp_path: Path, family: str) -> None:
    whole = save_composite(tmp_path / "whole", family, shards="40KB" if family == "gemma3" else "5GB")
    expected = logits(whole)
    loaded = load_model(str(tmp_path / "whole"), device="cpu", dtype="float32")
    assert torch.equal(logits(loaded.model), expected)
    loaded.model.save_pretrained(tmp_path / "text")
    reloaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    saved, report = reloaded
    assert type(saved) is type(loaded.model) and not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(logits(saved), expected)
    assert saved.generation_config.eos_token_id == whole.generation_config.eos_token_id
    assert all(
        name.startswith(("model.", "lm_head.")) for name in load_file(tmp_path / "text/model.safetensors")
    )
    [note] = loaded.notes
    assert type(whole).__name__ in note and type(saved).__name__ in note
    left_out = sum(int(number) for number in re.findall(r"(\d+) tensors?,", note))
    assert left_out == len(list(whole.parameters())) - len(list(loaded.model.parameters())) > 0


def test_settings_of_the_whole_model_reach_the_text_part(tmp_path: Path) -> None:
    """As in released folders: end tokens, dtype and chat template stand outside the text part."""
    whole = save_composite(tmp_path, "gemma3")
    whole.to(torch.bfloat16).save_pretrained(tmp_path)
    ends = [make_tiny_tokenizer().eos_token_id, 7]
    rewrite(tmp_path, eos_token_id=ends, dtype="bfloat16")
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'of the processor' }}"}))
    loaded = load_model(str(tmp_path), device="cpu")
    assert loaded.stop_ids == tuple(ends)
    assert read_stored_dtype(str(tmp_path)) == torch.bfloat16
    assert "of the processor" in loaded.tokenizer.chat_template


def test_a_head_that_the_config_wrongly_ties(tmp_path: Path) -> None:
    whole = save_composite(tmp_path / "whole", "mistral3")
    rewrite(tmp_path / "whole", tie_word_embeddings=None)  # the default is true
    assert AutoConfig.from_pretrained(tmp_path / "whole").tie_word_embeddings
    loaded = load_model(str(tmp_path / "whole"), device="cpu")
    assert torch.equal(logits(loaded.model), logits(whole))
    assert loaded.model.config.tie_word_embeddings is False


def test_fp8_weights_are_dequantized(tmp_path: Path) -> None:
    """As in the instruct releases of Ministral 3."""
    save_composite(tmp_path, "mistral3")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        stored[name] = weight
        if "language_model.model.layers" in name and weight.dim() == 2:
            scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            stored[name.replace(".weight", ".activation_scale")] = torch.tensor(1.0)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    kept = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": kept}
    rewrite(tmp_path, quantization_config=quantization | {"weight_block_size": None})
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(loaded.model), logits(whole.float()))
    loaded.model.save_pretrained(tmp_path / "text")
    assert "quantization_config" not in json.loads((tmp_path / "text" / "config.json").read_text())


def test_weights_outside_of_every_part_are_counted(tmp_path: Path) -> None:
    """Qwen3.5 has layers that predict further tokens, which the text class ignores without a word."""
    save_composite(tmp_path, "qwen3_5")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.norm.weight": torch.zeros(3, 1000)}, file, {"format": "pt"})
    [note] = load_model(str(tmp_path), device="cpu").notes
    assert "mtp (1 tensor, 3K parameters)" in note


def test_errors(tmp_path: Path) -> None:
    save_composite(tmp_path / "whole", "llava")
    file = tmp_path / "whole" / "model.safetensors"
    weights = load_file(file)
    weights.pop("language_model.model.norm.weight")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing .* model\.norm\.weight"):
        load_model(str(tmp_path / "whole"), device="cpu")
    AutoConfig.for_model("glm4v").save_pretrained(tmp_path / "glm")
    make_tiny_tokenizer().save_pretrained(tmp_path / "glm")
    with pytest.raises(ValueError, match=r"glm4v .* has no causal LM class .*glm4v_text.*REAL_MODELS"):
        load_model(str(tmp_path / "glm"), device="cpu")


def trained_adapter(base: Path, folder: Path) -> torch.Tensor:
    """Save an adapter that changes the text part, and return the logits with it."""
    loaded = load_model(str(base), device="cpu")
    model: Any = add_lora(loaded.model, r=4, alpha=8)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.2)
    save_checkpoint(folder, Learner(model, OptimizerOptions()), loaded.tokenizer, {})
    return logits(model)


def test_an_adapter_fits_the_text_part_and_the_whole_model(tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "whole", tmp_path / "checkpoint"
    whole = save_composite(base, "qwen3_vl")
    expected = trained_adapter(base, checkpoint)
    assert float((expected - logits(whole)).abs().max()) > 0.1
    exported = export(str(checkpoint), tmp_path / "adapter")
    assert exported.auto_class == "AutoModelForImageTextToText" and str(base) in exported.notes[0]
    adapted = AutoModelForImageTextToText.from_pretrained(exported.path)
    assert not any("visual" in name for name, _ in adapted.named_parameters() if "lora_" in name)
    torch.testing.assert_close(logits(adapted), expected, rtol=1e-5, atol=1e-5)
    loaded = load_model(str(base), device="cpu", adapter=str(exported.path))
    torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-5, atol=1e-5)
    file = exported.path / "adapter_model.safetensors"
    name = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
    save_file(load_file(file) | {name: torch.zeros(4, 16)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 module .* model\.visual\.blocks\.0\.attn\.qkv"):
        load_model(str(base), device="cpu", adapter=str(exported.path))


@pytest.mark.slow
def test_an_adapter_merged_into_the_text_part(tmp_path: Path) -> None:
    base, checkpoint = tmp_path / "whole", tmp_path / "checkpoint"
    save_composite(base, "qwen3_vl")
    expected = trained_adapter(base, checkpoint)
    merged = export(str(checkpoint), tmp_path / "merged", merge=True)
    assert "Left out: visual" in merged.notes[0]
    text = AutoModelForCausalLM.from_pretrained(merged.path)
    torch.testing.assert_close(logits(text), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.training
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3_vl", False),
        pytest.param("mistral3", True, marks=pytest.mark.slow),
        ("gemma3", False),
    ],
)
def test_grpo_trains_the_text_part(tmp_path: Path, family: str, lora: bool) -> None:
    base = tmp_path / "whole"
    whole = save_composite(base, family)
    watcher = Quiet()
    config = small(
        tmp_path, model={"name": str(base)}, lora={"enabled": lora, "r": 4}, training={"max_steps": 2}
    )
    run = RunFolder(train(config, "grpo", watcher).run)
    notes = [text for text in watcher.said if "Left out" in text]
    assert len(notes) == 1 and notes[0].removeprefix("note: ") in run.run_info[NOTES_KEY]
    exported = export(str(run.path), tmp_path / "model", merge=lora)
    trained = AutoModelForCausalLM.from_pretrained(exported.path)
    ours = load_model(str(exported.path), device="cpu")
    assert ours.notes == () and torch.equal(logits(ours.model), logits(trained))
    assert not torch.equal(logits(trained), logits(whole))


@pytest.mark.training
def test_sft_trains_the_text_part_of_a_model_with_windows(tmp_path: Path) -> None:
    base = tmp_path / "whole"
    whole = save_composite(base, "gemma3")
    row = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    config = small(
        tmp_path,
        model={"name": str(base)},
        training={"algorithm": "sft", "max_steps": 1},
        data={"dataset": str(tmp_path / "data.jsonl")},
    )
    report = train(config, "sft", environment=None)
    trained = AutoModelForCausalLM.from_pretrained(RunFolder(report.run).checkpoints()[-1])
    assert type(trained).__name__ == "Gemma3ForCausalLM"
    assert not torch.equal(logits(trained), logits(whole))
