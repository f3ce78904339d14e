"""The demo in miniature: every part runs, files are whole, weights change, mistakes are answered at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from TrainingFactory.cli import main
from TrainingFactory.cli.demo import chart
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.models import load_model
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.services.demo import demo as service
from TrainingFactory.services.demo.demo import Demo, DemoPlan
from TrainingFactory.services.demo.warm_start import WarmStartPlan

MINI = DemoPlan(
    WarmStartPlan(demonstrations=48, drill_steps=2, drill_rows=4, steps=4, rows=4),
    steps=2, tasks_per_step=2, group_size=4, heldout=6, max_tokens=12, max_turns=2,
)  # fmt: skip


def by_last_token(episode) -> float:  # type: ignore[no-untyped-def]
    """A reward that an untrained model earns now and then, so that there is something to learn from."""
    return float(episode.trajectory.turns[-1].completion.token_ids[-1] % 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("TrainingFactory.envs.SearchEnvironment.reward", lambda self, e: by_last_token(e))
        patch.setattr(service, "GATE", 0.0)
        phases: list[tuple[str, int, int]] = []
        Demo("search", 3, out, MINI, lambda phase, done, total, _: phases.append((phase, done, total))).run()
    assert [phase for phase, done, total in phases if done == total] == [
        "demonstrations", "warm start", "trial before", "GRPO", "trial after",
    ]  # fmt: skip
    return out


def test_the_report(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    assert report["finished"] and report["environment"] == "search" and report["seed"] == 3
    assert report["seconds"] > 0 and report["about"]["versions"]["torch"]
    assert [point["step"] for point in report["curve"]] == [1, 2]
    assert report["plan"]["warm_start"]["demonstrations"] == 48
    for side in ("before", "after"):
        episodes = list(load_trajectories(folder / f"{side}.jsonl"))
        metrics = rollout_metrics(episodes)
        assert report[side]["episodes"] == len(episodes) == 6
        assert report[side]["success"] == pytest.approx(metrics["reward"])
        assert report[side]["turns"] == metrics["turns"]
        assert sum(report[side]["calls"].values()) == 6
    assert report["example"]["before"][0] == report["example"]["after"][0]  # the same question


def test_trained_tasks_are_not_those_of_the_trial(folder: Path) -> None:
    trained = list(load_trajectories(folder / "train.jsonl"))
    assert len(trained) == 2 * 2 * 4 and len({episode.task.id for episode in trained}) == 4
    tried = [list(load_trajectories(folder / f"{side}.jsonl")) for side in ("before", "after")]
    questions = [[str(episode.task.prompt) for episode in side] for side in tried]
    assert questions[0] == questions[1]
    assert not {str(episode.task.prompt) for episode in trained} & set(questions[0])


def test_both_phases_change_the_weights(folder: Path) -> None:
    first = load_model("builtin:tiny", seed=3).model.state_dict()
    warm = load_file(folder / "warm_start" / "model.safetensors")
    final = load_file(folder / "model" / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(first[name], warm[name])
    assert not torch.equal(warm[name], final[name])
    assert (warm[name] - final[name]).abs().max() < 0.1  # GRPO's steps are small ones


def test_the_saved_model_can_be_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["rollout", "search", "--model", str(folder / "model"), "--tasks", "2", "--max-tokens", "4"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0, capsys.readouterr().err


def test_the_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    plan = DemoPlan(
        WarmStartPlan(demonstrations=24, drill_steps=1, drill_rows=2, steps=2, rows=2),
        steps=1, tasks_per_step=2, group_size=2, heldout=4, max_tokens=8, max_turns=2,
    )  # fmt: skip
    reports = [Demo("calculator", 1, tmp_path / name, plan).run() for name in "ab"]
    assert reports[0].before == reports[1].before and reports[0].after == reports[1].after
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in "ab"]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    Demo("search", 1, tmp_path / "a", plan)  # an earlier demo may be written over
    assert not json.loads((tmp_path / "a" / "report.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--env", "serch"], "did you mean search"),
        (["--env", "env_search"], "no recipe"),
        (["--seed", "-1"], "must be 0 or more"),
        (["--out", "file"], "is a file"),
        (["--out", "full"], "other things in it"),
        (["--out", "file/inside"], "cannot be written"),
    ],
)
def test_mistakes_are_answered_at_once(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Demo, "run", lambda self: pytest.fail("it began"))
    Path("file").write_text("mine")
    Path("full").mkdir()
    Path("full/report.json").write_text("[]")
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert Path("file").read_text() == "mine" and Path("full/report.json").read_text() == "[]"


def test_mistakes_do_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom TrainingFactory.cli import main\n"
        "try:\n    main(['demo', '--env', 'serch'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("plain", [False, True])
def test_the_chart(plain: bool) -> None:
    lines = chart([0.0, 0.5, 1.0, 1.0], plain=plain).split("\n")
    full = "#" if plain else "█"
    assert lines[0].startswith("reward by step") and lines[-1].split() == ["step", "1", "step", "4"]
    assert lines[1] == f" 1.0 |  {full}{full}" and lines[5] == f" 0.5 | {full * 3}"
    assert lines[-2] == " 0.0 +----"
    assert max(map(len, chart([0.5] * 1000).split("\n"))) <= 70
    assert chart([]).startswith("reward by step")
    assert not plain or chart([0.3], plain=True).isascii()
