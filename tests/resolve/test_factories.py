"""Ids that only a project knows: its factories.yaml, and the packages of the other factories."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.kits.cli import Run
from tests.kits.run import Quiet
from tests.kits.siblings import COMPUTE, DATA, ENVIRONMENTS, LOOKED_UP
from TrainingFactory.apps.views.run_tables import list_state_rows
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import CalculatorEnvironment
from TrainingFactory.resolve import factories
from TrainingFactory.services import GRPOTrainer, SFTTrainer
from TrainingFactory.trainers.training_run import Training, resume

Install = Callable[..., None]
FILE = """
models:
  Qwen3-4B: builtin:tiny  # until the real one is here
datasets:
  ds_questions: {dataset: questions.jsonl, count: 1}
environments:
  env_small:
    environment: {environment_id: calculator, max_turns: 1}
    sampling: {max_tokens: 4}
    training: {max_steps: 1, batch_size: 2, group_size: 2}
  env_talk: {tools: [calculator], data: {tasks: ds_questions}}
compute:
  alloc-8: {num_gpus: 8}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(**options: Any) -> dict[str, Any]:
    return {"max_steps": 1, "batch_size": 1, "sampling": {"max_tokens": 4}, "watcher": Quiet()} | options


def test_an_entry_fills_what_is_not_set(project: Path) -> None:
    (project / "factories.yaml").write_text(FILE)
    said: list[str] = []
    given = TrainingConfig(
        model="Qwen3-4B", environment={"environment_id": "env_small"}, sampling={"max_tokens": 7},
        allocation_id="alloc-8",
    )  # fmt: skip
    found = factories.resolve_ids(given, said.append)
    assert found.model.name == "builtin:tiny" and found.environment.environment_id == "calculator"
    assert (found.environment.max_turns, found.training.max_steps, found.sampling.max_tokens) == (1, 1, 7)
    assert found.compute.num_gpus == 8 and "model.name Qwen3-4B is builtin:tiny (factories.yaml)" in said
    assert factories.resolve_ids(found) == found  # a second time changes nothing
    talk = factories.resolve_ids(TrainingConfig(environment_id="env_talk"))
    assert talk.data.tasks == "questions.jsonl"
    assert talk.environment.environment_id is None and [tool.name for tool in talk.tools] == ["calculator"]
    tasks = factories.resolve_ids(TrainingConfig(data={"tasks": "ds_questions"})).data
    assert (tasks.tasks, tasks.dataset, tasks.count) == ("questions.jsonl", None, 1)
    assert (
        factories.get_model_target("Qwen3-4B") == "builtin:tiny"
        and factories.get_model_target("Qwen3-8B") is None
    )


