"""`RLTrainingTool`: train, load_dataset, create_reward and evaluate, each by one dictionary."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.integrations.hello_agents import datasets, training
from TrainingFactory.integrations.hello_agents.agents import Tool, ToolParameter
from TrainingFactory.integrations.hello_agents.results import Result
from TrainingFactory.integrations.hello_agents.rewards import OPTIONS as REWARDS
from TrainingFactory.integrations.hello_agents.rewards import STEP_CAP, make_reward, reward_options
from TrainingFactory.integrations.hello_agents.texts import Texts
from TrainingFactory.integrations.hello_agents.trainers import report_of
from TrainingFactory.options import did_you_mean, nearest
from TrainingFactory.texts import describe

log = logging.getLogger(__name__)
GSM8K = ("gsm8k", datasets.HUB)
DEFAULT_MODEL = "Qwen/Qwen2-0.5B-Instruct"
PAIRS = ("dpo", "kto", "reward_model")
TASKS = "data.tasks"  # a folder with GSM8K
DEFAULTS: dict[str, dict[str, Any]] = {
    "train": {
        "algorithm": "sft", "model_name": DEFAULT_MODEL, "dataset": "gsm8k", "split": "train", "max_samples": None,
        "num_epochs": 3, "output_dir": "./output", "use_lora": True, "batch_size": 4, "custom_dataset": None,
        "custom_reward": None, "reward": None, "reward_type": None, "reward_config": None, "confirm": None,
    },
    "load_dataset": {
        "format": "sft", "split": "train", "max_samples": 100, "model_name": datasets.DEFAULT_MODEL, "dataset": "gsm8k",
    },
    "create_reward": {"reward_type": "accuracy"},
    "evaluate": {
        "model_path": None, "dataset": "gsm8k", "split": "test", "max_samples": 100, "use_lora": None,
        "metrics": None, "k": 1, "return_details": False, "output_dir": None, "reward": None, "reward_type": None,
        "reward_config": None, "custom_reward": None,
    },
}  # fmt: skip
SAMPLING = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p",
            "batch_size": "slots", "thinking": "thinking"}  # fmt: skip
# Of evaluations beside their defaults, of trainings beside theirs.
MORE = {
    "train": [*training.OPTIONS, *training.SPECIAL],
    "load_dataset": ["format_type"],
    "create_reward": sorted({name for options in REWARDS.values() for name in options}),
    "evaluate": list(SAMPLING),
}
# What an agent is told: name -> (type, what it is).
PARAMETERS = {
    "action": ("string", "train, load_dataset, create_reward, evaluate"),
    "algorithm": ("string", "sft, grpo, ppo, dpo, kto, rft, reward_model; only if the user has named it"),
    "model_name": ("string", "hub id or folder; only if the user has named it"),
    "dataset": ("string", "gsm8k, a registered dataset, a file or a hub id"),
    "format": ("string", "load_dataset: sft or rl"),
    "split": ("string", "train or test"),
    "reward_type": ("string", "accuracy, length_penalty, step, combined, or a registered reward"),
    "max_samples": ("integer", "how many rows; all if left out"),
    "num_epochs": ("integer", "passes over the rows"),
    "output_dir": ("string", "folder of the trained model"),
    "use_lora": ("boolean", "train an adapter"),
    "batch_size": ("integer", "rows or tasks in a step"),
    "learning_rate": ("number", "peak learning rate"),
    "num_generations": ("integer", "grpo: answers to each task"),
    "max_new_tokens": ("integer", "longest answer in tokens"),
    "model_path": ("string", "evaluate: hub id or folder"),
    "penalty_weight": ("number", "of length_penalty"),
    "max_length": (
        "integer",
        "train: longest dialogue in tokens; length_penalty: characters that cost nothing",
    ),
    "step_bonus": ("number", "of step"),
    "confirm": ("boolean", "true starts a training; only after the user has agreed to its plan"),
}


class Refused(ValueError):
    """Says in the tool's own language what it does not do."""


