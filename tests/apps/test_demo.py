"""The demo in miniature: two ordinary runs and a report over their folders; mistakes are answered at once."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.kits.run import Quiet, assert_same_run
from TrainingFactory.apps.demo.demo import Demo, StageAnnouncer
from TrainingFactory.apps.demo.lessons import LESSONS as LESSONS_OF
from TrainingFactory.apps.demo.lessons import Lessons
from TrainingFactory.cli import main
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.models import load_model
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.runs.folder import RunFolder, list_runs

LESSONS = Lessons(num_drills=6, num_short_rows=6, num_dialogues=12, num_demonstrations=24)
OVERRIDES = ["training.batch_size=4", "training.group_size=4", "training.max_steps=3", "data.count=12",
             "data.heldout_count=6", "sampling.max_tokens=12", "environment.max_turns=2"]  # fmt: skip
WARM = "out-warm-start"


def by_last_token(episode) -> float:  # type: ignore[no-untyped-def]
    """A reward that an untrained model earns now and then, so that there is something to learn from."""
    return float(episode.trajectory.turns[-1].completion.token_ids[-1] % 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs after `tfactory demo`."""
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("TrainingFactory.envs.SearchEnvironment.reward", lambda self, e: by_last_token(e))
        small = functools.partial(Demo, lessons=LESSONS, overrides=OVERRIDES)
        patch.setattr("TrainingFactory.apps.demo.demo.Demo", small)
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--seed", "3", "--out", str(out)])
    assert ended.value.code == 0
    return out.parent


def test_it_is_two_ordinary_runs(folder: Path) -> None:
    warm, trained = list_runs(folder)
    assert (warm.name, warm.state, trained.name, trained.state) == (WARM, "finished", "out", "finished")
    assert [warm.status.step, trained.status.step] == [3, 3]
    assert warm.config.training.algorithm == "sft" and trained.config.training.algorithm == "grpo"
    # the warm start takes its lessons in their order
    taken = [name for step in warm.read_consumed_tasks().values() for name in step]
    assert taken == [f"out-demonstrations-{number}" for number in range(1, 13)]


def test_the_report(folder: Path) -> None:
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["environment"] == "search" and report["configs"][1]["training"]["seed"] == 3
    assert min(report["seconds"]) > 0 and report["versions"]["torch"]
    assert report["curve"] == [row["accuracy"] for row in RunFolder(folder / "out").metrics()]
    for side, run in (("before", WARM), ("after", "out")):
        episodes = list(load_trajectories(folder / run / "heldout.jsonl"))
        metrics = rollout_metrics(episodes)
        assert report[side]["episodes"] == len(episodes) == 6
        assert report[side]["success"] == pytest.approx(metrics["reward"])
        assert report[side]["turns"] == metrics["turns"]
        assert sum(report[side]["calls"].values()) == 6
    assert report["example"]["before"][0] == report["example"]["after"][0]  # the same question
    assert "An agent and its tools" in (folder / "out" / "report.html").read_text()


def test_new_kinds_of_rows_are_announced_where_the_loss_jumps(folder: Path) -> None:
    stages = LESSONS.describe_stages(batch_size=6)
    assert [*stages] == [1, 2, 3]
    lines = list[str]()

    class Lines(Quiet):
        def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
            lines.append(f"step {step}")

        def say(self, text: str) -> None:
            lines.append(text)

    watcher = StageAnnouncer(Lines(), stages)
    for step in (1, 2, 3, 4):
        watcher.step(step, 4, {})
    assert [line for line in lines if line.startswith("step")] == ["step 1", "step 2", "step 3", "step 4"]
    assert lines[1].startswith("From step 2 on: demonstrations") and lines[2] == "step 2"
    assert lines[3].startswith("From step 3 on: whole demonstrations") and len(lines) == 6
    page = (folder / "out" / "report.html").read_text("utf-8")
    assert "loss jumps" in page and "whole demonstrations" in page


def test_trained_tasks_are_not_those_of_the_trial(folder: Path) -> None:
    trained = list(load_trajectories(folder / "out" / "trajectories.jsonl"))
    assert len(trained) == 3 * 4 * 4 and len({episode.task.id for episode in trained}) == 12
    tried = [list(load_trajectories(folder / run / "heldout.jsonl")) for run in (WARM, "out")]
    questions = [[str(episode.task.prompt) for episode in side] for side in tried]
    assert questions[0] == questions[1]
    asked = {str(episode.task.prompt) for episode in trained}
    assert not asked & set(questions[0])
    shown = (folder / "out-demonstrations.jsonl").read_text()
    assert not any(question in shown for question in {*asked, *questions[0]})


