"""Import of an ms-swift training: a shell script, an arguments file, or an output folder. Nothing is run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.common.texts import is_secret
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import ConfigLoader
from TrainingFactory.integrations.rl_factory.launch_script import ASSIGNMENT, LINE, SHELL_ONLY, Expansion
from TrainingFactory.integrations.swift import keys
from TrainingFactory.integrations.swift.keys import BY_HAND, NO_COUNTERPART, NOT_NEEDED

COMMAND_PATTERN = re.compile(r"(?:^|/)swift$")
SWIFT_COMMANDS = ("rlhf", "sft", "pt")
MAX_BYTES = 1_000_000
ARGUMENT_PATTERN = re.compile(r"--([\w-]+)(?:=(.*))?", re.DOTALL)
BATCH_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
)
DATASET_KEYS = {
    "dataset": "tasks",
    "val_dataset": "heldout",
}  # -> key of the section data, for algorithms that sample


def read_arguments(path: Path, variables: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a script, file or output folder, and whether they include all defaults."""
    if path.is_dir():
        candidates = [path / "args.json", *sorted(path.glob("*/args.json"))]
        existing_file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if existing_file is None:
            raise ValueError(
                f"{path} has no args.json. Name an output folder of ms-swift, such as output/v0-..."
            )
        return _read_mapping(existing_file), True
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_mapping(path), path.name == "args.json"
    return _read_script(path, variables), False


