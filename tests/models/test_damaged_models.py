"""Damaged, truncated and absurd model files: one line that names the file and what to do."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from TrainingFactory.models.loading import load_model, load_tokenizer
from TrainingFactory.models.tiny import make_tiny_model, make_tiny_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tiny_tokenizer()
    make_tiny_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refused(name: Path) -> str:
    with pytest.raises(ValueError) as told:
        load_model(str(name))
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (WEIGHTS, b""),
        (WEIGHTS, struct.pack("<Q", 2**62) + b"{}"),
        (WEIGHTS, 0.5),
        ("config.json", 0.5),
        ("config.json", b'{"a":' * 100_000),
        ("tokenizer.json", 0.5),
        ("tokenizer.json", b"{}"),
        ("generation_config.json", 0.5),
    ],
    ids=["no weights", "huge header", "weights", "config", "nested", "tokenizer", "no keys", "generation"],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes | float) -> None:
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(
        content if isinstance(content, bytes) else before[: int(content * len(before))]
    )
    told = refused(folder)
    assert f"{folder / name} is damaged" in told and "download it again" in told


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": "abc"}, "'hidden_size' expected int"),
        ({"num_attention_heads": 0}, "division"),
        ({"hidden_act": "zzz"}, "zzz"),
        ({"vocab_size": 2000}, "the shapes of the weights"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers"),
    ],
)
def test_a_config_that_cannot_be(folder: Path, changes: dict[str, Any], text: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    if "num_hidden_layers" in changes:  # a family whose config does not list its layers
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | changes))
    told = refused(folder)
    assert str(folder / "config.json") in told and text in told


def test_a_model_without_a_tokenizer(folder: Path) -> None:
    for path in [*folder.glob("tokenizer*"), *folder.glob("chat_template*")]:
        path.unlink()
    assert f"{folder} has no tokenizer (such as tokenizer.json)" in refused(folder)
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(folder: Path, value: float) -> None:
    weights = load_file(folder / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name].view(-1)[7] = value
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    assert f"weight {name} has NaN or infinite values" in refused(folder)


def test_weights_beyond_the_range_of_float16(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    assert load_model(str(folder)).model.model.norm.weight[0] == 1e6
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* model\.dtype=bfloat16"):
        load_model(str(folder), dtype="float16")


def test_a_damaged_adapter_is_named(folder: Path) -> None:
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 5)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged"):
        load_model(str(folder), adapter=str(adapter))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)])
def test_a_damaged_gguf_file(tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert f"{tmp_path / 'model.gguf'} is damaged" in refused(tmp_path / "model.gguf")
    assert f"Reading {tmp_path / 'model.gguf'} (0.0 MB) ..." in capfd.readouterr().err


def test_a_device_without_memory_is_not_blamed_on_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(str(folder))
