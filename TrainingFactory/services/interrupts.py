"""Ctrl-C during training: what was learned is kept."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from TrainingFactory.services.tracking import Watcher


class Interrupts:
    """Ctrl-C. While episodes are sampled, no weights change, and it stops at once; otherwise the step is finished
    first. A second one stops at once whatever is under way, and then the last checkpoint is what remains."""

    def __init__(self, watcher: Watcher) -> None:
        self.asked = False
        self.consistent = True  # whether the learner is between two steps
        self._before: Any = None
        self._watcher = watcher

    def __enter__(self) -> Interrupts:
        with contextlib.suppress(ValueError):  # not the main thread: whoever owns it handles Ctrl-C
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Around `asyncio.run`, which with Python's own handler cancels its task and raises when that has ended.
        Raising from a handler of ours would be lost where Python swallows exceptions, as in weak references."""
        if self._before is None:
            yield
            return
        ours = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, ours)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.consistent = False
            raise KeyboardInterrupt
        self.asked = True
        self._watcher.say("stopping after this step; Ctrl-C again stops at once")
