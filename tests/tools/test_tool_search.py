from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kits.tools import one
from TrainingFactory.tools.builtin.search import SearchTool, split_terms

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def make(path: Path, tmp_path: Path, **options: Any) -> SearchTool:
    return SearchTool(path, index_dir=tmp_path / "index", **options)


def bm25(query: str, texts: list[str], k1: float = 1.2, b: float = 0.75) -> dict[int, float]:
    """The formula, written down once more: Robertson's, with the floor that SQLite puts under idf."""
    documents = [Counter(text.split()) for text in texts]
    lengths = [sum(document.values()) for document in documents]
    mean = sum(lengths) / len(lengths)
    scores: dict[int, float] = {}
    for term in set(query.split()):
        having = sum(term in document for document in documents)
        idf = max(math.log((len(texts) - having + 0.5) / (having + 0.5)), 1e-6)
        for number, document in enumerate(documents):
            if count := document[term]:
                norm = count + k1 * (1 - b + b * lengths[number] / mean)
                scores[number] = scores.get(number, 0.0) + idf * count * (k1 + 1) / norm
    return scores


def test_ranking_is_bm25(tmp_path: Path):
    chance = random.Random(0)
    vocabulary = [f"w{number}" for number in range(60)]
    texts = [" ".join(chance.choices(vocabulary, k=chance.randint(3, 30))) for _ in range(80)]
    tool = make(
        write(tmp_path / "d.jsonl", [{"id": n, "text": text} for n, text in enumerate(texts)]), tmp_path
    )
    for _ in range(20):
        query = " ".join(chance.sample(vocabulary, 3))
        expected = bm25(query, texts)
        best = sorted(expected, key=lambda number: (-expected[number], number))[:10]
        found = tool.find(query, 10)
        assert [score for *_, score in found] == pytest.approx([expected[number] for number in best])
        assert [int(name) for name, *_ in found] == best


ROWS = [
    {"id": "oslo", "title": "Oslo", "text": "The capital of Norway. Été comme hiver."},
    {"id": "beijing", "title": "北京", "text": "北京大学是一所位于北京的大学。"},
    {"id": "tokyo", "text": "東京タワーは東京にある。"},
    {"id": "delhi", "text": "दिल्ली भारत की राजधानी है"},
    {"id": "seoul", "text": "서울은 대한민국의 수도이다."},
    {"id": "long", "text": "filler " * 500 + "needle"},
]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("capital NORWAY", "oslo"),
        ("ete", "oslo"),
        ("Ｎｏｒｗａｙ", "oslo"),
        ("北京大学", "beijing"),
        ("京", "beijing"),
        ("タワー", "tokyo"),
        ("राजधानी", "delhi"),
        ("대한민국", "seoul"),
        ("needle", "long"),
    ],
)
def test_words_of_many_scripts(tmp_path: Path, query: str, first: str):
    tool = make(write(tmp_path / "d.jsonl", ROWS), tmp_path)
    assert tool.find(query, 3)[0][0] == first


@pytest.mark.parametrize(
    "query",
    [
        '"',
        'a" OR "b',
        "NEAR(a b)",
        "words:x",
        "*",
        "-norway",
        "^(",
        "AND OR NOT",
        "'; DROP TABLE x",
        "\0",
        "",
    ],
)
def test_no_query_is_syntax(tmp_path: Path, query: str):
    tool = make(write(tmp_path / "d.jsonl", ROWS), tmp_path)
    assert one(tool, {"query": query}).ok


def test_what_the_model_sees(tmp_path: Path):
    tool = make(write(tmp_path / "d.jsonl", ROWS), tmp_path, max_chars=40)
    result = one(tool, {"query": "norway needle", "top_k": 2})
    assert "[1] Oslo (oslo)\nThe capital of Norway. Été comme hiver." in result.content
    assert "[2] long\nfiller" in result.content and " [...]" in result.content and len(result.content) < 200
    assert one(tool, {"query": "zebra"}).content == "Nothing found; try other words."
    assert one(tool, {"query": "a", "top_k": 99}).error == "schema"
    assert tool.options.pure and tool.num_documents == 6
    assert len(tool.find("the of in " * 500, 3)) <= 3


def test_a_folder_and_other_fields(tmp_path: Path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("apples and pears")
    (folder / "sub" / "b.md").write_text("# Bread\nflour")
    (folder / "c.bin").write_text("apples")
    tool = make(folder, tmp_path)
    assert [row[0] for row in tool.find("apples", 5)] == ["a.txt"]
    assert [row[0] for row in tool.find("flour", 5)] == ["sub/b.md"]
    path = write(tmp_path / "d.jsonl", [{"body": "apples", "head": "Fruit", "key": 7}])
    other = make(path, tmp_path, text_field="body", title_field="head", id_field="key")
    assert other.find("fruit", 1)[0][:3] == ("7", "Fruit", "apples")


def test_the_index_is_kept_until_the_data_changes(tmp_path: Path):
    path = write(tmp_path / "d.jsonl", ROWS)
    first = make(path, tmp_path)
    built = first.index_path.stat()
    again = make(path, tmp_path)
    assert again.index_path.stat().st_ino == built.st_ino and again.options.version == first.options.version
    write(path, [*ROWS, {"id": "new", "text": "zebra"}])
    changed = make(path, tmp_path)
    assert changed.find("zebra", 1)[0][0] == "new" and changed.options.version != first.options.version
    assert len(list((tmp_path / "index").iterdir())) == 1
    changed.index_path.write_bytes(b"broken")
    assert make(path, tmp_path).find("zebra", 1)[0][0] == "new"


BUILDER = """
import sys
from TrainingFactory.tools.builtin.search import SearchTool
print(SearchTool(sys.argv[1], index_dir=sys.argv[2]).find("needle", 1)[0][0])
"""


def test_two_processes_build_at_once(tmp_path: Path):
    path = write(tmp_path / "d.jsonl", ROWS)
    command = [sys.executable, "-c", BUILDER, str(path), str(tmp_path / "index")]
    builders = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [builder.communicate(timeout=60)[0].strip() for builder in builders] == ["long", "long"]
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_the_index_goes_to_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tool = SearchTool(write(tmp_path / "d.jsonl", ROWS))
    assert tool.index_path.parent == tmp_path / "cache" / "training-factory" / "search"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_index_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(ValueError, match="set index_dir"):
        SearchTool(write(tmp_path / "d.jsonl", ROWS), index_dir="/proc/nowhere")


def test_words():
    assert split_terms("Don't_stop 3.5 Ünïcode") == ["don", "t", "stop", "3", "5", "ünïcode"]
    assert split_terms("北京2024") == ["北", "京", "北京", "2024"]
