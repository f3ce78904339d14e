"""Suites: files with several sets of tasks, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.test_compare import PARITY, outcomes
from tests.kits.cli import Run
from TrainingFactory.config import TrainingConfig
from TrainingFactory.evaluation.records import read_records
from TrainingFactory.evaluation.requests import EvaluationRequest, make_model_request
from TrainingFactory.evaluation.suites import (
    BUILTIN_SUITES,
    Suite,
    SuiteEntry,
    load_suite,
    make_suite_evaluations,
)

SUITE = """
name: release
entries:
  - environment: parity.py
    count: 5
    weight: 3
    sampling: {max_tokens: 4}
  - name: questions
    environment: calculator
    tasks: tasks.jsonl
    episodes: 2
    reward: {type: rule_based, options: {rule: numeric}}
    sampling: {max_tokens: 4, temperature: 0}
"""


def write(folder: Path) -> Path:
    folder.mkdir()
    (folder / "parity.py").write_text(PARITY)
    (folder / "tasks.jsonl").write_text(
        '{"prompt": "1+1", "answer": "2"}\n{"prompt": "2+2", "answer": "4"}\n'
    )
    (folder / "release.yaml").write_text(SUITE)
    return folder / "release.yaml"


def test_one_command_gives_a_table_and_a_total(tfactory: Run) -> None:
    path = write(Path("suites"))  # the files are beside the suite
    status, out, err = tfactory("eval", "tiny", "--suite", path, "--json")
    assert status == 0, err
    found, records = json.loads(out), read_records(Path("runs/evaluations.jsonl"))
    assert [(each.suite, each.entry) for each in records] == [
        ("release", "parity.py"),
        ("release", "questions"),
    ]
    assert [len(each.outcomes) for each in records] == [5, 2] and records[1].conditions.episodes == 2
    first, second = (each.metrics["success"] for each in records)
    assert found["total"] == pytest.approx((3 * first + second) / 4) and found["total_low"] <= found["total"]
    assert found["entries"]["questions"]["record"] == records[1].id
    status, out, err = tfactory("compare", "tiny", "tiny", "--suite", path)
    assert status == 0 and "loading" not in err and "tiny questions" in out, err
    assert "7 tasks" in out


def test_an_entry_becomes_a_config() -> None:
    suite = Suite(entries=[SuiteEntry(environment="any/where", count=3, weight=2.0, task_seed=7)])
    [asked] = suite.make_requests(make_model_request("some/model", ["training.seed=4", "sampling.top_p=0.5"]))
    config = asked.config
    assert config.sampling.top_p == 1.0  # the suite says how it is asked
    assert config.model.name == "some/model" and config.environment.environment_id == "any/where"
    assert (config.data.split, config.data.count, config.data.seed, config.training.seed) == (
        "heldout",
        3,
        7,
        4,
    )
    assert "group_size" in config.training.model_fields_set and config.training.group_size == 1


def test_the_total_is_weighted() -> None:
    suite = Suite(
        entries=[
            SuiteEntry(environment="calculator", weight=3.0),
            SuiteEntry(environment="search", weight=1.0),
        ]
    )
    total = suite.estimate_total([outcomes("m", "1111"), outcomes("m", "0000")])
    assert (total.value, total.low, total.high) == (0.75, 0.75, 0.75)


def test_suites_of_the_package_can_be_run(tmp_path: Path) -> None:
    for name in BUILTIN_SUITES:
        suite, folder = load_suite(name)
        config = TrainingConfig(logging={"output_dir": str(tmp_path)})
        made = make_suite_evaluations(suite, EvaluationRequest("tiny", config), folder)
        assert [each.request.entry for each in made] == ["calculator", "search", "text2sql"]
        for each in made:
            each.discard()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("entries:\n  - enviroment: search", "s.yaml:2: entries.0.enviroment: unknown key; did you mean"),
        (
            "entries:\n  - environment: search\n    weight: 0",
            "s.yaml:3: entries.0.weight: must be greater than 0",
        ),
        (
            "entries:\n  - environment: search\n    sampling: {temprature: 1}",
            "sampling.temprature: unknown key",
        ),
        ("entries: []", "entries: must have at least 1"),
        ("name: x", "entries: is missing"),
        ("- environment: search", "a list `entries:`"),
        ("entries:\n  - count: 3", "entries.0: has neither an environment nor tasks"),
        (
            "entries:\n  - environment: search\n  - environment: search",
            "the same name as another entry: search",
        ),
        ("entries:\n  - environment: serch", "suite s, entry serch: "),
        (
            "entries:\n  - environment: search\n    reward: {type: rule_based, options: {rule: numerc}}",
            "suite s, entry search: reward.options.rule: must be one of",
        ),
    ],
)
def test_what_is_wrong_with_a_suite_is_told_by_file_and_line(tfactory: Run, text: str, told: str) -> None:
    Path("s.yaml").write_text(text)
    status, _, err = tfactory("eval", "tiny", "--suite", "s.yaml")
    assert status == 2 and told in err, err
    assert "Traceback" not in err and not Path("runs/evaluations.jsonl").exists()


def test_suites_that_are_not_there(tfactory: Run) -> None:
    for name, told in (
        ("bultin", "builtin, quick; did you mean builtin?"),
        ("nothing.yaml", "nothing.yaml: file not found"),
    ):
        status, _, err = tfactory("eval", "tiny", "--suite", name)
        assert status == 2 and told in err, err
    assert "--suite" in tfactory("eval", "tiny", "--suite", "quick", "--env", "search")[2]
    err = tfactory("eval", "tiny", "--suite", "quick", "sampling.top_p=0.5")[2]
    assert "cannot set sampling.top_p with --suite" in err