class SwiftTranslation:
    """Config (`sections`) of an ms-swift training, and `notes` on arguments to translate by hand or drop."""

    def __init__(self, path: Path, arguments: Mapping[str, Any], is_complete: bool = False) -> None:
        self.path, self.is_complete = path, is_complete
        self.sections: dict[str, Any] = {}
        self.notes: list[str] = []
        self._arguments = {
            keys.NEW_NAME_BY_OLD.get(name, name): _parse_scalar(value)
            for name, value in arguments.items()
            if value is not None and value not in ([], "")
        }
        self._drop_shell_values()
        self._set_algorithm()
        self._add_defaults()
        self._translate_data()
        self._translate_batch()
        self._translate_reward()
        self._copy_keys()
        self._map_values()
        self._translate_lora()
        self._note_remaining()

    def text(self) -> str:
        """Return the config as YAML, with the notes as comments at its end."""
        header = (
            f"# Translated from {self.path}. Comments at the end list what was not translated, and why.\n"
        )
        sections = {
            name: self.sections[name] for name in TrainingConfig.model_fields if name in self.sections
        }
        footer = "".join(f"# {' '.join(note.split())}\n" for note in self.notes)
        return f"{header}{yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)}{footer}"

    def _set_key(self, key: str, value: Any) -> None:
        section, _, name = key.partition(".")
        self.sections.setdefault(section, {})[name] = value

    def _note(self, name: str, value: Any, status: str, reason: str) -> None:
        shown_value = "***" if is_secret(name.lower(), str(value)) else str(value)[:200]
        self.notes.append(f"--{name} {shown_value}: {status}: {reason}")

    def _drop_shell_values(self) -> None:
        for name, value in [*self._arguments.items()]:
            if shell_syntax := SHELL_ONLY.search(str(value)):
                del self._arguments[name]
                self.notes.append(
                    f"--{name}: {BY_HAND}: it depends on {shell_syntax[1]}, which only the shell knows"
                )

    def _set_algorithm(self) -> None:
        rlhf_type = self._arguments.pop("rlhf_type", None)
        algorithms = keys.VALUE_TRANSLATIONS["rlhf_type"][1]
        if rlhf_type is not None and rlhf_type not in algorithms:
            algorithm_list = ", ".join(algorithms)
            raise ValueError(
                f"{self.path}: rlhf_type {rlhf_type} has no counterpart. Supported: {algorithm_list}, and swift sft."
            )
        self.algorithm = str(algorithms[rlhf_type]) if rlhf_type is not None else "sft"
        self._set_key("training.algorithm", self.algorithm)

    def _add_defaults(self) -> None:
        defaults: dict[str, Any] = dict(keys.SWIFT_DEFAULTS)
        if self.algorithm == "grpo":
            defaults |= keys.GRPO_DEFAULTS
        tuner = str(self._arguments.get("tuner_type", defaults["tuner_type"]))
        defaults["learning_rate"] = keys.LEARNING_RATES.get(tuner, keys.LEARNING_RATES["full"])
        if tuner == "lora":
            defaults |= keys.LORA_DEFAULTS
        if self._arguments.get("max_steps", -1) > 0:  # then ms-swift ignores the epochs
            del defaults["num_train_epochs"]
            self._arguments.pop("num_train_epochs", None)
        self._arguments = defaults | self._arguments

    def _translate_data(self) -> None:
        for name, data_key in DATASET_KEYS.items():
            files = self._arguments.pop(name, None)
            if not files:
                continue
            first_file, *ignored_files = files if isinstance(files, list) else [files]
            key = data_key if self.algorithm == "grpo" or name == "val_dataset" else "dataset"
            file, _, num_rows = str(first_file).rpartition("#")  # FILE#COUNT takes the first rows
            if file and num_rows.isdigit():
                self._set_key("data.heldout_count" if key == "heldout" else "data.count", int(num_rows))
            else:
                file = str(first_file)
            self._set_key(f"data.{key}", file)
            if ignored_files:
                self._note(
                    name, ignored_files, BY_HAND, "only one file is supported; merge the rows of all files"
                )

    def _translate_batch(self) -> None:
        sizes = {name: self._pop_count(name) for name in BATCH_KEYS if name in self._arguments}
        size_text = ", ".join(f"{name} {value}" for name, value in sizes.items()) or "the default batch size"
        device_batch_size = sizes.get("per_device_train_batch_size", 1)
        num_passes = sizes.get("gradient_accumulation_steps", 1)
        if self.algorithm != "grpo":
            self._set_key("training.batch_size", device_batch_size * num_passes)
            return
        group_size = self._pop_count("num_generations") if "num_generations" in self._arguments else 8
        num_completions = sizes.get(
            "generation_batch_size", device_batch_size * sizes.get("steps_per_generation", num_passes)
        )
        self._set_key("training.batch_size", max(1, num_completions // group_size))
        self._set_key("training.group_size", group_size)
        note = f"training.batch_size counts tasks: {num_completions} completions of {group_size} each, on one device"
        if num_completions % group_size:
            note += "; it was rounded"
        self.notes.append(f"{size_text}: {BY_HAND}: {note}")

    def _pop_count(self, name: str) -> int:
        """Remove an argument and return its value, which must be a positive integer."""
        value = self._arguments.pop(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.path}: {name} is {value!r}; it must be a positive integer")
        return value

    def _translate_reward(self) -> None:
        functions = self._arguments.pop("reward_funcs", None)
        if functions:
            self._note(
                "reward_funcs", functions, BY_HAND,
                "use the class with reward.type=function and reward.options.function=FILE.py:NAME, or a built-in rule",
            )  # fmt: skip

    def _copy_keys(self) -> None:
        for name, key in keys.KEY_BY_ARGUMENT.items():
            if name not in self._arguments:
                continue
            value = self._arguments.pop(name)
            is_for_other_algorithm = name in keys.GRPO_ARGUMENTS and self.algorithm != "grpo"
            is_for_other_algorithm |= name == "beta" and self.algorithm not in keys.BETA_ALGORITHMS
            is_disabled = value == -1 or (name in ("delta", "eval_steps") and not value)
            if is_for_other_algorithm or is_disabled:
                self._note_unused(name, value)
                continue
            is_int = (
                isinstance(value, float)
                and value.is_integer()
                and name not in ("temperature", "lora_dropout")
            )
            self._set_key(self._fill_key(key), int(value) if is_int and key != "grpo.clip_dual" else value)
        if "grpo" in self.sections and "clip_high" not in self.sections["grpo"]:
            self._set_key("grpo.clip_high", self.sections["grpo"]["clip_low"])  # theirs is epsilon

    def _fill_key(self, key: str) -> str:
        """Replace `@` in a key by our key for ms-swift's `beta`, which is the weight of the KL term in grpo."""
        return key.replace("@", "grpo.kl" if self.algorithm == "grpo" else f"{self.algorithm}.beta")

    def _map_values(self) -> None:
        for name, (key, translations) in keys.VALUE_TRANSLATIONS.items():
            if name not in self._arguments:
                continue
            value = self._arguments.pop(name)
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            if name in keys.GRPO_ARGUMENTS and self.algorithm != "grpo":
                self._note_unused(name, value)
            elif str(value) in translations:
                self._set_key(key, translations[str(value)])
            else:
                self._note(name, value, NO_COUNTERPART, f"{key} supports {', '.join(translations)}")

    def _translate_lora(self) -> None:
        modules = self._arguments.pop("target_modules", None)
        if not self.sections.get("lora", {}).get("enabled"):
            self.sections.pop("lora", None)
        elif modules:
            names = [modules] if isinstance(modules, str) else list(modules)
            self._set_key("lora.target_modules", names[0] if names == ["all-linear"] else names)

    def _note_unused(self, name: str, value: Any) -> None:
        if not self.is_complete:
            self._note(name, value, NOT_NEEDED, f"it has no effect with {self.algorithm}")

    def _note_remaining(self) -> None:
        names: list[str] = []
        for name, value in self._arguments.items():
            status, reason = keys.find_reason(name)
            if self.is_complete and (status == NOT_NEEDED or not value):
                continue
            if self.is_complete and status == NO_COUNTERPART:
                names.append(name)
            else:
                self._note(name, value, status, reason)
        if names:
            self.notes.append(f"{NO_COUNTERPART}, mostly defaults of ms-swift: {', '.join(sorted(names))}")


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        arguments = json.loads(text) if path.suffix == ".json" else yaml.load(text, ConfigLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{path} has no arguments of ms-swift: it must be a mapping of names to values")
    return {str(name).replace("-", "_"): value for name, value in arguments.items() if name != "ENV"}


def _read_script(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of the only training command `swift rlhf|sft|pt ...` of a shell script."""
    expansion = Expansion(dict(variables))
    commands: list[list[str]] = []
    for match in LINE.finditer(_read_text(path)):
        line = match[0].replace("\\\n", "")
        try:
            words = shlex.split(expansion.expand_line(line), comments=True)
        except ValueError as error:
            raise ValueError(f"{path}: invalid shell command in {line[:60]!r}: {error}") from None
        start = next((index for index, word in enumerate(words) if COMMAND_PATTERN.search(word)), None)
        if start is not None and words[start + 1 : start + 2] and words[start + 1] in SWIFT_COMMANDS:
            commands.append(words[start + 1 :])
        elif len(words) <= 2 and (assignment := ASSIGNMENT.fullmatch(" ".join(words))):
            expansion.variables[assignment[1]] = variables.get(assignment[1], assignment[2])
    if len(commands) != 1:
        error_text = f"has {len(commands)} training commands" if commands else "has no training command"
        raise ValueError(
            f"{path} {error_text}. It must have one command: swift rlhf --rlhf_type grpo --model ..."
        )
    [(subcommand, *words)] = commands
    arguments = _parse_arguments(path, words)
    if subcommand == "rlhf":
        arguments.setdefault("rlhf_type", "dpo")  # ms-swift's default
    return arguments


def _parse_arguments(path: Path, words: list[str]) -> dict[str, Any]:
    """Parse `--name value ...`. A first word FILE.yaml or FILE.json is read, as ms-swift does."""
    arguments: dict[str, Any] = {}
    if words and words[0].endswith((".yaml", ".yml", ".json")):
        config_file = Path(words.pop(0))
        config_path = path.parent / (
            config_file if (path.parent / config_file).is_file() else config_file.name
        )  # such as "$HERE/args.yaml"
        arguments = _read_mapping(config_path)
    name = ""
    for word in words:
        if word in ("|", "&", "&&", "||", ";", ">", ">>", "2>&1", "<"):
            break
        if match := ARGUMENT_PATTERN.fullmatch(word):
            name = match[1].replace("-", "_")
            arguments[name] = True if match[2] is None else match[2]
        elif name and arguments[name] is True:
            arguments[name] = word
        elif name:  # one more value
            old_value = arguments[name]
            arguments[name] = [*(old_value if isinstance(old_value, list) else [old_value]), word]
    return arguments


def _parse_scalar(value: Any) -> Any:
    """Convert a text that is a number or boolean in YAML; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed_value = yaml.load(value, ConfigLoader)
    except yaml.YAMLError:
        return value
    return parsed_value if isinstance(parsed_value, int | float | bool) else value
