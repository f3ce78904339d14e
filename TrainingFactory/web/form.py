"""The config as a form: every option with its kind, range and help, as the schema has them; and what is wrong with
what stands in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field

from TrainingFactory import catalog
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.problems import ConfigError, Problem, dotted
from TrainingFactory.config.schema import sections
from TrainingFactory.options import did_you_mean, nearest, show
from TrainingFactory.services.build.notices import notices, unused
from TrainingFactory.services.runs.folder import SECRET, list_runs
from TrainingFactory.texts import secrets_in
from TrainingFactory.user_code import is_file_name

Kind = Literal["text", "number", "integer", "switch", "choice", "list", "map"]
KINDS: dict[str, Kind] = {
    "boolean": "switch", "integer": "integer", "number": "number", "string": "text", "array": "list", "object": "map"
}  # fmt: skip
HELP = {
    "model": "What is trained.",
    "training": "How it learns, how long, and from how much at once.",
    "environment": "Where its episodes are played.",
    "tools": "What it may call, besides the environment's own tools.",
    "reward": "Who scores an episode.",
    "optimization": "Sampling ahead, caches, rewards in other processes.",
    "data": "Tasks, and rows that exist already.",
    "sampling": "How its turns are sampled.",
    "lora": "An adapter in place of all weights.",
    "compute": "This machine, or a cluster.",
    "logging": "What is kept, and where.",
    "registry": "What becomes of the model when the run is finished.",
}
# What most runs set; the rest is shown on demand.
USUAL = set(
    "model.name training.algorithm training.max_steps training.num_epochs training.batch_size training.group_size "
    "training.learning_rate training.eval_every training.seed environment.environment_id environment.max_turns tools "
    "reward.type reward.options data.tasks data.count data.dataset data.heldout sampling.temperature "
    "sampling.max_tokens lora.enabled lora.r logging.checkpoint_every registry.name grpo.advantage grpo.credit grpo.kl "
    "ppo.critic_warmup dpo.beta kto.beta rft.keep sft.turns".split()
)
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
    runs: list[str]
    empty: str


class Draft(BaseModel):
    """A config as YAML, as options by dotted key, or as both: then the options override."""

    yaml: str | None = Field(default=None, max_length=200_000)
    options: dict[str, Any] = Field(default_factory=dict)


class Wrong(BaseModel):
    key: str
    message: str
    line: int | None = None  # of the YAML


class Checked(BaseModel):
    options: dict[str, Any]  # every option by dotted key; of a config that is wrong those that were given
    yaml: str  # what differs from the defaults; of a config that is wrong as it was given
    problems: list[Wrong]
    notices: list[str]


def options() -> Options:
    """Return the form: sections with their options."""
    known = {"environment.environment_id": catalog.names("environment")}
    algorithms = set(
        TrainingConfig.model_fields["training"].annotation.model_fields["algorithm"].annotation.__args__
    )  # type: ignore[union-attr]
    made = []
    for name in TrainingConfig.model_fields:
        section = sections().get(name)
        if section is None:  # tools, a list
            schema, shown = {"": {"type": "array", "default": []}}, name
        else:
            schema, shown = section.model_json_schema()["properties"], f"{name}."
        found = [_option(f"{shown}{key}", each, known.get(f"{shown}{key}")) for key, each in schema.items()]
        of_one = name in algorithms
        help = HELP.get(name) or f"Options of {name}, where training.algorithm is {name}."
        made.append(OptionSection(name=name, help=help, algorithm=of_one, options=found))
    return Options(sections=made)


def _option(key: str, schema: Mapping[str, Any], known: Iterable[str] | None) -> Option:
    kinds = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    first = kinds[0]
    choices = first.get("enum")
    kind: Kind = "choice" if choices else KINDS.get(first.get("type", ""), "text")
    least = first.get("minimum", first.get("exclusiveMinimum"))
    return Option(
        key=key,
        kind=kind,
        help=" ".join((schema.get("description") or HELP.get(key, "")).split()),
        default=schema.get("default", [] if kind == "list" else {} if kind == "map" else None),
        choices=choices or (sorted(known) if known is not None else None),
        least=least,
        most=first.get("maximum", first.get("exclusiveMaximum")),
        above="exclusiveMinimum" in first,
        nullable=len(kinds) < len(schema.get("anyOf", [schema])),
        advanced=key not in USUAL,
    )


def starts(runs: Path) -> Starts:
    """Return what a new run can start from: templates, the runs that are there, nothing."""
    folders = dict.fromkeys((Path("configs").resolve(), FOLDER))
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    made = [_template(path) for path in files]
    return Starts(
        templates=made, runs=[run.name for run in reversed(list_runs(runs))], empty="model: builtin:tiny\n"
    )


def _template(path: Path) -> Template:
    text = path.read_text(encoding="utf-8")
    head = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    return Template(name=path.stem, what=" ".join(head).partition(". ")[0].rstrip("."), yaml=text)


def read(draft: Draft) -> TrainingConfig:
    """Return the config that a draft stands for; raise ConfigError with all that is wrong."""
    given = [key_value(key, value) for key, value in draft.options.items()]
    with tempfile.TemporaryDirectory(prefix="tfactory-ui-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(draft.yaml or "{}", encoding="utf-8")
        config = load_config(path, given)
    wrong = [Problem(key, SECRET) for key, _ in secrets_in(config.model_dump())]
    if wrong := [*wrong, *_unknown(config)]:
        raise config.wrong(wrong)
    return config


def check(draft: Draft) -> Checked:
    """Return the whole config and its shortest text, or what is wrong with it, each at its key."""
    try:
        config = read(draft)
    except ConfigError as error:
        text = draft.yaml if draft.yaml is not None else shortest(nested(draft.options))
        return Checked(options=draft.options, yaml=text, problems=told(error), notices=[])
    said = [*notices(config), *unused(config)]
    return Checked(options=flat(config.model_dump()), yaml=text_of(config), problems=[], notices=said)


def text_of(config: TrainingConfig) -> str:
    """Return the YAML of what differs from the defaults."""
    return shortest(config.model_dump(exclude_defaults=True))


def shortest(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True) if data else ""


def told(error: ConfigError) -> list[Wrong]:
    """Return the problems with their keys; the file that they were read from is ours, and not told."""
    found = []
    for each in error.problems:
        key, line = dotted(each.key), each.where.rpartition(":")[2]
        got = "" if each.value is ... else f" (got {show(key, each.value)})"
        at = int(line) if line.isdecimal() else None
        found.append(Wrong(key=key, message=each.text + got, line=at))
    return found


def _unknown(config: TrainingConfig) -> list[Problem]:
    """Return names that nothing goes by. Models are told when they are looked for: a hub has too many of them."""
    name = config.environment.environment_id
    if name is None or is_file_name(name) or "/" in name or name in (known := catalog.names("environment")):
        return []
    near = did_you_mean(nearest(name, known)) or f"; there are {', '.join(sorted(known))}"
    return [Problem(("environment", "environment_id"), f"there is no environment of this name{near}", name)]


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections from dotted keys."""
    made: dict[str, Any] = {}
    for key, value in options.items():
        section, _, name = key.partition(".")
        if name:
            made.setdefault(section, {})[name] = value
        else:
            made[section] = value
    return made


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of a dumped config by its dotted key."""
    made: dict[str, Any] = {}
    for name, value in data.items():
        made |= (
            {f"{name}.{key}": each for key, each in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return made
