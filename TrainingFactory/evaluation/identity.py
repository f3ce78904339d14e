"""Digests that identify an evaluated model and the conditions of its evaluation; they are the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from TrainingFactory.assembly.named_files import map_files
from TrainingFactory.common.endpoints.names import find_endpoint, is_endpoint
from TrainingFactory.common.user_code import is_file_name
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ModelSection
from TrainingFactory.data.disk import TRAINING_STATE_FILES, digest_file, read_checksums
from TrainingFactory.evaluation.records import Conditions, ModelIdentity, digest_json, digest_tasks
from TrainingFactory.models.names import TINY_IDS, resolve_model_name
from TrainingFactory.registry.store import combine_digests as digest_checksums
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Task

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
# Options that change the outputs.
OUTPUT_OPTIONS = ("family", "tools_format", "dtype", "max_length", "thinking", "quantization")
# Sampling options that change only the speed or the shapes of the engine.
SPEED_OPTIONS = {"slots", "deterministic"}
# Options of the environment, besides its name and system prompt, that change an episode.
ENVIRONMENT_OPTIONS = {"command", "options", "context", "user"}


def identify_model(
    model: ModelSection,
    name: str,
    run: RunFolder | None = None,
    step: int | None = None,
    is_saved: bool = True,
) -> ModelIdentity:
    """Return a model's name, options, run and step, and the digest of its weights if these are saved."""
    options = {key: value for key in OUTPUT_OPTIONS if (value := getattr(model, key)) is not None}
    if model.chat_template is not None:
        options["chat_template"] = _identify_file(model.chat_template)
    run_info = {} if run is None else {"run": run.name, "run_id": run.run_info.get("id"), "step": step}
    return ModelIdentity(
        name=name, digest=digest_model(model) if is_saved else None, options=options, **run_info
    )


def make_conditions(
    config: TrainingConfig, tasks: Sequence[Task], num_episodes: int, extra_inputs: Sequence[str | None] = ()
) -> Conditions:
    """Return the conditions that two evaluations must share to be comparable. Files are identified by their contents,
    and Python objects that the config does not name by `extra_inputs`."""
    hashed_config = map_files(config, _identify_file)
    environment_name = config.environment.environment_id
    if environment_name is not None and is_file_name(environment_name):
        environment_name = Path(environment_name).name
    reward = hashed_config.reward.model_dump(exclude={"max_unscored", "max_equal_steps"})
    tools = [entry.model_dump() for entry in hashed_config.tools]
    environment = hashed_config.environment
    settings = environment.model_dump(include=ENVIRONMENT_OPTIONS, exclude_defaults=True)
    return Conditions(
        environment=environment_name,
        tasks=digest_tasks(tasks),
        count=len(tasks),
        seed=config.training.seed,
        episodes=num_episodes,
        sampling=config.sampling.model_dump(exclude=SPEED_OPTIONS)
        | {"max_turns": config.environment.max_turns},
        rest=digest_json(
            [environment.system_prompt, reward, environment.environment_id, tools, *extra_inputs]
            + ([settings] if settings else [])  # without options, the digest is that of earlier versions
        ),
    )


def digest_model(model: ModelSection) -> str:
    """Return the digest of local weights; for others, the name and revision of the model."""
    base_digest = _digest_base(model)
    if model.adapter is None:
        return base_digest
    adapter_digest = digest_weights(Path(model.adapter).expanduser())
    return f"sha256:{hashlib.sha256(f'{base_digest} {adapter_digest}'.encode()).hexdigest()}"


def digest_weights(folder: Path) -> str:
    """Return the digest of the weight files in a folder, from its checksum file if it has one."""
    checksums = read_checksums(folder)
    files = [
        path
        for path in folder.iterdir()
        if path.suffix in WEIGHT_SUFFIXES and path.name not in TRAINING_STATE_FILES
    ]
    return f"sha256:{digest_checksums({p.name: checksums.get(p.name) or digest_file(p) for p in files})}"


def _digest_base(model: ModelSection) -> str:
    if is_endpoint(model.name):
        return f"endpoint:{find_endpoint(model.name).make_endpoint().identity}"
    model_name, path = resolve_model_name(model.name), Path(model.name).expanduser()
    if path.is_dir():
        return digest_weights(path)
    if path.is_file():
        return f"sha256:{digest_file(path)}"
    if model_name in TINY_IDS:
        return f"{model_name}@{model.revision or 0}"
    if model_name.startswith("package:"):
        return model_name
    from huggingface_hub import try_to_load_from_cache

    revision = model.revision or "main"
    cached_path = try_to_load_from_cache(model_name, "config.json", revision=revision)
    return f"hub:{model_name}@{Path(cached_path).parent.name if isinstance(cached_path, str) else revision}"


def _identify_file(name: str) -> str:
    path = Path(name).expanduser()
    return f"{path.name} {digest_file(path)}" if path.is_file() else name
