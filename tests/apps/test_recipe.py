"""The whole recipe, on a tiny model whose template has no tools, from 20 rows that are made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_device_failures import MEMORY
from tests.data.test_gsm8k import question, written
from tests.kits.cli import Run
from tests.kits.run import Quiet
from tests.models.test_tools_format import bare
from TrainingFactory.apps.recipes import recipe as recipes
from TrainingFactory.apps.recipes.recipe import EVALUATED_CHECKPOINTS, Recipe
from TrainingFactory.evaluation.comparison import sides
from TrainingFactory.resolve.model_names import find_model, with_original_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.sampling.native import NativeEngine

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
append = RunFolder.append
SHORT_TURNS = "sampling.max_tokens=12"  # an untrained model writes up to the limit in every evaluation
# Luck decides, so that evaluations differ and there is something to learn.
SCORE = "def score(episode):\n    return float(sum(episode.trajectory.turns[0].completion.token_ids) % 2)\n"


def sums(dev: bool, numbers: range) -> list[tuple[str, str]]:
    return [(question(dev, n), f"It is {n}+{n} = <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}") for n in numbers]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    loaded, model = bare(), tmp_path / "bare"
    loaded.model.save_pretrained(model)
    loaded.tokenizer.save_pretrained(model)
    (tmp_path / "g").mkdir()
    written(tmp_path / "g", sums(False, range(12)) + sums(True, range(4)), sums(False, range(20, 24)))
    (tmp_path / "luck.py").write_text(SCORE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lucky = ("reward.type=function", "reward.options={function: luck.py:score}")
    return {
        "source": "g", "model": "bare", "out": "made", "scale": "small", "sft": (SHORT_TURNS,), "grpo": lucky,
    }  # fmt: skip


def full(run: RunFolder, name: str, row: dict[str, Any]) -> None:
    """Stand for `RunFolder.append` while the disk becomes full, also for recipe.json."""
    if row["step"] < 3:
        append(run, name, row)
    else:
        (run.path.parent / ".recipe.json.part").symlink_to("/dev/full")
        raise OSError("No space left")


@FULL
def test_from_data_to_figures(asked: dict[str, Any], tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--data", "g", "--model", "bare", "--scale", "small", "--out", "made"]
    options += [word for given in asked["grpo"] for word in ("--grpo", given)] + ["--sft", SHORT_TURNS]
    with pytest.raises(ValueError, match="data file not found: /gone/g"):
        Recipe(**asked | {"source": "/gone/g"}).prepare(Quiet())  # nothing is begun by it
    # Broken off in both runs: they go on, with the tokens that were added to the model.
    recipe = Recipe(**asked)
    recipe.prepare(Quiet())
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", full)
        with pytest.raises(OSError, match=r"^No space left.*run: tfactory runs resume made/sft$"):
            recipe.train("sft", Quiet())
        with pytest.raises(
            OSError, match=r"^made/recipe.json could not .*\(No space left.*same command again$"
        ):
            recipe.train("sft", Quiet())
    Path("made/.recipe.json.part").unlink()
    recipe.train("sft", again := Quiet())
    assert any("model.tools_format=hermes adds them" in text for text in again.said)
    assert any("step 2" in text for text in again.said)
    with pytest.raises(RuntimeError):
        recipe.train("grpo", Quiet(fail_at=2))
    status, out, err = tfactory("recipe", "gsm8k", *options)
    assert status == 0, err
    assert "sft: already finished" in err and "resuming" in err and "dev" in out and "test" not in out
    # What breaks an evaluation off is told, and the same command goes on; slots are those of the run.
    Path("made/episodes/sft-test-0.jsonl.part").symlink_to("/dev/full")
    status, _, err = tfactory("recipe", "gsm8k", *options, "--final")
    assert status == 1 and "sft-test-0.jsonl.part could not be written (No space left on device); " in err
    assert err.endswith("run the same command again\n")
    Path("made/episodes/sft-test-0.jsonl.part").unlink()
    config = Path("made/grpo/config.yaml")
    config.write_text(config.read_text("utf-8").replace("slots: 8", "slots: 3"), encoding="utf-8")
    slots = list[int]()

    def too_large(_: NativeEngine, *given: Any, **options: Any) -> None:
        slots.append(options["slots"])
        raise MEMORY

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "__init__", too_large)
        status, _, err = tfactory("recipe", "gsm8k", *options, "--final")
    assert status == 2 and slots == [3] and "the device has too little memory: CUDA out of memory" in err
    assert err.endswith("run the same command again\n")
    status, out, err = tfactory("recipe", "gsm8k", *options, "--final", "--json")
    assert (
        status == 0
        and "grpo: already finished" in err
        and "on dev at" not in err
        and err.count("on test at") == 4
    )
    found = json.loads(out)
    assert found == json.loads(Path("made/results.json").read_text("utf-8"))
    assert found["data"]["rows"] == {"sft": 12, "sft_dev": 4, "tasks": 12, "dev": 4, "test": 4}
    assert found["runs"]["grpo"]["steps"] == 2 and len(found["runs"]["grpo"]["evaluations"]) == 3
    assert found["runs"]["grpo"]["sampled_tokens"] > 0 and set(found["seconds"]) == {
        "data",
        "sft",
        "grpo",
        "dev",
        "test",
    }
    for part in ("dev", "test"):
        for how in ("greedy", "temperature 1"):
            each = found["evaluations"][part][how]
            assert each["tasks"] == 4 and each["difference"] == pytest.approx(
                each["grpo"]["success"] - each["sft"]["success"]
            )
            assert each["sft"]["success_low"] <= each["sft"]["success"] <= each["sft"]["success_high"]
    # The checkpoint of the first run has the tokens and the template, so that the second needs no option.
    run = RunFolder(Path("made/grpo"))
    assert run.config.model.tools_format is None and "tools_format: hermes" in (
        run.checkpoints()[-1] / "chat_template.jinja"
    ).read_text("utf-8")
    # It began where SFT ended, and that is what it is compared with.
    ended = RunFolder(Path("made/sft")).checkpoints()[-1].resolve()
    assert Path(with_original_model(run).model.name).resolve() == ended and ended.name == "step-000004"
    assert (
        find_model(EVALUATED_CHECKPOINTS["sft"], "made").folder
        == RunFolder(Path("made/sft")).checkpoints()[-1]
    )
    # What is compared by name, in any order, is asked what the run that has tasks was asked.
    for names in (["sft", "grpo@best"], ["grpo@best", "sft"]):
        both, _ = sides(names, runs="made", must_rerun=True)
        assert {
            wanted.num_episodes for side in both for wanted in side.evaluations if wanted is not None
        } == {4}
    # Nothing is played twice, and the test stays among the figures.
    status, out, err = tfactory("recipe", "gsm8k", *options, "--json")
    assert json.loads(out)["evaluations"] == found["evaluations"] and " on test at" not in err
    with pytest.raises(ValueError, match=r"other options \(model was bare, is gone; seed was 0, is 1\); "):
        Recipe(**{**asked, "model": "gone", "seed": 1})
    Recipe(**asked | {"source": "elsewhere"}).prepare(Quiet())  # its rows are here


@FULL
def test_until_a_run_is_there_options_may_change(asked: dict[str, Any]) -> None:
    for part, file in ((".recipe.json.part", "recipe.json"), ("data/.tasks.jsonl.part", "data/tasks.jsonl")):
        made, link = Recipe(**asked), Path("made", part)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to("/dev/full")
        told = rf"^made/{file} could not be written \(No space left on device\); .* same command again$"
        with pytest.raises(OSError, match=told):
            made.prepare(Quiet())
        Recipe(**asked)  # the same command is not refused for what is half there
        link.unlink()
    made = Recipe(**asked | {"model": "nomodel"})
    made.prepare(Quiet())
    with pytest.raises(ValueError, match="nomodel"):
        made.train("sft", Quiet())
    changed = Path("made/data/sft.jsonl").stat().st_mtime_ns
    again = Recipe(**asked)
    again.prepare(Quiet())
    assert (
        again.state["asked"]["model"] == "bare" and Path("made/data/sft.jsonl").stat().st_mtime_ns == changed
    )
    plain = Recipe(**{**asked, "plain": True})
    plain.prepare(Quiet())
    assert "tool_calls" not in Path("made/data/sft.jsonl").read_text("utf-8")
    assert json.loads(Path("made/recipe.json").read_text("utf-8"))["asked"]["plain"]
    assert str(Recipe("g").out) == "runs/gsm8k" and str(Recipe("g", scale="small").out) == "runs/gsm8k-small"


def test_recipe_with_generated_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT learns from the environment's expert, and the last checkpoint of GRPO is compared with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "TEXT2SQL_TASK_COUNTS", {"tasks": 8, "dev": 4, "test": 4})
    options: dict[str, Any] = {"task": "text2sql", "model": "builtin:tiny", "scale": "small"}
    recipe = Recipe(**options, sft=["training.max_steps=1", SHORT_TURNS])
    recipe.prepare(Quiet())
    assert recipe.runs == ["sft", "grpo"] and recipe.models == {"sft": "sft", "grpo": "grpo"}
    for name in recipe.runs:
        recipe.train(name, Quiet())
    recipe.measure("dev", Quiet())
    results = recipe.write_results()
    assert results["data"]["rows"] == {"tasks": 8, "dev": 4, "test": 4} and [*results["runs"]] == [
        "sft",
        "grpo",
    ]
    assert results["evaluations"]["dev"]["greedy"].keys() >= {"sft", "grpo", "difference"}
    with pytest.raises(ValueError, match="text2sql generates its tasks; remove --data x"):
        Recipe("x", **options)
    with pytest.raises(ValueError, match="remove --plain"):
        Recipe(**options, plain=True, out="plain").prepare(Quiet())


def test_model_that_can_call_tools_starts_with_grpo() -> None:
    coder = Recipe("g", "qwen2.5-coder-1.5b", "coder")
    assert coder.runs == ["grpo"] and coder.configs["grpo"].training.learning_rate == 2e-6
    assert coder.models == {"base": "qwen2.5-coder-1.5b", "grpo": "grpo"}
    other = Recipe("g", "qwen2.5-coder-1.5b", "coder", grpo=["model.name=my.gguf"])
    assert other.models["base"] == "my.gguf"
    assert Recipe("g", "mine", "other").configs["sft"].model.name == "mine"
    with pytest.raises(ValueError, match="qwen25_coder_gsm8k has no SFT stage; remove --sft a=1"):
        Recipe("g", "qwen2.5-coder-1.5b", "coder", sft=["a=1"])
