"""The config: the seeds' forms load, and everything that can be wrong is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from TrainingFactory.algorithms.correction import Correction
from TrainingFactory.assembly.learner import compute_importance_cap, make_algorithm
from TrainingFactory.assembly.rewards import check_reward
from TrainingFactory.config import ConfigError, TrainingConfig, load_config
from TrainingFactory.config.names import ALIASES, SHORT_KEYS
from TrainingFactory.config.not_yet import UNIMPLEMENTED_OPTIONS
from TrainingFactory.config.problems import map_fields
from TrainingFactory.trainers.notices import list_notices, list_unused_options

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FIXTURES = CONFIGS.parent / "tests" / "fixtures"
SEED_CONFIG = CONFIGS / "qwen3_grpo.yaml"
# nine lines that stand for 10^9 values
BOMB = "a0: &a0 [" + "x, " * 9 + "x]\n"
BOMB += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))


def list_problems(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"model": "Qwen3-4B", "environment_id": "env_search", "reward_function": "rule_based",
             "tools": ["search", "calculator"]},
            {"model.name": "Qwen3-4B", "environment.environment_id": "env_search", "reward.type": "rule_based",
             "tools.0.name": "search", "tools.1.name": "calculator"},
        ),
        (  # the names of the HelloAgents text
            {"model_name": "Qwen/Qwen2-0.5B-Instruct", "output_dir": "./output/custom", "num_train_epochs": 3,
             "per_device_train_batch_size": 4, "learning_rate": 5e-5, "use_lora": True, "lora_r": 16},
            {"model.name": "Qwen/Qwen2-0.5B-Instruct", "logging.output_dir": "./output/custom",
             "training.num_epochs": 3, "training.batch_size": 4, "training.learning_rate": 5e-5,
             "lora.enabled": True, "lora.r": 16},
        ),
        (  # paths are welcome in Python
            {"data": {"tasks": Path("a") / "b.jsonl"}, "model": Path("checkpoint")},
            {"data.tasks": str(Path("a") / "b.jsonl"), "model.name": "checkpoint"},
        ),
    ],
)  # fmt: skip
def test_short_forms_and_other_names(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = TrainingConfig(**given)
    assert {key: at(config, key) for key in expected} == expected


SEED = {
    "model.name": "Qwen/Qwen3-4B-Instruct",
    "model.max_length": 4096,
    "training.learning_rate": 1e-6,
    "training.num_epochs": 100,
    "environment.environment_id": "env_search_v1",
    "tools.0.config": "tools/search.json",
    "tools.0.cache_enabled": True,
    "reward.step_rewards": {"correct_tool": 0.5, "clear_reasoning": 0.3, "efficient_path": 0.2},
    "optimization.async_rollout": True,
    "optimization.tool_cache": True,
}


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        (None, {}),  # the seed's YAML as it stands
        ("training.learning_rate=3E-4", {"training.learning_rate": 3e-4}),
        ("tools.0.name=lookup", {"tools.0.name": "lookup"}),
        ("tools.1=calculator", {"tools.1.name": "calculator"}),
        ("model=builtin:tiny", {"model.name": "builtin:tiny"}),
        ("environment.name=weather.py:Weather", {"environment.environment_id": "weather.py:Weather"}),
        (
            "reward.step_rewards.correct_tool=1",
            {"reward.step_rewards": SEED["reward.step_rewards"] | {"correct_tool": 1}},
        ),
        ("logging.trackers=[wandb]", {"logging.trackers": ["wandb"]}),
        ("data.tasks=", {"data.tasks": None}),
    ],
)
def test_the_seeds_yaml_with_overrides(override: str | None, changed: dict[str, Any]) -> None:
    """The rest stays as it stands."""
    config = load_config(SEED_CONFIG, [override] if override else [])
    expected = SEED | changed
    assert {key: at(config, key) for key in expected} == expected


@pytest.mark.parametrize("path", sorted((CONFIGS / "templates").glob("*.yaml")), ids=lambda path: path.name)
def test_the_templates_are_right(path: Path) -> None:
    config = load_config(path)
    check_reward(config)
    assert list_notices(config) == [] and list_unused_options(config) == []


def test_every_alias_leads_to_a_key() -> None:
    keys = map_fields(TrainingConfig)
    assert set(ALIASES.values()) <= keys.keys()
    assert {f"{section}.{key}" for section, key in SHORT_KEYS.items()} <= keys.keys()
    assert UNIMPLEMENTED_OPTIONS.keys() <= keys.keys()


def test_a_config_survives_its_own_dump() -> None:
    config = load_config(SEED_CONFIG, ["data.tasks=tasks.jsonl"])
    assert TrainingConfig(**json.loads(json.dumps(config.model_dump()))) == config


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "+1e-6", "0.000001", "10e-7", "1.e-6"])
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str) -> None:
    assert load_config(None, [f"learning_rate={text}"]).training.learning_rate == pytest.approx(1e-6)
    path = written(tmp_path, f"training:\n  learning_rate: {text}\n")
    assert load_config(path).training.learning_rate == pytest.approx(1e-6)


def test_all_problems_at_once_with_file_line_key_value_and_the_right_name(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "model:\n  dtype: fp32\n  nme: x\n"
        "trainng: {}\n"
        "training:\n  batch_size: -3\n  group_size: '8'\n  temperature: 1\n"
        "tools:\n  - nam: search\n",
    )
    found = list_problems(path, "environment.max_turns=0", "sampling.top_p=2")
    assert found == [
        f"{path}:2: model.dtype: must be one of auto, float32, bfloat16, float16; did you mean float32?"
        ' (got "fp32")',
        f'{path}:3: model.nme: unknown key; did you mean model.name? (got "x")',
        f"{path}:4: trainng: unknown key; did you mean training? (got a mapping)",
        f"{path}:6: training.batch_size: must be greater than or equal to 1 (got -3)",
        f'{path}:7: training.group_size: must be a valid integer (got "8")',
        f"{path}:8: training.temperature: unknown key; did you mean sampling.temperature? (got 1)",
        f"{path}:10: tools.0.name: is missing",
        f'{path}:10: tools.0.nam: unknown key; did you mean tools.0.name? (got "search")',
        "command line: environment.max_turns: must be greater than or equal to 1 (got 0)",
        "command line: sampling.top_p: must be less than or equal to 1 (got 2)",
    ]


def test_keys_that_are_guessed_name_what_to_write() -> None:
    (found,) = list_problems(None, "reward.function=my.py:score")
    assert "reward.options.function=FILE.py:NAME" in found
    ours = ["reward.type=function", "reward.options.function=my.py:score"]
    assert load_config(None, ours).reward.options == {"function": "my.py:score"}


def test_python_users_get_the_same_error() -> None:
    with pytest.raises(
        ConfigError, match=r"2 problems:\n  training.batch_size.*\n  trainin: .*mean training\?"
    ):
        TrainingConfig(training={"batch_size": 0}, trainin={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must contain sections"),
        ("# nothing\n", "must contain sections"),
        ("- a\n", "must contain sections"),
        ("just text", "must contain sections"),
        ("a: [1\n", ":2: is not valid YAML"),
        ("a: b: c\n", ":1: is not valid YAML"),
        ("a: 1\n---\nb: 2\n", ":2: is not valid YAML"),
        ("a: !!python/object:os.system x\n", "is not valid YAML"),
        ("a: \x00\n", "cannot be read: unacceptable character"),
        ("? [a]\n: b\n", "is not valid YAML"),
        ("model: &m {name: *m}\n", "too large at line 1"),
        (BOMB, "at most 50 levels and 100000 values"),
        ("tools: " + "[" * 100_000, "too large at line 1"),
        ("a: &a {b: 1}\nc: *a\nd: *e\n", ":3: is not valid YAML: found undefined alias 'e'"),
        (
            f"training:\n  seed: {'9' * 5000}\n",
            ":2: is not valid YAML: cannot parse a value as an integer of",
        ),
        (f"training:\n  seed: 0x{'f' * 5000}\n", "an integer of at most 100 digits"),
        ("training:\n  seed: !!int abc\n", ":2: is not valid YAML: cannot parse a value as an integer"),
        ("training:\n  seed: !!int ''\n", ":2: is not valid YAML: cannot parse a value as an integer"),
        ("training:\n  seed: !!bool abc\n", ":2: is not valid YAML: cannot parse a value as bool"),
        ("environment:\n  options: {a: !!timestamp abc}\n", ":2: is not valid YAML: cannot parse a value as"),
        ("environment:\n  options: {a: !!binary aGVs}\n", ":2: is not valid YAML: cannot parse a value as"),
        ("training:\n  seed: 1\n  seed: 2\n", ":3: training.seed: duplicate key in lines 2 and 3"),
        ("sampling: 4\n", "must be a section with the keys engine, temperature"),
        ("training:\n  learning_rate: .inf\n", "finite"),
        ("epochs: 1\ntraining: {num_epochs: 2}\n", "alias of training.num_epochs"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, expected: str) -> None:
    path = written(tmp_path, text)
    found = list_problems(path)
    assert len(found) == 1
    assert expected in found[0] and str(path) in found[0]


@pytest.mark.parametrize("date", ["2024-01-31", "2024-13-45", "2001-12-14t21:59:43.10-05:00"])
def test_dates_are_texts(tmp_path: Path, date: str) -> None:
    config = load_config(
        written(tmp_path, f"environment:\n  options: {{since: {date}}}\n"), [f"data.tasks={date}"]
    )
    assert (config.environment.options, config.data.tasks) == ({"since": date}, date)


def test_aliases_may_be_used(tmp_path: Path) -> None:
    path = written(
        tmp_path, "model: &m {name: a}\nlora: {<<: &l {r: 4}}\ntraining: {seed: &s 5, max_steps: *s}\n"
    )
    config = load_config(path)
    assert (config.model.name, config.lora.r, config.training.max_steps) == ("a", 4, 5)


def test_places_that_are_no_file(tmp_path: Path) -> None:
    written(tmp_path, "model: tiny\n")
    assert list_problems(tmp_path / "rum.yaml")[0].endswith(f"did you mean {tmp_path / 'run.yaml'}?")
    assert "cannot be read: [Errno 21] Is a directory" in list_problems(tmp_path)[0]
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read: 'utf-8' codec" in list_problems(tmp_path / "run.yaml")[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo", "expected key=value"),
        ("=3", "expected key=value"),
        ("model.name=[", "not valid YAML"),
        (f"training.seed={'9' * 5000}", "command line: training.seed: the value is not valid YAML"),
        ("tools.3.name=x", "no such list entry"),
        ("tools.name=x", "tools"),
        ("model.name.deeper=x", "model.name"),
        ("a.b.c=1", "command line: a: unknown key"),
    ],
)
def test_wrong_overrides(override: str, expected: str) -> None:
    assert any(expected in problem for problem in list_problems(None, override))


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "model:\n  # name: x\ntools:\n")) == TrainingConfig()


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "logging:\n  wandb_api_key: hunter2\n  other: hf_hunter2hunter2\n  deep: {x: hunter2}\n"
        "model:\n  password: [hunter2]\n  device: http://me:hunter2@host\n",
    )
    found = list_problems(path, "hf_token=hunter2")
    assert len(found) == 6 and "hunter2" not in "".join(found)
    path.write_text("api_key: hunter2: x\n")
    assert "hunter2" not in list_problems(path)[0]
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(api_key="hunter2")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    # counts of tokens are none
    assert list_problems(None, "sampling.max_tokens=0")[0].endswith("or equal to 1 (got 0)")


def test_what_is_not_there_yet_is_said() -> None:
    said = list_notices(load_config(SEED_CONFIG))
    assert said == []  # everything that it asks for is done
    assert list_notices(TrainingConfig()) == []
    assert list_notices(TrainingConfig(optimization={"async_rollout": False})) == []


def test_options_for_several_processes_are_reported_in_a_run_of_one() -> None:
    said = list_unused_options(
        TrainingConfig(optimization={"offload_reference": True}, compute={"gpus_per_learner": 1.0})
    )
    assert [line.split(":")[0] for line in said] == [
        "compute.gpus_per_learner",
        "optimization.offload_reference",
    ]


def test_what_a_run_does_not_use_is_said() -> None:
    assert list_unused_options(TrainingConfig()) == list_unused_options(load_config(SEED_CONFIG)) == []
    rows = TrainingConfig(algorithm="sft", data={"dataset": "d.jsonl"}, environment={"num_workers": 4})
    assert [line.split(":")[0] for line in list_unused_options(rows)] == ["environment.num_workers"]
    config = TrainingConfig(
        algorithm="dpo",
        grpo={"kl": 0.1, "refill": 2},
        ppo={"gamma": 1.0},  # as it is anyway
        group_size=4,
        sampling={"max_tokens": 9},
        data={"heldout": "x.jsonl", "heldout_count": 3},
        lora_r=4,
    )
    wanted = [
        "grpo.kl, grpo.refill: options of grpo, but this run trains with dpo",
        "training.group_size: dpo samples no groups of episodes",
        "sampling.max_tokens: dpo samples only with an environment and training.eval_every",
        "data.heldout, data.heldout_count: nothing is evaluated without training.eval_every",
        "lora.r: there is no adapter without lora.enabled=true",
    ]
    assert list_unused_options(config) == wanted
    # The config of a run has every key; it is no different.
    assert list_unused_options(TrainingConfig(**config.model_dump())) == wanted
    used: dict[str, Any] = {"environment": "search", "sampling": {"max_tokens": 9}, "data": {"heldout": "x"}}
    used |= {"training": {"algorithm": "dpo", "eval_every": 5}, "use_lora": True, "lora_r": 4}
    assert list_unused_options(TrainingConfig(**used)) == []
    used["training"] = {"algorithm": "ppo", "eval_every": 5, "group_size": 2}
    assert list_unused_options(TrainingConfig(**used, ppo={"gamma": 0.9})) == []
    used = {"algorithm": "sft", "environment": "search", "sampling": {"max_reply_tokens": 9}}
    assert list_unused_options(TrainingConfig(**used)) == []


@pytest.mark.parametrize(
    ("sections", "cap"),
    [
        ({}, None),
        ({"optimization": {"importance_cap": 1.5}}, 1.5),
        ({"sampling": {"engine": "vllm"}}, 2.0),
        ({"compute": {"backend": "ray"}, "algorithm": "ppo"}, 2.0),
        ({"compute": {"backend": "ray"}, "algorithm": "dpo"}, None),
        ({"optimization": {"async_rollout": True}, "algorithm": "rft"}, 2.0),
        ({"optimization": {"async_rollout": True, "max_staleness": 0}}, None),
        ({"optimization": {"max_staleness": 3}}, None),
    ],
)
def test_what_the_learner_did_not_sample_is_weighted(sections: dict[str, Any], cap: float | None) -> None:
    sections = {"algorithm": "grpo"} | sections
    sections["optimization"] = sections.get("optimization", {}) | {"importance_by": "sequence"}
    sections["optimization"] |= {"importance_mask": [0.5, 3]}
    config = TrainingConfig(**sections)
    assert compute_importance_cap(config) == cap
    made: Any = make_algorithm(config)
    found = getattr(made, "correction", None)
    older = config.optimization.async_rollout
    assert found == (None if cap is None else Correction(cap, "sequence", (0.5, 3), older))
    [said] = [line for line in list_unused_options(config) if "importance" in line] if cap is None else [""]
    assert said.startswith("optimization.importance_by, optimization.importance_mask: ") or cap is not None


@pytest.mark.parametrize("mask", [[2.0, 0.5], [1.5, 2.0], [-1.0, 2.0], [0.5], [0.5, 2.0, 3.0]])
def test_a_mask_is_around_one(mask: list[float]) -> None:
    with pytest.raises(ValueError, match=r"optimization\.importance_mask"):
        TrainingConfig(optimization={"importance_mask": mask})


def test_the_cap_has_moved_and_its_old_place_is_read(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "grpo:\n  importance_cap: 1.5\n  kl: 0.1\n"))
    assert config.optimization.importance_cap == 1.5 and config.grpo.kl == 0.1
    assert load_config(None, ["grpo.importance_cap=3.0"]).optimization.importance_cap == 3.0
    assert load_config(FIXTURES / "run_before" / "config.yaml").optimization.importance_cap is None
    twice = "grpo: {importance_cap: 1.5}\noptimization: {importance_cap: 2.0}\n"
    with pytest.raises(ValueError, match=r"alias of optimization\.importance_cap"):
        load_config(written(tmp_path, twice))
    with pytest.raises(ValueError, match=r"run.yaml:2: optimization\.importance_cap: must be greater than 0"):
        load_config(written(tmp_path, "grpo:\n  importance_cap: 0.0\n"))


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainingConfig().training.batch_size = -1  # type: ignore[misc]


def test_tools_on_a_cluster_need_one() -> None:
    asked = {
        "environment": {"num_workers": 4},
        "tools": [{"name": "calculator"}, {"name": "x.py", "remote": True}],
    }
    text = "tools.1.remote: without compute.backend=ray tools run in the run's process"
    assert list_unused_options(TrainingConfig(**asked)) == [text]
    assert list_unused_options(TrainingConfig(**asked, compute={"backend": "ray"})) == []


@pytest.mark.parametrize(
    ("name", "option"), [("orpo", "dpo dpo.loss_kind=orpo"), ("rloo", "grpo grpo.advantage=rloo")]
)
def test_the_name_of_a_loss_as_an_algorithm_leads_to_its_option(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"set training.algorithm={option}"):
        load_config(None, [f"training.algorithm={name}"])
