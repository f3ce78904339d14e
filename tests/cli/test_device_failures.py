"""A device with too little memory or that is lost, and a full disk: told in words, and the run goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.cli import Run
from TrainingFactory.learning.learner import Learner
from TrainingFactory.runs.devices import CHECK_DEVICE, SAVE_MEMORY, describe_device_failure
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.sampling.native import NativeEngine
from TrainingFactory.types import SamplersLost

MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB of which 1.50 GiB is free. "
    "Process 7 has 40.00 GiB memory in use. Of the allocated memory 36 GiB is allocated by PyTorch, and 1 GiB is "
    "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting more."
)
LOST = torch.AcceleratorError(
    "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' ...\n"
)
FULL = OSError(28, "No space left on device")
SMALL = """
environment: mine.py
training: {max_steps: 3, batch_size: 2, group_size: 2}
sampling: {max_tokens: 4}
data: {count: 4}
logging: {checkpoint_every: 1}
"""
MINE = """
from TrainingFactory.envs import CalculatorEnvironment

class Mine(CalculatorEnvironment):
    def reward(self, episode):
        return float(sum(episode.trajectory.turns[0].completion.token_ids) % 7)
"""


@pytest.fixture(autouse=True)
def files(tfactory: Run) -> None:
    """A small config and its environment, in the folder of the test."""
    Path("small.yaml").write_text(SMALL)
    Path("mine.py").write_text(MINE)


def failing(error: Exception, place: Any, method: str) -> Callable[..., Any]:
    """That method, which fails from the moment on when the run has its first checkpoint."""
    before = getattr(place, method)

    def called(*args: Any, **kwargs: Any) -> Any:
        if Path("runs/a/checkpoints/step-000001").exists():
            raise error
        return before(*args, **kwargs)

    return called


@pytest.mark.parametrize(
    ("error", "place", "method", "phase", "says"),
    [
        (
            MEMORY,
            Learner,
            "update",
            "update",
            "too little memory: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        pytest.param(
            *(MEMORY, NativeEngine, "_run_step", "generate", "Process 7 has 40.00 GiB memory in use"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                LOST,
                Learner,
                "update",
                "update",
                "the device failed: CUDA error: unspecified launch failure.",
            ),
            marks=pytest.mark.slow,
        ),
        (
            LOST,
            NativeEngine,
            "_run_step",
            "generate",
            "the device failed: CUDA error: unspecified launch failure.",
        ),
        (FULL, RunFolder, "append", None, "No space left on device. Fix the problem, then run:"),
    ],
)
def test_it_is_told_and_the_run_goes_on(
    tfactory: Run, monkeypatch: pytest.MonkeyPatch,
    error: Exception, place: Any, method: str, phase: str | None, says: str,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(place, method, failing(error, place, method))
        status, _, err = tfactory("train", "small.yaml", "--name", "a")
    assert status == (2 if phase else 1) and "Traceback" not in err
    [told] = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    assert says in told and told.endswith(": tfactory runs resume a")
    assert "allocated by PyTorch" not in told and "Search for" not in told
    assert phase is None or told.startswith(f"In phase {phase}, after 1 of 3 steps: the device ")
    run = RunFolder(Path("runs/a"))
    assert run.state == "failed" and run.status.reason == told
    assert told in re.sub(r"\s+", " ", tfactory("runs", "show", "a", "--json")[1])
    config = run.path / "config.yaml"  # as the text says, these may change
    given = config.read_text()
    for old, new in (
        ("token_budget: 16384", "token_budget: 64"), ("slots: 64", "slots: 2"),
        ("gradient_checkpointing: false", "gradient_checkpointing: true"), ("device: auto", "device: cpu"),
    ):  # fmt: skip
        assert old in given
        given = given.replace(old, new)
    config.write_text(given)
    status, _, err = tfactory("runs", "resume", "a")
    assert status == 0 and "resuming after step 1 of 3" in err, err
    assert run.state == "finished" and [row["step"] for row in run.metrics()] == [1, 2, 3]


@pytest.mark.parametrize(
    "command", [("train", "small.yaml", "--name", "a"), ("eval", "builtin:tiny", "--env", "calculator")]
)
def test_a_model_that_is_too_large(
    tfactory: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise MEMORY

    monkeypatch.setattr("TrainingFactory.models.load_model", load)
    status, _, err = tfactory(*command)
    assert status == 2 and "error: the device has too little memory: CUDA out of memory" in err
    assert "Traceback" not in err and "lora.enabled=true" in err and not Path("runs/a").exists()


def test_help_names_what_the_texts_say_may_change(tfactory: Run) -> None:
    told = " ".join(tfactory("runs", "resume", "--help")[1].split())
    for key in (*re.findall(r"\w+\.\w+", SAVE_MEMORY.partition("; a resumed run")[0]), "model.device"):
        assert key in told
    assert (
        "model.device" in CHECK_DEVICE
        and "resumed run reads these from its config.yaml" in SAVE_MEMORY
        and "resumed run reads this from its config.yaml" in CHECK_DEVICE
    )
    assert tfactory("runs", "resume", "a", "sampling.slots=2")[0] != 0  # only there


def test_what_is_a_device_failure() -> None:
    for text, says in (
        ("CUDA error: out of memory", "too little memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "too little memory"),
        (
            "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried",
            "too little",
        ),
        ("Triton Error [CUDA]: an illegal memory access was encountered", "the device failed"),
    ):
        assert says in (describe_device_failure(RuntimeError(text)) or "")
    there = OSError(f"learner 1 has failed: OutOfMemoryError: {MEMORY}; steps that will be made again: 3")
    assert "made again: 3. To save memory" in (describe_device_failure(there) or "")
    assert "too little memory" in (
        describe_device_failure(SamplersLost(f"no sampler is left: {MEMORY}")) or ""
    )
    for other in (RuntimeError("shapes differ"), ValueError(str(MEMORY)), FULL):
        assert describe_device_failure(other) is None
