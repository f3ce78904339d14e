"""`RLTrainingTool`: the actions train, load_dataset, create_reward and evaluate, each called with one dictionary."""

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
from TrainingFactory.integrations.hello_agents.texts import ToolMessages

log = logging.getLogger(__name__)
TASKS_KEY = "data.tasks"  # a folder with GSM8K
NO_REWARD = {"reward": None, "reward_type": None, "reward_config": None, "custom_reward": None}
ACTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "train": {
        "algorithm": "sft", "model_name": "Qwen/Qwen2-0.5B-Instruct", "dataset": "gsm8k", "split": "train",
        "max_samples": None, "num_epochs": 3, "output_dir": "./output", "use_lora": True, "batch_size": 4,
        "custom_dataset": None, "confirm": None, **NO_REWARD
    },
    "load_dataset": {
        "format": "sft", "split": "train", "max_samples": 100, "model_name": None, "dataset": "gsm8k",
    },
    "create_reward": {"reward_type": "accuracy"},
    "evaluate": {
        "model_path": None, "dataset": "gsm8k", "split": "test", "max_samples": 100, "use_lora": None,
        "metrics": ("accuracy", "average_reward"), "k": 1, "return_details": False, "output_dir": "runs", **NO_REWARD
    },
}  # fmt: skip
SAMPLING_KEYS = {"max_new_tokens": "sampling.max_tokens", "temperature": "sampling.temperature",
            "top_p": "sampling.top_p", "batch_size": "sampling.slots", "thinking": "model.thinking"}  # fmt: skip
# Keys of an action besides those with a default above.
ACTION_KEYS = {
    "train": [*training.OPTION_KEYS, *training.SPECIAL_KEYS],
    "load_dataset": ["format_type"],
    "create_reward": sorted({name for options in rewards.REWARD_OPTIONS.values() for name in options}),
    "evaluate": list(SAMPLING_KEYS),
}
# Parameter descriptions for agents: name -> (type, description).
PARAMETER_DOCS = {
    "action": ("string", "train, load_dataset, create_reward, evaluate"),
    "algorithm": ("string", "sft, grpo, ppo, dpo, kto, rft, reward_model; only if the user has named it"),
    "model_name": ("string", "hub id or folder; only if the user has named it"),
    "dataset": ("string", "gsm8k, a registered dataset, a file or a hub id"),
    "format": ("string", "load_dataset: sft or rl"),
    "split": ("string", "train or test"),
    "reward_type": ("string", "accuracy, length_penalty, step, combined, or a registered reward"),
    "max_samples": ("integer", "number of rows; default: all"),
    "num_epochs": ("integer", "passes over the rows"),
    "output_dir": ("string", "folder for the trained model"),
    "use_lora": ("boolean", "train a LoRA adapter"),
    "batch_size": ("integer", "rows or tasks per step"),
    "learning_rate": ("number", "peak learning rate"),
    "num_generations": ("integer", "grpo: completions per task"),
    "max_new_tokens": ("integer", "maximum tokens per completion"),
    "model_path": ("string", "evaluate: hub id or folder"),
    "penalty_weight": ("number", "length_penalty: weight of the penalty"),
    "max_length": (
        "integer",
        "train: maximum dialogue length in tokens; length_penalty: characters without a penalty",
    ),
    "step_bonus": ("number", "step: bonus per line"),
    "confirm": ("boolean", "true starts the training; only after the user has agreed to the plan"),
}


class Result(str):
    """JSON text of a mapping whose values can also be read by key."""

    data: dict[str, Any]

    def __new__(cls, data: dict[str, Any]) -> Result:
        result = super().__new__(cls, json.dumps(data, ensure_ascii=False, indent=2))
        result.data = data
        return result

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def keys(self) -> KeysView[str]:
        return self.data.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.data.items()


