"""System metrics of a run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.kits.run import brief, train
from TrainingFactory.runs import system_metrics
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.system_metrics import SystemMonitor, read_gpu_metrics

NAMES = {"system/cpu", "system/process_cpu", "system/memory", "system/process_memory"}


def test_a_run_records_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "MIN_INTERVAL_SECONDS", 0.0)
    report = train(brief(tmp_path, training={"max_steps": 2}), "a")
    rows = RunFolder(tmp_path / "a").metrics()
    total = psutil.virtual_memory().total / 1e9
    for row in rows:
        assert {name for name in row if name.startswith("system/")} == NAMES
        assert 0 <= row["system/cpu"] <= 1 and 0 < row["system/process_memory"] < total
        assert row["system/process_cpu"] <= (os.cpu_count() or 1) + 0.5
    # Nothing that a run computes or decides with sees them.
    assert not [name for row in report.rows for name in row if name.startswith("system/")]


def test_quick_steps_share_a_reading() -> None:
    monitor = SystemMonitor()
    monitor.start()
    assert monitor.read_metrics() == {}


def test_gpus_by_nvml_and_without() -> None:
    use, memory = [40, 0], [3_000_000_000, 500_000_000]
    nvml = SimpleNamespace(
        device_count=lambda: 2, utilization=use.__getitem__, device_memory_used=memory.__getitem__
    )
    assert read_gpu_metrics(nvml) == {
        "system/gpu/0": 0.4, "system/gpu_memory/0": 3.0, "system/gpu/1": 0.0, "system/gpu_memory/1": 0.5
    }  # fmt: skip

    def missing(_: int) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    reserved = [0, 2_000_000_000]
    torch_only = SimpleNamespace(
        device_count=lambda: 2, utilization=missing, memory_reserved=reserved.__getitem__
    )
    assert read_gpu_metrics(torch_only) == {"system/gpu_memory/1": 2.0}
