"""The form: what it offers is what the schema takes, and what it refuses is what the command refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.kits.registry import made_run
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.problems import ConfigError, map_fields
from TrainingFactory.web import form
from TrainingFactory.web.form import Draft

CONFIGS = Path(__file__).parents[2] / "configs"


def check(draft: Draft, runs: Path = Path("runs")) -> form.DraftCheck:
    return form.check_draft(draft, runs)


def test_every_option_is_there_with_its_help_and_default() -> None:
    found = {option.key: option for section in form.list_options().sections for option in section.options}
    keys = (".".join(key.split(".")[:2]) for key in map_fields(TrainingConfig))
    wanted = {key for key in keys if not key.startswith("tools.")} | {"tools"}
    assert found.keys() == wanted
    assert all(option.help for option in found.values())
    given = form.flatten_options(TrainingConfig())
    assert {key: option.default for key, option in found.items()} == given
    assert found.keys() >= form.COMMON_OPTIONS


def test_kinds_and_ranges_are_those_of_the_schema() -> None:
    found = {option.key: option for section in form.list_options().sections for option in section.options}
    rate, steps = found["training.learning_rate"], found["training.max_steps"]
    assert (rate.kind, rate.least, rate.above, rate.nullable) == ("number", 0, True, False)
    assert (steps.kind, steps.least, steps.nullable, steps.default) == ("integer", 1, True, None)
    assert found["training.algorithm"].kind == "choice" and "dpo" in (
        found["training.algorithm"].choices or []
    )
    assert [found[key].kind for key in ("lora.enabled", "reward.options", "logging.trackers", "model.name")] == [
        "switch", "map", "list", "text"
    ]  # fmt: skip
    assert "search" in (found["environment.environment_id"].choices or [])
    assert (found["sampling.top_p"].least, found["sampling.top_p"].most) == (0, 1)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_templates_go_through_the_form_unchanged(path: Path) -> None:
    first = check(Draft(yaml=path.read_text()))
    own = {"data.dataset", "data.tasks", "data.heldout", "model.name"}  # of the user, and not there
    assert {each.key for each in first.problems} <= own
    assert (
        form.read_draft(Draft(options=first.options))
        == load_config(path)
        == form.read_draft(Draft(yaml=first.yaml))
    )
    assert set(yaml.safe_load(first.yaml) or {}) <= set(TrainingConfig.model_fields)


def test_mistakes_stand_at_their_keys() -> None:
    found = check(Draft(yaml="model: x\ntraining:\n  batch_size: many\n  lerning_rate: 1\n")).problems
    assert [(each.key, each.line) for each in found] == [
        ("training.batch_size", 3),
        ("training.lerning_rate", 4),
    ]
    assert "did you mean training.learning_rate" in found[1].message
    found = check(Draft(options={"training.max_steps": 0, "sampling.top_p": 2.0})).problems
    assert [each.key for each in found] == ["training.max_steps", "sampling.top_p"]
    [broken] = check(Draft(yaml="model: [")).problems
    assert broken.key == "" and "not valid YAML" in broken.message and "/" not in broken.message
    assert check(Draft(yaml="- a\n- b")).problems
    assert check(Draft(yaml="&a [*a, *a]")).problems


def test_options_override_the_text_and_secrets_stay_out() -> None:
    draft = Draft(
        yaml="training: {max_steps: 5}", options={"training.max_steps": 7, "tools": [{"name": "sql"}]}
    )
    config = form.read_draft(draft)
    assert (config.training.max_steps, config.tools[0].name) == (7, "sql")
    with pytest.raises(ConfigError, match="contains a secret"):
        form.read_draft(Draft(options={"reward.options": {"api_key": "sk-abcdefghijkl"}}))
    assert check(Draft(yaml="lora: {r: 4}")).notices == [
        "lora.r: there is no adapter without lora.enabled=true"
    ]


def test_starts_are_templates_and_runs(tmp_path: Path) -> None:
    found = form.list_starting_points(tmp_path)
    assert "tiny_sft" in [each.name for each in found.templates] and all(
        each.what for each in found.templates
    )
    assert found.runs == [] and form.read_draft(Draft(yaml=found.empty)) == TrainingConfig()


def test_names_that_lead_nowhere_stand_at_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "elsewhere"
    made_run(runs, "mine")
    wrong = """
model: {name: mime}
environment: {environment_id: serch}
data: {heldout: gone.jsonl}
reward: {type: rule_based, options: {rule: exatc}}
"""
    told = check(Draft(yaml=wrong), runs)
    found = {each.key: each for each in told.problems}
    assert {key: each.line for key, each in found.items()} == {
        "model.name": 2, "environment.environment_id": 3, "data.heldout": 4, "reward.options.rule": 5,
    }  # fmt: skip
    assert "did you mean mine?" in found["model.name"].message
    assert "did you mean search?" in found["environment.environment_id"].message
    assert told.options["model.name"] == "mime" and "serch" in told.yaml  # the form goes on showing it
    (tmp_path / "homes.py").write_text("raise SystemExit('a form runs nothing')")
    (tmp_path / "factories.yaml").write_text("environments: {shop: homes.py}\n")
    for name in ("homes.py:Homes", "shop", "reasoning_gym/any", "env_search"):
        draft = Draft(options={"model.name": "mine@best", "environment.environment_id": name})
        assert check(draft, runs).problems == []
    [missing] = check(Draft(options={"environment.environment_id": "house.py"}), runs).problems
    assert "there is no file house.py" in missing.message
    draft = Draft(options={"model.name": "mine", "environment.environment_id": "search"})
    assert [each.key for each in check(draft, tmp_path).problems] == ["model.name"]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("model: builtin:tiny", "environment.environment_id", "no environment is named"),
        ("training: {algorithm: sft}", "environment.environment_id", "no environment is named"),
        ("tools: [calculator]", "data.tasks", "data.tasks=FILE"),
        ("training: {algorithm: dpo}", "", "data.dataset=FILE"),
        ("environment: search\ntraining: {group_size: 1}", "", "training.group_size=1"),
        ("environment: search\ndata: {dataset: rows.jsonl}", "", "not on a dataset"),
    ],
)
def test_a_config_that_cannot_start_has_a_problem(
    text: str, key: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}")
    [problem] = check(Draft(yaml=text)).problems
    assert problem.key == key and message in problem.message


def test_a_folder_that_a_run_will_not_be_in_is_told(tmp_path: Path) -> None:
    draft = Draft(options={"logging.output_dir": str(tmp_path / "other")})
    [told] = check(draft, tmp_path / "runs").notices
    assert told.startswith("logging.output_dir: ") and str(tmp_path / "runs") in told
    assert check(draft, tmp_path / "other").notices == check(Draft(), tmp_path).notices == []


def test_a_template_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gone.yaml").symlink_to(tmp_path / "moved.yaml")
    monkeypatch.chdir(tmp_path)
    found = {each.name: each.what for each in form.list_starting_points(tmp_path).templates}
    assert found["gone"].startswith("Cannot read") and "tiny_sft" in found
