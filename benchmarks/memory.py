"""Peak memory of a piece of work, in MiB above what was in use before it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch


def peak_mib(work: Callable[[], object], device: torch.device) -> float:
    """On a GPU what torch allocated. On a CPU the high-water mark of the process, which Linux can set back; run
    it in a process of its own, because freed memory need not go back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is in use now
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    """In KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
