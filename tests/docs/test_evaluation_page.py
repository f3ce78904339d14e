"""What docs/EVALUATION.md prints runs as printed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.kits.docs import Page
from TrainingFactory.config import load_config
from TrainingFactory.evaluation.records import EvaluationRecord, read_records
from TrainingFactory.evaluation.suites import SuiteEntry, load_suite

PAGE = Page("docs/EVALUATION.md")


def test_the_program_and_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PAGE.block("import RecordedEvaluation"))
    runpy.run_path("program.py")
    [record] = read_records(Path("runs/evaluations.jsonl"))  # the comparison has found it
    assert capsys.readouterr().out == f"0.0 {record.id}\n0.000 (0.000 to 0.000)\n"
    suite, config = PAGE.of("yaml")
    Path("suite.yaml").write_text(suite)
    assert [entry.title for entry in load_suite("suite.yaml")[0].entries] == ["search", "questions"]
    Path("run.yaml").write_text(config)
    assert load_config("run.yaml").training.stop_when == {"patience": 3, "target": 0.95}


def test_every_key_is_told() -> None:
    for model in (EvaluationRecord, SuiteEntry):
        assert all(f"`{key}`" in PAGE.text for key in model.model_fields)
    assert PAGE.commands()
