"""The config as a form: every option with its kind, range and help, as the schema has them; and what is wrong with
what stands in it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.environment import check_name, make_environment
from TrainingFactory.assembly.rewards import check_reward
from TrainingFactory.common import catalog
from TrainingFactory.common.options import show
from TrainingFactory.common.texts import secrets_in, valid_text
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.problems import ConfigError, Problem, dotted
from TrainingFactory.config.schema import ALGORITHMS, sections
from TrainingFactory.data.datasets import is_path, read_rows
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.resolve.factories import by_file
from TrainingFactory.resolve.model_names import with_model
from TrainingFactory.runs.folder import SECRET, list_runs
from TrainingFactory.trainers.notices import notices, unused
from TrainingFactory.training.dataset import make_tasks
from TrainingFactory.training.preflight import check_options

Kind = Literal["text", "number", "integer", "switch", "choice", "list", "map"]
SHAPES: dict[str, Kind] = {
    "boolean": "switch", "integer": "integer", "number": "number", "string": "text", "array": "list", "object": "map"
}  # fmt: skip
HELP = {
    "model": "What is trained.", "training": "How it learns, how long, and from how much at once.",
    "environment": "Where its episodes are played.", "reward": "Who scores an episode.",
    "tools": "What it may call, besides the environment's own tools.", "sampling": "How its turns are sampled.",
    "optimization": "Sampling ahead, caches, rewards in other processes.", "compute": "This machine, or a cluster.",
    "data": "Tasks, and rows that exist already.", "lora": "An adapter in place of all weights.",
    "logging": "What is kept, and where.", "registry": "What becomes of the model when the run is finished.",
}  # fmt: skip
# What most runs set; the rest is shown on demand.
USUAL = set(
    "model.name training.algorithm training.max_steps training.num_epochs training.batch_size training.group_size "
    "training.learning_rate training.eval_every training.seed environment.environment_id environment.max_turns tools "
    "reward.type reward.options data.tasks data.count data.dataset data.heldout sampling.temperature "
    "sampling.max_tokens lora.enabled lora.r logging.checkpoint_every registry.name grpo.advantage grpo.credit grpo.kl "
    "ppo.critic_warmup dpo.beta kto.beta sft.turns".split()
)
PLAIN = ("environment", "rule_based", "tool_verified")  # rewards that are made of their options alone
FOLDER = Path(__file__).resolve().parents[2] / "configs"  # where the package is a checkout


class Option(BaseModel):
    key: str
    kind: Kind
    help: str
    default: Any = None
    choices: list[str] | None = None  # of a text: names that are known, others may be right as well
    least: float | None = None
    most: float | None = None
    above: bool = False  # `least` itself is not allowed
    nullable: bool = False
    advanced: bool = False


class OptionSection(BaseModel):
    name: str
    help: str
    algorithm: bool  # the section of one algorithm: shown where it is chosen
    options: list[Option]


class Options(BaseModel):
    sections: list[OptionSection]


class Template(BaseModel):
    name: str
    what: str
    yaml: str


class Starts(BaseModel):
    templates: list[Template]
    runs: list[str]  # the newest first
    empty: str = "model: builtin:tiny\n"


class Draft(BaseModel):
    """A config as YAML, as options by dotted key, or as both: then the options override."""

    yaml: str | None = Field(default=None, max_length=200_000)
    options: dict[str, Any] = Field(default_factory=dict)
    name: str | None = None  # of the run that is started; None: made from algorithm, environment and time


class Mistake(BaseModel):
    key: str
    message: str
    line: int | None = None  # of the YAML


class Checked(BaseModel):
    options: dict[str, Any]  # every option by dotted key; of a config that is wrong those that were given
    yaml: str  # what differs from the defaults; of a config that is wrong as it was given
    problems: list[Mistake]
    notices: list[str]


def options() -> Options:
    """Return the form: sections with their options."""
    made = []
    for name in TrainingConfig.model_fields:
        section = sections().get(name)
        if section is None:  # tools, a list
            found = [_option(name, {"type": "array", "default": []})]
        else:
            properties = section.model_json_schema()["properties"]
            found = [_option(f"{name}.{key}", schema) for key, schema in properties.items()]
        text = HELP.get(name) or f"Options of {name}, where training.algorithm is {name}."
        made.append(OptionSection(name=name, help=text, algorithm=name in ALGORITHMS, options=found))
    return Options(sections=made)


def _option(key: str, schema: Mapping[str, Any]) -> Option:
    kinds = schema.get("anyOf", [schema])
    first = next(each for each in kinds if each.get("type") != "null")
    kind: Kind = "choice" if "enum" in first else SHAPES.get(first.get("type", ""), "text")
    known = sorted(catalog.names("environment")) if key == "environment.environment_id" else None
    return Option(
        key=key, kind=kind, help=" ".join(schema.get("description", HELP.get(key, "")).split()),
        default=schema.get("default", {"list": [], "map": {}}.get(kind)), choices=first.get("enum", known),
        least=first.get("minimum", first.get("exclusiveMinimum")), above="exclusiveMinimum" in first,
        most=first.get("maximum", first.get("exclusiveMaximum")), nullable={"type": "null"} in kinds,
        advanced=key not in USUAL,
    )  # fmt: skip


def starts(runs: Path) -> Starts:
    """Return what a new run can start from: templates, the runs that are there, nothing."""
    folders, made = dict.fromkeys((Path("configs").resolve(), FOLDER)), []
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:  # one that cannot be read must not hide the others
            text = f"# It cannot be read: {error}\n"
        head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        made.append(Template(name=path.stem, what=head.partition(". ")[0].rstrip("."), yaml=text))
    return Starts(templates=made, runs=[valid_text(run.name) for run in reversed(list_runs(runs))])


def read(draft: Draft) -> TrainingConfig:
    """Return the config that a draft stands for; raise ConfigError with all that is wrong."""
    given = [key_value(key, value) for key, value in draft.options.items()]
    with tempfile.TemporaryDirectory(prefix="tfactory-ui-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(draft.yaml or "{}", encoding="utf-8")
        config = load_config(path, given)
    if wrong := [Problem(key, SECRET) for key, _ in secrets_in(config.model_dump())]:
        raise config.wrong(wrong)
    return config


def placed(config: TrainingConfig, runs: Path) -> TrainingConfig:
    """Return the config as it is where the page's runs are: names of models are looked up there."""
    logging = config.logging.model_copy(update={"output_dir": str(runs)})
    return config.model_copy(update={"logging": logging})


