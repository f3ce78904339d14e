"""Evaluation suites: several sets of tasks with rewards and weights, in a YAML file or built in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from TrainingFactory.assembly.named_files import with_files_beside
from TrainingFactory.common.options import Count, Positive, Text, ZeroOrMore, did_you_mean, nearest
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import Key, read_yaml
from TrainingFactory.config.names import expand_key
from TrainingFactory.config.problems import KeyLocations, Problem, list_problems
from TrainingFactory.config.schema import RewardSection, SamplingSection, ToolEntry
from TrainingFactory.config.section import PathText, Section
from TrainingFactory.evaluation import statistics
from TrainingFactory.evaluation.gate import Gate
from TrainingFactory.evaluation.records import EvaluationRecord, Notify
from TrainingFactory.evaluation.requests import MODEL_KEYS, EvaluationRequest, RecordedEvaluation


class SuiteEntry(Section):
    """One set of tasks, from an environment or a file, with its reward and sampling options."""

    name: Text | None = None
    """Name in the results table; null: the environment or file."""
    environment: PathText | None = None
    """Name of an environment, or a Python file; null with tools and tasks: a conversation with those tools."""
    tasks: PathText | None = None
    """File, saved dataset or hub id with tasks; null: the environment generates them."""
    split: str | None = None
    """Split of the tasks; null: heldout of an environment, test of a dataset."""
    count: Count | None = None
    """Number of tasks; null: all of a file, 64 of an environment."""
    task_seed: ZeroOrMore = 0
    """Seed with which the environment generates tasks."""
    episodes: Count = 1
    """Episodes per task. With more than one, pass@k and pass^k are reported."""
    weight: Positive = 1.0
    """Weight of the entry's success rate in the total."""
    max_turns: Count = 8
    """Maximum number of model turns in an episode."""
    system_prompt: str | None = None
    """System prompt; null: that of the environment."""
    tools: list[ToolEntry] = Field(default_factory=list)
    """Tools, as in a config."""
    reward: RewardSection = Field(default_factory=RewardSection)
    """Reward, as in a config; default: the environment's own."""
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    """Sampling parameters, as in a config."""

    @property
    def title(self) -> str:
        return self.name or self.environment or Path(self.tasks or "tools").stem

    def make_config(self, base_config: TrainingConfig) -> TrainingConfig:
        """Return a config with the model of `base_config` and the sections of this entry."""
        tasks, split = self.tasks, self.split or ("test" if self.tasks else "heldout")
        data_update = {"tasks": tasks, "count": self.count or (None if tasks else 64), "seed": self.task_seed}
        data_update["dataset_split" if tasks else "split"] = split
        environment_update = {"environment_id": self.environment, "max_turns": self.max_turns}
        environment_update["system_prompt"] = self.system_prompt
        return base_config.model_copy(
            update={
                "environment": base_config.environment.model_copy(update=environment_update),
                "data": base_config.data.model_copy(update=data_update),
                "training": base_config.training.model_copy(update={"group_size": self.episodes}),
                "tools": self.tools,
                "reward": self.reward,
                "sampling": self.sampling,
            }
        )


class Suite(Section):
    name: Text | None = None
    """Name of the suite; null: that of its file."""
    entries: Annotated[list[SuiteEntry], Field(min_length=1)]
    """Sets of tasks."""
    gate: Gate | None = None
    """Conditions for the promotion of a model."""

    def make_requests(self, model: EvaluationRequest, folder: Path | None = None) -> list[EvaluationRequest]:
        """Return one request per entry. Files are searched in the current folder and in the suite's `folder`."""
        requests = []
        for entry in self.entries:
            config = entry.make_config(model.config)
            config = config if folder is None else with_files_beside(config, folder)
            requests.append(model.with_conditions(config, self.name, entry.title))
        return requests

    def estimate_total(self, records: Sequence[EvaluationRecord]) -> statistics.Estimate:
        """Return the weighted mean of the entries' success rates, with an interval over tasks."""
        strata = [
            (entry.weight, [sum(successes) / len(successes) for successes in record.scored_episodes.values()])
            for entry, record in zip(self.entries, records, strict=True)
        ]
        return statistics.bootstrap_mean(strata)


SUITE_ENVIRONMENTS = ("calculator", "search", "text2sql")
BUILTIN_SUITES: dict[str, dict[str, Any]] = {
    name: {"name": name, "entries": [{"environment": env, "count": count} for env in SUITE_ENVIRONMENTS]}
    for name, count in (("builtin", 64), ("quick", 8))
}


def load_suite(name_or_file: str) -> tuple[Suite, Path | None]:
    """Load a suite by name or file; return it and its folder (None if it is built in). Raise ConfigError if it is
    invalid."""
    path, builtin_names = Path(name_or_file).expanduser(), ", ".join(BUILTIN_SUITES)
    if name_or_file in BUILTIN_SUITES and not path.exists():
        return Suite(**BUILTIN_SUITES[name_or_file]), None
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        hint = did_you_mean(nearest(name_or_file, BUILTIN_SUITES))
        raise ValueError(
            f"there is no suite {name_or_file!r}. Use a YAML file or a built-in suite: {builtin_names}{hint}"
        )
    problems: list[Problem] = []
    locations: dict[Key, str] = {}
    fields = read_yaml(path, locations, problems, "a list `entries:`, each with an environment or tasks")
    try:
        suite = Suite(**{str(key): value for key, value in fields.items()})
        problems += _find_problems(suite)
        if not problems:
            return suite.model_copy(update={"name": suite.name or path.stem}), path.parent
    except ValidationError as error:
        problems += list_problems(error, Suite)
    raise KeyLocations(locations, str(path)).make_error(problems) from None


def _find_problems(suite: Suite) -> list[Problem]:
    """Return the problems of a suite: entries without tasks, duplicate names, and problems of the gate."""
    problems: list[Problem] = []
    titles: list[str] = []
    for index, entry in enumerate(suite.entries):
        key = ("entries", index)
        if entry.environment is None and entry.tasks is None:
            problems.append(Problem(key, "has neither an environment nor tasks. Set one of them"))
        if entry.title in titles:
            problems.append(Problem(key, f"has the same name as another entry: {entry.title}. Set `name`"))
        titles.append(entry.title)
    return problems if suite.gate is None else problems + suite.gate.find_problems(titles)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ValueError if an override would change the conditions of a suite."""
    keys = [expand_key(option.partition("=")[0].strip()) for option in overrides]
    if invalid_keys := [key for key in keys if not key.startswith(MODEL_KEYS)]:
        raise ValueError(
            f"cannot set {', '.join(invalid_keys)} with --suite: the suite's entries define it. Only model.*, "
            "logging.* and training.seed can be set"
        )


def make_suite_evaluations(
    suite: Suite, model: EvaluationRequest, folder: Path | None = None, notify: Notify = lambda _: None
) -> list[RecordedEvaluation]:
    """Return an evaluation for each entry of a suite; raise ValueError with the name of an invalid entry."""
    evaluations: list[RecordedEvaluation] = []
    for request in suite.make_requests(model, folder):
        try:
            evaluations.append(RecordedEvaluation(request, notify=notify))
        except ValueError as error:
            for evaluation in evaluations:
                evaluation.discard()
            raise ValueError(f"suite {suite.name}, entry {request.entry}: {error}") from error
    return evaluations
