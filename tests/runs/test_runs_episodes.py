"""`tfactory runs episodes` on real runs, as users meet it."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.kits.cli import Run
from tests.kits.run import Parity, small, train
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.apps.reports.run_credit import compute_run_credit
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.protocols import Episode
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Completion, Message, Reward, Task, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[2]


class Stepped(Parity):
    """Pays for turns too, and cannot score every episode."""

    def reward(self, episode: Episode) -> Reward:  # type: ignore[override]
        turns = episode.trajectory.turns
        if episode.trajectory.member == 3:
            raise ValueError("no verdict")
        return Reward(super().reward(episode), [0.25 * (n % 2) for n in range(len(turns))], {"parity": 1.0})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(small(folder, training={"max_steps": 2}), "a", environment=Stepped)
    return folder


@pytest.fixture
def episodes(runs: Path, tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, where: Path = runs) -> tuple[int, str, str]:
        return tfactory("runs", "episodes", *arguments, "--runs", where)

    return run


def shown(out: str) -> list[tuple[int, float]]:
    """(member, advantage) of each turn."""
    found, member = [], -1
    for line in out.splitlines():
        if match := re.match(r"member (\d+) ", line):
            member = int(match[1])
        elif match := re.search(r"advantage ([+-]\d\.\d\d)", line):
            found.append((member, float(match[1])))
    return found


def test_the_figures_are_those_of_training(runs: Path, episodes: Run) -> None:
    groups: dict[str, list] = {}
    for trajectory in load_trajectories(runs / "a" / "trajectories.jsonl", "0/"):
        groups.setdefault(trajectory.task.id, []).append(trajectory)
    assert len(groups) == 3
    compared = 0
    for task, group in groups.items():
        status, out, err = episodes("a", "--step", "1", "--task", task)
        assert status == 0 and "\x1b" not in out, err
        rows = GRPO().samples(group)
        scored = [trajectory for trajectory in group if trajectory.reward is not None]
        assert len(scored) == 3 and len(rows) in (0, 3)
        wanted = []
        for trajectory, row in zip(scored if rows else [], rows, strict=True):
            values = [value for value, used in zip(row.advantages, row.loss_mask, strict=True) if used]
            for turn in trajectory.turns:
                size = len(turn.completion.token_ids)
                wanted.append((trajectory.member, pytest.approx(values[0], abs=0.00501)))
                values = values[size:]
        assert shown(out) == wanted
        compared += len(wanted)
        assert out.count("not scored: ") == 1 and "no verdict" in out and "parity 1" in out
        assert "Run a, step 1: grpo, credit turn, advantage group" in err
    assert compared >= 3


def made(folder: Path, *trajectories: Trajectory) -> RunFolder:
    run = RunFolder.create(small(folder), "made", {})
    run.append_trajectories(trajectories)
    run.append("consumed.jsonl", {"step": 1, "epoch": 0, "tasks": ["t"]})
    run.unlock()
    return run


def test_turns_that_were_paid_differently(episodes: Run, tmp_path: Path) -> None:
    def member(number: int, outcome: float, steps: list[float]) -> Trajectory:
        first = Turn([5, 6], Completion([7, 8], [-1.0, -1.0], "stop"), Message("assistant", "a"))
        last = Turn([5, 6, 7, 8, 9], Completion([10], [-1.0], "stop"), Message("assistant", "b"))
        reward = Reward(outcome, steps)
        return Trajectory(Task("t", "?"), "0/t", number, turns=[first, last], reward=reward)

    run = made(tmp_path, member(0, 1.0, [0.5, 0.0]), member(1, 0.0, [-0.5, 0.5]))
    # 1.5 and 0 from the first turn on, 1 and 0.5 from the second on
    assert shown(episodes("made", where=tmp_path)[1]) == [(0, 0.75), (0, 0.25), (1, -0.75), (1, -0.25)]
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("credit: turn", "credit: trajectory"))
    assert shown(episodes("made", where=tmp_path)[1]) == [(0, 0.75), (0, 0.75), (1, -0.75), (1, -0.75)]


def test_a_task_without_a_scored_episode(episodes: Run, tmp_path: Path) -> None:
    """There is no best one, and why nothing was scored is what one came for."""
    turn = Turn([5, 6], Completion([7, 8], [-1.0, -1.0], "stop"), Message("assistant", "a"))
    lost = [
        Trajectory(Task("t", "?"), "0/t", number, turns=[turn], error=f"scoring failed: reason {number}")
        for number in range(2)
    ]
    made(tmp_path, *lost)
    for asked in (("--best", "1"), ("--worst", "1"), ("--best", "1", "--worst", "2")):
        status, out, err = episodes("made", *asked, where=tmp_path)
        assert status == 0, err
        assert "reason 0" in out and "reason 1" in out
        assert "1 of 1 tasks have no scored episode" in " ".join(err.split())
        page = tmp_path / "paid.html"
        assert episodes("made", *asked, "--html", str(page), where=tmp_path)[0] == 0
        text = page.read_text(encoding="utf-8")
        assert "reason 0" in text and "reason 1" in text and "no scored episode" in text


def test_which_are_shown(runs: Path, episodes: Run) -> None:
    folder = RunFolder(runs / "a")
    taken, (step, credit) = folder.read_consumed_tasks(), compute_run_credit(folder)
    assert step == 2 and {group.task for group in credit.groups} == set(taken[2])
    out, err = episodes("a")[1:]
    # One task, the one with the largest advantage, and the others by name.
    assert out.count("member") == 4 and f"task {credit.groups[0].task} " in out
    assert all(group.task in out for group in credit.groups) and "shown: 1 of 3 tasks" in err
    assert episodes("a", "--show", "3")[1].count("member") == 12
    best = max(credit.groups[0].rewards)
    out = episodes("a", "--best", "1", "--worst", "1")[1]
    assert len(re.findall(r"^member", out, re.M)) == 2 and f"reward {best:g}" in out
    _, out, err = episodes("a", "--worst", "4")
    assert len(re.findall(r"^member", out, re.M)) == 3  # of the scored
    assert "1 episodes without a reward" in " ".join(err.split())
    only = next(task for task in taken[1] if task not in taken[2])
    assert f"task {only}" in episodes("a", "--task", only)[1]  # in the step that took it


def test_the_page(runs: Path, episodes: Run, tmp_path: Path) -> None:
    path = tmp_path / "new" / "credit.html"
    status, out, err = episodes("a", "--step", "1", "--html", str(path))
    assert status == 0 and out == "" and str(path) in err
    root = ElementTree.fromstring(path.read_text(encoding="utf-8").split("\n", 1)[1])
    loaded = list(load_trajectories(runs / "a" / "trajectories.jsonl", "0/"))
    titles = [span.attrib["title"] for span in root.iter("span") if "title" in span.attrib]
    tokens = [token for title in titles for token in re.findall(r", token (\d+), log-prob", title)]
    sampled = [str(token) for t in loaded for turn in t.turns for token in turn.completion.token_ids]
    assert sorted(tokens) == sorted(sampled) and len(list(root.iter("h2"))) == 3
    (tmp_path / "file").touch()
    status, _, err = episodes("a", "--html", str(tmp_path / "file" / "x.html"))
    assert status == 1 and "File exists" in err and len(err.splitlines()) == 1


def test_a_run_that_is_being_written_or_lost_its_checkpoints(
    runs: Path, episodes: Run, tmp_path: Path
) -> None:
    copy = tmp_path / "a"
    shutil.copytree(runs / "a", copy)
    with (copy / "trajectories.jsonl").open("a") as file:
        file.write('{"task": {"id": "half')
    before = episodes("a")[1]
    assert episodes("a", where=tmp_path)[1] == before
    shutil.rmtree(copy / "checkpoints")  # the tokenizer of the model serves as well
    assert episodes("a", where=tmp_path)[1] == before
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("name: builtin:tiny", "name: ./gone"))
    status, _, err = episodes("a", where=tmp_path)
    assert status == 2 and "./gone" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("b",), "there is no run 'b'"),
        (("a", "--step", "9"), "run a has no step 9; it has steps 1 to 2"),
        (("a", "--step", "0"), "run a has no step 0"),
        (("a", "--task", "zzz"), "run a has no task 'zzz'"),
        (("a", "--best", "0"), "--best"),
    ],
)
def test_mistakes(episodes: Run, arguments: tuple[str, ...], says: str) -> None:
    status, out, err = episodes(*arguments)
    assert status != 0 and says in err + out and "Traceback" not in err


def test_tasks_that_are_not_there(runs: Path, episodes: Run) -> None:
    taken = RunFolder(runs / "a").read_consumed_tasks()
    err = episodes("a", "--task", taken[1][0] + "0")[2]
    assert "did you mean" in err and len(err.splitlines()) == 1
    only = next(task for task in taken[1] if task not in taken[2])
    assert "it is in step 1" in episodes("a", "--step", "2", "--task", only)[2]


def test_runs_without_episodes(episodes: Run, tmp_path: Path) -> None:
    options = {
        "logging": {"output_dir": str(tmp_path), "save_trajectories": False},
        "training": {"max_steps": 1},
    }
    train(small(tmp_path, **options), "b")
    status, _, err = episodes("b", where=tmp_path)
    assert status == 2 and "logging.save_trajectories" in err
    for algorithm, says in (
        ("sft", "run sft uses sft"),
        ("ppo", "not finished a step"),
    ):
        RunFolder.create(small(tmp_path, training={"algorithm": algorithm}), algorithm, {}).unlock()
        status, _, err = episodes(algorithm, where=tmp_path)
        assert status == 2 and says in err and len(err.splitlines()) == 1


def test_the_example_prints_what_the_page_on_rewards_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    monkeypatch.setattr(sys, "argv", ["turn_rewards.py"])
    runpy.run_path(str(ROOT / "examples" / "turn_rewards.py"), run_name="__main__")
    told = capsys.readouterr().out
    page = (ROOT / "docs" / "REWARDS.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```\n(system .*?)```", page, re.DOTALL)
    assert shown in "\n".join(line.rstrip() for line in told.splitlines())
