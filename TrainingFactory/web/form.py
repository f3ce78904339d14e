"""The web form of a config: all options with type, range and help text from the schema, and the validation of
drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.environment import check_environment_name, make_environment
from TrainingFactory.assembly.rewards import check_reward
from TrainingFactory.common import catalog
from TrainingFactory.common.options import show_value
from TrainingFactory.common.starters import find_starter_root
from TrainingFactory.common.texts import iter_secrets, replace_surrogates
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.problems import ConfigError, Problem, dotted
from TrainingFactory.config.schema import ALGORITHMS, get_sections
from TrainingFactory.data.datasets import is_path, read_rows
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.resolve.factories import resolve_ids
from TrainingFactory.resolve.model_names import with_resolved_model
from TrainingFactory.runs.folder import SECRET_IN_CONFIG, list_runs
from TrainingFactory.trainers.notices import list_notices, list_unused_options
from TrainingFactory.training.dataset import make_tasks
from TrainingFactory.training.preflight import check_options

InputKind = Literal["text", "number", "integer", "switch", "choice", "list", "map"]
INPUT_KIND_BY_TYPE: dict[str, InputKind] = {
    "boolean": "switch", "integer": "integer", "number": "number", "string": "text", "array": "list", "object": "map"
}  # fmt: skip
HELP_TEXTS = {
    "model": "The model to train.", "training": "Algorithm, number of steps and batch sizes.",
    "environment": "Where episodes are played.", "reward": "How episodes are scored.",
    "tools": "Tools in addition to the environment's own.", "sampling": "How turns are sampled.",
    "optimization": "Asynchronous sampling, caches, rewards in other processes.",
    "compute": "This machine or a cluster.", "data": "Tasks and datasets.",
    "lora": "Train a LoRA adapter instead of all weights.", "logging": "Checkpoints, metrics and where they are saved.",
    "registry": "Registration of the model when the run finishes.",
}  # fmt: skip
# Options that most runs set; the others are shown on demand.
COMMON_OPTIONS = set(
    "model.name training.algorithm training.max_steps training.num_epochs training.batch_size training.group_size "
    "training.learning_rate training.eval_every training.seed environment.environment_id environment.max_turns tools "
    "reward.type reward.options data.tasks data.count data.dataset data.heldout sampling.temperature "
    "sampling.max_tokens lora.enabled lora.r logging.checkpoint_every registry.name grpo.advantage grpo.credit grpo.kl "
    "ppo.critic_warmup dpo.beta kto.beta sft.turns".split()
)
# Rewards that can be checked from their options alone.
SIMPLE_REWARDS = ("environment", "rule_based", "tool_verified")


class Option(BaseModel):
    key: str
    kind: InputKind
    help: str
    default: Any = None
    choices: list[str] | None = None  # for kind "text": known names, other values are allowed
    least: float | None = None
    most: float | None = None
    above: bool = False  # the value must be greater than `least`
    nullable: bool = False
    advanced: bool = False


class OptionSection(BaseModel):
    name: str
    help: str
    algorithm: bool  # section of one algorithm, shown only if that algorithm is selected
    options: list[Option]


class Options(BaseModel):
    sections: list[OptionSection]


class ConfigTemplate(BaseModel):
    name: str
    what: str
    yaml: str


class StartingPoints(BaseModel):
    templates: list[ConfigTemplate]
    runs: list[str]  # the newest first
    empty: str = "model: builtin:tiny\n"


class Draft(BaseModel):
    """A draft config: YAML, options by dotted key, or both; options override the YAML."""

    yaml: str | None = Field(default=None, max_length=200_000)
    options: dict[str, Any] = Field(default_factory=dict)
    name: str | None = None  # of the new run; None: generated from algorithm, environment and time


class ConfigProblem(BaseModel):
    key: str
    message: str
    line: int | None = None  # line of the YAML


class DraftCheck(BaseModel):
    options: dict[str, Any]  # every option by dotted key; for an invalid config the draft's options
    yaml: str  # options that differ from the defaults; for an invalid config the draft's YAML
    problems: list[ConfigProblem]
    notices: list[str]


def list_options() -> Options:
    """Return the sections of the config form with their options."""
    groups = []
    for name in TrainingConfig.model_fields:
        section = get_sections().get(name)
        if section is None:  # tools, a list
            options = [_make_option(name, {"type": "array", "default": []})]
        else:
            properties = section.model_json_schema()["properties"]
            options = [_make_option(f"{name}.{key}", schema) for key, schema in properties.items()]
        help_text = HELP_TEXTS.get(name) or f"Options of {name}, where training.algorithm is {name}."
        groups.append(OptionSection(name=name, help=help_text, algorithm=name in ALGORITHMS, options=options))
    return Options(sections=groups)


def _make_option(key: str, schema: Mapping[str, Any]) -> Option:
    alternatives = schema.get("anyOf", [schema])
    spec = next(candidate for candidate in alternatives if candidate.get("type") != "null")
    kind: InputKind = "choice" if "enum" in spec else INPUT_KIND_BY_TYPE.get(spec.get("type", ""), "text")
    if "$ref" in spec:  # an optional section of its own
        kind = "map"
    known_names = sorted(catalog.names("environment")) if key == "environment.environment_id" else None
    return Option(
        key=key, kind=kind, help=" ".join(schema.get("description", HELP_TEXTS.get(key, "")).split()),
        default=schema.get("default", {"list": [], "map": {}}.get(kind)), choices=spec.get("enum", known_names),
        least=spec.get("minimum", spec.get("exclusiveMinimum")), above="exclusiveMinimum" in spec,
        most=spec.get("maximum", spec.get("exclusiveMaximum")), nullable={"type": "null"} in alternatives,
        advanced=key not in COMMON_OPTIONS,
    )  # fmt: skip


def list_starting_points(runs_folder: Path) -> StartingPoints:
    """Return the starting points of a new run: templates, existing runs, and an empty config."""
    folders, templates = dict.fromkeys((Path("configs").resolve(), find_starter_root() / "configs")), []
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:  # an unreadable template must not hide the others
            text = f"# Cannot read this template: {error}\n"
        intro = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        templates.append(ConfigTemplate(name=path.stem, what=intro.partition(". ")[0].rstrip("."), yaml=text))
    return StartingPoints(
        templates=templates, runs=[replace_surrogates(run.name) for run in reversed(list_runs(runs_folder))]
    )


def read_draft(draft: Draft) -> TrainingConfig:
    """Return the config of a draft; raise ConfigError with all problems."""
    overrides = [key_value(key, value) for key, value in draft.options.items()]
    with tempfile.TemporaryDirectory(prefix="tfactory-ui-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(draft.yaml or "{}", encoding="utf-8")
        config = load_config(path, overrides)
    if problems := [Problem(key, SECRET_IN_CONFIG) for key, _ in iter_secrets(config.model_dump())]:
        raise config.wrong(problems)
    return config


def with_runs_folder(config: TrainingConfig, runs_folder: Path) -> TrainingConfig:
    """Return the config with the UI's runs folder as its output folder, because model names are resolved there."""
    logging = config.logging.model_copy(update={"output_dir": str(runs_folder)})
    return config.model_copy(update={"logging": logging})


