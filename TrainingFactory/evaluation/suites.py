"""A suite: several sets of tasks with their rewards and weights, in a YAML file or built in, for one figure of a
model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from TrainingFactory.assembly.named_files import found_beside
from TrainingFactory.common.options import Count, Positive, Text, ZeroOrMore, did_you_mean, nearest
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import Key, read_yaml
from TrainingFactory.config.names import full_key
from TrainingFactory.config.problems import Places, Problem, explain
from TrainingFactory.config.schema import RewardSection, SamplingSection, ToolEntry
from TrainingFactory.config.section import PathText, Section
from TrainingFactory.evaluation import statistics
from TrainingFactory.evaluation.gate import Gate
from TrainingFactory.evaluation.records import EvaluationRecord, Say
from TrainingFactory.evaluation.requests import OF_THE_MODEL, Asked, RecordedEvaluation


class SuiteEntry(Section):
    """Says what a model is asked: an environment, or tasks of a file, and how it is scored."""

    name: Text | None = None
    """What it is called in the table; null: its environment or file."""
    environment: PathText | None = None
    """Name of any environment, or a Python file; null with tools and tasks: a conversation with those tools."""
    tasks: PathText | None = None
    """A file, saved dataset or hub id; null: the environment makes them."""
    split: str | None = None
    """Of the environment's tasks, heldout if null; of a dataset test."""
    count: Count | None = None
    """Number of tasks; null: all of a file, 64 of an environment."""
    task_seed: ZeroOrMore = 0
    """Which tasks the environment makes."""
    episodes: Count = 1
    """Episodes a task; with several, pass@k and pass^k are told."""
    weight: Positive = 1.0
    """Of its success in the total."""
    max_turns: Count = 8
    """Turns of the model after which an episode ends."""
    system_prompt: str | None = None
    """What the model is told first; null: what the environment says."""
    tools: list[ToolEntry] = Field(default_factory=list)
    """As in a config."""
    reward: RewardSection = Field(default_factory=RewardSection)
    """As in a config; the environment's own if it is left out."""
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    """As in a config."""

    @property
    def title(self) -> str:
        return self.name or self.environment or Path(self.tasks or "tools").stem

    def config(self, base: TrainingConfig) -> TrainingConfig:
        """Return the config by which this is asked of the model that `base` names."""
        tasks, split = self.tasks, self.split or ("test" if self.tasks else "heldout")
        data = {"tasks": tasks, "count": self.count or (None if tasks else 64), "seed": self.task_seed}
        data["dataset_split" if tasks else "split"] = split
        place = {"environment_id": self.environment, "max_turns": self.max_turns}
        place["system_prompt"] = self.system_prompt
        return base.model_copy(
            update={
                "environment": base.environment.model_copy(update=place),
                "data": base.data.model_copy(update=data),
                "training": base.training.model_copy(update={"group_size": self.episodes}),
                "tools": self.tools,
                "reward": self.reward,
                "sampling": self.sampling,
            }
        )


class Suite(Section):
    name: Text | None = None
    """Of the suite; null: that of its file."""
    entries: Annotated[list[SuiteEntry], Field(min_length=1)]
    """What a model is asked."""
    gate: Gate | None = None
    """What must hold for a model to be promoted."""

    def asked(self, model: Asked, folder: Path | None = None) -> list[Asked]:
        """Return what the suite asks of a model; files are looked for here and in the suite's folder."""
        found = []
        for entry in self.entries:
            config = entry.config(model.config)
            config = config if folder is None else found_beside(config, folder)
            found.append(model.under(config, self.name, entry.title))
        return found

    def total(self, records: Sequence[EvaluationRecord]) -> statistics.Estimate:
        """Return the weighted mean of the entries' successes; the interval goes by tasks."""
        strata = [
            (entry.weight, [sum(won) / len(won) for won in record.scored.values()])
            for entry, record in zip(self.entries, records, strict=True)
        ]
        return statistics.bootstrap(strata)


ENVIRONMENTS = ("calculator", "search", "text2sql")
BUILTIN: dict[str, dict[str, Any]] = {
    name: {"name": name, "entries": [{"environment": each, "count": count} for each in ENVIRONMENTS]}
    for name, count in (("builtin", 64), ("quick", 8))
}


def load_suite(source: str) -> tuple[Suite, Path | None]:
    """Return a suite by its name or file, and the folder of that; raise ConfigError with all that is wrong."""
    path, known = Path(source).expanduser(), ", ".join(BUILTIN)
    if source in BUILTIN and not path.exists():
        return Suite(**BUILTIN[source]), None
    if not path.exists() and path.suffix not in (".yaml", ".yml"):
        near = did_you_mean(nearest(source, BUILTIN))
        raise ValueError(f"there is no suite {source!r}{near}; built in are {known}, others are YAML files")
    problems: list[Problem] = []
    places: dict[Key, str] = {}
    data = read_yaml(path, places, problems, "a list `entries:`, each with an environment or tasks")
    try:
        suite = Suite(**{str(key): value for key, value in data.items()})
        problems += _wrong(suite)
        if not problems:
            return suite.model_copy(update={"name": suite.name or path.stem}), path.parent
    except ValidationError as error:
        problems += explain(error, Suite)
    raise Places(places, str(path)).error(problems) from None


def _wrong(suite: Suite) -> list[Problem]:
    """Return what is wrong with entries that are each well formed."""
    found, titles = [], set[str]()
    for number, entry in enumerate(suite.entries):
        key = ("entries", number)
        if entry.environment is None and entry.tasks is None:
            found.append(Problem(key, "names neither an environment nor tasks"))
        if entry.title in titles:
            found.append(
                Problem(key, f"is the second that is called {entry.title}; give it a name of its own")
            )
        titles.add(entry.title)
    return found + ([] if suite.gate is None else suite.gate.problems([each.title for each in suite.entries]))


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise where somebody would change what a suite asks."""
    keys = [full_key(each.partition("=")[0].strip()) for each in overrides]
    if wrong := [key for key in keys if not key.startswith(OF_THE_MODEL)]:
        raise ValueError(
            f"{', '.join(wrong)}: with --suite this stands in the suite's entries; beside it there are options of "
            "the model (model.*), of logging (logging.*) and training.seed"
        )


def suite_evaluations(
    suite: Suite, model: Asked, folder: Path | None = None, say: Say = lambda _: None
) -> list[RecordedEvaluation]:
    """Return an evaluation for each entry; what is wrong with one is told with its name, before anything is run."""
    made: list[RecordedEvaluation] = []
    for asked in suite.asked(model, folder):
        try:
            made.append(RecordedEvaluation(asked, say=say))
        except ValueError as error:
            for each in made:
                each.discard()
            raise ValueError(f"suite {suite.name}, entry {asked.entry}: {error}") from error
    return made
