"""The reward of a run as users meet it: who scores an evaluation, where its file is, what is said when it fails."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.judge import Said, judging
from tests.kits.run import Quiet, go_on, small, train
from TrainingFactory.cli.display import Display
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.tracking import format_metrics_line
from TrainingFactory.services import GRPOTrainer

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
environment: mine.py
training: {max_steps: 2, batch_size: 2, group_size: 2, learning_rate: 1e-3}
sampling: {max_tokens: 6}
data: {count: 4, heldout_count: 4}
"""
ENVIRONMENT = """
from TrainingFactory.envs import CalculatorEnvironment

class Mine(CalculatorEnvironment):
    def reward(self, episode):
        return 1.0
"""
REWARDS = """
from TrainingFactory.types import Reward

def never(trajectory):
    number = sum(trajectory.turns[0].completion.token_ids)
    return Reward(-1.0 - number % 3, parts={"odd": float(number % 2)})

def best(trajectories):
    return [float(place) for place, _ in enumerate(trajectories)]

def broken(episode):
    raise RuntimeError("the scoring machine is away")
"""


def by(function: str, *more: str) -> list[str]:
    return ["reward.type=function", f'reward.options={{function: "rewards.py:{function}"}}', *more]


@pytest.fixture
def tfactory(tfactory: Run) -> Run:
    """Runs a command in a folder with a config, an environment and rewards; what it says on stderr is on one line."""
    Path("small.yaml").write_text(SMALL)
    Path("mine.py").write_text(ENVIRONMENT)
    Path("rewards.py").write_text(REWARDS)

    def run(*arguments: str) -> tuple[int, str, str]:
        status, out, err = tfactory(*arguments)
        return status, out, " ".join(err.split())

    return run


def evaluated(tfactory: Run, *arguments: str) -> tuple[dict[str, Any], str]:
    status, out, err = tfactory("eval", *arguments, "--tasks", "3", "--json")
    assert status == 0, err
    return json.loads(out), err


