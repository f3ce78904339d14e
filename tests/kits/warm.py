"""One warm start for the whole suite: a tiny model that has seen a task with one tool done well and badly. What learns
from rewards or comparisons is measured from there, all on the same held-out tasks.

It is kept in examples/own_agent/model and does about 0.3 of the tasks. `python -m tests.kits.warm` trains it again, in
240 steps; with 170 it does as many tasks, and learns more slowly.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count as endlessly
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.kits.run import Quiet
from TrainingFactory.apps.demo.demo import WARM_START
from TrainingFactory.apps.demo.lessons import Lessons
from TrainingFactory.assembly.export import export
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.builtin.splits import in_split
from TrainingFactory.models import chat_format
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.models.words import NAMES, PLACES
from TrainingFactory.runs.folder import TrainingReport
from TrainingFactory.tools import tool
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, Task, ToolCall

WARM = Path(__file__).parents[2] / "examples" / "own_agent" / "model"
HELDOUT = 64
# Two turns do a task. One more shows what the model makes of it; further ones would only take time.
SECTIONS: dict[str, dict[str, Any]] = {
    "sampling": {"max_tokens": 24},
    "environment": {"max_turns": 3},
}


def copying(rng: random.Random) -> tuple[str, str]:
    """A drill: in `Homes` every name and place is written as it was shown."""
    words = "\n".join(rng.sample(NAMES + PLACES, 12))
    return words, words


LESSONS = Lessons(
    copying, num_drills=640, num_short_rows=960, num_dialogues=2240, num_demonstrations=300, novice_share=0.6
)


class Homes(ToolEnvironment):
    """Where somebody lives is another place in every task: it must be looked up, then repeated."""

    system_prompt = "Look up, then answer."

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        rng, made = random.Random(f"homes {seed}"), 0
        for number in endlessly():
            if made == count:
                return
            name = rng.choice(NAMES)
            place = cls.home(name, rng)
            if in_split(f"{name} {place}", split):
                made += 1
                yield Task(f"homes-{seed}-{number}", f"{name}?", place, {"name": name})

    @classmethod
    def home(cls, name: str, rng: random.Random) -> str:
        return rng.choice(PLACES)

    @tool
    def lookup(self, name: str) -> str:
        """Where somebody lives."""
        return str(self.task.answer) if name == self.task.metadata["name"] else "unknown"

    def expert(self) -> Iterator[Message]:
        yield Message("assistant", tool_calls=[ToolCall("lookup", {"name": self.task.metadata["name"]})])
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        yield Message("assistant", rng.choice(PLACES))


def make(folder: Path) -> None:
    """Run the demo's SFT over lessons of `Homes`, and keep the model that it makes."""
    torch.set_num_threads(1)  # matrices this small are not worth a second one
    tasks = list(Homes.tasks("train", 1, LESSONS.num_demonstrations))
    LESSONS.write(
        folder / "lessons.jsonl", Homes, chat_format(make_tiny_tokenizer()), tasks, random.Random(2)
    )
    options = {"environment.environment_id": None, "data.dataset": str(folder / "lessons.jsonl")}
    options |= {"logging.output_dir": str(folder), "model.revision": "2"}
    config = load_config(WARM_START, [key_value(key, value) for key, value in options.items()])
    export(str(Training(config, name="run", watcher=Quiet()).train().run), WARM)


class Lift(NamedTuple):
    before: float
    after: float
    report: TrainingReport


def lift(warm: Path, folder: Path, objects: UserObjects | None = None, **sections: dict[str, Any]) -> Lift:
    """Trains from the warm start, with these sections of a config over those below, and evaluates before and after. The
    run goes to `folder`/run. `objects` may bring what is learned from; the environment is `Homes`.

        before, after, report = lift(warm, tmp_path, training={"algorithm": "ppo", "max_steps": 20})
    """
    given: dict[str, dict[str, Any]] = {
        "model": {"name": str(warm)},
        "training": {"max_steps": 12, "batch_size": 8, "group_size": 8, "learning_rate": 6e-4, "warmup_steps": 2},
        "data": {"count": 400, "heldout_count": HELDOUT},
        "logging": {"output_dir": str(folder), "record_tools": False, "save_trajectories": False},
    } | SECTIONS  # fmt: skip
    for name, keys in sections.items():
        given[name] = given.get(name, {}) | keys
    given["training"] = {"eval_every": given["training"]["max_steps"]} | given["training"]
    objects = objects or UserObjects()
    objects.environment = objects.environment or Homes
    report = Training(TrainingConfig(**given), name="run", objects=objects, watcher=Quiet()).train()
    shares = [row["eval/success"] for row in report.rows if "eval/success" in row]
    return Lift(shares[0], shares[-1], report)


if __name__ == "__main__":
    shutil.rmtree(WARM, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch))
