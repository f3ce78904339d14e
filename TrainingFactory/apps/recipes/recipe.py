"""`tfactory recipe`: train a model on a task with SFT, then GRPO, and evaluate it after both. A model that can call the
task's tools starts with GRPO, and is evaluated before and after it.

    OUT/recipe.json         the options, and the seconds that each stage took
    OUT/data/               rows, by gsm8k.py, wordnet_questions.py, screen.py or envs/builtin/text2sql.py
    OUT/sft/, OUT/grpo/     ordinary runs, by the configs beside this file
    OUT/episodes/           evaluation episodes of both models
    OUT/results.json        all results

Completed stages are skipped, so the same command resumes an interrupted recipe."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.apps.recipes.gsm8k import HUB_ID, PreparedRows, prepare_gsm8k
from TrainingFactory.apps.recipes.screen import ALIGNMENT_STEPS, TEXT_MODEL, prepare_screen, write_model
from TrainingFactory.apps.recipes.wordnet import WORDNET_FOLDER, WordNet
from TrainingFactory.apps.recipes.wordnet_questions import prepare_wordnet
from TrainingFactory.assembly.datasets import write_rows
from TrainingFactory.assembly.named_files import read_config
from TrainingFactory.common.event_loop import run
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import key_value
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.envs.builtin.text2sql import generate_explored_tasks
from TrainingFactory.evaluation.comparison import ComparedModel, Comparison, compare
from TrainingFactory.evaluation.requests import RecordedEvaluation, make_model_request
from TrainingFactory.runs.devices import describe_device_failure
from TrainingFactory.runs.folder import RunFolder, is_run
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.builtin.calculator import calculator
from TrainingFactory.trainers.training_run import Training, resume
from TrainingFactory.types import Trajectory

Scale = Literal["full", "small"]
RUN_NAMES, STATE_FILE = ("sft", "grpo"), "recipe.json"
# task -> model -> prefix of its configs, PREFIX_sft.yaml and PREFIX_grpo.yaml. The first model is the default; other
# models than these are trained by its configs.
CONFIG_PREFIXES = {
    "gsm8k": {
        "smollm2-135m": "smollm2_gsm8k",
        "qwen2.5-coder-1.5b": "qwen25_coder_gsm8k",
        "gemma3-270m": "gemma3_gsm8k",
    },
    "wordnet": {"smollm2-135m": "smollm2_wordnet"},
    "text2sql": {"qwen2.5-coder-1.5b": "qwen25_coder_text2sql"},
    "screen": {TEXT_MODEL: "smolvlm_screen"},
}
# For sft the last checkpoint, which solves more tasks than the one with the lowest loss; for grpo the best one.
EVALUATED_CHECKPOINTS = {"sft": "sft", "grpo": "grpo@best"}
GENERATED_SOURCE = "generated"  # the source of rows that are not read
EVAL_TEMPERATURES = {"greedy": 0.0, "temperature 1": 1.0}
TEXT2SQL_TASK_COUNTS = {"tasks": 2000, "dev": 300, "test": 600}  # generated tasks of each split
MAX_EXAMPLES = 3  # examples of improved tasks, and of worsened tasks
REPORTED_METRICS = (
    "success", "success_low", "success_high", "turns", "tool_success", "sampled_tokens", "seconds",
)  # fmt: skip
# Overrides for a smoke test on any CPU: a few steps that exercise every stage and teach nothing.
SMALL_OVERRIDES: dict[str, dict[str, Any]] = {
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
SMALL_ALIGNMENT_STEPS = 2  # steps of the screen recipe's alignment in a smoke test
# Overrides without tools: a task is one turn that holds the whole solution.
PLAIN_OVERRIDES: dict[str, dict[str, Any]] = {
    "sft": {"model.tools_format": None},
    "grpo": {"tools": [], "environment.max_turns": 1, "sampling.max_tokens": 320},
}


def write_gsm8k(source: str | Path, folder: Path, plain: bool = False) -> PreparedRows:
    """Write the rows of each part into a folder; with `plain`, without tool calls."""
    return _save_rows(prepare_gsm8k(source, [] if plain else [spec_to_dict(calculator.spec)]), source, folder)


def write_wordnet(source: str | Path, folder: Path, plain: bool = False) -> PreparedRows:
    return _save_rows(run(lambda: prepare_wordnet(source, plain)), source, folder)


def _save_rows(prepared: PreparedRows, source: str | Path, folder: Path) -> PreparedRows:
    for split, rows in prepared.rows.items():
        if not rows:
            raise ValueError(f"{source} has no rows for {split}; skipped: {dict(prepared.dropped) or 'none'}")
        write_rows(folder / f"{split}.jsonl", rows)
    return prepared


def write_text2sql(source: str | Path, folder: Path, plain: bool = False) -> PreparedRows:
    if plain:
        raise ValueError(
            "text2sql has no form without tools: only the tool sql shows the schema; remove --plain"
        )
    rows_by_split = {
        split: [asdict(task) for task in generate_explored_tasks(split, count)]
        for split, count in TEXT2SQL_TASK_COUNTS.items()
    }
    return _save_rows(PreparedRows(rows_by_split), source, folder)


def write_screen(
    options: Mapping[str, Any], model: str | None, folder: Path, seed: int = 0, steps: int = ALIGNMENT_STEPS
) -> PreparedRows:
    """Write the rows of each part, and the text model `model` with a vision tower aligned for `steps` steps."""
    write_model(folder / "model", options, model or TEXT_MODEL, seed, steps)
    return _save_rows(run(lambda: prepare_screen(options)), GENERATED_SOURCE, folder)


# task -> default source of its rows, and the function that writes them; `screen` also writes its model
TASK_WRITERS = {
    "gsm8k": (HUB_ID, write_gsm8k),
    "wordnet": (WORDNET_FOLDER, write_wordnet),
    "text2sql": (GENERATED_SOURCE, write_text2sql),
    "screen": (GENERATED_SOURCE, None),
}


class Recipe:
    """The stages of a recipe. The constructor validates the options; then call `prepare`, `train` for each of `runs`,
    `measure` and `write_results` in this order. `sft` and `grpo` are overrides of their configs."""

    def __init__(
        self, source: str | None = None, model: str | None = None, out: str | Path | None = None, seed: int = 0,
        scale: Scale = "full", plain: bool = False, sft: Sequence[str] = (), grpo: Sequence[str] = (),
        task: str = "gsm8k",
    ) -> None:  # fmt: skip
        if TASK_WRITERS[task][0] == GENERATED_SOURCE and source is not None:
            raise ValueError(f"{task} generates its tasks; remove --data {source}")
        if task == "screen" and plain:
            raise ValueError("screen has no form without tools: the model taps with one; remove --plain")
        default_out = f"runs/{task}-small" if scale == "small" else f"runs/{task}"
        self.source, self.out = source or TASK_WRITERS[task][0], Path(out or default_out).expanduser()
        self.plain, self.task = plain, task
        options = {"task": task, "source": self.source, "plain": plain, "model": model, "seed": seed}
        options |= {"scale": scale, "sft": list(sft), "grpo": list(grpo)}
        self.state: dict[str, Any] = {"asked": options, "seconds": {}}
        self.comparisons = dict[str, dict[str, Comparison]]()
        self.blind_metrics = dict[str, dict[str, dict[str, float]]]()  # of the last model with empty pictures
        if (state_file := self.out / STATE_FILE).is_file():
            previous_state = json.loads(state_file.read_text(encoding="utf-8"))
            recorded_options = options | previous_state["asked"]  # earlier versions did not record the task
            changes_by_key = {key: (recorded_options[key], options[key]) for key in options}
            differences = {key: f"{key} was {a}, is {b}" for key, (a, b) in changes_by_key.items() if a != b}
            has_runs = any(is_run(self.out / name) for name in RUN_NAMES)
            if has_runs and differences.keys() - {"source"}:  # the rows are written: their source may differ
                changes = "; ".join(change for key, change in differences.items() if key != "source")
                raise ValueError(f"{self.out} was made with other options ({changes}); choose another --out")
            # Else prepare the rows again.
            if has_runs or not differences.keys() & {"task", "source", "plain"}:
                self.state = previous_state | {"asked": recorded_options if has_runs else options}
        elif self.out.is_dir() and any(self.out.glob("[!.]*")):
            raise ValueError(f"{self.out} exists and is not a recipe's folder; choose another --out")
        config_prefixes = CONFIG_PREFIXES[task]
        self._config_prefix = config_prefixes.get((model or "").lower(), next(iter(config_prefixes.values())))
        self.runs = [name for name in RUN_NAMES if self._find_config(name).is_file()]
        if sft and "sft" not in self.runs:
            raise ValueError(f"{self._config_prefix} has no SFT stage; remove --sft {sft[0]}")
        overrides = self._make_overrides(model, seed, scale)
        user_overrides = {"sft": sft, "grpo": grpo}
        self._overrides = {name: [*_to_options(overrides[name]), *user_overrides[name]] for name in self.runs}
        self.configs = {name: self._load_config(name) for name in self.runs}
        # Models to compare, by their names in the results.
        keeps_best = self.configs["grpo"].logging.keep_best
        baseline = "sft" if "sft" in self.runs else "base"
        self.models = {
            baseline: EVALUATED_CHECKPOINTS.get(baseline, self.configs["grpo"].model.name),
            "grpo": EVALUATED_CHECKPOINTS["grpo"] if keeps_best else "grpo",
        }

    def _make_overrides(self, model: str | None, seed: int, scale: Scale) -> dict[str, dict[str, Any]]:
        """Return the overrides of each run's config, before those of the user."""
        data = {name: str(self.out / "data" / f"{name}.jsonl") for name in ("sft", "sft_dev", "tasks", "dev")}
        overrides: dict[str, dict[str, Any]] = {
            "sft": {"data.dataset": data["sft"], "data.heldout": data["sft_dev"]},
            "grpo": {"data.tasks": data["tasks"], "data.heldout": data["dev"]},
        }
        if self.task == "text2sql":  # its demonstrations are played by the environment's expert
            overrides["sft"] = dict(overrides["grpo"])
        if "sft" in self.runs:
            overrides["grpo"]["model.name"] = EVALUATED_CHECKPOINTS["sft"]
        if self.task == "screen":  # the model of the data, which has the weights of `model`
            overrides["sft"]["model.name"] = str(self.out / "data" / "model")
        elif model is not None:
            overrides[self.runs[0]]["model.name"] = model
        if self.task == "wordnet":
            wordnet_folder = str(WordNet(self.source).folder.resolve())  # raises if WordNet is missing
            overrides["grpo"]["tools"] = [{"name": "wordnet", "options": {"path": wordnet_folder}}]
        for run_name in self.runs:
            overrides[run_name] |= {"training.seed": seed, "logging.output_dir": str(self.out)}
            overrides[run_name] |= PLAIN_OVERRIDES[run_name] if self.plain else {}
            overrides[run_name] |= SMALL_OVERRIDES[run_name] if scale == "small" else {}
        return overrides

    def _find_config(self, run_name: str) -> Path:
        return Path(__file__).with_name(f"{self._config_prefix}_{run_name}.yaml")

    def _load_config(self, name: str, overrides: dict[str, Any] | None = None) -> TrainingConfig:
        return read_config(self._find_config(name), [*self._overrides[name], *_to_options(overrides or {})])

    def prepare(self, watcher: Watcher) -> None:
        """Write the rows, and report how many were written and skipped."""
        if "data" not in self.state:
            with self._record_seconds("data"), _with_resume_hint():
                prepared = self._write_data(self.out / "data")
                self.state["data"] = {"rows": prepared.row_counts, "left_out": dict(prepared.dropped)}
        for heading, counts in self.state["data"].items():
            counts_text = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
            watcher.say(f"{heading.replace('_', ' ')}: {counts_text}")

    def _write_data(self, folder: Path) -> PreparedRows:
        if (write_task_rows := TASK_WRITERS[self.task][1]) is not None:
            return write_task_rows(self.source, folder, self.plain)
        requested_options = self.state["asked"]
        options = self.configs["grpo"].environment.options
        num_steps = SMALL_ALIGNMENT_STEPS if requested_options["scale"] == "small" else ALIGNMENT_STEPS
        return write_screen(options, requested_options["model"], folder, requested_options["seed"], num_steps)

    def train(self, run_name: str, watcher: Watcher) -> None:
        """Train the run `run_name`, or resume it; skip it if it has finished."""
        folder = self.out / run_name
        if is_run(folder) and RunFolder(folder).state == "finished":
            watcher.say(f"{run_name}: already finished")
            return
        with self._record_seconds(run_name):
            if is_run(folder):
                training = resume(run_name, self.out, watcher)
            else:
                training = Training(self.configs[run_name], name=run_name, watcher=watcher)
            if training.train().state != "finished":
                watcher.say("interrupted; run the same command again to resume")
                raise KeyboardInterrupt

    def choose_splits(self, with_test: bool) -> list[str]:
        """Return the splits to evaluate: `dev`, and `test` if `with_test` is set or was set in an earlier call."""
        self.state["final"] = with_test or self.state.get("final", False)
        return ["dev", "test"] if self.state["final"] else ["dev"]

    def measure(self, split: str, watcher: Watcher) -> None:
        """Evaluate both models on `dev` or `test` at every temperature; reuse recorded evaluations."""
        with self._record_seconds(split), _with_resume_hint():
            for decoding, temperature in EVAL_TEMPERATURES.items():
                baseline, candidate = (
                    self._evaluate(name, split, temperature, watcher) for name in self.models
                )
                self.comparisons.setdefault(split, {})[decoding] = compare(baseline, candidate)
                if self.task == "screen":
                    blind_model = self._evaluate("grpo", split, temperature, watcher, {"blind": True})
                    self.blind_metrics.setdefault(split, {})[decoding] = _select_metrics(blind_model)

    def _evaluate(
        self,
        name: str,
        split: str,
        temperature: float,
        watcher: Watcher,
        environment_options: Mapping[str, Any] | None = None,
    ) -> ComparedModel:
        """Evaluate a model on a split, unless it is recorded. `environment_options` are part of the file's name."""
        options = {"data.tasks": str(self.out / "data" / f"{split}.jsonl"), "data.heldout": None}
        options |= {"data.split": "heldout", "training.group_size": 1, "sampling.temperature": temperature}
        options["sampling.slots"] = RunFolder(self.out / "grpo").config.sampling.slots  # may be edited there
        options |= {f"environment.options.{key}": value for key, value in (environment_options or {}).items()}
        model_request = make_model_request(self.models[name], (), self.out).with_conditions(
            self._load_config("grpo", options)
        )
        variant = "-".join([name, *(environment_options or ())])
        file = self.out / "episodes" / f"{variant}-{split}-{temperature:g}.jsonl"
        compared_model = ComparedModel(variant)
        compared_model.add_evaluation(RecordedEvaluation(model_request, file, notify=watcher.say))
        for evaluation in compared_model.evaluations:
            if evaluation is not None:
                watcher.say(
                    f"{variant} on {split} at temperature {temperature:g}: {evaluation.num_episodes} episodes"
                )
                watcher.phase("evaluate")
                if evaluation.run(watcher.episode).interrupted:
                    raise KeyboardInterrupt
        compared_model.collect_records()
        if not compared_model.records:
            raise ValueError(f"no episode of {variant} on {split} was scored; see the errors in {file}")
        return compared_model

    def write_results(self) -> dict[str, Any]:
        """Write all results to results.json, and return them."""
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        run_info = RunFolder(self.out / self.runs[0]).run_info
        results = self.state | {key: run_info[key] for key in ("versions", "platform", "commit", "started")}
        results |= {
            "device": device,
            "runs": {name: _summarize_run(RunFolder(self.out / name)) for name in self.runs},
        }
        results["evaluations"] = {
            split: {decoding: _format_comparison(comparison) for decoding, comparison in comparisons.items()}
            for split, comparisons in self.comparisons.items()
        }
        results |= {"blind": self.blind_metrics} if self.blind_metrics else {}
        comparison = list(self.comparisons.values())[-1]["greedy"]
        flips = [*comparison.wins[:MAX_EXAMPLES], *comparison.losses[:MAX_EXAMPLES]]
        changed_episodes = comparison.load_episodes(flips)
        results["examples"] = [_make_example(self.models, episodes) for _, episodes in changed_episodes]
        self._write_json("results.json", results)
        return results

    @contextmanager
    def _record_seconds(self, stage: str) -> Iterator[None]:
        """Add the seconds of a stage to the recorded state, including those of interrupted attempts."""
        start_time, seconds = time.perf_counter(), self.state["seconds"]
        self._write_json(STATE_FILE, self.state)
        try:
            yield
        finally:
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start_time
            with suppress(OSError):  # must not mask the stage's error; the next stage writes the state again
                self._write_json(STATE_FILE, self.state)

    def _write_json(self, file_name: str, results: dict[str, Any]) -> None:
        with _with_resume_hint():
            self.out.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out / file_name, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def _with_resume_hint() -> Iterator[None]:
    """Append to disk and device errors the hint that the same command resumes the recipe."""
    try:
        yield
    except Exception as error:
        failure, is_disk_error = describe_device_failure(error), isinstance(error, OSError)
        if failure is None and not is_disk_error:
            raise
        error_type = OSError if is_disk_error else ValueError
        raise error_type(f"{failure or error}; fix this, then run the same command again") from error


