"""The example: an agent that is written with the openai package and knows nothing of us."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proxy_faults import EXPECTED, campaign
from tests.kits.cli import Run
from tests.kits.proxy import Talker, play_program
from tests.kits.scale import packages
from TrainingFactory.agent_api.agent_program import AgentProgram
from TrainingFactory.config import load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Message, Reward, Task, ToolCall

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_agent"


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the example find the openai package; run it by this interpreter, from any folder."""
    monkeypatch.setenv("PYTHONPATH", packages())
    given: dict[str, Any] = {
        "model.name": str(EXAMPLE / "model"),
        "environment.command": shlex.join([sys.executable, "examples/own_agent/agent.py"]),
        "environment.options": {"env": ["PYTHONPATH"], "cwd": str(ROOT), "processes": os.cpu_count()},
        "data.tasks": str(EXAMPLE / "train.jsonl"),
        "data.heldout": str(EXAMPLE / "heldout.jsonl"),
    }
    return [key_value(key, value) for key, value in given.items()]


def test_its_turns_are_kept_whatever_its_client_does(options: list[str]) -> None:
    config = load_config(EXAMPLE / "config.yaml", options)
    program = AgentProgram(config.environment.command or "", config.environment.options)
    call = Message("assistant", tool_calls=[ToolCall("lookup", {"name": "Viktor"})])
    sampler = Talker(lambda prompt: "Dublin" if "Dublin" in prompt else call)
    task = Task("t", "Viktor?", "Dublin", {"name": "Viktor"})
    [episode], counts = play_program(program, sampler, task)
    assert (episode.status, episode.reward) == ("done", Reward(1.0, parts={"votes": 1.0})), episode.error
    # Two conversations side by side: one goes on, one comes back with other arguments; and one is packed up anew.
    assert {name: counts[f"proxy/{name}"] for name in ("turns", "rows", "arguments", "rewritten", "ignored")} == {
        "turns": 5, "rows": 4, "arguments": 1, "rewritten": 1, "ignored": 2,
    }  # fmt: skip
    assert counts["proxy/extended"] == pytest.approx(1 / 3)
    samples = to_samples(episode)
    assert len(samples) == 4 and [turn.signals["proxy/row"] for turn in episode.turns].count(1.0) <= 2
    trained = sum(sum(row.loss_mask) for row in samples)
    assert trained == sum(len(turn.completion.token_ids) for turn in episode.turns)


# Each way alone, by programs that start at once: test_proxy_programs.py, test_proxy.py.
SIDE_BY_SIDE = ("none", "killed", "late")


@pytest.mark.parametrize(
    "kinds", [SIDE_BY_SIDE, pytest.param(tuple(EXPECTED), marks=pytest.mark.slow)], ids=len
)
def test_agents_that_fail_in_every_way_are_each_accounted_for(
    options: list[str], kinds: tuple[str, ...]
) -> None:
    found = campaign(len(kinds), seed=1, processes=4, timeout=12.0, kinds=kinds)
    assert not found["wrong"], found
    assert sum(found["ends"].values()) == len(kinds)


@pytest.mark.slow
def test_it_learns(tfactory: Run, options: list[str]) -> None:
    status, out, err = tfactory("train", EXAMPLE / "config.yaml", *options, "logging.output_dir=runs")
    assert status == 0, out + err
    [run] = Path("runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in run.read_text().splitlines()]
    shares = [row["eval/success"] for row in rows if "eval/success" in row]
    assert shares[-1] > shares[0] + 0.2, shares
    assert sum(row.get("proxy/arguments", 0) for row in rows) and sum(
        row.get("proxy/rewritten", 0) for row in rows
    )


def test_its_config_is_one_that_a_user_can_run() -> None:
    config = load_config(EXAMPLE / "config.yaml", [])
    assert config.environment.command == "python examples/own_agent/agent.py"
    assert all((ROOT / path).is_file() for path in (config.data.tasks or "", config.data.heldout or ""))
