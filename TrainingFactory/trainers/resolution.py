"""Resolution and validation of a config, each done once. Resolution replaces ids, file names, devices and the model's
name by the values that the run uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.branching import make_branching
from TrainingFactory.assembly.fleet import check_engines
from TrainingFactory.assembly.folding import make_folding
from TrainingFactory.assembly.gpus import with_gpu_division
from TrainingFactory.assembly.learner_processes import with_learner_count
from TrainingFactory.assembly.named_files import with_original_files
from TrainingFactory.assembly.rewards import check_group_size, check_reward
from TrainingFactory.assembly.sampler import check_chat_template
from TrainingFactory.assembly.trackers import check_trackers
from TrainingFactory.assembly.users import make_user
from TrainingFactory.common.endpoints.names import is_endpoint
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.models.names import resolve_model_name
from TrainingFactory.promotion.model_registry import ModelRegistry
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.registry.rows import check_name
from TrainingFactory.resolve import factories
from TrainingFactory.resolve.model_names import check_original_model, with_original_model, with_resolved_model
from TrainingFactory.resolve.siblings import Allocation
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.training.preflight import check_config

Notify = Callable[[str], None]


@dataclass(frozen=True)
class ResolvedConfig:
    """A config after resolution. The run folder stores `written_config`; the run uses `config`."""

    written_config: TrainingConfig  # ids resolved and devices divided; the model's name as the user wrote it
    config: TrainingConfig  # the same with the folder and adapter that the model's name stands for
    objects: UserObjects  # Python objects of the caller, and the rows of datasets that are given by id
    allocation: Allocation | None  # held until the run ends
    notes: list[str]  # one line per resolved id


def resolve_config(
    config: TrainingConfig, run: RunFolder | None, objects: UserObjects, notify: Notify
) -> ResolvedConfig:
    """Resolve the ids, files, devices and model of a config, for a new run or to resume `run`. `notify` gets one line
    per decision."""
    notes: list[str] = []

    def add_note(text: str) -> None:
        notes.append(text)
        notify(text)

    allocation = None if objects.allocation is None else Allocation.from_object(objects.allocation)
    try:
        if run is not None:
            check_original_model(run)
        config = with_original_files(config, run)
        config = factories.resolve_ids(config, add_note)
        _reject_endpoints(config)
        allocation = allocation or factories.find_allocation(config, add_note)
        config = factories.with_allocation(config, allocation, add_note)
        config = with_gpu_division(config, notify)
        written_config = with_learner_count(config, notify)
        objects = factories.with_dataset_rows(written_config, objects, add_note)
        config = (
            with_resolved_model(written_config) if run is None else with_original_model(run, written_config)
        )
        _note_model(written_config, config, add_note)
    except BaseException:
        if allocation is not None:
            allocation.release()
        raise
    return ResolvedConfig(written_config, config, objects, allocation, notes)


def _reject_endpoints(config: TrainingConfig) -> None:
    if is_endpoint(config.model.name):
        problem = "is an endpoint, which has no weights here to train. Name a model; tfactory data teach uses endpoints"
        raise config.wrong([Problem(("model", "name"), problem, config.model.name)])


def _note_model(written_config: TrainingConfig, config: TrainingConfig, add_note: Notify) -> None:
    model = config.model
    if written_config.model.name != (resolved_name := resolve_model_name(model.name)):
        adapter_note = f" under the adapter {model.adapter}" if model.adapter else ""
        add_note(f"model.name {written_config.model.name} is {resolved_name}{adapter_note}")


def validate_config(resolved_config: ResolvedConfig) -> RewardFunction | None:
    """Raise for every part of the config that the run could not execute, before anything is loaded. Return the reward,
    so that tasks can be checked against it."""
    config, objects = resolved_config.config, resolved_config.objects
    check_config(config, config.data.dataset is not None or objects.examples is not None)
    make_branching(config)  # raises if its function cannot be loaded
    check_engines(config)
    check_chat_template(config)
    make_folding(config)
    make_user(config, is_replaying=True)  # the key is checked when the tools are made
    check_trackers(config.logging.trackers)
    check_registry(config)
    reward = objects.reward or check_reward(config)
    if KINDS[config.training.algorithm].samples:
        check_group_size(reward, config.training.group_size)
    return reward


def check_registry(config: TrainingConfig) -> None:
    """Raise if the trained model could not be registered after the run."""
    registry_section = config.registry
    if registry_section.name is not None:
        try:
            check_name(registry_section.name)
        except ValueError as error:
            raise config.wrong([Problem(("registry", "name"), str(error))]) from error
        ModelRegistry(registry_section.path, config.logging.output_dir).names()