def _to_options(overrides: dict[str, Any]) -> list[str]:
    return [key_value(key, value) for key, value in overrides.items()]


def _summarize_run(run: RunFolder) -> dict[str, Any]:
    """Return a run's steps, seconds, tokens, evaluations and rewards."""
    rows, best_checkpoint = run.metrics(), run.best()
    keys = ("step", "eval/success", "eval/success_low", "eval/success_high", "eval/loss", "eval/seconds")
    evaluations = [{key: row[key] for key in keys if key in row} for row in rows if "eval/seconds" in row]
    token_totals = {
        key: sum(row.get(key, 0) for row in rows)
        for key in ("sampled_tokens", "trained_tokens", "row_tokens")
    }
    return {
        "steps": run.status.step,
        "seconds": run.status.seconds,  # of the steps, without evaluations
        **token_totals,
        "best": None if best_checkpoint is None else best_checkpoint.name,
        "evaluations": evaluations,
        "rewards": [row["reward"] for row in rows if "reward" in row],
    }


def _format_comparison(comparison: Comparison) -> dict[str, Any]:
    summary = comparison.as_json()
    keys = ("tasks", "difference", "difference_low", "difference_high", "p", "notes")
    model_results = {model.name: _select_metrics(model) for model in (comparison.first, comparison.second)}
    changes = {"better": len(summary["better"]), "worse": len(summary["worse"])}
    return model_results | {key: summary[key] for key in keys} | changes


def _select_metrics(model: ComparedModel) -> dict[str, float]:
    metrics = model.records[0].metrics
    return {key: metrics[key] for key in REPORTED_METRICS if key in metrics}


def _make_example(
    model_names: Iterable[str], episodes_by_model: Iterable[Trajectory | None]
) -> dict[str, Any]:
    named_episodes = zip(model_names, episodes_by_model, strict=True)
    episodes = {name: episode for name, episode in named_episodes if episode is not None}
    task = next(iter(episodes.values())).task
    messages = {
        name: [message_to_dict(message) for turn in e.turns for message in (turn.message, *turn.replies)]
        for name, e in episodes.items()
    }
    return {"task": task.id, "question": task.prompt, "answer": task.answer} | messages