class RLTraining:
    """Does what a dictionary says and answers with a `Result`, whatever the protocol of tools around it. Messages
    are Chinese, or English by `language="en"`."""

    name = "rl_training"
    trl_available = True  # our trainers need no TRL

    def __init__(self, language: str | None = None) -> None:
        self.say = Texts(language)
        self.description = self.say("description")
        self.custom_datasets: dict[str, Any] = {}
        self.custom_reward_functions: dict[str, Callable[..., Any]] = {}
        self._created: dict[str, dict[str, Any]] = {}  # options by reward_type

    def register_dataset(self, name: str, dataset: Any) -> None:
        self.custom_datasets[name] = dataset
        print(self.say("registered_dataset", value=name))

    def register_reward_function(self, name: str, reward_fn: Callable[..., Any]) -> None:
        if not callable(reward_fn):
            raise ValueError(f"the reward {name} is a {type(reward_fn).__name__}; it must be a function")
        self.custom_reward_functions[name] = reward_fn
        print(self.say("registered_reward", value=name))

    def listed(self) -> list[dict[str, Any]]:
        """Return what an agent is told of each parameter."""
        return [
            {"name": name, "type": kind, "description": text, "required": False, "default": None}
            for name, (kind, text) in PARAMETERS.items()
        ]

    def answer(self, parameters: Mapping[str, Any]) -> Result:
        """Do what the parameters say; what goes wrong is in the answer, never raised."""
        try:
            given = _read(parameters)
            action = str(given.pop("action", "train")).lower()
            actions = {
                "train": self._train,
                "load_dataset": self._load,
                "create_reward": self._create,
                "evaluate": self._evaluate,
            }
            if action not in actions:
                raise Refused(self.say("action", value=action, known=", ".join(actions)))
            return Result(actions[action](self._checked(action, given)))
        except Refused as error:
            return Result({"status": "error", "message": str(error)})
        except ValueError as error:
            return Result({"status": "error", "message": self.say("failed", why=error)})
        except Exception as error:  # foreign code: datasets, rewards, the hub
            log.exception("rl_training")
            return Result({"status": "error", "message": self.say("failed", why=describe(error))})

    def _checked(self, action: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters that are there; raise ValueError for one that the action does not read."""
        known = [*DEFAULTS[action], *MORE[action], TASKS]
        for key in given:
            dotted = action == "train" and "." in key  # an option of ours in full, which the config checks
            if key not in known and not dotted:
                near = did_you_mean(nearest(key, known))
                raise ValueError(
                    self.say(
                        "key", action=action, value=key, near=near, known=", ".join(dict.fromkeys(known))
                    )
                )
        return given

    # train

    def _train(self, given: dict[str, Any]) -> dict[str, Any]:
        chosen = DEFAULTS["train"] | given
        algorithm = str(chosen["algorithm"]).lower()
        if algorithm not in training.TRAINERS:
            known = ", ".join(training.TRAINERS)
            raise Refused(self.say("algorithm", value=algorithm, known=known))
        explicit = {"algorithm", "model_name"} <= given.keys()
        samples = KINDS[algorithm].samples
        keys = {name: chosen[name] for name in MORE["train"] if name in chosen}
        keys |= {name: value for name, value in given.items() if "." in name and name != TASKS}
        # The rate of SFT would ruin a model that learns from rewards or pairs.
        keys.setdefault("learning_rate", 5e-5 if algorithm == "sft" else 1e-5 if chosen["use_lora"] else 1e-6)
        told, reward = self._reward(chosen) if samples else (None, None)
        unread = given.keys() & {"reward", "reward_type", "reward_config", "custom_reward"}
        if unread and not samples:
            raise ValueError(
                f"{min(unread)} is for algorithms that sample; {algorithm} learns from rows that exist"
            )
        if confirm_needed := not (chosen["confirm"] if chosen["confirm"] is not None else explicit):
            plan = {
                name: chosen[name] for name in (*DEFAULTS["train"],) if isinstance(chosen[name], str | int)
            }
            plan = plan | keys | {"algorithm": algorithm} | ({"reward": told} if told else {})
            text = self.say("plan", known=", ".join(DEFAULTS))
            return {"status": "plan", "message": text, "plan": plan, "confirm": confirm_needed}
        rows, split, count = self._rows(chosen, algorithm)
        folder = given.get(TASKS)
        heldout = (lambda: datasets.read_gsm8k("test", 64, folder)) if chosen["dataset"] in GSM8K else None
        job = training.Job(
            algorithm, chosen["model_name"], rows, chosen["output_dir"], keys, reward, split, count, heldout
        )
        trained = training.train(job)
        about = report_of(job, trained) | ({"reward": told} if told else {})
        training.write_model(trained.trainer, job.output_dir, about)
        if trained.report.state != "finished":
            about["message"] = self.say("interrupted", steps=trained.report.steps, value=job.output_dir)
        return about

    def _rows(self, chosen: Mapping[str, Any], algorithm: str) -> tuple[Any, str, int | None]:
        """Return the dataset that is named, the split to take of it, and how many rows."""
        name, count, split = chosen["dataset"], chosen["max_samples"], chosen["split"]
        custom = chosen.get("custom_dataset")
        if custom is None:
            custom = self.custom_datasets.get(name)
        if custom is not None:
            return custom, split, count
        if name in GSM8K:
            if algorithm in PAIRS:
                raise Refused(self.say("pairs", value=algorithm))
            return datasets.read_gsm8k(split, count, chosen.get(TASKS)), split, None
        if not (Path(name).expanduser().exists() or "/" in name):
            raise ValueError(
                self.say("dataset", value=name, known=", ".join([GSM8K[0], *self.custom_datasets]))
            )
        return name, split, count

    def _reward(self, chosen: Mapping[str, Any]) -> tuple[str, Callable[..., Any]]:
        """Return the reward and its name: the object that is given, the one that is named, the one registered under
        the name of the dataset, the only one registered; else accuracy."""
        if (custom := chosen.get("custom_reward")) is not None:
            return str(getattr(custom, "__name__", type(custom).__name__)), custom
        own, options = self.custom_reward_functions, chosen.get("reward_config")
        name = chosen.get("reward") or chosen.get("reward_type")
        if name is None:
            named = [each for each in own if each == chosen["dataset"]] or list(own)
            if len(named) > 1:
                raise Refused(self.say("registered", known=", ".join(named)))
            name = named[0] if named else "accuracy"
        if name in own:
            return name, own[name]
        if name not in REWARDS:
            raise Refused(self.say("reward", value=name, known=", ".join([*own, *REWARDS])))
        return name, make_reward(name, self._created.get(name, {}) if options is None else options)

    # the other actions

    def _load(self, given: dict[str, Any]) -> dict[str, Any]:
        if "format_type" in given:
            given.setdefault("format", given.pop("format_type"))
        chosen = DEFAULTS["load_dataset"] | given
        form = chosen["format"]
        if form not in ("sft", "rl"):
            raise Refused(self.say("format", value=form, known="sft, rl"))
        rows, split, count = self._rows(chosen, form)
        tokenizer = datasets._tokenizer(chosen["model_name"]) if form == "rl" else None
        found = datasets.read_each(rows, "rows", lambda row, number: row.columns, split, count)
        if {"question", "answer"} <= found[0].keys():
            found = datasets.format_rows(found, form, tokenizer)
        return {
            "status": "success",
            "format": form,
            "split": split,
            "dataset_size": len(found),
            "sample_keys": list(found[0]),
        }

    def _create(self, given: dict[str, Any]) -> dict[str, Any]:
        kind = given.pop("reward_type", "accuracy")
        if kind not in REWARDS:
            raise Refused(self.say("reward", value=kind, known=", ".join(REWARDS)))
        options = reward_options(kind, given)
        make_reward(kind, given)
        self._created[kind] = given
        shown = options | {"components": options.get("components"), "cap": STEP_CAP}
        return {
            "status": "success",
            "reward_type": kind,
            "description": self.say(kind, **shown),
            **{name: value for name, value in options.items() if value is not None},
        }

    def _evaluate(self, given: dict[str, Any]) -> dict[str, Any]:
        from TrainingFactory.integrations.hello_agents.evaluation import DEFAULT_METRICS, evaluate
        from TrainingFactory.models.loading import pick_device

        chosen = DEFAULTS["evaluate"] | given
        if not (path := chosen["model_path"]):
            raise Refused(self.say("missing", value="model_path"))
        adapter = (Path(path).expanduser() / training.ADAPTER).is_file()
        rows, split, count = self._rows(chosen, "evaluate")
        told, reward = self._reward(chosen)
        out = chosen["output_dir"]
        found = evaluate(
            path,
            datasets.tasks(rows, split, count),
            reward,
            metrics=chosen["metrics"] or DEFAULT_METRICS,
            k=chosen["k"],
            details=chosen["return_details"],
            out=Path(out) / "episodes.jsonl" if out else None,
            **{SAMPLING[key]: given[key] for key in SAMPLING if key in given},
        )
        about = {"status": "success", "model_path": path, "device": str(pick_device("auto")), "reward": told}
        if chosen["use_lora"] is not None and chosen["use_lora"] != adapter:
            kind = "an adapter" if adapter else "a whole model"
            about["note"] = f"use_lora is {chosen['use_lora']}, and {path} holds {kind}, which was evaluated"
        return about | found


def _read(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters in their types: agents write numbers as text, and registries put all of it in `input`."""
    if not isinstance(parameters, Mapping):
        raise ValueError(f"parameters must be a dictionary, not {str(parameters)[:60]!r}")
    given = dict(parameters)
    text = given.pop("input", None)
    if isinstance(text, str) and text.lstrip().startswith("{"):
        try:
            given |= json.loads(text)
        except ValueError as error:
            raise ValueError(f"input is not valid JSON: {error}") from error
    section = given.pop("data", None)
    given |= {f"data.{key}": value for key, value in section.items()} if isinstance(section, Mapping) else {}
    for key, (kind, _) in PARAMETERS.items():
        if kind != "string" and isinstance(value := given.get(key), str):
            try:
                given[key] = json.loads(value.lower())
            except ValueError:
                continue  # the config refuses it by name
    return {key: value for key, value in given.items() if value is not None or key == "max_samples"}


class RLTrainingTool(RLTraining, Tool):
    """The tool by itself, where no HelloAgents is installed: `run` returns JSON text that has keys as well."""

    def __init__(self, language: str | None = None) -> None:
        RLTraining.__init__(self, language)

    def get_parameters(self) -> list[ToolParameter]:
        return [ToolParameter(**each) for each in self.listed()]

    def run(self, parameters: Mapping[str, Any]) -> Result:
        return self.answer(parameters)