def test_both_runs_change_the_weights(folder: Path) -> None:
    first = load_model("builtin:tiny", seed=3).model.state_dict()
    warm, final = (load_file(folder / run / "model" / "model.safetensors") for run in (WARM, "out"))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert 0 < (first[name] - warm[name]).abs().max() < 0.3  # it began with the weights of the seed
    assert 0 < (warm[name] - final[name]).abs().max() < 0.1  # GRPO's steps are small ones


@pytest.mark.slow  # that runs of one seed are the same: tests/training
def test_the_same_seed_gives_the_same_runs(tmp_path: Path) -> None:
    def play(name: str) -> Path:
        demo = Demo("calculator", 1, tmp_path / name, LESSONS, OVERRIDES)
        demo.warm_start(Quiet())
        demo.train(Quiet())
        return tmp_path / name

    assert_same_run(play("a"), play("b"))


def images_of(path: Path) -> set[str]:
    """Return the digests of the images in the prompts of saved episodes."""
    return {
        image.digest for episode in load_trajectories(path) for m in episode.prompt for _, image in m.images
    }


def test_the_screen_demo_sees_pictures_and_is_evaluated_blind(tmp_path: Path) -> None:
    few = {"num_drills": 6, "num_short_rows": 6, "num_dialogues": 12, "num_demonstrations": 24}
    lessons = dataclasses.replace(LESSONS_OF["screen"], **few)
    demo = Demo("screen", 2, tmp_path / "out", lessons, OVERRIDES)
    demo.warm_start(Quiet())
    demo.train(Quiet())
    report = demo.report().as_json()
    assert report["environment"] == "screen" and report["configs"][0]["model"]["name"] == "builtin:tiny-vl"
    assert [report[name]["episodes"] for name in ("before", "after", "blind")] == [6, 6, 6]
    assert all(0 <= report[name]["success"] <= 1 for name in ("before", "after", "blind"))
    before, after, blind = (
        tmp_path / name for name in ("out-warm-start/heldout.jsonl", "out/heldout.jsonl", "out/blind.jsonl")
    )
    assert images_of(before) == images_of(after) and len(images_of(after)) == 6 and len(images_of(blind)) == 1
    assert [e.task.id for e in load_trajectories(after)] == [e.task.id for e in load_trajectories(blind)]
    assert "With empty pictures" in (tmp_path / "out" / "report.html").read_text("utf-8")
    rows = [json.loads(line) for line in (tmp_path / "out-demonstrations.jsonl").read_text().splitlines()]
    asked = [next(message for message in row["messages"] if message["role"] == "user") for row in rows]
    shown = [part for message in asked for part in message["content"] if part["type"] == "image_url"]
    assert len(rows) == len(shown) == 24


@pytest.mark.slow
def test_the_screen_demo_learns_what_it_cannot_learn_blind(tmp_path: Path) -> None:
    demo = Demo("screen", 0, tmp_path / "out")
    demo.warm_start(Quiet())
    demo.train(Quiet())
    report = demo.report()
    assert report.blind is not None
    print(f"before {report.before.success}, after {report.after.success}, blind {report.blind.success}")
    assert report.after.success >= report.before.success + 0.3
    assert report.blind.success <= 1 / 8 + 0.05


def test_an_earlier_demo_is_replaced(folder: Path, tmp_path: Path) -> None:
    for name in (WARM, "out"):
        shutil.copytree(folder / name, tmp_path / name.replace("out", "other"))
        config = shutil.copytree(folder / name, tmp_path / name) / "config.yaml"
        config.write_text(
            config.read_text().replace(str(folder), str(tmp_path))
        )  # where a demo looks for its own
    Demo("search", 1, tmp_path / "out")
    assert {run.name for run in list_runs(tmp_path)} == {"other-warm-start", "other"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--env", "serch"], "did you mean search"),
        (["--env", "env_search"], "env_search"),
        (["--seed", "-1"], "training.seed"),
        (["--out", "file"], "not an earlier demo"),
        (["--out", "full"], "not an earlier demo"),
        (["--out", "beside"], "not an earlier demo"),
        (["--out", "file/inside"], "file"),
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
    monkeypatch.setattr(Demo, "warm_start", lambda self, watcher: pytest.fail("it began"))
    Path("file").write_text("mine")
    for name in ("full", "beside-warm-start"):
        Path(name).mkdir()
        Path(name, "config.yaml").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code and says in capsys.readouterr().err
    assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"mine"}
