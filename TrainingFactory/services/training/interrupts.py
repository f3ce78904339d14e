"""Ctrl-C during training: what was learned is kept."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from TrainingFactory.services.runs.tracking import Watcher


class Interrupts:
    """Ctrl-C. While episodes are sampled, no weights change, and it stops at once; otherwise the step is finished
    first. A second one stops at once whatever is under way, and then the last checkpoint is what remains."""

    def __init__(self, watcher: Watcher) -> None:
        self.asked = False
        self.consistent = True  # whether the learner is between two steps
        self._before: Any = None
        self._sampling = False
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
        """Around code that samples by `asyncio.run`: Ctrl-C cancels what runs on the event loop. Nothing is raised from
        the handler, because it would be raised just anywhere: in the set-up of a loop, which then stays open, or where
        Python swallows exceptions, as in weak references."""
        if self.asked:
            raise KeyboardInterrupt
        self._sampling = True
        try:
            yield
        except asyncio.CancelledError:
            if not self.asked:
                raise
            raise KeyboardInterrupt from None
        finally:
            self._sampling = False

    def pause(self, seconds: float) -> None:
        """A sleep that Ctrl-C ends at once."""
        with self.at_once():
            asyncio.run(asyncio.sleep(seconds))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.consistent = self._sampling  # no weights change meanwhile
            raise KeyboardInterrupt
        self.asked = True
        if self._sampling:
            with contextlib.suppress(
                RuntimeError
            ):  # no loop runs yet, or any more: then the step is finished
                loop = asyncio.get_running_loop()
                loop.call_soon_threadsafe(_cancel_all, loop)
                return
        self._watcher.say("stopping after this step; Ctrl-C again stops at once")


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