def check_draft(draft: Draft, folder: Path) -> DraftCheck:
    """Return all options of a draft, its shortest YAML, and its problems by key."""
    try:
        config = read_draft(draft)
    except ConfigError as error:
        return DraftCheck(
            options=draft.options, yaml=draft.yaml or "", problems=list_config_problems(error), notices=[]
        )
    notes, output_folder = [*list_notices(config), *list_unused_options(config)], config.logging.output_dir
    if "output_dir" in config.logging.model_fields_set and Path(output_folder).resolve() != folder.resolve():
        notes.append(f"logging.output_dir: runs started here are saved to {folder}, not to {output_folder}")
    problems = find_start_problems(with_runs_folder(config, folder))
    options, yaml_text = flatten_options(config), dump_yaml(config)
    return DraftCheck(options=options, yaml=yaml_text, problems=problems, notices=notes)


def find_start_problems(config: TrainingConfig) -> list[ConfigProblem]:
    """Return the problems that would prevent the start of a run, without importing user code or loading a model."""
    problems = list[Problem]()

    def collect(key: str, check: Callable[[], Any]) -> Any:
        try:
            return check()
        except ConfigError as error:
            problems.extend(error.problems)
        except ValueError as error:
            problems.append(Problem(tuple(key.split(".")), str(error)))

    config = collect("", lambda: resolve_ids(config)) or config
    collect("model.name", lambda: with_resolved_model(config))
    algorithm_kind, has_dataset = KINDS[config.training.algorithm], config.data.dataset is not None
    plays_episodes = algorithm_kind.samples or (algorithm_kind.accepts_demonstrations and not has_dataset)
    collect("", lambda: check_options(config, has_dataset))
    if (name := config.environment.environment_id) is not None:
        collect("environment.environment_id", lambda name=name: check_environment_name(name))
    elif plays_episodes and config.environment.command is None:  # a plain conversation with tasks from a file
        collect("environment.environment_id", lambda: make_environment(config, bool(config.tools)))
        if config.tools and config.data.tasks is None:
            collect("data.tasks", lambda: make_tasks(config, ToolEnvironment))  # raises
    for key in ("tasks", "dataset", "heldout"):
        name = getattr(config.data, key) or ""
        if is_path(name) and not Path(name).expanduser().exists():
            collect(f"data.{key}", lambda name=name: next(read_rows(name)))  # raises
    if config.reward.type in SIMPLE_REWARDS and not (
        config.reward.parts or config.optimization.distributed_reward
    ):
        collect("reward", lambda: check_reward(config))
    return list_config_problems(config.wrong(problems))


def list_config_problems(error: ConfigError) -> list[ConfigProblem]:
    """Return the problems by key, without the name of the temporary file that held the draft."""
    problems = []
    for problem in error.problems:
        key, line = dotted(problem.key), problem.location.rpartition(":")[2]
        value_note = "" if problem.value is ... else f" (got {show_value(key, problem.value)})"
        line_number = int(line) if line.isdecimal() else None
        problems.append(ConfigProblem(key=key, message=problem.text + value_note, line=line_number))
    return problems


def dump_yaml(config: TrainingConfig) -> str:
    changed_options = config.model_dump(exclude_defaults=True)
    return yaml.safe_dump(changed_options, sort_keys=False, allow_unicode=True) if changed_options else ""


def flatten_options(config: TrainingConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"tools": config.model_dump()["tools"]}
    for name in get_sections():
        options |= {f"{name}.{key}": value for key, value in getattr(config, name).model_dump().items()}
    return options
