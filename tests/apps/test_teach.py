"""`tfactory data teach`: a teacher on the loopback plays, and its episodes become rows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.teacher import APIS, USED, Teacher, teaching
from TrainingFactory.data.examples import load_examples

PRICES = ("--input-price", "1", "--output-price", "10")
COST = (USED[0] + 10 * USED[1]) / 1e6  # of a reply
TURNS = 3  # of a solved task


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def taught(
    tfactory: Run, teacher: Teacher, out: Path, *more: str, api: str = "openai"
) -> tuple[int, str, str]:
    return tfactory("data", "teach", "search", "--teacher", teacher.name(api), "--out", str(out), *more)


@pytest.mark.parametrize(
    "api", ["openai", *(pytest.param(api, marks=pytest.mark.slow) for api in APIS if api != "openai")]
)
def test_good_episodes_become_rows_with_lineage_and_cost(tfactory: Run, tmp_path: Path, api: str):
    with teaching(wrong=lambda number, question: "apple" in question) as teacher:
        status, out, _ = taught(tfactory, teacher, tmp_path / "t", "--tasks", "4", *PRICES, api=api)
    assert status == 0 and "cost per row" in out
    report = json.loads((tmp_path / "t/report.json").read_text())
    assert report["requests"] == teacher.answered == 4 * TURNS
    assert report["cost"] == pytest.approx(4 * TURNS * COST)
    rows = lines(tmp_path / "t/rows.jsonl")
    assert report["rows"] == len(rows) < len(lines(tmp_path / "t/episodes.jsonl")) == 4
    assert all(row["lineage"]["teacher"] == "teacher" and row["reward"] == 1.0 for row in rows)
    assert len(load_examples(str(tmp_path / "t/rows.jsonl"), "sft")) == len(rows)


def test_a_spent_budget_stops_and_the_next_run_pays_only_the_rest(tfactory: Run, tmp_path: Path):
    out = tmp_path / "t"
    with teaching() as teacher:
        status, _, error = taught(
            tfactory, teacher, out, "--tasks", "6", *PRICES, "--max-cost", str(7.5 * COST)
        )
        assert status == 1 and "budget.max_cost is" in error and "of 6 episodes" in error
        first = teacher.answered
        assert 8 <= first < 6 * TURNS
        # What was spent before counts: nothing more is sent.
        status, _, error = taught(
            tfactory, teacher, out, "--tasks", "6", *PRICES, "--max-cost", str(7.5 * COST)
        )
        assert status == 1 and teacher.answered == first
        assert taught(tfactory, teacher, out, "--tasks", "6", *PRICES)[0] == 0
        assert teacher.answered == 6 * TURNS and len(lines(out / "rows.jsonl")) == 6
        status, _, notes = taught(
            tfactory, teacher, out, "--tasks", "8", *PRICES
        )  # more tasks: only the new ones
        assert status == 0 and "6 finished episodes" in notes and teacher.answered == 8 * TURNS
        assert json.loads((out / "report.json").read_text())["requests"] == 8 * TURNS
        assert taught(tfactory, teacher, out, "--tasks", "2", *PRICES)[0] == 0  # fewer: nothing is lost
        assert len(lines(out / "episodes.jsonl")) == 8 and teacher.answered == 8 * TURNS


def test_a_killed_run_continues_from_its_partial_file(tfactory: Run, tmp_path: Path):
    out = tmp_path / "t"
    with teaching() as teacher:
        assert taught(tfactory, teacher, out, "--tasks", "4")[0] == 0
        episodes = (out / "episodes.jsonl").read_text().splitlines(keepends=True)
        (out / "episodes.jsonl").unlink()
        (out / "episodes.jsonl.part").write_text("".join(episodes[:2]) + episodes[2][:50])
        with (out / "spent.jsonl").open("a") as file:
            file.write('{"input_tok')
        assert (
            taught(tfactory, teacher, out, "--tasks", "4", "--seed", "5")[0] == 2
        )  # refused, and nothing is lost
        status, _, notes = taught(tfactory, teacher, out, "--tasks", "4")
    assert status == 0 and "2 finished episodes" in notes and teacher.answered == 4 * TURNS
    assert len(lines(out / "rows.jsonl")) == 4


def test_a_failing_endpoint_loses_nothing(tfactory: Run, tmp_path: Path):
    out, state = tmp_path / "t", {"down": True}

    def fails(number: int, question: str) -> tuple[int, bytes] | None:
        if state["down"] and number >= 5:
            return 401, b'{"error": {"message": "wrong key"}}'
        return (429, b"slow down") if number == 2 else None

    with teaching(fails=fails, headers={"retry-after": "0"}) as teacher:
        status, _, error = taught(tfactory, teacher, out, "--tasks", "3")
        assert status == 1 and "status 401" in error and "api_key_env" in error
        paid = teacher.answered
        state["down"] = False
        assert taught(tfactory, teacher, out, "--tasks", "3")[0] == 0
    assert paid >= 3 and teacher.answered == 3 * TURNS


def test_a_malformed_reply_ends_one_episode(tfactory: Run, tmp_path: Path):
    broken = {"n": 0}

    def fails(number: int, question: str) -> tuple[int, bytes] | None:
        broken["n"] += number == 0
        return (200, b'{"choices": []}') if number == 0 else None

    with teaching(fails=fails) as teacher:
        assert taught(tfactory, teacher, tmp_path / "t", "--tasks", "3")[0] == 0
        episodes = lines(tmp_path / "t/episodes.jsonl")
        [failed] = [row for row in episodes if row["status"] == "error"]
        assert "did not return a chat completion" in failed["error"]
        assert len(lines(tmp_path / "t/rows.jsonl")) == 2
        assert taught(tfactory, teacher, tmp_path / "t", "--tasks", "3")[0] == 0  # plays the failed one again
    assert len(lines(tmp_path / "t/rows.jsonl")) == 3 and teacher.answered == 3 * TURNS


def test_pairs_best_of_n_and_unique_rows(tfactory: Run, tmp_path: Path):
    answers: dict[str, int] = {}

    def wrong(number: int, question: str) -> bool:
        answers[question] = answers.get(question, 0) + 1
        return answers[question] % 2 == 0

    with teaching(wrong=wrong) as teacher:
        assert (
            taught(tfactory, teacher, tmp_path / "t", "--tasks", "3", "--episodes", "4", "--to", "dpo")[0]
            == 0
        )
        pairs = lines(tmp_path / "t/rows.jsonl")
        assert len(pairs) == 3 and all(pair["margin"] == 1.0 for pair in pairs)
        assert len(load_examples(str(tmp_path / "t/rows.jsonl"), "dpo")) == 3
        for form, best, rows in (("sft", (), 6), ("sft", ("--best", "1"), 3), ("rft", (), 3)):
            status = taught(
                tfactory, teacher, tmp_path / "t", "--tasks", "3", "--episodes", "4", "--to", form, *best
            )[0]
            assert status == 0 and len(lines(tmp_path / "t/rows.jsonl")) == rows
    assert teacher.answered == 3 * 4 * TURNS  # other rows of the same episodes cost nothing


def test_a_judge_in_place_of_the_environment(tfactory: Run, tmp_path: Path):
    from tests.kits.judge import judging

    with teaching() as teacher, judging(lambda prompt, number: f"Score: {9 - 8 * (number % 2)}") as judge:
        more = ("--judge", f"openai:judge@{judge.url}", "--min-reward", "0.5", "--tasks", "4")
        assert taught(tfactory, teacher, tmp_path / "t", *more)[0] == 0
        assert len(lines(tmp_path / "t/rows.jsonl")) == 2 and len(judge.asked) == 4
        assert json.loads((tmp_path / "t/report.json").read_text())["judge/requests"] == 4


@pytest.mark.parametrize(
    ("teacher", "more", "says"),
    [
        ("openai:m", (), "OPENAI_API_KEY"),
        ("gpt-9", (), "is not an endpoint"),
        ("openai:m@http://127.0.0.1:9/v1", ("--max-cost", "1"), "without prices"),
        ("openai:m@http://127.0.0.1:9/v1?key=1", (), "must not contain"),
        ("openai:m@http://127.0.0.1:9/v1", ("--model", "tiny"), "--teacher"),
        ("openai:m@http://127.0.0.1:9/v1", ("reward.type=rul",), "reward.type"),
    ],
)
def test_mistakes(
    tfactory: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    teacher: str,
    more: tuple[str, ...],
    says: str,
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    status, _, error = tfactory(
        "data", "teach", "search", "--teacher", teacher, "--out", str(tmp_path / "t"), *more
    )
    assert status == 2 and says in error and "Traceback" not in error


def test_another_request_needs_another_folder(tfactory: Run, tmp_path: Path):
    with teaching() as teacher:
        assert taught(tfactory, teacher, tmp_path / "t", "--tasks", "1")[0] == 0
        status, _, error = taught(tfactory, teacher, tmp_path / "t", "--tasks", "1", "--temperature", "0.5")
        assert status == 2 and "sampling" in error and "--out" in error
    assert len(lines(tmp_path / "t/episodes.jsonl")) == 1


def test_a_cancelled_request_is_still_recorded(tmp_path: Path):
    """Its reply is paid. Requests that are not sent yet are dropped."""
    from TrainingFactory.common.endpoints.messages import ModelReply
    from TrainingFactory.tools.endpoints.client import EndpointClient
    from TrainingFactory.types import Message

    sent: list[str] = []

    class Model:
        timeout = 5.0

        async def ask(self, key: str) -> ModelReply:
            sent.append(key)
            await asyncio.sleep(0.05)
            return ModelReply(Message("assistant", key), 1, 1)

        async def close(self) -> None: ...

    async def run() -> None:
        client = EndpointClient(model=Model(), concurrency=1, cache=tmp_path / "c.sqlite")
        waiting = [
            asyncio.ensure_future(client.request([key], lambda key=key: client.model.ask(key)))
            for key in "ab"
        ]
        while not sent:
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await client.close()
        again = EndpointClient(model=Model(), cache=tmp_path / "c.sqlite")
        replies = [(await again.request([key], lambda key=key: again.model.ask(key))).text for key in "ab"]
        await again.close()
        assert replies == ["a", "b"] and again.usage.cached == 1

    asyncio.run(run())
    assert sent == ["a", "b"]