def test_a_run_keeps_what_its_ids_were_found_to_be(project: Path, install: Install) -> None:
    def started(**options: Any) -> list[str]:
        said: list[str] = []
        watcher = Quiet()
        watcher.say = said.append  # type: ignore[method-assign]
        made = Training(TrainingConfig(data={"count": 1}, **options), watcher=watcher)
        found = json.loads((made.run.path / "environment.json").read_text())["resolved"]
        made.run.unlock()
        assert found and set(found) <= set(said)
        assert [text for name, text in list_state_rows(made.run) if name == "resolved"] == found
        return found

    assert started(model="tiny", environment_id="env_search_v1") == [
        "model.name tiny is builtin:tiny",
        "environment.environment_id env_search_v1 is search, a built-in environment",
    ]
    learns = {"training": {"algorithm": "sft"}, "dataset_id": "ds_tool_calling_v1"}
    assert started(**learns) == [
        "data.dataset ds_tool_calling_v1 is a small dataset that comes with TrainingFactory"
    ]
    install(DataFactory=DATA, EnvironmentFactory=ENVIRONMENTS, ComputeFactory=COMPUTE + LOOKED_UP)
    assert started(environment_id="env_search_v1", allocation_id="alloc-1")[1:] == [
        "environment.environment_id env_search_v1 is a scenario of EnvironmentFactory"
    ]
    assert started(**learns) == ["data.dataset ds_tool_calling_v1 is a dataset of DataFactory"]
    (project / "factories.yaml").write_text(FILE)
    assert "model.name Qwen3-4B is builtin:tiny (factories.yaml)" in started(
        model="Qwen3-4B", environment_id="calculator"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models:\n  a: [1\n", "factories.yaml:3: is not valid YAML"),
        (
            "model:\n  a: b\n",
            "factories.yaml:1: model: must be one of environments, models, datasets, compute",
        ),
        (
            "models:\n  a: {nam: b}\n",
            "factories.yaml:2: models.a.model.nam: unknown key; did you mean model.name?",
        ),
        ("models:\n  a: {family: b}\n", "factories.yaml:2: models.a: must set model.name"),
        ("models: [a]\n", "factories.yaml:1: models: must be a mapping"),
        ("datasets:\n  a: b\n  b: c.jsonl\n", "factories.yaml:2: datasets.a: refers to 'b'"),
        ("compute:\n  a: 8\n", "factories.yaml:2: compute.a: must be a valid string"),
        ("compute:\n  a: eight\n", "factories.yaml:2: compute.a: must be a mapping such as {num_gpus: 8}"),
        ("models:\n  a: b\n  a: c\n", "factories.yaml:3: models.a: duplicate key"),
    ],
)
def test_a_broken_file_is_told_by_place(project: Path, text: str, told: str) -> None:
    (project / "factories.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        GRPOTrainer(environment="calculator", **small()).train()
    assert told in str(error.value)
    assert not (project / "runs").exists()


def test_ids_that_lead_nowhere(project: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*given: Any, **options: Any) -> None:
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    (project / "factories.yaml").write_text(FILE)

    def told(trainer: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as error:
            trainer(**small(), **options).train()
        return str(error.value)

    text = told(SFTTrainer, dataset_id="ds_question")
    assert "from the hub failed" in text and "DataFactory (not installed)" in text
    assert "factories.yaml (not under datasets; did you mean ds_questions?)" in text
    text = told(GRPOTrainer, environment_id="env_smal")
    assert "unknown environment 'env_smal'" in text and "EnvironmentFactory (not installed)" in text
    assert "did you mean env_small?" in text
    text = told(GRPOTrainer, environment_id="env_small", allocation_id="alloc-9")
    assert "there is no allocation 'alloc-9'" in text and "ComputeFactory (not installed)" in text
    assert "did you mean alloc-8?" in text
    text = told(GRPOTrainer, environment_id="env_small", model="Qwen3-4")
    assert "there is no such run or model" in text and "did you mean Qwen3-4B?" in text
    install(DataFactory=DATA)
    assert "DataFactory (unknown id)" in told(SFTTrainer, dataset_id="ds_question")
    (project / "factories.yaml").unlink()
    assert "factories.yaml (no such file" in told(SFTTrainer, dataset_id="ds_question")


def test_a_sibling_without_the_method(project: Path, install: Install) -> None:
    empty = "class DatasetManager:\n    pass\n"
    broken = "class ScenarioBuilder:\n    def __init__(self):\n        raise OSError('no server')\n"
    install(DataFactory=empty, EnvironmentFactory=broken)
    with pytest.raises(ValueError, match=r"services\.DatasetManager has no method get_dataset"):
        SFTTrainer(dataset_id="ds_x", **small()).train()
    with pytest.raises(ValueError, match=r"ScenarioBuilder\(\) fails: OSError: no server"):
        GRPOTrainer(environment_id="env_x", **small()).train()
    (project / "factories.yaml").write_text("environments: {env_x: calculator}\ndatasets: {ds_x: x.jsonl}\n")
    with pytest.raises(ValueError, match=r"data file not found: x\.jsonl"):  # the file goes first
        SFTTrainer(dataset_id="ds_x", **small()).train()


def test_objects_without_what_is_needed() -> None:
    class Bare:
        dataset_id = scenario_id = allocation_id = "x1"
        num_gpus = "eight"

    trainer: Any
    for trainer, key, told in (
        (SFTTrainer, "dataset_id", "no `path`"),
        (GRPOTrainer, "environment_id", "neither an `environment`"),
        (GRPOTrainer, "allocation_id", "'eight' GPUs"),
    ):
        with pytest.raises(ValueError, match=told):
            trainer(**small(), **{key: Bare()}).train()
    with pytest.raises(ValueError, match="environment_id and environment are both given"):
        GRPOTrainer(environment="calculator", environment_id=Bare())
    # a config holds text: of an object its id
    assert TrainingConfig(environment_id=Bare(), dataset_id=Bare()).data.dataset == "x1"


def test_rows_of_a_data_factory_are_learned(project: Path, install: Install) -> None:
    install(DataFactory=DATA)
    report = SFTTrainer(dataset_id="ds_tool_calling_v1", **small(max_steps=2)).train()
    assert report.steps == 2 and report.rows[0]["loss"] > 0
    # no object of the user's: the command line can go on with it
    again = resume(str(report.run))
    assert again.data.size == 2
    again.run.unlock()
    dataset = import_module("DataFactory.services").DatasetManager().get_dataset("ds_tool_calling_v1")
    handed = SFTTrainer(dataset_id=dataset, **small())
    assert handed.objects.examples is not None and len(handed.objects.examples) == 2
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dataset.rows))
    dataset.path = "rows.jsonl"
    assert len(SFTTrainer(dataset=dataset, **small()).objects.examples or ()) == 2


