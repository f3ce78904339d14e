"""`tfactory envs check`: rewards of a reference and of junk, determinism, reset, and concurrent episodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kits import environments_table
from tests.kits.cli import Run
from tests.kits.containers import NoContainers
from tests.kits.environments_table import ENTRIES, NOT_RUN, PAGE, check, is_installed, rows_of
from TrainingFactory.apps.env_check.check import EnvironmentReport, check_environment
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs.process.programs import list_adapters

ROOT = Path(__file__).resolve().parents[2]
FLAWED = ROOT / "tests" / "kits" / "flawed_environment.py"


def checked(flaw: str, num_episodes: int = 8) -> EnvironmentReport:
    environment = {
        "environment_id": f"process:{sys.executable} {FLAWED}",
        "options": {"args": {"flaw": flaw}, "episodes_per_process": 256},
    }
    return check_environment(TrainingConfig(environment=environment), num_episodes=num_episodes)


def failures(report: EnvironmentReport) -> list[str]:
    return [result.name for result in report.checks if result.status == "failed"]


def test_a_sound_environment_passes() -> None:
    report = checked("", num_episodes=256)
    assert failures(report) == []
    assert report.figures["reference_reward"] == 1 and report.figures["junk_reward"] == 0
    assert report.figures["episodes"] == 256


@pytest.mark.parametrize(
    ("flaw", "failed"),
    [
        ("generous", ["the reference earns more than junk"]),
        ("random reward", ["the reward is deterministic"]),
        ("kept state", ["reset restores the initial state"]),
        ("moody", ["replies are deterministic"]),
        ("crowded", ["8 episodes run concurrently"]),
    ],
)
def test_every_flaw_is_found_by_its_check(flaw: str, failed: list[str]) -> None:
    assert failures(checked(flaw)) == failed


FARM = """
import asyncio
from TrainingFactory.envs import CalculatorEnvironment

class Farm(CalculatorEnvironment):
    max_episodes = 2
    num_open = 0

    async def reset(self):
        Farm.num_open += 1
        if Farm.num_open > 2:
            raise RuntimeError("all devices are in use")
        await asyncio.sleep(0)
        return await super().reset()

    async def close(self):
        Farm.num_open -= 1
"""


def test_episodes_wait_for_the_limit_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "farm.py").write_text(FARM)
    config = TrainingConfig(environment={"environment_id": f"{tmp_path / 'farm.py'}:Farm"})
    report = check_environment(config, num_tasks=6, num_episodes=12)
    assert failures(report) == []
    assert "2 at a time" in report.checks[-1].detail


def test_without_a_reference_the_comparison_is_skipped() -> None:
    report = checked("no answer")
    assert report.checks[0].status == "skipped" and "--reference" in report.checks[0].detail
    assert not report.failed


def test_the_command(tmp_path: Path, tfactory: Run) -> None:
    solve = tmp_path / "solve.py"
    solve.write_text(
        "def right(messages, task):\n    return '5'\n\ndef wrong(messages, task):\n    return '6'\n"
    )
    name = f"process:{sys.executable} {FLAWED}"
    options = ["environment.options={args: {flaw: no answer}}", "--episodes", "4"]
    command = ["envs", "check", name, *options, "--reference"]
    status, output, _ = tfactory(*command, f"{solve}:right", "--json")
    assert status == 0 and json.loads(output)["figures"]["reference_reward"] == 1
    status, output, _ = tfactory(*command, f"{solve}:wrong")
    assert status == 1 and "reference 0, junk 0" in output
    status, _, error = tfactory(*command, f"{solve}:none")
    assert status == 2 and "does not define 'none'" in error


def test_the_table_has_every_environment() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert names == [entry.name for entry in ENTRIES] + list(NOT_RUN)
    assert {entry.package for entry in ENTRIES} == {*list_adapters(), "containers", "process"}
    assert all("passed" in row or "read, not run: " in row or "not: " in row for row in rows)


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_the_table_is_true(entry: environments_table.Entry) -> None:
    """Rates differ between machines, and so do installed versions of podman; all else must be as in the page."""
    if not is_installed(entry):
        pytest.skip(f"{entry.package} is not installed: make servers agents, or apt install podman")
    [recorded] = [
        row for row in rows_of(PAGE.read_text(encoding="utf-8")) if row.startswith(f"| {entry.name} |")
    ]
    try:
        row = environments_table.row_of(entry, check(entry))
    except NoContainers as error:
        pytest.skip(str(error))
    compared = [
        [
            cell
            for number, cell in enumerate(text.split(" | ")[:-1])
            if number != 1 or entry.package != "containers"
        ]
        for text in (recorded, row)
    ]
    assert compared[0] == compared[1]