class RLTraining:
    """The RL tool without a tool base class. A subclass adds HelloAgents' `Tool` as a second base and sets
    `parameter_class` and `result_class`. Messages are in Chinese; in English with `language="en"`."""

    name = "rl_training"
    trl_available = True  # our trainers do not need TRL
    parameter_class: Callable[..., Any]
    result_class: Callable[[dict[str, Any]], Any]

    def __init__(self, language: str | None = None) -> None:
        self.messages = ToolMessages(language)
        base_tool: Any = super()  # the tool base class of the subclass
        base_tool.__init__(name=self.name, description=self.messages("description"))
        self.custom_datasets: dict[str, Any] = {}
        self.custom_reward_functions: dict[str, Callable[..., Any]] = {}
        self._presets: dict[str, dict[str, Any]] = {}  # options by reward_type

    def register_dataset(self, name: str, dataset: Any) -> None:
        self.custom_datasets[name] = dataset
        print(self.messages("added", value=name))

    def register_reward_function(self, name: str, reward_fn: Callable[..., Any]) -> None:
        self.custom_reward_functions[name] = reward_fn
        print(self.messages("added", value=name))

    def get_parameters(self) -> list[Any]:
        return [
            self.parameter_class(name=name, type=type_name, description=text, required=False, default=None)
            for name, (type_name, text) in PARAMETER_DOCS.items()
        ]

    def run(self, parameters: Mapping[str, Any] | str) -> Any:
        """Run an action from a mapping or its JSON text and return its result, a training plan, or an error."""
        try:
            return self.result_class(self._run_action(self._parse_parameters(parameters)))
        except ValueError as error:
            message = str(error)
        except Exception as error:  # foreign code: datasets, rewards, the hub
            log.exception("rl_training")
            message = self.messages("failed", why=describe(error))
        return self.result_class({"status": "error", "message": message})

    def _run_action(self, options: dict[str, Any]) -> dict[str, Any]:
        action = self._require("action", str(options.pop("action", "train")).lower(), ACTION_DEFAULTS)
        known_names = dict.fromkeys([*ACTION_DEFAULTS[action], *ACTION_KEYS[action], TASKS_KEY])
        for key in options:
            is_config_key = action == "train" and "." in key  # a full config key, validated by the config
            if key not in known_names and not is_config_key:
                hint, name_list = did_you_mean(nearest(key, known_names)), ", ".join(known_names)
                raise ValueError(self.messages("key", action=action, value=key, near=hint, known=name_list))
        methods = {"train": self._train, "load_dataset": self._load_dataset, "create_reward": self._create}
        return methods.get(action, self._evaluate)(options, ACTION_DEFAULTS[action] | options)

    def _parse_parameters(self, parameters: Any) -> dict[str, Any]:
        """Convert the parameters to their types. Agents write numbers as text, and tool registries put all parameters
        into `input`."""
        if not isinstance(parameters, str | Mapping):
            raise ValueError(self.messages("parameters", value=type(parameters).__name__))
        options = {"input": parameters} if isinstance(parameters, str) else dict(parameters)
        input_text, data_section = options.pop("input", None), options.pop("data", None)
        if isinstance(input_text, str) and input_text.lstrip().startswith("{"):
            try:
                options |= json.loads(input_text)
            except json.JSONDecodeError as error:
                raise ValueError(self.messages("json", line=error.lineno, column=error.colno)) from error
        if isinstance(data_section, Mapping):
            options |= {f"data.{key}": value for key, value in data_section.items()}
        for key, (type_name, _) in PARAMETER_DOCS.items():
            if type_name != "string" and isinstance(value := options.get(key), str):
                try:
                    options[key] = json.loads(value.lower())
                except ValueError:
                    continue  # the config rejects it with its key
        return {key: value for key, value in options.items() if value is not None or key == "max_samples"}

    def _require(self, subject: str, value: str, choices: Collection[str]) -> str:
        if value not in choices:
            raise ValueError(
                self.messages("choice", what=self.messages(subject), value=value, known=", ".join(choices))
            )
        return value

    # Actions: `options` are the user's, `config` is completed with defaults.

    def _train(self, options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        algorithm = self._require("algorithm", str(config["algorithm"]).lower(), KINDS)
        is_online = KINDS[algorithm].samples
        if not is_online and (unused_options := options.keys() & NO_REWARD):
            raise ValueError(self.messages("unread", value=min(unused_options), algorithm=algorithm))
        reward_name, reward = self._find_reward(config) if is_online else (None, None)
        config_keys = {key for key in options if "." in key and key != TASKS_KEY}
        keys = {key: config[key] for key in config if key in ACTION_KEYS["train"] or key in config_keys}
        # SFT's learning rate is too high for learning from rewards or preference pairs.
        keys.setdefault("learning_rate", 5e-5 if algorithm == "sft" else 1e-5 if config["use_lora"] else 1e-6)
        reward_arguments = {"reward": reward_name} if reward_name else {}
        if not options.get("confirm", {"algorithm", "model_name"} <= options.keys()):
            plan = (
                {key: value for key, value in config.items() if isinstance(value, str | int)}
                | keys
                | reward_arguments
            )
            plan["algorithm"] = algorithm
            message = self.messages("plan", known=", ".join(ACTION_DEFAULTS))
            return {"status": "plan", "message": message, "plan": plan, "confirm": True}
        heldout_rows = None
        if {"eval_steps", "training.eval_every"} & keys.keys() and config["dataset"] in datasets.GSM8K_NAMES:
            heldout_rows = datasets.read_gsm8k("test", 64, options.get(TASKS_KEY))
        model, folder = config["model_name"], config["output_dir"]
        rows = self._load_rows(config, training.pick_row_reader(algorithm))
        trainer, result = training.train(algorithm, model, rows, folder, keys, reward, heldout_rows)
        training.write_model(trainer, folder, result | reward_arguments)
        return result | reward_arguments

    def _load_rows(self, config: Mapping[str, Any], read_dataset: datasets.RowReader) -> list[dict]:
        """Return the rows of the requested dataset."""
        name, split, count = config["dataset"], config["split"], config["max_samples"]
        custom_dataset = config.get("custom_dataset")
        dataset = self.custom_datasets.get(name, name) if custom_dataset is None else custom_dataset
        if isinstance(dataset, str) and dataset in datasets.GSM8K_NAMES:
            return read_dataset(datasets.read_gsm8k(split, count, config.get(TASKS_KEY)))
        if isinstance(dataset, str) and "/" not in dataset and not Path(dataset).exists():
            known_names = ["gsm8k", *self.custom_datasets, "FILE.jsonl", "OWNER/NAME (hub)"]
            self._require("dataset", dataset, known_names)
        return read_dataset(dataset, split, count)

    def _find_reward(self, config: Mapping[str, Any]) -> tuple[str, Callable[..., Any]]:
        """Return the name of the reward and its function. The first of these applies: `custom_reward`; the reward named
        by `reward` or `reward_type`; the reward registered under the dataset's name; the only registered reward;
        accuracy."""
        if (custom_reward := config["custom_reward"]) is not None:
            return str(getattr(custom_reward, "__name__", type(custom_reward).__name__)), custom_reward
        functions, options = self.custom_reward_functions, config["reward_config"]
        name = config["reward"] or config["reward_type"]
        if name is None:
            dataset_rewards = [key for key in functions if key == config["dataset"]]
            candidates = dataset_rewards or [*functions] or ["accuracy"]
            if len(candidates) > 1:
                raise ValueError(self.messages("registered", known=", ".join(candidates)))
            name = candidates[0]
        self._require("reward", name, [*functions, *rewards.REWARD_OPTIONS])
        if name in functions:
            return name, functions[name]
        return name, rewards.make_reward(name, self._presets.get(name, {}) if options is None else options)

    def _load_dataset(self, options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        format_name = self._require("format", options.get("format_type", config["format"]), datasets.FORMATS)
        rows = self._load_rows(config, datasets.read_plain_rows)
        if {"question", "answer"} <= rows[0].keys():
            tokenizer = datasets.load_model_tokenizer(config["model_name"]) if format_name == "rl" else None
            rows = datasets.format_rows(rows, format_name, tokenizer)
        result = {"status": "success", "format": format_name, "split": config["split"]}
        return result | {"dataset_size": len(rows), "sample_keys": list(rows[0])}

    def _create(self, options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        reward_type = self._require("reward", config.pop("reward_type"), rewards.REWARD_OPTIONS)
        full_options = rewards.complete_options(reward_type, config)
        rewards.make_reward(reward_type, config)
        self._presets[reward_type] = config
        text = self.messages(reward_type, **full_options, cap=rewards.MAX_STEP_BONUS)
        completed_options = {name: value for name, value in full_options.items() if value is not None}
        return {"status": "success", "reward_type": reward_type, "description": text, **completed_options}

    def _evaluate(self, options: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        from TrainingFactory.integrations.hello_agents.evaluation import evaluate
        from TrainingFactory.models.dtypes import pick_device

        if not (path := config["model_path"]):
            raise ValueError(self.messages("missing", value="model_path"))
        name, reward = self._find_reward(config)
        overrides = {SAMPLING_KEYS[key]: options[key] for key in SAMPLING_KEYS if key in options}
        overrides["logging.output_dir"] = config["output_dir"]
        metrics, k, with_details = config["metrics"], config["k"], config["return_details"]
        rows = self._load_rows(config, datasets.read_tasks)
        scores = evaluate(path, rows, reward, overrides, metrics, k, with_details)
        result = {"status": "success", "model_path": path, "device": str(pick_device("auto")), "reward": name}
        return result | scores


class RLTrainingTool(RLTraining, Tool):
    """The RL tool for machines without HelloAgents, whose `run` returns a `Result`."""

    parameter_class, result_class = ToolParameter, Result
