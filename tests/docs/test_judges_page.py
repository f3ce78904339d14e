"""The page about judges holds: its options are those of `model_judge`, its snippets and its commands run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.apps.test_judge_audit import compares
from tests.kits.cli import Run
from tests.kits.docs import Page
from tests.kits.judge import judging
from TrainingFactory.common.endpoints.transport import KEY_BY_HOST
from TrainingFactory.rewards.judge.model_judge import VERDICT_TYPES, model_judge
from TrainingFactory.rewards.judge.prompts import BASE_RUBRIC, GROUP, PAIR, SINGLE

PAGE = Page("docs/JUDGES.md")


def table(heading: str) -> list[list[str]]:
    section = PAGE.text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[2:]]


def shown(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "needed"
    known = {KEY_BY_HOST: "by host", BASE_RUBRIC: "built in", "": '`""`'}
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return known.get(value, f"`{value}`")


def test_the_options_are_all_there_with_their_defaults():
    parameters = inspect.signature(model_judge).parameters
    listed = {row[0].strip("`"): row[1] for row in table("Options")}
    wanted = {name: shown(parameter.default) for name, parameter in parameters.items()}
    assert listed == wanted | {"template": "built in"}
    assert [row[0].strip("`") for row in table("Verdicts")] == list(VERDICT_TYPES)
    fields = re.findall(r"\{(\w+)\}", " ".join(row[0] for row in table("Template")))
    assert set(fields) == {"rubric", *SINGLE, *PAIR, *GROUP}


def test_the_snippets_run_as_printed(program: Callable[[str], str]):
    assert f"```\n{program(chr(10).join(PAGE.of('python')))}```" in PAGE.text


@pytest.mark.usefixtures("judge_key")
def test_the_gold_file_and_the_commands_run_as_printed(tfactory: Run):
    Path("gold.jsonl").write_text(PAGE.of("json")[0], encoding="utf-8")
    commands = PAGE.commands()
    assert len(commands) == 2
    with judging(lambda prompt, number: "Winner: A" if compares(prompt) else "Score: 6") as server:
        Path("judge.yaml").write_text(f"base_url: {server.url}\nmodel: big\n")
        for program, *given in commands:
            assert program == "tfactory"
            here = [f"base_url={server.url}" if each.startswith("base_url=") else each for each in given]
            assert tfactory(*here)[0] == 0
        assert len(server.asked) == (4 * 3 + 2) * (1 + 3)  # 4 items and a pair; 1 sample, then 3
    assert Path("judge-audit.html").is_file()
