"""The registry: versions by content, aliases with a history, lineage, and everything that can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.kits.cli import ROOT, Run
from tests.kits.registry import made_run, model_folder
from TrainingFactory.assembly.reward_types import find_reward_model
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.disk import write_checksums
from TrainingFactory.promotion.model_registry import ModelRegistry
from TrainingFactory.registry import store
from TrainingFactory.registry.lineage import list_ancestors, render_tree
from TrainingFactory.resolve import model_names
from TrainingFactory.resolve.model_names import check_original_model, find_model, with_original_model
from TrainingFactory.runs.folder import RunFolder

MLFLOW = ROOT / ".servers" / "mlflow"


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    made_run(tmp_path, "sft", training={"algorithm": "sft", "max_steps": 2})
    return ModelRegistry(runs=tmp_path)


def test_a_version_outlives_its_run(registry: ModelRegistry) -> None:
    run = RunFolder(registry.runs / "sft")
    version = registry.register("agent", "sft", "first", {"team": "search"})
    assert (str(version), version.description, version.tags) == ("agent:1", "first", {"team": "search"})
    files = registry.get_model_folder(version)
    names = {"model.safetensors", "config.json", "tokenizer.json", "SHA256SUMS"}
    assert {path.name for path in files.iterdir()} == names  # nothing of the state of training
    # Not linked: what happens to the run's own files happens to them alone.
    (run.checkpoint_folder(2) / "model.safetensors").write_text("overwritten")
    assert (files / "model.safetensors").read_text() == "sft 2"
    shutil.rmtree(run.path)
    assert registry.verify() == {}
    found = find_model("agent", registry.runs)
    assert (found.folder, found.run and found.run.name) == (files, "agent:1")


def test_equal_models_are_stored_once_and_freed_with_the_last(registry: ModelRegistry) -> None:
    first, second = registry.register("agent", "sft"), registry.register("other", "sft@step-2")
    third = registry.register("agent", "sft@step-1")
    assert first.digest == second.digest != third.digest
    assert len(list(registry.store.path.iterdir())) == 2
    assert registry.delete("agent:1")[1] == 0  # the other model needs it
    assert registry.delete("other:1")[1] > 0
    assert [path.name for path in registry.store.path.iterdir()] == [third.digest]
    assert str(registry.register("agent", "sft")) == "agent:3"  # no number is used again


def test_an_adapter_brings_the_model_under_it(registry: ModelRegistry) -> None:
    made_run(registry.runs, "lora", adapter=True, model={"name": "sft"}, lora={"enabled": True})
    version = registry.register("agent", "lora")
    assert version.base is not None and version.base["digest"]
    shutil.rmtree(registry.runs / "sft")
    shutil.rmtree(registry.runs / "lora")
    found = find_model("agent:1", registry.runs)
    assert found.adapter == str(registry.get_model_folder(version))
    assert (Path(found.name) / "model.safetensors").read_text() == "sft 2"
    again = registry.register("agent", "agent:1")  # a version can be registered again
    assert (again.digest, again.base, again.lineage) == (version.digest, version.base, version.lineage)


def test_aliases_move_and_are_taken_back(registry: ModelRegistry) -> None:
    for step in (1, 2, 2):
        registry.register("agent", f"sft@step-{step}")
    for number in (1, 2, 3):
        registry.set_alias(f"agent:{number}", "champion")
    assert registry.get("agent@champion").number == 3
    assert [registry.rollback("agent", "champion")[0].number for _ in range(2)] == [2, 1]
    with pytest.raises(ValueError, match="cannot roll back"):
        registry.rollback("agent", "champion")
    registry.set_alias("agent:3", "champion")
    assert registry.rollback("agent", "champion") == (registry.get("agent:1"), 3)
    with pytest.raises(ValueError, match="from version 2 to 1"):
        registry.set_alias("agent:3", "champion", expected=2)
    kinds = [row["kind"] for row in registry.decisions("agent")]
    assert kinds == ["alias"] * 3 + ["rollback"] * 2 + ["alias", "rollback"]
    assert registry.remove_alias("agent", "champion") == 1
    assert registry.get("agent@latest").number == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("agent:9", ":1, @champion"),
        ("agent:2", "version 2 of agent was deleted"),
        ("agent@chmpion", "agent has no alias 'chmpion'; did you mean champion?"),
        ("agnt", "there is no such run or model: 'agnt'; did you mean agent?"),
    ],
)
def test_names_that_are_not_there_are_told(registry: ModelRegistry, name: str, text: str) -> None:
    registry.register("agent", "sft")
    registry.register("agent", "sft")
    registry.set_alias("agent:1", "champion")
    registry.delete("agent:2")
    with pytest.raises(ValueError) as told:
        find_model(name, registry.runs)
    assert text in str(told.value)


def test_what_cannot_be_done_changes_nothing(registry: ModelRegistry, tmp_path: Path) -> None:
    registry.register("agent", "sft")
    registry.set_alias("agent:1", "champion")
    before = registry.versions(), registry.decisions("agent")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_text("")
    damaged = RunFolder(tmp_path / "sft").checkpoint_folder(1)
    (damaged / "model.safetensors").write_text("changed")
    for text, attempt in {
        "agent:1: it is agent@champion": lambda: registry.delete("agent:1"),
        "version 7 of agent": lambda: registry.set_alias("agent:7", "champion"),
        "alias 'step-3'": lambda: registry.set_alias("agent:1", "step-3"),
        "model name 'a/b'": lambda: registry.register("a/b", "sft"),
        "model name 'tiny'": lambda: registry.register("tiny", "sft"),
        "is damaged: model.safetensors": lambda: registry.register("agent", "sft@step-1"),
        "no .safetensors": lambda: registry.register("agent", str(tmp_path / "pickled")),
        "cannot register qwen3-4b": lambda: registry.register("agent", "qwen3-4b"),
        "there is no such run or model: 'gone'": lambda: registry.register("agent", "gone"),
    }.items():
        with pytest.raises(ValueError) as told:
            attempt()
        assert text in str(told.value)
    assert (registry.versions(), registry.decisions("agent")) == before


def test_a_changed_or_missing_byte_is_found_and_mended(registry: ModelRegistry) -> None:
    version = registry.register("agent", "sft")
    weights = registry.get_model_folder(version) / "model.safetensors"
    weights.chmod(0o644)
    weights.write_text("sft 3")  # as long as before
    assert registry.verify() == {"agent:1": [f"{weights} is missing or changed"]}
    for use in (lambda: find_model("agent", registry.runs), lambda: registry.export("agent:1", "out")):
        with pytest.raises(ValueError, match="agent:1 is damaged"):
            use()
    weights.unlink()
    assert registry.verify("agent:1") == {"agent:1": [f"{weights} is missing or changed"]}
    registry.register("agent", "sft")  # the same bytes again
    assert registry.verify() == {}
    shutil.rmtree(registry.get_model_folder(version))
    assert registry.verify()["agent:1"] == [f"{registry.get_model_folder(version)} is missing"]


def test_a_model_that_is_swept_away_while_it_is_looked_at_is_stored_again(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, changed = registry.get_model_folder(registry.register("agent", "sft")), store.find_modified_files

    def swept(path: Path, ignored: Collection[str] = ()) -> list[str]:
        found = changed(path, ignored)
        if path == folder:
            monkeypatch.setattr(store, "find_modified_files", changed)
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(store, "find_modified_files", swept)
    registry.register("agent", "sft")
    assert folder.is_dir() and registry.verify() == {}


def test_links_in_the_store_are_removed_and_block_nothing(registry: ModelRegistry, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    version = registry.register("agent", "sft")
    (registry.store.path / "left").mkdir()
    (registry.store.path / "left" / "dangling").symlink_to("nowhere")
    (registry.store.path / "link").symlink_to(tmp_path / "others")
    assert str(registry.register("agent", "sft@step-1")) == "agent:2"
    assert registry.delete("agent:1")[1] > 0
    registry.get_model_folder(version).symlink_to("nowhere")  # in place of the model
    assert str(registry.register("agent", "sft")) == "agent:3" and registry.verify() == {}
    assert len(list(registry.store.path.iterdir())) == 2 and (tmp_path / "others" / "file").exists()
    stored = registry.get_model_folder(version) / "tokenizer.json"
    shutil.move(stored, tmp_path / "moved.json")
    stored.symlink_to(tmp_path / "moved.json")
    assert "is a link" in registry.verify("agent:3")["agent:3"][0]


def test_a_model_is_not_registered_with_files_from_elsewhere(registry: ModelRegistry, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("hunter2")
    folder = model_folder(tmp_path / "model", "weights")
    (folder / "same.json").symlink_to("tokenizer.json")
    registry.register("agent", folder)
    (folder / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"vocab\.txt is a link to .*secret\.txt"):
        registry.register("agent", folder)
    assert [str(version) for version in registry.versions()] == ["agent:1"]
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"  # as huggingface_hub has it
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for path in model_folder(snapshot, "hub").iterdir():
        shutil.move(path, blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    version = registry.register("agent", snapshot)
    assert (registry.get_model_folder(version) / "model.safetensors").read_text() == "hub"


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("digest", "../..", "'../..'"),
        ("base", '{"name": "x", "digest": "../.."}', "'../..'"),
        ("lineage", '{"run": ', "Expecting value"),
        ("lineage", "{}", "incomplete lineage"),
        ("lineage", "[]", "list"),
    ],
)
def test_a_damaged_row_is_named_and_reaches_no_other_folder(
    registry: ModelRegistry, column: str, value: str, text: str
) -> None:
    version = registry.register("agent", "sft")
    with sqlite3.connect(registry.path) as db:
        db.execute(f"UPDATE versions SET {column} = ?", (value,))
    for use in (
        registry.versions,
        registry.remove_unused_files,
        lambda: registry.register("other", "sft@step-1"),
    ):
        with pytest.raises(ValueError, match=r"version 1 of 'agent' in .*\.sqlite is damaged: ") as found:
            use()
        assert text in str(found.value)
    assert (registry.get_model_folder(version) / "model.safetensors").exists()


def test_registries_of_others_are_left_alone(registry: ModelRegistry, tmp_path: Path) -> None:
    registry.register("agent", "sft")
    with sqlite3.connect(registry.path) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(ValueError, match=r"schema 9, .* only 1\. Nothing was changed"):
        registry.register("agent", "sft")
    with sqlite3.connect(tmp_path / "other.sqlite") as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to be read as one " * 20)
    for file in ("other", "text"):
        with pytest.raises(ValueError, match=r"another program|not a registry"):
            ModelRegistry(tmp_path / f"{file}.sqlite", tmp_path).register("agent", "sft")
    assert ModelRegistry(tmp_path / "new.sqlite").versions() == []
    assert not (tmp_path / "new.sqlite").exists()  # nothing is made by looking


def test_a_full_disk_leaves_what_was_there(registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register("agent", "sft")

    def full(source: Path, target: Path) -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_copy_file", full)
    with pytest.raises(OSError, match=r"cannot copy .*: No space left on device. Nothing registered"):
        registry.register("agent", "sft@step-1")
    monkeypatch.undo()
    assert [str(version) for version in registry.versions()] == ["agent:1"]
    assert len(list(registry.store.path.iterdir())) == 1
    assert str(registry.register("agent", "sft@step-1")) == "agent:2"


def test_lineage_goes_back_to_the_base_model(registry: ModelRegistry, tmp_path: Path) -> None:
    registry.register("agent", "sft")
    made_run(tmp_path, "rl", model={"name": "agent:1"}, reward={"type": "rule_based"})
    version = registry.register("agent", "rl@step-1")
    registry.delete("agent:1")  # its children remember it
    shutil.rmtree(tmp_path / "sft")
    nodes = list_ancestors(version.lineage)
    assert [(node["run"], node["step"]) for node in nodes] == [("sft", 2), ("rl", 1)]
    assert nodes[0]["version"] == "agent:1"
    lines = render_tree(version.lineage, str(version))
    assert lines[0] == "builtin:tiny" and lines[-1].strip() == "└─ agent:2"
    text = "\n".join(lines)
    for part in (
        "sft on search: run sft, step 2, registered as agent:1",
        "reward: rule_based",
        "tools: search",
    ):
        assert part in text
    assert (", commit " in text) == bool(nodes[0]["about"]["commit"])


def test_a_run_goes_on_from_the_version_that_an_alias_named_then(registry: ModelRegistry) -> None:
    version = registry.register("agent", "sft")
    registry.set_alias("agent:1", "champion")
    run = made_run(registry.runs, "rl", model={"name": "agent@champion"})
    registry.register("agent", "sft@step-1")
    registry.set_alias("agent:2", "champion")
    assert run.run_info["model"]["version"] == "agent:1" and run.config.model.name == "agent@champion"
    check_original_model(run)
    assert with_original_model(run).model.name == str(registry.get_model_folder(version).resolve())
    registry.delete("agent:1")
    with pytest.raises(ValueError, match=r"run rl was started from agent@champion, .* missing"):
        check_original_model(run)


def test_a_reward_model_can_be_a_registered_one(registry: ModelRegistry) -> None:
    folder = RunFolder(registry.runs / "sft").checkpoint_folder(2)
    (folder / "scalar_head.safetensors").write_text("head")
    (folder / "reward_model.json").write_text('{"kind": "outcome"}')
    (folder / "SHA256SUMS").unlink()
    write_checksums(folder)
    version = registry.register("scorer", "sft")
    config = TrainingConfig(logging={"output_dir": str(registry.runs)})
    assert find_reward_model("scorer:1", config).folder == registry.get_model_folder(version)
    with pytest.raises(ValueError, match="version 2 of scorer"):
        find_reward_model("scorer:2", config)


def test_the_records_of_a_run_come_along(registry: ModelRegistry) -> None:
    run = RunFolder(registry.runs / "sft")
    for step in (1, 2):
        run.append("evaluations.jsonl", {"model": {"step": step}, "metrics": {"success": step / 4}})
    registry.register("agent", "sft")
    assert [each["metrics"]["success"] for each in registry.evaluations("agent:1")] == [0.5]


def test_a_folder_for_the_hub_has_a_card(registry: ModelRegistry, tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base", "base")
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    made_run(tmp_path, "rl", model={"name": str(base)})
    record = {
        "model": {"step": 2},
        "suite": "release",
        "metrics": {"success": 0.5, "success_low": 0.4, "success_high": 0.6},
    }
    RunFolder(tmp_path / "rl").append("evaluations.jsonl", record)
    version = registry.register("agent", "rl", "good at search")
    done = registry.export("agent", tmp_path / "out")
    page = (done.path / "README.md").read_text()
    head = page.split("---")[1]
    assert "license: mit" in head and "library_name: transformers" in head
    for part in (
        "# agent:1",
        "good at search",
        version.digest,
        "| release | 0.500 (0.400 to 0.600) |",
        "run rl",
    ):
        assert part in page
    assert (done.path / "model.safetensors").read_text() == "rl 2"
    assert json.loads((done.path / "lineage.json").read_text())["run"] == "rl"


def test_commands(registry: ModelRegistry, tfactory: Run, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        status, out, err = tfactory("registry", *arguments, "--runs", str(tmp_path))
        assert status == 0, err
        return out

    text = said("register", "agent", "sft", "--alias", "champion")
    assert "agent:1" in text and "agent@champion" in text
    said("register", "agent", "sft@step-1", "--tag", "team=search")
    assert "agent@champion is agent:2; it was agent:1" in said("alias", "agent:2", "champion")
    rows = json.loads(said("list", "--json"))["models"][0]["versions"]
    assert [(row["version"], row["aliases"]) for row in rows] == [("agent:1", []), ("agent:2", ["champion"])]
    shown = said("show", "agent@champion", "--lineage")
    assert "builtin:tiny" in shown and "run sft, step 1" in shown
    assert json.loads(said("show", "agent:2", "--json"))["lineage"][-1]["name"] == "sft"
    assert "agent@champion is agent:1 again" in said("rollback", "agent")
    assert "deleted agent:2" in said("delete", "agent:2")
    assert "1 version: " in said("verify")
    for arguments, text in [
        (["show", "agnt"], "did you mean agent?"),
        (["delete", "agent"], "agent:2"),
        (["register", "agent", "sft", "--tag", "x"], "KEY=VALUE"),
        (["export", "agent", "again", "--to", "recipe"], '"recipe"'),
    ]:
        status, _, err = tfactory("registry", *arguments, "--runs", str(tmp_path))
        assert status == 2 and text in " ".join(err.split())
    next(registry.store.path.glob("*/model.safetensors")).unlink()
    status, _, err = tfactory("registry", "verify", "--runs", str(tmp_path))
    assert status == 1 and "missing or changed" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.skipif(not (MLFLOW / "mlflow").is_dir(), reason="MLflow is not installed: make servers")
def test_an_export_arrives_in_a_real_mlflow(registry: ModelRegistry, tmp_path: Path) -> None:
    run = RunFolder(registry.runs / "sft")
    run.append(
        "evaluations.jsonl", {"model": {"step": 2}, "suite": "s", "metrics": {"success": 0.5, "pass^2": 0.25}}
    )
    version = registry.register("agent", "sft", "first", {"team": "search"})
    registry.set_alias("agent:1", "champion")
    program = f"""