def test_a_run_is_evaluated_by_its_own_reward(tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = tfactory(
        "train", "small.yaml", "--name", "a", *by("never", "max_steps=1", "training.eval_every=1")
    )
    assert status == 0, err
    assert RunFolder(Path("runs/a")).metrics()[-1]["eval/success"] == 0.0
    found, _ = evaluated(tfactory, "a")
    assert found["success"] == 0.0 and found["reward/odd"] >= 0
    assert found["scored_by"] == "reward.type=function (rewards.py:never)"
    found, _ = evaluated(tfactory, "a", "reward=environment")
    assert found["success"] == 1.0 and found["scored_by"] == "the environment's own reward"
    out = tfactory("eval", "a", "--tasks", "2")[1]
    assert "scored by" in out and "rewards.py:never" in out
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert evaluated(tfactory, "../runs/a")[0]["success"] == 0.0
    monkeypatch.chdir("..")
    Path("rewards.py").write_text(REWARDS.replace("-1.0 -", "1.0 +"))
    found, err = evaluated(tfactory, "a")
    assert found["success"] == 1.0 and "rewards.py has changed since run a was started" in err
    assert "has changed" in evaluated(tfactory, "a", "reward.type=environment")[1]


def test_what_compares_does_not_measure(tfactory: Run) -> None:
    assert tfactory("train", "small.yaml", "--name", "a", *by("best", "max_steps=1"))[0] == 0
    found, err = evaluated(tfactory, "a")
    assert found["success"] == 1.0 and found["scored_by"] == "the environment's own reward"
    assert "evaluation uses the environment's own reward" in err


def test_a_reward_that_was_an_object_cannot_be_restored(tfactory: Run, tmp_path: Path) -> None:
    config = small(tmp_path / "runs", training={"max_steps": 1}, environment={"environment_id": "mine.py"})
    GRPOTrainer(config=config, reward_function=lambda episode: -1.0, name="a", watcher=Quiet()).train()
    found, err = evaluated(tfactory, "a")
    assert found["success"] == 1.0 and found["scored_by"] == "the environment's own reward"
    assert "cannot be restored here" in err


def test_an_evaluation_without_a_figure_is_a_failure(tfactory: Run) -> None:
    model = ("eval", "builtin:tiny", "--env", "mine.py", "--tasks", "2", "sampling.max_tokens=6")
    status, _, err = tfactory(*model, *by("broken"))
    assert status == 1 and "no episode could be scored" in err and "machine is away" in err


def test_a_reward_that_fails_on_everything_is_told_at_the_first_episode(tfactory: Run) -> None:
    status, _, err = tfactory("train", "small.yaml", "--name", "a", *by("broken", "max_steps=9"))
    first, rest = err.split("WARNING: the first episode could not be scored; ")
    assert (
        status == 2
        and "WARNING" not in first
        and "the scoring machine is away" in rest.partition("WARNING")[0]
    )
    assert "error: Stopped because no episode" in rest and not RunFolder(Path("runs/a")).metrics()


@pytest.mark.parametrize(
    "options", [["environment=bare.py"], ["reward.type=rule_based", "reward.options={rule: numeric}"]]
)
def test_tasks_without_answers_are_told_before_anything_is_loaded(tfactory: Run, options: list[str]) -> None:
    Path("bare.py").write_text(
        "from TrainingFactory.envs import ToolEnvironment\n\nclass Bare(ToolEnvironment): pass\n"
    )
    Path("tasks.csv").write_text("prompt,gold\nWhat is 1 + 1?,2\n")
    status, _, err = tfactory(
        "train", "small.yaml", "--name", "a", "data.tasks=tasks.csv", "model=no/such", *options
    )
    said = " ".join(err.split())
    assert status == 2 and "none of the 1 tasks has an answer" in said and "gold, prompt" in said
    assert not Path("runs/a").exists()


def test_a_short_run_of_which_nothing_was_scored(tfactory: Run) -> None:
    arguments = by("broken", "max_steps=2", "training.eval_every=1")
    status, _, err = tfactory("train", "small.yaml", "--name", "a", *arguments)
    assert status == 2 and "finished" not in err
    told = err.partition("error: ")[2]
    assert "no episode of the run could be scored" in told
    assert "the scoring machine is away" in told
    assert told.endswith("(options are in runs/a/config.yaml), then run: tfactory runs resume a")
    run = RunFolder(Path("runs/a"))
    assert run.state == "failed" and "could be scored" in str(run.status.reason)
    Path("rewards.py").write_text(REWARDS.replace("raise RuntimeError", "return len"))
    status, _, err = tfactory("runs", "resume", "a")
    assert status == 0 and "finished" in err and "rewards.py has changed since run a was started" in err
    assert [row["episodes/unscored"] for row in run.metrics() if row["step"]] == [0, 0]


def test_files_are_found_beside_the_config(tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tasks.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n' * 4)
    Path("small.yaml").write_text(SMALL.replace("{count: 4,", "{tasks: tasks.jsonl,"))
    Path("w").mkdir()
    Path("other").mkdir()
    monkeypatch.chdir("w")
    status, _, err = tfactory("train", "../small.yaml", "--name", "a", *by("never"))
    assert status == 0, err
    status, _, err = tfactory("rollout", "../small.yaml", *by("never"), "--tasks", "1")
    assert status == 0, err
    status, _, err = tfactory("train", "../small.yaml", "--name", "b", *by("nothing"))
    assert status == 2 and "has no function 'nothing'" in err  # so the file was found
    missing = [each.replace("rewards.py", "no.py") for each in by("never")]
    status, _, err = tfactory("train", "../small.yaml", *missing)
    assert status == 2 and f"there is no file no.py in {Path.cwd()}, nor next to the config" in err
    (status_file := Path("runs/a/status.json")).write_text(
        json.dumps(json.loads(status_file.read_text()) | {"status": "interrupted"})
    )
    for checkpoint in RunFolder(Path("runs/a")).checkpoints():
        checkpoint.rename(checkpoint.with_name(".gone"))
    monkeypatch.chdir("../other")
    status, _, err = tfactory("runs", "resume", "../w/runs/a")
    assert status == 0 and "finished" in err and "has changed" not in err


def test_changed_code_is_noticed(tfactory: Run) -> None:
    """Of rewards, environments and tools alike; the options that may be edited are in the run's folder."""
    Path("lookup.py").write_text(
        "from TrainingFactory.tools import tool\n\n@tool\ndef find(key: str) -> str:\n"
        '    """Finds.\n\n    Args:\n        key: what.\n    """\n    return key\n'
    )
    arguments = by("broken", "max_steps=1", "tools.0.name=lookup.py")
    assert tfactory("train", "small.yaml", "--name", "a", *arguments)[0] == 2
    assert "has changed" not in tfactory("runs", "resume", "a")[2]
    config = Path("runs/a/config.yaml")
    config.write_text(config.read_text().replace("rewards.py:broken", "rewards.py:never"))
    for name in ("lookup.py", "mine.py"):
        Path(name).write_text(Path(name).read_text() + "\n# another comment\n")
    status, _, err = tfactory("runs", "resume", "a")
    assert status == 0, err
    assert "note: lookup.py has changed" in err and "note: mine.py has changed" in err
    assert "rewards.py has changed" not in err


def test_the_parts_and_what_was_asked_are_shown(tfactory: Run) -> None:
    def say(prompt: str, number: int) -> Said:
        return f"Score: {number % 5 + 1}"

    with judging(say) as judge:
        options = {"base_url": [judge.url], "api_key_env": None, "judge_unfinished": True}
        parts = {
            "judged": {"type": "model_judge", "model": "m", "options": options},
            "low": {"type": "function", "options": {"function": "rewards.py:never"}},
        }
        given = [f"reward.parts={json.dumps(parts)}", "max_steps=2", "training.eval_every=2"]
        status, _, err = tfactory("train", "small.yaml", "--name", "a", *given)
        assert status == 0, err
        asked = len(judge.asked)
    shutil.copytree("runs/a", "runs/b")
    metrics = RunFolder(Path("runs/a")).metrics()
    assert [row.get("judge/requests") for row in metrics] == [None, 4, 4]
    assert [row.get("eval/judge/requests") for row in metrics] == [4, None, 4] and asked == 16
    out = tfactory("runs", "show", "a")[1]
    [low] = [line.split() for line in out.splitlines() if line.startswith("reward/low")]
    values = [row["reward/low"] for row in metrics if row["step"]]
    assert low[1:3] == [f"{values[0]:.3f}", f"{values[-1]:.3f}"] and "eval/reward/low" in out
    assert f"total: requests {asked}," in " ".join(out.split()) and f"worker 0 done {asked}" in out
    out = tfactory("runs", "compare", "a", "b")[1]
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}
    assert rows["judge/requests"] == ["16", "16"] and "reward/judged" in rows


def test_what_judges_are_asked_adds_up_over_a_resume(tmp_path: Path) -> None:
    with judging(lambda prompt, number: f"Score: {number % 5 + 1}") as judge:
        options = {"base_url": judge.url, "api_key_env": None, "judge_unfinished": True}
        section = {"type": "model_judge", "model": "m", "options": options}
        config = small(tmp_path, training={"max_steps": 3, "batch_size": 1}, reward=section)
        with pytest.raises(RuntimeError, match="broken off"):
            train(config, "a", Quiet(fail_at=2))
        go_on(tmp_path / "a")
    assert [row["judge/requests"] for row in RunFolder(tmp_path / "a").metrics()] == [4] * 3


def test_unscored_episodes_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    metrics: dict[str, float] = {"episodes": 8, "episodes/unscored": 3, "reward": 0.5, "rows": 4}
    assert "3 of 8 unscored" in format_metrics_line(
        metrics
    ) and "nothing to learn" not in format_metrics_line(metrics)
    few = format_metrics_line(metrics | {"episodes/unscored": 6, "rows": 0})
    assert "6 of 8 unscored" in few
    assert "equal rewards in all groups of scored episodes" in few
    none = format_metrics_line(metrics | {"episodes/unscored": 0, "rows": 0})
    assert "unscored" not in none and "all groups, nothing to learn" in none
    from rich.console import Console

    console = Console(force_terminal=True, width=100, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with Display(console=console) as display:
        display.phase("generate")
        display.step(1, 4, metrics)
    assert "3 of 8 unscored" in console.export_text()


def test_hints_work_as_printed(tfactory: Run) -> None:
    where = "logging.output_dir=my runs"
    status, _, err = tfactory("train", "small.yaml", where, "--name", "loc", "max_steps=1")
    assert status == 0, err
    hint = err.partition("see its metrics: ")[2]
    shown, _, evaluate = hint.partition("; evaluate it: ")
    for command in (shown, evaluate):
        program, *arguments = shlex.split(command)
        status, out, err = tfactory(*arguments)
        assert program == "tfactory" and status == 0, err
    assert "success" in out


def test_the_help_says_what_may_be_edited(tfactory: Run) -> None:
    out = " ".join(tfactory("runs", "resume", "--help")[1].split())
    assert "config.yaml" in out and "reward.options" in out


def test_the_config_keeps_what_was_set(tfactory: Run) -> None:
    """Moving a file to where it is does not make other options look as if they had been given."""
    from TrainingFactory.assembly.named_files import read_config

    Path("w").mkdir()
    os.chdir("w")
    config = read_config("../small.yaml", by("never"))
    assert config.environment.environment_id == "../mine.py"
    assert config.reward.options["function"] == "../rewards.py:never"
    assert "seed" not in config.data.model_fields_set and "seed" not in config.training.model_fields_set
    assert config.model_copy(update={}) == config and isinstance(config, TrainingConfig)
