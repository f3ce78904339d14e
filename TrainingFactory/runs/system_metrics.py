"""System metrics of a run: use of processors, memory and GPUs, averaged over a step.

system/cpu               share of the machine's processors in use, 0 to 1
system/process_cpu       processors that this process uses
system/memory            used memory of the machine, GB
system/process_memory    resident memory of this process, GB
system/gpu/0             share of the time in which GPU 0 was busy, 0 to 1; needs NVML (`pip install nvidia-ml-py`)
system/gpu_memory/0      used memory of GPU 0, GB; without NVML the memory that this process reserves there
"""

from __future__ import annotations

import sys
import threading
import time
from statistics import fmean
from typing import Any

import psutil

GB = 1e9
# Between two readings; quicker steps share one, so that reading costs no step time.
MIN_INTERVAL_SECONDS = 0.2
GPU_INTERVAL_SECONDS = 1.0  # seconds between two readings of the GPUs during a step


class SystemMonitor:
    """Monitor of the machine between two calls of `read_metrics`; `start` begins the first interval."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last_reading_time = 0.0  # time of the last reading
        self._gpu_samples: list[dict[str, float]] = []
        self._stop_event = threading.Event()
        self._gpu_thread: threading.Thread | None = None

    def start(self) -> None:
        psutil.cpu_percent()
        self._process.cpu_percent()
        self._last_reading_time = time.monotonic()
        if self._gpu_thread is None and _get_cuda() is not None:
            self._gpu_thread = threading.Thread(target=self._sample_gpus, daemon=True, name="system-metrics")
            self._gpu_thread.start()

    def read_metrics(self) -> dict[str, float]:
        """Return the metrics since the last reading; none if it was less than MIN_INTERVAL_SECONDS ago."""
        now = time.monotonic()
        if now - self._last_reading_time < MIN_INTERVAL_SECONDS:
            return {}
        self._last_reading_time = now
        with self._process.oneshot():
            process_cpu, process_memory = self._process.cpu_percent(), self._process.memory_info().rss
        metrics = {
            "system/cpu": psutil.cpu_percent() / 100,
            "system/process_cpu": process_cpu / 100,
            "system/memory": psutil.virtual_memory().used / GB,
            "system/process_memory": process_memory / GB,
        }
        return metrics | self._average_gpu_samples()

    def close(self) -> None:
        self._stop_event.set()

    def _sample_gpus(self) -> None:
        while not self._stop_event.wait(GPU_INTERVAL_SECONDS):
            self._gpu_samples.append(read_gpu_metrics(_get_cuda()))

    def _average_gpu_samples(self) -> dict[str, float]:
        samples, self._gpu_samples = self._gpu_samples, []
        if self._gpu_thread is not None and not samples:  # the step was shorter than GPU_INTERVAL_SECONDS
            samples = [read_gpu_metrics(_get_cuda())]
        return _average_samples(samples)


def read_gpu_metrics(cuda: Any) -> dict[str, float]:
    """Return the utilization and memory of the visible GPUs; `cuda` is torch.cuda. The function does not call the CUDA
    runtime, because a call from another thread could break the capture of a CUDA graph."""
    metrics: dict[str, float] = {}
    devices = range(cuda.device_count())
    try:
        for device in devices:
            metrics[f"system/gpu/{device}"] = cuda.utilization(device) / 100
            metrics[f"system/gpu_memory/{device}"] = cuda.device_memory_used(device) / GB
    except Exception:  # no NVML, a driver without it, or a device that it cannot measure (MIG)
        memory = {device: cuda.memory_reserved(device) for device in devices}
        metrics |= {f"system/gpu_memory/{device}": size / GB for device, size in memory.items() if size}
    return metrics


def _average_samples(samples: list[dict[str, float]]) -> dict[str, float]:
    metric_names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: fmean(sample[name] for sample in samples if name in sample) for name in metric_names}


def _get_cuda() -> Any:
    """Return torch.cuda if this process uses a GPU, else None. Torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
