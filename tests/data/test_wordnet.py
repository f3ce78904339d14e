"""Tools over WordNet's files, and questions that take several calls of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.wordnet import ambiguous, write_wordnet
from TrainingFactory.apps.recipes.gsm8k import PreparedRows
from TrainingFactory.apps.recipes.wordnet_questions import MAX_PER_ANSWER, MAX_PER_KIND, prepare_wordnet
from TrainingFactory.assembly.tools import make_tool
from TrainingFactory.common.openai_format import message_from_dict
from TrainingFactory.data.examples import load_examples
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.tools.executor import AsyncToolExecutor
from TrainingFactory.types import ToolCall

REAL = Path(os.environ.get("WORDNET", "/usr/share/wordnet"))
MORE = {
    # Each of these two has one sense, and leads up on a way of its own.
    "plum": ("plum", "fruit", "", "a purple one"),
    "candy": ("candy", "sweet", "", "a hard one"),
    "knife": ("knife", "tool", "", "for the table"),
    "blade": ("Blade", "thing", "knife", "the flat part of a thing"),
    "blade 2": ("blade", "whole", "knife", "the part that cuts"),
    "blade 3": ("leaf_of_grass blade", "whole", "", "of grass; long"),
    "saw": ("saw", "hand tool, sweet", "", "with teeth"),
    "saw 2": ("saw", "sweet", "", "a slur"),
    "long": ("long", "thing", "", "one of which much is said " * 9),
    **{f"run {n}": ("run", "thing", "", f"a sense numbered {n}") for n in range(7)},
}


def calls(folder: Path, *asked: tuple[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    """Return how the executor answers, as in an episode."""

    async def answered() -> list[tuple[bool, str]]:
        executor = AsyncToolExecutor([make_tool({"name": "wordnet", "options": {"path": str(folder)}})], 5.0)
        results = await executor.batch_execute([ToolCall(*each, f"{n}") for n, each in enumerate(asked)])
        await executor.close()
        return [(result.ok, result.content) for result in results]

    return asyncio.run(answered())


def asked(done: PreparedRows, part: str) -> list[str]:
    return [word for row in done.rows[part] for word in row["id"].split("-")[1:]]


def test_tools_tell_senses_and_where_they_lead(tmp_path: Path) -> None:
    told = calls(
        write_wordnet(tmp_path, MORE),
        ("lookup", {"word": "Hand  Tool"}),
        ("kind_of", {"word": "hand tool", "sense": 1}),
        ("kind_of", {"word": "saw", "sense": 1}),
        ("part_of", {"word": "blade", "sense": 2}),
        ("part_of", {"word": "blade", "sense": 3}),
        ("kind_of", {"word": "blade", "sense": 2}),
        ("kind_of", {"word": "implement", "sense": 1}),
        ("lookup", {"word": "food"}),
    )
    assert told == [
        (True, "1: held in the hand"),
        (True, "tool, sense 1"),
        (True, "hand tool, sense 1\nsweet, sense 1"),
        (True, "knife, sense 1"),
        (True, "nothing"),
        (True, "whole, sense 1"),
        (True, "whole, sense 1"),
        (True, "1: what is eaten"),  # without examples
    ]
    [(_, long), (_, run)] = calls(tmp_path, ("lookup", {"word": "long"}), ("lookup", {"word": "run"}))
    senses = ({"sense": 3}, {"sense": 0}, {})
    wrong = calls(
        tmp_path, ("lookup", {"word": "nowhere"}), *(("kind_of", {"word": "saw"} | each) for each in senses)
    )
    for file in tmp_path.glob("*.noun"):
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))  # as a package has them; places stay
    assert calls(tmp_path, ("lookup", {"word": "run"})) == [(True, run)]
    assert long.endswith(" ...") and len(long) <= 73
    assert run.splitlines()[4:] == ["5: a sense numbered 4", "and 2 more"]
    assert not any(ok for ok, _ in wrong)
    texts = ["there is no noun 'nowhere'", "saw has no sense 3, only 1 to 2", "no sense 0", "sense"]
    assert all(text in said for text, (_, said) in zip(texts, wrong, strict=True))


def test_questions_take_several_calls(tmp_path: Path) -> None:
    done = asyncio.run(prepare_wordnet(write_wordnet(tmp_path, MORE | ambiguous(60))))
    rows = {row["id"]: row for part in ("sft", "sft_dev") for row in done.rows[part]}
    tasks = {row["id"]: row for part in ("tasks", "dev", "test") for row in done.rows[part]}
    assert (
        len(tasks) == sum(done.row_counts[part] for part in ("tasks", "dev", "test"))
        and done.row_counts["test"] > 0
    )
    assert {row["id"] for row in done.rows["sft"]} == {row["id"] for row in done.rows["tasks"]}
    # Each word once, in one part; what others lead through is not asked about, nor what leads two ways.
    words = [word for part in ("tasks", "dev", "test") for word in asked(done, part)]
    assert len(words) == len(set(words)) and not {"saw", "run", "long", "fruit"} & set(words)
    assert (
        sum(done.dropped.values()) + len(words) == len((tmp_path / "index.noun").read_text().splitlines()) - 1
    )
    # By fruit, or by hand tool, off which the answer tool could be read.
    ways = {"two": {"food"}, "three": {"thing", "whole"}}
    for kind, answers in ways.items():
        found = {row["answer"] for name, row in tasks.items() if name.startswith(f"{kind}-word")}
        assert found == answers
    assert tasks["part-blade"]["answer"] == "tool" and '"the part that cuts"' in tasks["part-blade"]["prompt"]
    again = asyncio.run(prepare_wordnet(tmp_path))
    assert again.rows == done.rows
    # The dialogues are what the environment answers, and the last word is the answer.
    some = next(row for name, row in rows.items() if name.startswith("three-"))
    messages = [message_from_dict(message) for message in some["messages"]]
    made = [(call.name, call.arguments) for message in messages for call in message.tool_calls]
    assert [name for name, _ in made] == ["lookup", "kind_of", "kind_of", "kind_of"]
    assert [text for _, text in calls(tmp_path, *made)] == [
        message.content for message in messages if message.role == "tool"
    ]
    sense = made[1][1]["sense"]
    gloss = messages[2].content.splitlines()[sense - 1].removeprefix(f"{sense}: ")
    assert (
        f'in the sense "{gloss}"' in messages[0].content
        and messages[-1].content == tasks[some["id"]]["answer"]
    )
    assert len(load_examples(done.rows["sft"], "sft")) == done.row_counts["sft"]
    assert len(load_tasks(done.rows["tasks"])) == done.row_counts["tasks"]
    plain = asyncio.run(prepare_wordnet(tmp_path, plain=True)).rows["sft"][0]
    assert [message["role"] for message in plain["messages"]] == [
        "user",
        "assistant",
    ] and "tools" not in plain


def test_what_two_words_share_is_the_nearest(tmp_path: Path) -> None:
    more = {f"w{n}": ("kind" + chr(97 + n // 26) + chr(97 + n % 26), "fruit" if n % 2 else "sweet", "", f"no. {n}")
            for n in range(120)}  # fmt: skip
    done = asyncio.run(prepare_wordnet(write_wordnet(tmp_path, more)))
    for part, numbers in (("tasks", range(4, 15)), ("dev", (0, 1)), ("test", (2, 3))):
        hashes = [int(blake2b(word.encode(), digest_size=8).hexdigest(), 16) for word in asked(done, part)]
        assert hashes and {number % 15 for number in hashes} <= set(numbers)  # both words of a question
    found, lengths = Counter[str](), set[int]()
    for row in done.rows["sft"] + done.rows["sft_dev"]:
        _, first, second = row["id"].split("-")
        kinds = {more[name][1] for name in more if more[name][0] in (first, second)}
        nearest = kinds.pop() if len(kinds) == 1 else "food"
        assert row["messages"][-1]["content"] == nearest
        found[nearest] += 1
        lengths.add(sum(message["role"] == "tool" for message in row["messages"]))
    assert set(found) == {"fruit", "sweet", "food"} and lengths == {2, 4}


def test_files_that_are_not_there_or_do_not_fit(tmp_path: Path, tfactory: Run) -> None:
    for command in (
        ["data", "wordnet", "nowhere"],
        ["recipe", "wordnet", "--data", "nowhere", "--out", "made"],
    ):
        status, _, err = tfactory(*command)
        assert status == 2 and "nowhere/data.noun" in err and "wordnet-base" in err
    assert not Path("made").exists()
    folder = write_wordnet(tmp_path / "broken", MORE)
    (folder / "data.noun").write_text("x" + (folder / "data.noun").read_text("utf-8"), encoding="utf-8")
    status, _, err = tfactory("data", "wordnet", str(folder))
    assert status == 2 and "broken/data.noun does not match index.noun" in err.replace("\n", "")


@pytest.mark.slow
def test_the_recipe_from_files_to_figures(tmp_path: Path, tfactory: Run) -> None:
    write_wordnet(tmp_path / "net", MORE | ambiguous(80))
    options = [
        "--data",
        str(tmp_path / "net"),
        "--model",
        "builtin:tiny",
        "--scale",
        "small",
        "--out",
        "made",
    ]
    status, out, err = tfactory("recipe", "wordnet", *options, "--final", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert set(found["evaluations"]) == {"dev", "test"} and found["runs"]["grpo"]["steps"] == 2
    episode = json.loads(Path("made/grpo/trajectories.jsonl").read_text("utf-8").splitlines()[0])
    assert [tool["function"]["name"] for tool in episode["tools"]] == ["lookup", "kind_of", "part_of"]


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "data.noun").is_file(), reason=f"WordNet is not in {REAL} (or $WORDNET)")
def test_the_real_files() -> None:
    done = asyncio.run(prepare_wordnet(REAL))
    assert done.row_counts["tasks"] > 4500 and min(done.row_counts["dev"], done.row_counts["test"]) > 600
    parts = [set(asked(done, part)) for part in ("tasks", "dev", "test")]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    kinds = Counter(row["id"].split("-")[0] for part in ("tasks", "dev", "test") for row in done.rows[part])
    assert set(kinds) == {"part", "two", "three", "both"} and max(kinds.values()) <= MAX_PER_KIND
    answers = Counter(
        (row["id"].split("-")[0], row["answer"])
        for part in ("tasks", "dev", "test")
        for row in done.rows[part]
    )
    assert max(answers.values()) <= MAX_PER_ANSWER
    made = {sum(message["role"] == "tool" for message in row["messages"]) for row in done.rows["sft"]}
    assert made == {2, 3, 4}
