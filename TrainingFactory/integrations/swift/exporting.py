"""Export of a config to ms-swift: a dataset with its tasks, the arguments, and a script that starts the training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.assembly.named_files import map_files
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.common.event_loop import run
from TrainingFactory.common.openai_format import spec_to_dict
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.data.trajectories import task_to_dict
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.integrations.swift import CONFIG_VARIABLE, PLUGIN_NAME, TASK_COLUMN
from TrainingFactory.integrations.swift.keys import KEY_BY_ARGUMENT, LORA_ARGUMENTS, VALUE_TRANSLATIONS
from TrainingFactory.integrations.swift.scheduler import as_swift_messages, build_environment, check_config
from TrainingFactory.models.names import TINY_IDS, resolve_model_name
from TrainingFactory.resolve import factories
from TrainingFactory.resolve.model_names import with_resolved_model
from TrainingFactory.training.dataset import make_tasks
from TrainingFactory.types import Task

ROWS_FILE, CONFIG_FILE, ARGUMENTS_FILE, SCRIPT_FILE = "rows.jsonl", "config.yaml", "args.yaml", "run.sh"
# Written even if the config does not set them, because ms-swift's defaults differ from ours.
CORE_KEYS = (
    "model.name", "training.algorithm", "training.learning_rate", "training.num_epochs", "training.schedule",
    "training.weight_decay", "training.group_size", "training.seed", "sampling.max_tokens", "sampling.temperature",
    "environment.max_turns", "sampling.engine", "lora.enabled", "logging.output_dir", "grpo.kl", "grpo.normalization",
    "grpo.scale_rewards", "grpo.clip_low", "grpo.clip_high",
)  # fmt: skip
PLUGIN_KEYS = ("environment.system_prompt", "environment.max_turns", "data.seed")  # the plugin applies them
# Sections that the plugin reads from the config itself.
PLUGIN_PREFIXES = (
    "environment",
    "tools",
    "reward",
    "data",
    "sampling.max_reply_tokens",
    "optimization.tool_cache",
)


def export_config(config: TrainingConfig, folder: Path, notify: Callable[[str], None]) -> list[str]:
    """Write rows, config, arguments and script to a new folder; return the keys without a counterpart in ms-swift."""
    if config.training.algorithm != "grpo":
        raise ValueError(
            f"training.algorithm: {config.training.algorithm} trains on rows, which ms-swift reads as they are. Only "
            "grpo, which plays an environment, is exported."
        )
    check_config(config)
    config = map_files(config, _make_absolute)
    resolved_config = factories.resolve_ids(config, notify)
    tools = RunTools(resolved_config, (), None)
    environment = build_environment(resolved_config, tools)
    tasks = make_tasks(resolved_config, environment)
    rows = run(lambda: _make_dataset_rows(tools, environment, tasks))
    arguments, unsupported_keys = make_swift_arguments(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomically(folder / ROWS_FILE, "".join(lines))
    options = config.model_dump(mode="json", exclude_unset=True)
    write_atomically(folder / CONFIG_FILE, yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
    write_atomically(folder / ARGUMENTS_FILE, _format_arguments(arguments, unsupported_keys))
    write_atomically(folder / SCRIPT_FILE, make_script())
    (folder / SCRIPT_FILE).chmod(0o755)
    return unsupported_keys


def make_swift_arguments(config: TrainingConfig, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return ms-swift's arguments, and the keys that the config sets but that have no counterpart."""
    options = {key: _read_value(config, key) for key in {*_list_explicit_keys(config), *CORE_KEYS}}
    arguments: dict[str, Any] = {}
    for name, key in KEY_BY_ARGUMENT.items():
        key = key.replace("@", "grpo.kl")
        if key in PLUGIN_KEYS and name != "max_turns":
            options.pop(key, None)
        elif key in options and (value := options.pop(key)) is not None:
            arguments[name] = value
    for name, (key, translations) in VALUE_TRANSLATIONS.items():
        if key in options:
            value = options.pop(key)
            match = next((swift_value for swift_value, ours in translations.items() if ours == value), None)
            if match is None:
                options[key] = value
            else:
                arguments[name] = {"True": True, "False": False}.get(match, match)
    batch_size = options.pop("training.batch_size", config.training.batch_size)
    # One group per device and pass; the passes of a step add up to batch_size groups.
    arguments["per_device_train_batch_size"] = config.training.group_size
    arguments["gradient_accumulation_steps"] = batch_size
    target_modules = options.pop("lora.target_modules", None)
    if not config.lora.enabled:
        arguments = {name: value for name, value in arguments.items() if name not in LORA_ARGUMENTS}
    elif target_modules is not None:
        arguments["target_modules"] = target_modules
    arguments |= _make_model_arguments(config)
    arguments["output_dir"] = str(folder.resolve() / "output")
    arguments |= {
        "dataset": str(folder.resolve() / ROWS_FILE),
        "multi_turn_scheduler": PLUGIN_NAME,
        "reward_funcs": PLUGIN_NAME,
        "remove_unused_columns": False,
        "logging_steps": 1,
    }
    options.pop("model.adapter", None)
    unsupported_keys = [key for key in options if not key.startswith(PLUGIN_PREFIXES)]
    return arguments, sorted(unsupported_keys)