def test_a_scenario_is_an_environment(install: Install, tfactory: Run) -> None:
    install(EnvironmentFactory=ENVIRONMENTS)
    training = Training(TrainingConfig(environment_id="env_search_v1"), watcher=Quiet())
    training.run.unlock()
    [task] = training.data.tasks
    assert task.prompt == "Where is the tea?" and training.data.environment is not None
    made: Any = training.data.environment(task)
    assert made.system_prompt == "Look it up." and [tool.spec.name for tool in made.tools] == ["shelf"]
    status, out, _ = tfactory("rollout", "env_search_v1", "--max-tokens", 4, "--max-turns", 1)
    assert status == 0 and "Where is the tea?" in out
    scenario = import_module("EnvironmentFactory.services").Scenario()
    scenario.environment = "calculator"
    named = GRPOTrainer(environment={"environment_id": scenario}, **small())
    assert named.objects.environment is CalculatorEnvironment


@pytest.mark.parametrize("ending", ["end", "failure", "interrupt", "start"])
def test_machines_are_released_however_a_run_ends(install: Install, ending: str) -> None:
    install(ComputeFactory=COMPUTE + LOOKED_UP)
    released = import_module("ComputeFactory.services").released
    endings: dict[str, type[BaseException]] = {"failure": RuntimeError, "interrupt": KeyboardInterrupt}

    class Watcher(Quiet):
        def phase(self, name: str) -> None:
            assert released == []  # not while it runs
            if ending in endings:
                raise endings[ending]

    watcher = Watcher()
    options = small(watcher=watcher, group_size=2)
    if ending == "start":
        options["data"] = {"tasks": "no.jsonl"}
    trainer = GRPOTrainer(environment="calculator", allocation_id="alloc-1", **options)
    if ending == "end":
        report = trainer.train()
        assert "num_gpus: 8" in (report.run / "config.yaml").read_text()
    else:
        with pytest.raises(endings.get(ending, ValueError)):
            trainer.train()
    assert released == ["alloc-1"]
    assert any("allocation alloc-1 has 8 GPUs" in text for text in watcher.said)
    assert any("compute.num_gpus=8, but this machine has no visible GPU" in text for text in watcher.said)


def test_machines_that_are_handed_in(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(ComputeFactory=COMPUTE + LOOKED_UP)
    services = import_module("ComputeFactory.services")
    mine = services.Held(services.ResourceSpec("gpu", 2, 80))
    options = small(environment="calculator", allocation_id=mine)
    with pytest.raises(ValueError, match="num_gpus=4, but allocation alloc-1 has 2"):
        GRPOTrainer(**options, compute={"num_gpus": 4}).train()
    assert services.released == ["alloc-1"]
    monkeypatch.setattr(services.Held, "release", lambda self: 1 / 0)
    training = Training(TrainingConfig(environment_id="calculator", allocation_id="alloc-1"), watcher=Quiet())
    assert training.config.compute.num_gpus == 8
    training.run.unlock()
    assert training.allocation is not None
    training.allocation.release()  # is told, and raises nothing


def test_the_command(tfactory: Run, project: Path) -> None:
    (project / "factories.yaml").write_text("# ours\ndatasets:  # of the team\n    a: a.jsonl\n")
    assert tfactory("factories", "add", "dataset", "b", "b.jsonl")[:2] == (
        0,
        "factories.yaml: b is b.jsonl\n",
    )
    added = tfactory(
        "factories", "add", "environment", "e", "environment_id=calculator", "training.max_steps=2"
    )
    assert added[0] == 0
    assert (project / "factories.yaml").read_text().startswith('# ours\ndatasets:  # of the team\n    "b": ')
    assert factories.read_entries()["environments"]["e"].training.max_steps == 2
    status, out, err = tfactory("factories", "list")
    assert status == 0 and "a.jsonl" in out and "calculator" in out and "DataFactory is not installed" in err
    found = json.loads(tfactory("factories", "list", "--json")[1])
    assert found["ids"]["datasets"] == {"b": "b.jsonl", "a": "a.jsonl"}
    before = (project / "factories.yaml").read_text()
    for words, told in (
        (["dataset", "a", "c.jsonl"], "already has datasets.a"),
        (["dataset", "c", "a"], "refers to 'a'"),
        (["compute", "c", "num_gpu=1"], "did you mean compute.num_gpus?"),
        (["model", "c", "x", "y"], "invalid target 'x y'"),
    ):
        status, _, err = tfactory("factories", "add", *words)
        assert status == 2 and told in err.replace("\n", " ")
    assert (project / "factories.yaml").read_text() == before