def check(draft: Draft, runs: Path) -> Checked:
    """Return the whole config and its shortest text, and what is wrong with it, each at its key."""
    try:
        config = read(draft)
    except ConfigError as error:
        return Checked(options=draft.options, yaml=draft.yaml or "", problems=mistakes(error), notices=[])
    said, folder = [*notices(config), *unused(config)], config.logging.output_dir
    if "output_dir" in config.logging.model_fields_set and Path(folder).resolve() != runs.resolve():
        said.append(f"logging.output_dir: a run that is started here goes to {runs}, not to {folder}")
    missed = missing(placed(config, runs))
    return Checked(options=flat(config), yaml=text_of(config), problems=missed, notices=said)


def missing(config: TrainingConfig) -> list[Mistake]:
    """Return what keeps a config from being started, as a run reports it; import no user code and load no model."""
    found = list[Problem]()

    def tried(key: str, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except ConfigError as error:
            found.extend(error.problems)
        except ValueError as error:
            found.append(Problem(tuple(key.split(".")), str(error)))

    config = tried("", lambda: by_file(config)) or config
    tried("model.name", lambda: with_model(config))
    kind, recorded = KINDS[config.training.algorithm], config.data.dataset is not None
    plays = kind.samples or (kind.demonstrations and not recorded)
    tried("", lambda: check_options(config, recorded))
    if (place := config.environment.environment_id) is not None:
        tried("environment.environment_id", lambda: check_name(place))
    elif plays and config.environment.command is None:  # a plain conversation, whose tasks come from a file
        tried("environment.environment_id", lambda: make_environment(config, bool(config.tools)))
        if config.tools and config.data.tasks is None:
            tried("data.tasks", lambda: make_tasks(config, ToolEnvironment))  # raises
    for key in ("tasks", "dataset", "heldout"):
        name = getattr(config.data, key) or ""
        if is_path(name) and not Path(name).expanduser().exists():
            tried(f"data.{key}", lambda name=name: next(read_rows(name)))  # raises
    if config.reward.type in PLAIN and not (config.reward.parts or config.optimization.distributed_reward):
        tried("reward", lambda: check_reward(config))
    return mistakes(config.wrong(found))


def mistakes(error: ConfigError) -> list[Mistake]:
    """Return the problems with their keys; the file that they were read from is ours, and not told."""
    found = []
    for each in error.problems:
        key, line = dotted(each.key), each.where.rpartition(":")[2]
        got = "" if each.value is ... else f" (got {show(key, each.value)})"
        found.append(Mistake(key=key, message=each.text + got, line=int(line) if line.isdecimal() else None))
    return found


def text_of(config: TrainingConfig) -> str:
    """Return the YAML of what differs from the defaults."""
    data = config.model_dump(exclude_defaults=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True) if data else ""


def flat(config: TrainingConfig) -> dict[str, Any]:
    """Return every option by its dotted key."""
    made: dict[str, Any] = {"tools": config.model_dump()["tools"]}
    for name in sections():
        made |= {f"{name}.{key}": value for key, value in getattr(config, name).model_dump().items()}
    return made