def make_script() -> str:
    """Return the shell script that starts the training. It asks ms-swift's Python for the path of our plugin."""
    return f"""#!/bin/sh
# Train with ms-swift in the environment of {CONFIG_FILE}. Arguments are passed on: sh {SCRIPT_FILE} --max_steps 8
# TrainingFactory must be installed in ms-swift's environment: pip install --no-deps training-factory
set -e
HERE="$(cd "$(dirname "$0")" && pwd)"
export {CONFIG_VARIABLE}="${{{CONFIG_VARIABLE}:-$HERE/{CONFIG_FILE}}}"
PLUGIN="$(python -m TrainingFactory.integrations.swift)"
exec swift rlhf "$HERE/{ARGUMENTS_FILE}" --external_plugins "$PLUGIN" "$@"
"""


def _make_model_arguments(config: TrainingConfig) -> dict[str, Any]:
    """Return the arguments that load the config's model: a folder, a hub id, or an adapter of one."""
    section = with_resolved_model(config).model
    model_name = resolve_model_name(section.name)
    if model_name in TINY_IDS or model_name.startswith("package:") or model_name.endswith(".gguf"):
        raise ValueError(
            f"model.name: ms-swift cannot load {section.name}. Name a folder or a hub id; `tfactory export` writes the "
            "folder of a trained model."
        )
    arguments = {"model": _make_absolute(model_name)}
    return arguments if section.adapter is None else arguments | {"adapters": _make_absolute(section.adapter)}


async def _make_dataset_rows(tools: RunTools, environment: Any, tasks: list[Task]) -> list[dict[str, Any]]:
    try:
        equipped_environment = await tools.equip(environment)
        return [await _make_dataset_row(equipped_environment, task) for task in tasks]
    finally:
        await tools.close()


async def _make_dataset_row(environment: Any, task: Task) -> dict[str, Any]:
    """Return the dataset row of a task with its prompt, its tools, and the task for the plugin."""
    episode_environment = environment(task)
    try:
        messages = await episode_environment.reset()
        tools = [spec_to_dict(tool.spec) for tool in episode_environment.tools]
    finally:
        await episode_environment.close()
        if isinstance(episode_environment, ToolEnvironment):
            await episode_environment.executor.close()
    try:
        task_json = json.dumps(task_to_dict(task), ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"task {task.id}: answer and metadata must be JSON values ({error})") from error
    row: dict[str, Any] = {"messages": as_swift_messages(messages)}
    if tools:
        row["tools"] = json.dumps(tools, ensure_ascii=False)
    return row | {TASK_COLUMN: task_json}


def _list_explicit_keys(config: TrainingConfig) -> list[str]:
    """Return the keys that the config sets: SECTION.KEY, or SECTION for lists."""
    keys: list[str] = []
    for name in config.model_fields_set:
        section = getattr(config, name)
        explicit_fields = getattr(section, "model_fields_set", None)
        keys += [name] if explicit_fields is None else [f"{name}.{key}" for key in explicit_fields]
    return keys


def _read_value(config: TrainingConfig, key: str) -> Any:
    value: Any = config
    for field_name in key.split("."):
        value = getattr(value, field_name)
    return value


def _make_absolute(name: str) -> str:
    path = Path(name).expanduser()
    return os.path.abspath(path) if path.exists() else name


def _format_arguments(arguments: dict[str, Any], unsupported_keys: list[str]) -> str:
    text = yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True)
    notes = "".join(f"# {key} has no counterpart in ms-swift\n" for key in unsupported_keys)
    return f"# swift rlhf {ARGUMENTS_FILE}; written by tfactory swift export\n{text}{notes}"
