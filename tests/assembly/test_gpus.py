"""How the GPUs of a run are divided among learners and samplers: decided from numbers, no GPU is needed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from TrainingFactory.assembly.gpus import with_gpu_division
from TrainingFactory.cluster import ray_session
from TrainingFactory.config import TrainingConfig
from TrainingFactory.resolve import factories
from TrainingFactory.resolve.siblings import Allocation
from TrainingFactory.trainers.notices import list_unused_options


def divided(visible: int = 8, sections: dict[str, Any] | None = None, **compute: Any) -> Any:
    """Return what the compute section has become, beside what it was, and what was said."""
    config, said = TrainingConfig(**(sections or {}), compute=compute), list[str]()
    found = with_gpu_division(config, said.append, lambda: visible).compute.model_dump(exclude_defaults=True)
    return {key: value for key, value in found.items() if compute.get(key) != value}, said


HALF = {"learners": 4, "gpus_per_learner": 1.0, "samplers": 4, "gpus_per_sampler": 1.0}
WIDE = {"sampling": {"engine": "vllm", "engine_options": {"tensor_parallel_size": 2}}}
SFT = {"training": {"algorithm": "sft"}}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"num_gpus": 8}, {"learners": 8}),
        ({"num_gpus": 8, "backend": "ray", "address": "auto"}, HALF),
        ({"num_gpus": 8, "backend": "ray"}, HALF | {"num_gpus": 7}),  # Ray is started with the others
        (
            {"num_gpus": 8, "backend": "ray", "address": "auto", "sections": WIDE},
            HALF | {"samplers": 2, "gpus_per_sampler": 2.0},
        ),
        (
            {"num_gpus": 8, "backend": "ray", "address": "auto", "sections": SFT},
            {"learners": 8, "gpus_per_learner": 1.0},
        ),
        (
            {"num_gpus": 2, "backend": "ray", "address": "auto"},  # and one sampler, as by default
            {"learners": 1, "gpus_per_learner": 1.0, "gpus_per_sampler": 1.0},
        ),
        ({"num_gpus": 8, "learners": 2}, {}),
        ({"num_gpus": 8, "backend": "ray", "samplers": 7}, {}),
        ({"num_gpus": 1}, {}),
        ({"num_gpus": 8, "sections": {"model": {"device": "cpu"}}}, {}),
        ({"num_gpus": 8, "visible": 0}, {}),
    ],
)
def test_all_gpus_are_divided_unless_the_config_does(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    found, said = divided(**given)
    assert found == wanted
    for key, value in wanted.items():
        assert f"compute.{key}={value}" in said[0]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_gpus": 16}, r"shows 8 GPUs. Set compute.num_gpus=8, or compute.backend=ray"),
        (
            {"num_gpus": 8, "sections": {"training": {"optimizer": "adamw_8bit"}}},
            r"adamw_8bit.*Set compute.learners=1 .*compute.samplers=7",
        ),
        (
            {"num_gpus": 2, "backend": "ray", "gpus_per_sampler": 2},
            r"a sampler needs 2 GPUs and a learner one. Raise compute.num_gpus",
        ),
    ],
)
def test_gpus_that_cannot_be_used_are_an_error_with_the_keys_to_set(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        divided(**given)


def test_an_allocation_is_used_and_no_key_of_it_is_called_unused() -> None:
    said: list[str] = []
    allocated = factories.with_allocation(TrainingConfig(), Allocation("alloc-1", 8), said.append)
    config = with_gpu_division(allocated, said.append, lambda: 8)
    assert (config.compute.num_gpus, config.compute.learners) == (8, 8)
    assert "allocation alloc-1 has 8 GPUs" in said[0] and "compute.learners=8" in said[1]
    assert not any("num_gpus" in line for line in list_unused_options(config))


@pytest.mark.parametrize(
    ("before", "count", "shown"),
    [(None, 3, "1,2,3"), (None, 4, None), (None, None, None), ("4,5,6", 2, "5,6"), ("4,5", 2, "4,5")],
)
def test_a_ray_that_is_started_has_the_gpus_beside_the_first(
    before: str | None, count: int | None, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    manager = SimpleNamespace(get_current_node_num_accelerators=lambda: 4)
    accelerators = SimpleNamespace(get_accelerator_manager_for_resource=lambda name: manager)
    with ray_session._show_last_gpus(
        SimpleNamespace(_private=SimpleNamespace(accelerators=accelerators)), count
    ):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == shown
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
