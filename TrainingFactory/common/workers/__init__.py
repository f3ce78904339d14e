"""Worker processes that answer requests. `process` is the parent's side; `child` runs in the worker."""

from TrainingFactory.common.workers.process import Worker, WorkerDied, WorkerError, WorkerTooSlow

__all__ = ["Worker", "WorkerDied", "WorkerError", "WorkerTooSlow"]
