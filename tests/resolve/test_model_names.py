"""One way to name models: runs, their checkpoints, folders and the rest, and what a run remembers of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.kits.cli import Run
from tests.kits.registry import made_run
from tests.kits.run import Parity, Quiet, brief, go_on, train
from TrainingFactory.assembly.export import export
from TrainingFactory.resolve.model_names import find_model, with_resolved_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects

SHORT = {"max_steps": 1, "batch_size": 2, "group_size": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a whole model and one of an adapter, which were never trained."""
    folder = tmp_path_factory.mktemp("runs")
    made_run(folder, "sft", model={"name": "builtin:tiny", "family": "generic"})
    made_run(folder, "lora", adapter=True, lora={"enabled": True})
    return folder


def test_a_name_means_the_same_wherever_it_is_written(runs: Path) -> None:
    first, last = RunFolder(runs / "sft").checkpoints()
    for name, folder in [
        ("sft", last),
        (str(runs / "sft"), last),
        ("sft@last", last),
        ("sft@best", last),  # none has been kept as the best
        ("sft@step-1", first),
        (str(first), first),
    ]:
        found = find_model(name, runs)
        assert (found.name, found.adapter, found.folder) == (str(folder), None, folder)
        assert found.run is not None and found.run.name == "sft"
    adapter = find_model("lora@step-2", runs)
    assert (adapter.name, adapter.adapter) == ("builtin:tiny", str(runs / "lora/checkpoints/step-000002"))
    for name in ("Qwen3-4B", "builtin:tiny", "some/model", "package:some"):
        found = find_model(name, runs)
        assert (found.name, found.adapter, found.run) == (name, None, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sfft", "there is no such run or model: 'sfft'; did you mean sft?"),
        ("qwen3-4bb", "did you mean qwen3-4b?"),
        ("./nothing", "there is no such run or model: './nothing'"),
        ("nothing.gguf", "no such run or model"),
        ("sft@step-7", "step-000001, step-000002"),
        ("sft:3", "no such run or model: 'sft:3'; did you mean sft?"),
        ("sft@champion", "no such run or model: 'sft@champion'; did you mean sft?"),
    ],
)
def test_a_name_that_means_nothing_is_told_with_the_nearest(runs: Path, name: str, text: str) -> None:
    with pytest.raises(ValueError) as told:
        find_model(name, runs)
    assert text in str(told.value)


def test_folders_with_nothing_in_them_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_model(str(tmp_path / "empty"), tmp_path / "runs")
    with pytest.raises(ValueError, match=r"config\.yaml or environment\.json is missing"):
        find_model(str(tmp_path / "empty"), tmp_path)


def test_a_config_takes_what_the_run_was_trained_with(runs: Path) -> None:
    config = brief(runs, model={"name": "sft"})
    assert with_resolved_model(config).model.family == "generic"
    assert with_resolved_model(brief(runs, model={"name": "sft", "family": "qwen3"})).model.family == "qwen3"
    adapter = with_resolved_model(brief(runs, model={"name": "builtin:tiny", "adapter": "lora"})).model
    assert adapter.adapter == str(runs / "lora/checkpoints/step-000002")
    for section, text in [
        (
            {"name": "lora", "adapter": "lora"},
            "model.adapter: model.name=lora is already an adapter",
        ),
        ({"adapter": "sft"}, "model.adapter: sft is a whole model"),
        ({"name": "sft", "revision": "main"}, "model.revision: .*hub"),
        ({"name": "sftt"}, "model.name: there is no such run or model: 'sftt'; did you mean sft"),
    ]:
        with pytest.raises(ValueError, match=text):
            with_resolved_model(brief(runs, model=section))


def test_a_run_goes_on_from_the_bytes_it_was_started_from(tmp_path: Path, tfactory: Run) -> None:
    train(brief(tmp_path, training=SHORT, lora={"enabled": True}), "lora")
    _check_commands(tfactory, tmp_path)
    broken = Quiet(fail_at=1)
    registered = {"name": "agent", "register": "best"}
    config = brief(tmp_path, model={"name": "lora"}, training=SHORT, registry=registered)
    with pytest.raises(RuntimeError):
        Training(config, name="next", objects=UserObjects(environment=Parity), watcher=broken).train()
    run = RunFolder(tmp_path / "next")
    started = run.run_info["model"]
    adapter = tmp_path / "lora/checkpoints/step-000001"
    assert run.config.model.name == started["written"] == "lora"
    assert started["meant"] == {"name": "builtin:tiny", "adapter": str(adapter)}
    assert (started["parent"]["run"], started["parent"]["step"]) == ("lora", 1)
    shutil.copytree(adapter, tmp_path / "lora/checkpoints/step-000009")  # another one is the last by now
    assert find_model("lora", tmp_path).folder != adapter
    report = go_on(run.path)
    assert (report.state, report.version) == ("finished", "agent:1")
    assert find_model("next", tmp_path).name == find_model("agent", tmp_path).name == "builtin:tiny"
    sums = adapter / "SHA256SUMS"
    sums.write_text(sums.read_text().replace("a", "b"))
    with pytest.raises(ValueError, match=r"was started from lora, .* changed"):
        go_on(run.path)
    shutil.rmtree(adapter)
    with pytest.raises(ValueError, match="step-000001 is missing"):
        go_on(run.path)


def _check_commands(tfactory: Run, runs: Path) -> None:
    options = ["--tasks", "2", "--max-tokens", "4", f"logging.output_dir={runs}"]
    status, out, err = tfactory("eval", "lora@step-1", "--env", "calculator", "--json", *options)
    assert status in (0, 1), err
    assert json.loads(out)["model"] == str(runs / "lora/checkpoints/step-000001")
    status, _, err = tfactory("rollout", "calculator", "--model", "lora", *options)
    assert status == 0, err
    assert export("lora@step-1", "out", merge=True, runs=runs).kind == "merged"