from TrainingFactory.promotion.model_registry import ModelRegistry
from mlflow import MlflowClient, artifacts
uri = "sqlite:///{tmp_path}/mlflow.db"
registry = ModelRegistry(runs={str(tmp_path)!r})
names = [registry.export_to_mlflow("agent@champion", uri) for _ in range(2)]
client = MlflowClient(uri, uri)
found = client.get_model_version_by_alias("agent", "champion")
metrics = client.get_run(found.run_id).data.metrics
import json, mlflow
mlflow.set_tracking_uri(uri)
folder = artifacts.download_artifacts("models:/agent@champion")
print(json.dumps([names, found.tags, found.description, metrics, folder]))
"""
    paths = os.pathsep.join([str(ROOT), str(MLFLOW)])
    quiet = {"PYTHONPATH": paths, "HOME": str(tmp_path), "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=os.environ | quiet
    )
    assert done.returncode == 0, done.stderr
    names, tags, description, metrics, folder = json.loads(done.stdout.splitlines()[-1])
    assert names == ["models:/agent/1", "models:/agent/2"] and description == "first"
    assert tags == {"team": "search", "tfactory.version": "agent:1", "tfactory.digest": version.digest}
    assert metrics == {"s/success": 0.5, "s/pass_all_2": 0.25}
    assert (Path(folder) / "model.safetensors").read_text() == "sft 2"
    assert "# agent:1" in (Path(folder) / "README.md").read_text()


def test_without_mlflow_the_way_to_get_it_is_told(registry: ModelRegistry) -> None:
    if "mlflow" in sys.modules:
        pytest.skip("MLflow is here")
    registry.register("agent", "sft")
    with pytest.raises(ValueError, match="pip install 'training-factory\\[mlflow\\]'"):
        registry.export_to_mlflow("agent", "sqlite:///x.db")


def test_what_was_read_is_not_read_again(registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    first, read = find_model("sft", registry.runs), list[Path]()
    monkeypatch.setattr(model_names, "find_modified_files", lambda folder, **_: read.append(folder) or [])
    assert find_model("sft", registry.runs).folder == first.folder and not read
