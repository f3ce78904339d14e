"""`tfactory recipe`: a small model learns GSM8K, or WordNet's nouns, by sft, then by grpo, measured after both.

    OUT/recipe.json         what was asked for, and the seconds that each part took
    OUT/data/               rows, by apps/recipes/gsm8k.py or apps/recipes/wordnet_questions.py
    OUT/sft/, OUT/grpo/     two ordinary runs, by the configs beside this file
    OUT/episodes/           what both models did in the evaluations
    OUT/results.json        all figures

What is there already is not done again, so that the same command goes on after a break."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.apps.recipes.gsm8k import HUB, Prepared, prepare
from TrainingFactory.apps.recipes.wordnet import FOLDER, WordNet
from TrainingFactory.apps.recipes.wordnet_questions import ask
from TrainingFactory.assembly.datasets import write_rows
from TrainingFactory.common.event_loop import run
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.data.disk import write_aside
from TrainingFactory.evaluation.comparison import Comparison, Side, compare
from TrainingFactory.evaluation.requests import RecordedEvaluation, ask_model
from TrainingFactory.runs.devices import device_failure
from TrainingFactory.runs.folder import RunFolder, is_run
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.builtin.calculator import calculator
from TrainingFactory.trainers.training_run import Training, resume
from TrainingFactory.types import Trajectory

Scale = Literal["full", "small"]
RUNS, STATE = ("sft", "grpo"), "recipe.json"
# Of sft the last checkpoint, which solves more tasks than the one of least loss; of grpo the one that solves most.
TAKEN = {"sft": "sft", "grpo": "grpo@best"}
TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0}
FEW = 3  # examples of tasks that became better, and worse
TOLD = ("success", "success_low", "success_high", "turns", "tool_success", "sampled_tokens", "seconds")
# A few steps, which show on any CPU that all parts go together, and teach nothing.
SMALL: dict[str, dict[str, Any]] = {
    "sft": {
        "training.max_steps": 4, "training.batch_size": 4, "training.eval_every": 2, "data.heldout_count": 4,
        "logging.checkpoint_every": 2,
    },
    "grpo": {
        "training.max_steps": 2, "training.batch_size": 2, "training.group_size": 2, "training.eval_every": 1,
        "training.minibatches": 2,
        "data.count": 8, "data.heldout_count": 4, "environment.max_turns": 2, "sampling.slots": 8,
        "sampling.max_tokens": 12,
    },
}  # fmt: skip
# Without tools a task is one turn with the whole solution.
PLAIN: dict[str, dict[str, Any]] = {
    "sft": {"model.tools_format": None},
    "grpo": {"tools": [], "environment.max_turns": 1, "sampling.max_tokens": 320},
}


def write_gsm8k(source: str | Path, folder: Path, plain: bool = False) -> Prepared:
    """Write the rows of each part into a folder."""
    return _written(prepare(source, [] if plain else [spec_to_dict(calculator.spec)]), source, folder)


def write_wordnet(source: str | Path, folder: Path, plain: bool = False) -> Prepared:
    return _written(run(lambda: ask(source, plain)), source, folder)


def _written(done: Prepared, source: str | Path, folder: Path) -> Prepared:
    for part, rows in done.rows.items():
        if not rows:
            raise ValueError(f"{source} gives no rows for {part}; left out: {dict(done.dropped) or 'none'}")
        write_rows(folder / f"{part}.jsonl", rows)
    return done


TASKS = {"gsm8k": (HUB, write_gsm8k), "wordnet": (FOLDER, write_wordnet)}


class Recipe:
    """Checks what is asked for when it is made; then `prepare`, `train` for both runs, `measure` and `results` in this
    order. `sft` and `grpo` are overrides of their configs."""

    def __init__(
        self, source: str | None = None, model: str | None = None, out: str | Path | None = None, seed: int = 0,
        scale: Scale = "full", plain: bool = False, sft: Sequence[str] = (), grpo: Sequence[str] = (),
        task: str = "gsm8k",
    ) -> None:  # fmt: skip
        usual = f"runs/{task}-small" if scale == "small" else f"runs/{task}"
        self.source, self.out = source or TASKS[task][0], Path(out or usual).expanduser()
        self.plain, self.task = plain, task
        asked = {"task": task, "source": self.source, "plain": plain, "model": model, "seed": seed}
        asked |= {"scale": scale, "sft": list(sft), "grpo": list(grpo)}
        self.state: dict[str, Any] = {"asked": asked, "seconds": {}}
        self.compared = dict[str, dict[str, Comparison]]()
        if (path := self.out / STATE).is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            was = asked | before["asked"]  # earlier versions wrote no task
            other = {key: f"{key} was {was[key]}, is {asked[key]}" for key in asked if asked[key] != was[key]}
            begun = any(is_run(self.out / name) for name in RUNS)
            if begun and other.keys() - {"source"}:  # the rows are there, wherever they came from
                told = "; ".join(text for key, text in other.items() if key != "source")
                raise ValueError(f"{self.out} was made by other options ({told}); choose another --out")
            if begun or not other.keys() & {"task", "source", "plain"}:  # else rows are made again
                self.state = before | {"asked": was if begun else asked}
        elif self.out.is_dir() and any(self.out.glob("[!.]*")):
            raise ValueError(f"{self.out} is there already, and no recipe made it; name another with --out")
        data = {part: str(self.out / "data" / f"{part}.jsonl") for part in ("sft", "sft_dev", "tasks", "dev")}
        common = {"training.seed": seed, "logging.output_dir": str(self.out)}
        own: dict[str, dict[str, Any]] = {
            "sft": {"data.dataset": data["sft"], "data.heldout": data["sft_dev"]},
            "grpo": {"data.tasks": data["tasks"], "data.heldout": data["dev"], "model.name": TAKEN["sft"]},
        }
        if task == "wordnet":
            folder = str(WordNet(self.source).folder.resolve())  # if it is there
            own["grpo"]["tools"] = [{"name": "wordnet", "options": {"path": folder}}]
        own["sft"] |= {} if model is None else {"model.name": model}
        for name in RUNS:
            own[name] |= (PLAIN[name] if plain else {}) | (SMALL[name] if scale == "small" else {})
        given = {"sft": sft, "grpo": grpo}
        self._given = {name: [*_options(common | own[name]), *given[name]] for name in RUNS}
        self.configs = {name: self._config(name) for name in RUNS}

    def _config(self, name: str, more: dict[str, Any] | None = None) -> TrainingConfig:
        file = Path(__file__).with_name(f"smollm2_{self.task}_{name}.yaml")
        return load_config(file, [*self._given[name], *_options(more or {})])

    def prepare(self, watcher: Watcher) -> None:
        """Write the rows, and say how many could not be used."""
        if "data" not in self.state:
            with self._spent("data"), _told():
                done = TASKS[self.task][1](self.source, self.out / "data", self.plain)
                self.state["data"] = {"rows": done.counts, "left_out": dict(done.dropped)}
        for what, counts in self.state["data"].items():
            told = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
            watcher.say(f"{what.replace('_', ' ')}: {told}")

    def train(self, name: str, watcher: Watcher) -> None:
        """Train one of the two, or go on with it."""
        folder = self.out / name
        if is_run(folder) and RunFolder(folder).state == "finished":
            watcher.say(f"{name}: finished before")
            return
        with self._spent(name):
            if is_run(folder):
                made = resume(name, self.out, watcher)
            else:
                made = Training(self.configs[name], name=name, watcher=watcher)
            if made.train().state != "finished":
                watcher.say("run the same command again to resume")
                raise KeyboardInterrupt

    def parts(self, final: bool) -> list[str]:
        """Return what is measured: the test set too, where that is asked for or was before."""
        self.state["final"] = final or self.state.get("final", False)
        return ["dev", "test"] if self.state["final"] else ["dev"]

    def measure(self, part: str, watcher: Watcher) -> None:
        """Play the tasks of dev or test with both models; an evaluation that is recorded stands."""
        with self._spent(part), _told():
            for how, temperature in TEMPERATURES.items():
                before, after = (self._played(name, part, temperature, watcher) for name in RUNS)
                self.compared.setdefault(part, {})[how] = compare(before, after)

    def _played(self, name: str, part: str, temperature: float, watcher: Watcher) -> Side:
        asked = {"data.tasks": str(self.out / "data" / f"{part}.jsonl"), "data.heldout": None}
        asked |= {"data.split": "heldout", "training.group_size": 1, "sampling.temperature": temperature}
        asked["sampling.slots"] = RunFolder(self.out / "grpo").config.sampling.slots  # may be edited there
        model = ask_model(TAKEN[name], (), self.out).under(self._config("grpo", asked))
        file, side = self.out / "episodes" / f"{name}-{part}-{temperature:g}.jsonl", Side(name)
        side.add(RecordedEvaluation(model, file, say=watcher.say))
        for wanted in side.wanted:
            if wanted is not None:
                watcher.say(f"{name} on {part} at temperature {temperature:g}: {wanted.total} episodes")
                watcher.phase("evaluate")
                if wanted.run(watcher.episode).interrupted:
                    raise KeyboardInterrupt
        side.take()
        if not side.records:
            raise ValueError(f"no episode of {name} on {part} could be scored; look at {file}")
        return side

    def results(self) -> dict[str, Any]:
        """Write all figures into results.json, and return them."""
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = RunFolder(self.out / RUNS[0]).about
        found = self.state | {key: about[key] for key in ("versions", "platform", "commit", "started")}
        found |= {"device": device, "runs": {name: _figures(RunFolder(self.out / name)) for name in RUNS}}
        found["evaluations"] = {
            part: {how: _compared(each) for how, each in by_how.items()}
            for part, by_how in self.compared.items()
        }
        last = list(self.compared.values())[-1]["greedy"]
        changed = last.episodes([*last.better[:FEW], *last.worse[:FEW]])
        found["examples"] = [_example(*episodes) for _, episodes in changed]
        self._write("results.json", found)
        return found

    @contextmanager
    def _spent(self, part: str) -> Iterator[None]:
        """Count the seconds of a part, those of a process that was interrupted too."""
        started, seconds = time.perf_counter(), self.state["seconds"]
        self._write(STATE, self.state)
        try:
            yield
        finally:
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started
            with suppress(OSError):  # it must hide no error of the part, and the next one writes first
                self._write(STATE, self.state)

    def _write(self, name: str, found: dict[str, Any]) -> None:
        with _told():
            self.out.mkdir(parents=True, exist_ok=True)
            write_aside(self.out / name, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def _told() -> Iterator[None]:
    """Say of a full disk, or of a device that failed, that the same command goes on."""
    try:
        yield
    except Exception as error:
        told, full = device_failure(error), isinstance(error, OSError)
        if told is None and not full:
            raise
        kind = OSError if full else ValueError
        raise kind(f"{told or error}; when that is mended, run the same command again") from error


def _options(given: dict[str, Any]) -> list[str]:
    return [key_value(key, value) for key, value in given.items()]


def _figures(run: RunFolder) -> dict[str, Any]:
    """Return what a run took, and its curves."""
    rows, best = run.metrics(), run.best()
    told = ("step", "eval/success", "eval/success_low", "eval/success_high", "eval/loss", "eval/seconds")
    measured = [{key: row[key] for key in told if key in row} for row in rows if "eval/seconds" in row]
    sums = {
        key: sum(row.get(key, 0) for row in rows)
        for key in ("sampled_tokens", "trained_tokens", "row_tokens")
    }
    return {
        "steps": run.status.step,
        "seconds": run.status.seconds,  # of the steps, without evaluations
        **sums,
        "best": None if best is None else best.name,
        "evaluations": measured,
        "rewards": [row["reward"] for row in rows if "reward" in row],
    }


def _compared(found: Comparison) -> dict[str, Any]:
    told = found.as_json()
    kept = ("tasks", "difference", "difference_low", "difference_high", "p", "notes")
    sides = {
        side.name: {key: side.records[0].metrics[key] for key in TOLD if key in side.records[0].metrics}
        for side in (found.first, found.second)
    }
    changes = {"better": len(told["better"]), "worse": len(told["worse"])}
    return sides | {key: told[key] for key in kept} | changes


def _example(before: Trajectory | None, after: Trajectory | None) -> dict[str, Any]:
    """Return a task with what both models did."""
    episodes = {name: each for name, each in zip(RUNS, (before, after), strict=True) if each is not None}
    task = next(iter(episodes.values())).task
    said = {
        name: [message_to_dict(message) for turn in each.turns for message in (turn.message, *turn.replies)]
        for name, each in episodes.items()
    }
    return {"task": task.id, "question": task.prompt, "answer": task.answer} | said
