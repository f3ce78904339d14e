"""`RLTrainingTool`: train, load_dataset, create_reward and evaluate, each by one dictionary."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, ItemsView, KeysView, Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.texts import describe
from TrainingFactory.integrations.hello_agents import datasets, rewards, training
from TrainingFactory.integrations.hello_agents.agents import Tool, ToolParameter
from TrainingFactory.integrations.hello_agents.texts import Texts

log = logging.getLogger(__name__)
TASKS = "data.tasks"  # a folder with GSM8K
REWARD = {"reward": None, "reward_type": None, "reward_config": None, "custom_reward": None}
DEFAULTS: dict[str, dict[str, Any]] = {
    "train": {
        "algorithm": "sft", "model_name": "Qwen/Qwen2-0.5B-Instruct", "dataset": "gsm8k", "split": "train",
        "max_samples": None, "num_epochs": 3, "output_dir": "./output", "use_lora": True, "batch_size": 4,
        "custom_dataset": None, "confirm": None, **REWARD,
    },
    "load_dataset": {
        "format": "sft", "split": "train", "max_samples": 100, "model_name": None, "dataset": "gsm8k",
    },
    "create_reward": {"reward_type": "accuracy"},
    "evaluate": {
        "model_path": None, "dataset": "gsm8k", "split": "test", "max_samples": 100, "use_lora": None,
        "metrics": ("accuracy", "average_reward"), "k": 1, "return_details": False, "output_dir": "runs", **REWARD,
    },
}  # fmt: skip
SAMPLING = {"max_new_tokens": "sampling.max_tokens", "temperature": "sampling.temperature", "top_p": "sampling.top_p",
            "batch_size": "sampling.slots", "thinking": "model.thinking"}  # fmt: skip
# What an action reads beside the keys that have a default above.
MORE = {
    "train": [*training.OPTIONS, *training.SPECIAL],
    "load_dataset": ["format_type"],
    "create_reward": sorted({name for options in rewards.OPTIONS.values() for name in options}),
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


class Result(str):
    """Holds a mapping as its JSON text: `json.loads(result)` and `result["output_dir"]` give the same values."""

    data: dict[str, Any]

    def __new__(cls, data: dict[str, Any]) -> Result:
        made = super().__new__(cls, json.dumps(data, ensure_ascii=False, indent=2))
        made.data = data
        return made

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def keys(self) -> KeysView[str]:
        return self.data.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.data.items()


class RLTraining:
    """Does what a dictionary says, in any protocol of tools: `parameter` and `result` are the classes of the one around
    it. Messages are Chinese, or English by `language="en"`."""

    name = "rl_training"
    trl_available = True  # our trainers need no TRL
    parameter: Callable[..., Any]
    result: Callable[[dict[str, Any]], Any]

    def __init__(self, language: str | None = None) -> None:
        self.say = Texts(language)
        tool: Any = super()  # the class of tools beside this one
        tool.__init__(name=self.name, description=self.say("description"))
        self.custom_datasets: dict[str, Any] = {}
        self.custom_reward_functions: dict[str, Callable[..., Any]] = {}
        self._created: dict[str, dict[str, Any]] = {}  # options by reward_type

    def register_dataset(self, name: str, dataset: Any) -> None:
        self.custom_datasets[name] = dataset
        print(self.say("added", value=name))

    def register_reward_function(self, name: str, reward_fn: Callable[..., Any]) -> None:
        self.custom_reward_functions[name] = reward_fn
        print(self.say("added", value=name))

    def get_parameters(self) -> list[Any]:
        return [
            self.parameter(name=name, type=kind, description=text, required=False, default=None)
            for name, (kind, text) in PARAMETERS.items()
        ]

    def run(self, parameters: Mapping[str, Any] | str) -> Any:
        """Do what the parameters say, a mapping or its JSON text; other texts get a plan. Errors are in the answer."""
        try:
            return self.result(self._answer(self._read(parameters)))
        except ValueError as error:
            message = str(error)
        except Exception as error:  # foreign code: datasets, rewards, the hub
            log.exception("rl_training")
            message = self.say("failed", why=describe(error))
        return self.result({"status": "error", "message": message})

    def _answer(self, given: dict[str, Any]) -> dict[str, Any]:
        action = self._one_of("action", str(given.pop("action", "train")).lower(), DEFAULTS)
        known = dict.fromkeys([*DEFAULTS[action], *MORE[action], TASKS])
        for key in given:
            dotted = action == "train" and "." in key  # an option of ours in full, which the config checks
            if key not in known and not dotted:
                near, names = did_you_mean(nearest(key, known)), ", ".join(known)
                raise ValueError(self.say("key", action=action, value=key, near=near, known=names))
        does = {"train": self._train, "load_dataset": self._load, "create_reward": self._create}
        return does.get(action, self._evaluate)(given, DEFAULTS[action] | given)

    def _read(self, parameters: Any) -> dict[str, Any]:
        """Return the parameters in their types: agents write numbers as text, and registries put all in `input`."""
        if not isinstance(parameters, str | Mapping):
            raise ValueError(self.say("parameters", value=type(parameters).__name__))
        given = {"input": parameters} if isinstance(parameters, str) else dict(parameters)
        text, section = given.pop("input", None), given.pop("data", None)
        if isinstance(text, str) and text.lstrip().startswith("{"):
            try:
                given |= json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(self.say("json", line=error.lineno, column=error.colno)) from error
        if isinstance(section, Mapping):
            given |= {f"data.{key}": value for key, value in section.items()}
        for key, (kind, _) in PARAMETERS.items():
            if kind != "string" and isinstance(value := given.get(key), str):
                try:
                    given[key] = json.loads(value.lower())
                except ValueError:
                    continue  # the config refuses it by name
        return {key: value for key, value in given.items() if value is not None or key == "max_samples"}

    def _one_of(self, what: str, value: str, known: Collection[str]) -> str:
        if value not in known:
            raise ValueError(self.say("choice", what=self.say(what), value=value, known=", ".join(known)))
        return value

    # train

    def _train(self, given: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        algorithm = self._one_of("algorithm", str(chosen["algorithm"]).lower(), KINDS)
        samples = KINDS[algorithm].samples
        if not samples and (unread := given.keys() & REWARD):
            raise ValueError(self.say("unread", value=min(unread), algorithm=algorithm))
        told, reward = self._reward(chosen) if samples else (None, None)
        dotted = {key for key in given if "." in key and key != TASKS}
        keys = {key: chosen[key] for key in chosen if key in MORE["train"] or key in dotted}
        # The rate of SFT would ruin a model that learns from rewards or pairs.
        keys.setdefault("learning_rate", 5e-5 if algorithm == "sft" else 1e-5 if chosen["use_lora"] else 1e-6)
        more = {"reward": told} if told else {}
        if not given.get("confirm", {"algorithm", "model_name"} <= given.keys()):
            plan = {key: value for key, value in chosen.items() if isinstance(value, str | int)} | keys | more
            plan["algorithm"], text = algorithm, self.say("plan", known=", ".join(DEFAULTS))
            return {"status": "plan", "message": text, "plan": plan, "confirm": True}
        heldout = None
        if {"eval_steps", "training.eval_every"} & keys.keys() and chosen["dataset"] in datasets.NAMES:
            heldout = datasets.read_gsm8k("test", 64, given.get(TASKS))
        model, folder = chosen["model_name"], chosen["output_dir"]
        rows = self._rows(chosen, training.reader(algorithm))
        trainer, about = training.train(algorithm, model, rows, folder, keys, reward, heldout)
        training.write_model(trainer, folder, about | more)
        return about | more

    def _rows(self, chosen: Mapping[str, Any], read: datasets.Reader) -> list[dict]:
        """Return the rows of the dataset that is named."""
        name, split, count = chosen["dataset"], chosen["split"], chosen["max_samples"]
        custom = chosen.get("custom_dataset")
        source = self.custom_datasets.get(name, name) if custom is None else custom
        if isinstance(source, str) and source in datasets.NAMES:
            return read(datasets.read_gsm8k(split, count, chosen.get(TASKS)))
        if isinstance(source, str) and "/" not in source and not Path(source).exists():
            self._one_of(
                "dataset", source, ["gsm8k", *self.custom_datasets, "FILE.jsonl", "OWNER/NAME (hub)"]
            )
        return read(source, split, count)

    def _reward(self, chosen: Mapping[str, Any]) -> tuple[str, Callable[..., Any]]:
        """Return the reward and its name: the object that is given, the one that is named, the one registered under
        the name of the dataset, the only one registered; else accuracy."""
        if (custom := chosen["custom_reward"]) is not None:
            return str(getattr(custom, "__name__", type(custom).__name__)), custom
        own, options = self.custom_reward_functions, chosen["reward_config"]
        name = chosen["reward"] or chosen["reward_type"]
        if name is None:
            named = [each for each in own if each == chosen["dataset"]] or [*own] or ["accuracy"]
            if len(named) > 1:
                raise ValueError(self.say("registered", known=", ".join(named)))
            name = named[0]
        self._one_of("reward", name, [*own, *rewards.OPTIONS])
        if name in own:
            return name, own[name]
        return name, rewards.make_reward(name, self._created.get(name, {}) if options is None else options)

    # the other actions

    def _load(self, given: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        form = self._one_of("format", given.get("format_type", chosen["format"]), datasets.FORMATS)
        found = self._rows(chosen, datasets.unchanged)
        if {"question", "answer"} <= found[0].keys():
            tokenizer = datasets.tokenizer_of(chosen["model_name"]) if form == "rl" else None
            found = datasets.format_rows(found, form, tokenizer)
        about = {"status": "success", "format": form, "split": chosen["split"]}
        return about | {"dataset_size": len(found), "sample_keys": list(found[0])}

    def _create(self, given: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        kind = self._one_of("reward", chosen.pop("reward_type"), rewards.OPTIONS)
        options = rewards.reward_options(kind, chosen)
        rewards.make_reward(kind, chosen)
        self._created[kind] = chosen
        text = self.say(kind, **options, cap=rewards.STEP_CAP)
        shown = {name: value for name, value in options.items() if value is not None}
        return {"status": "success", "reward_type": kind, "description": text, **shown}

    def _evaluate(self, given: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        from TrainingFactory.integrations.hello_agents.evaluation import evaluate
        from TrainingFactory.models.loading import pick_device

        if not (path := chosen["model_path"]):
            raise ValueError(self.say("missing", value="model_path"))
        told, reward = self._reward(chosen)
        options = {SAMPLING[key]: given[key] for key in SAMPLING if key in given}
        options["logging.output_dir"] = chosen["output_dir"]
        asked = chosen["metrics"], chosen["k"], chosen["return_details"]
        found = evaluate(path, self._rows(chosen, datasets.tasks), reward, options, *asked)
        about = {"status": "success", "model_path": path, "device": str(pick_device("auto")), "reward": told}
        return about | found


class RLTrainingTool(RLTraining, Tool):
    """The tool by itself, where no HelloAgents is installed: `run` returns JSON text that has keys as well."""

    parameter, result = ToolParameter, Result
