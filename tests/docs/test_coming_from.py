"""What docs/COMING_FROM.md prints runs as printed; `benchmarks.coming_from` makes its table of these and others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.coming_from import Outcomes, Row, table
from tests.kits.cli import Run
from tests.kits.docs import Page
from tests.kits.seeds import Block
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import map_fields
from TrainingFactory.data.trajectories import load_trajectories

PAGE = Page("docs/COMING_FROM.md")


def episodes() -> int:
    [file] = Path("runs").glob("*/trajectories.jsonl")
    return len(list(load_trajectories(file)))


@pytest.mark.program("TRL", "1", "python: `GRPOTrainer` with `GRPOConfig`")
def test_grpo_as_for_trl(program: Callable[[str], str]) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    program(PAGE.block("from trl import GRPOConfig"))
    assert episodes() == 8 and Path("model", "model.safetensors").is_file()


@pytest.mark.program("TRL", "2", "python: `DPOTrainer`")
def test_dpo_as_for_trl(program: Callable[[str], str]) -> None:
    assert program(PAGE.block("import DPOTrainer")).splitlines()[-1] == "1"


@pytest.mark.program("ms-swift", "1", "json: pairs")
def test_rows_of_ms_swift(tfactory: Run) -> None:
    Path("pairs.jsonl").write_text(PAGE.of("json")[0])
    status, out, err = tfactory("data", "check", "pairs.jsonl", "--for", "dpo")
    assert status == 0 and "2 examples for dpo" in out, err


@pytest.mark.program("ms-swift", "2", "python: a reward class")
def test_a_reward_of_ms_swift(program: Callable[[str], str]) -> None:
    program(PAGE.block("class Accuracy"))
    assert episodes() == 2


@pytest.mark.program("verl", "1", "python: `compute_score`")
def test_a_reward_of_verl(program: Callable[[str], str]) -> None:
    program(PAGE.block("def compute_score"))
    assert episodes() == 2


@pytest.mark.program("OpenRLHF", "1", "python: `reward_func`")
def test_a_reward_of_openrlhf(program: Callable[[str], str]) -> None:
    program(PAGE.block("def reward_func"))
    assert episodes() == 2


def test_the_page_names_what_exists() -> None:
    """Every key in the second column of a table is one of the config, and every printed command exists."""
    assert [words[1] for words in PAGE.commands() if words[0] == "tfactory"] == ["data", "data"]
    known, found = map_fields(TrainingConfig), 0
    for line in PAGE.text.splitlines():
        if not line.startswith("| ") or line.count("|") != 3:
            continue
        for key in re.findall(r"`(\w+\.\w+)(?:=[^`]*)?`", line.split("|")[2]):
            assert key in known, key
            found += 1
    assert found > 50


def test_the_table() -> None:
    """A block without a test says why, one with several tests says the worst, and programs come last."""

    class Report:
        when, longrepr = "call", ("file", 1, "Skipped: the host cannot be reached")

        def __init__(self, nodeid: str, outcome: str) -> None:
            self.nodeid, self.outcome = nodeid, outcome

    rows = {"000-1": Row("a", "1", ""), "TRL-1": Row("TRL", "1", "x")}
    outcomes = Outcomes(rows, {"t1": "000-1", "t2": "000-1", "t3": "TRL-1"})
    for test, outcome in [("t1", "passed"), ("t2", "skipped"), ("t3", "passed"), ("other", "failed")]:
        outcomes.pytest_runtest_logreport(Report(test, outcome))  # type: ignore[arg-type]
    texts = [
        ("000", 1, "python", "class Thing:"),
        ("000", 2, "bash", "pip install x"),
        ("002", 3, "python", "f(1)"),
    ]
    found = table(outcomes, [Block(name, number, kind, 1, text) for name, number, kind, text in texts])
    assert [(row.what, row.result) for row in found] == [
        ("python: `Thing`", "not run: the host cannot be reached"),
        ("bash", "not run: installs packages from the network"),
        ("python: `f`", "no test"),
        ("x", "works"),
    ]
