"""Child processes that answer messages: `process` is the side of this process, `child` runs in the other one."""

from TrainingFactory.common.workers.process import Worker, WorkerDied, WorkerError, WorkerTooSlow

__all__ = ["Worker", "WorkerDied", "WorkerError", "WorkerTooSlow"]
