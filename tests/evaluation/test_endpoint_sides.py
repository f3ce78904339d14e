"""Models behind endpoints as sides of `eval` and `compare`: episodes without token ids, with tokens and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import ROOT, Run
from tests.kits.teacher import APIS, USED, teaching
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.evaluation.records import read_records

TASKS = ("--env", "search", "--tasks", "4")


@pytest.mark.parametrize("api", APIS)
def test_an_endpoint_is_evaluated(tfactory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str):
    monkeypatch.chdir(tmp_path)
    with teaching() as teacher:
        status, out, _ = tfactory("eval", teacher.name(api), *TASKS, "--json")
    metrics = json.loads(out)
    assert status == 0 and metrics["success"] == 1.0 and metrics["turns"] == 3.0
    assert metrics["endpoint/input_tokens"] == 12 * USED[0] and metrics["sampled_tokens"] == 12 * USED[1]
    assert "endpoint/cost" not in metrics  # no price is known
    [record] = read_records(tmp_path / "runs/evaluations.jsonl")
    [file] = (tmp_path / "runs/rollouts").iterdir()
    turns = [turn for episode in load_trajectories(file) for turn in episode.turns]
    assert len(turns) == 12 and not any(turn.completion.token_ids or turn.prompt_ids for turn in turns)
    assert sum(episode.tokens for task in record.outcomes for episode in task.episodes) == 12 * USED[1]


def test_two_endpoints_are_compared_with_their_costs(
    tfactory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with teaching(wrong=lambda number, question: True) as bad, teaching() as good:
        settings = f"model: teacher\nbase_url: {good.url}\ninput_price: 1.0\noutput_price: 10.0\n"
        Path("good.yaml").write_text(settings)
        status, out, _ = tfactory("compare", bad.name("gemini"), "good.yaml", *TASKS, "--show", "0")
        assert status == 0 and "+1.000" in out and "4 better, 0 worse" in out
        assert "0.0024" in out and "1200 tokens" in out  # money where prices are known, else tokens
        requests = len(good.requests)
        assert tfactory("compare", bad.name("gemini"), "good.yaml", *TASKS, "--json")[0] == 0
    assert len(good.requests) == requests == 12  # recorded evaluations are not paid again


def test_a_recorded_evaluation_is_replayed_without_the_endpoint(
    tfactory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with teaching() as teacher:
        settings = f"model: teacher\nbase_url: {teacher.url}\ncache: replies.sqlite\nretries: 0\n"
        Path("live.yaml").write_text(settings)
        assert tfactory("eval", "live.yaml", *TASKS)[0] == 0
    Path("recorded.yaml").write_text(settings + "replay: true\n")
    status, out, _ = tfactory("eval", "recorded.yaml", *TASKS, "--json")
    metrics = json.loads(out)
    assert status == 0 and metrics["success"] == 1.0
    assert (metrics["endpoint/cached"], metrics["endpoint/requests"]) == (12, 0)
    status, _, error = tfactory("eval", "recorded.yaml", "--env", "search", "--tasks", "5")
    assert status == 2 and "replies.sqlite has no reply" in error
    status, _, error = tfactory("eval", "live.yaml", "--env", "search", "--tasks", "5")
    assert status == 2 and "could not be reached" in error


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ((404, b'{"error": {"message": "no model"}}'), "check its name and base_url"),
        ((401, b"who?"), "api_key_env"),
        ((200, b"<html>"), "no episode could be scored"),
    ],
)
def test_errors_of_the_endpoint(
    tfactory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any, says: str
):
    monkeypatch.chdir(tmp_path)
    with teaching(fails=lambda number, question: failure) as teacher:
        status, _, error = tfactory("eval", teacher.name(), *TASKS)
    assert status in (1, 2) and says in error and "Traceback" not in error


def test_a_budget_ends_an_evaluation_and_saves_its_episodes(
    tfactory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with teaching() as teacher:
        Path("t.yaml").write_text(f"model: t\nbase_url: {teacher.url}\nmax_requests: 5\nconcurrency: 1\n")
        status, _, error = tfactory("eval", "t.yaml", *TASKS, "--out", "kept.jsonl")
    assert (
        status == 2
        and "budget.max_requests is 5" in error
        and "1 of 4 episodes, saved to kept.jsonl" in error
    )
    assert len(list(load_trajectories("kept.jsonl"))) == 1 and not read_records(
        Path("runs/evaluations.jsonl")
    )


def test_an_endpoint_can_not_be_trained(tfactory: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = tfactory("train", str(ROOT / "configs/tiny_grpo.yaml"), "model.name=openai:m")
    assert status == 2 and "is an endpoint" in error and not Path("runs").exists()
