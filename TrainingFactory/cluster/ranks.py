"""The processes of a learner on several devices. Rank 0 is the run itself: it says what is done next, and does it as
all others do, each of which has a learner of its own over its share of the weights."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partialmethod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from TrainingFactory.common.event_loop import OneThread
from TrainingFactory.learning.learner import Learner
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Weights

T = TypeVar("T")
log = logging.getLogger(__name__)
FIRST = asyncio.FIRST_COMPLETED
LONG = timedelta(days=60)  # between two calls: rollouts take as long as they take
WAIT = timedelta(hours=2)  # within a call
GRACE = 10.0  # seconds in which an error of one process must be that of all, and its end be noticed
CLOSE_SECONDS = 10.0


def listening(host: str) -> tuple[Store, int]:
    """Open the store by which processes find each other, on this address alone; return its port too."""
    taken = socket.create_server((host, 0), backlog=128)
    port = taken.getsockname()[1]
    return TCPStore(host, port, None, True, WAIT, False, master_listen_fd=taken.detach()), port


class Group:
    """The processes that train together. Weights and gradients go over torch's own group; beside it are two for what is
    said: calls of rank 0 to all, and answers to it. Whoever listens there hears at once that a process is gone. `store`
    is that of rank 0, or its port; None: the launcher's."""

    def __init__(self, rank: int, count: int, store: Store | int | None, host: str, cuda: bool) -> None:
        self.count, self.ended = count, False
        if host in ("127.0.0.1", "localhost") and sys.platform == "linux":  # else by the name of the machine
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")
        self._own = store is not None  # else it is the launcher's, and may serve another run
        if not dist.is_initialized():
            store = TCPStore(host, store, None, False) if isinstance(store, int) else store
            given: dict[str, Any] = (
                {} if store is None else {"store": store, "rank": rank, "world_size": count}
            )
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=WAIT, **given)
        self._calls: Any = dist.new_group(backend="gloo", timeout=LONG)
        self._answers: Any = dist.new_group(backend="gloo", timeout=LONG)

    def broadcast(self, *call: Any) -> list[Any]:
        """Say it to all others, as rank 0; elsewhere return what it says. Torch pickles it, in half the time that rows
        take in other forms; only processes of one program hear each other."""
        held = [call]
        dist.broadcast_object_list(held, 0, group=self._calls)
        return [*held[0]]

    def tell(self, what: Any, rank: int = 0) -> None:
        dist.send_object_list([what], rank, group=self._answers)

    def heard(self, rank: int) -> Any:
        """Wait for what a process has to say; raise RuntimeError when it is gone."""
        held = [None]
        dist.recv_object_list(held, rank, group=self._answers)
        return held[0]

    def close(self) -> None:
        self.ended = True
        for group in (self._calls, self._answers, *([None] if self._own else [])):
            dist.destroy_process_group(group)


class Ranks:
    """All processes as rank 0 sees them, and their `Policy`: every call is made here, by `own`, and in all others.
    `lost` hears on the running event loop that one is gone, whatever is being done; `note` says where to look."""

    def __init__(self, group: Group, lost: Callable[[OSError], object], note: str) -> None:
        self._group, self._lost, self._note = group, lost, note
        self.own: Any = None  # the policy of this process, once it is made
        self.about: dict[int, dict[str, Any]] = {}
        self._done = self._saved = 0  # steps that were learned, and those in a checkpoint
        self._thread, self._loop = OneThread("ranks"), asyncio.get_running_loop()
        self._gone: asyncio.Future[OSError] = self._loop.create_future()
        self._doing: asyncio.Future[Any] | None = None
        self._expect()
        self._threads = {rank: _thread(self._listen, rank) for rank in self._answers}

    async def hello(self) -> None:
        """Wait until each has said what it is."""
        every = await self._or_lost(asyncio.gather(*self._answers.values()))
        self.about = dict(zip(self._answers, every, strict=True))

    async def call(self, method: str, args: Sequence[Any], own: Callable[[], Awaitable[T]]) -> T:
        """Do `own` here and the same in all others, and return what it returns. A call whose caller was cancelled, such
        as an evaluation, ends first: its answers would count as this one's."""
        if self._doing is not None and not self._doing.done():
            await asyncio.wait({self._doing, self._gone}, return_when=FIRST)
        self._expect()
        self._doing = asyncio.ensure_future(self._do(method, args, own))
        return await self._or_lost(self._doing)

    async def _port(self, method: str, *args: Any) -> Any:
        found = await self.call(method, args, lambda: getattr(self.own, method)(*args))
        if method in ("step", "load"):
            self._done = args[1] + 1 if method == "step" else found["step"]
        if method in ("save", "load"):
            self._saved = self._done
        return found

    step = partialmethod(_port, "step")
    evaluate = partialmethod(_port, "evaluate")
    score = partialmethod(_port, "score")
    save = partialmethod(_port, "save")
    load = partialmethod(_port, "load")
    publish = partialmethod(_port, "publish")

    async def close(self, report: Any = None) -> None:
        """Let the others end, at once where they are in the middle of something; again does nothing."""
        if self._group.ended:
            return
        self._group.ended, last = True, "failed"
        if not self._gone.done() and all(answer.done() for answer in self._answers.values()):
            with suppress(RuntimeError):
                await self._thread.call(self._group.broadcast, "end", report)
                last = ""
        await in_thread(self._part, last)
        self._thread.close()
        if self.own is not None:
            await self.own.close()

    async def _or_lost(self, doing: asyncio.Future[T]) -> T:
        await asyncio.wait({doing, self._gone}, return_when=FIRST)
        if self._gone.done():
            doing.cancel()  # what it has begun may never end
            raise self._gone.result()
        return doing.result()

    async def _do(self, method: str, args: Sequence[Any], own: Callable[[], Awaitable[T]]) -> T:
        try:
            await self._thread.call(self._group.broadcast, method, *args)
            found = await own()
        except RuntimeError:  # most often because another one is gone, which is heard in a moment
            await asyncio.sleep(GRACE)
            raise
        except (ValueError, OSError):  # the same happens in the others, before they hear the next call
            await asyncio.wait(self._answers.values(), timeout=GRACE)
            raise
        for rank, answer in self._answers.items():
            if await answer:
                self._lose(rank, "has failed")
        return found

    def _expect(self) -> None:
        self._answers = {rank: self._loop.create_future() for rank in range(1, self._group.count)}

    def _listen(self, rank: int) -> None:
        with suppress(RuntimeError):  # of a loop that is closed
            try:
                while [heard := self._group.heard(rank)] and not self._group.ended:
                    self._loop.call_soon_threadsafe(self._heard, rank, heard)
            except RuntimeError:
                self._loop.call_soon_threadsafe(self._lose, rank, "is gone")

    def _heard(self, rank: int, text: str) -> None:
        self._answers[rank].set_result(text)
        if text and (doing := self._doing) is not None:  # those who do not fail too may wait for it for ever
            self._loop.call_later(GRACE, lambda: doing.done() or self._lose(rank, "has failed"))

    def _lose(self, rank: int, how: str) -> None:
        if self._gone.done() or self._group.ended:
            return
        about, answer = self.about.get(rank, {"pid": "?", "host": "?"}), self._answers[rank]
        why = f": {answer.result()}" if answer.done() and answer.result() else ""
        who = f"learner {rank} (process {about['pid']} on {about['host']}{self._note})"
        since = f"steps since the last checkpoint, which will be made again: {self._done - self._saved}"
        self._gone.set_result(OSError(f"{who} {how}{why}; {since}"))
        self._lost(self._gone.result())

    def _part(self, last: str) -> None:
        """Wait for all that listens: a thread that waits in torch must not see the end of the program."""
        for rank in self._threads:
            with suppress(RuntimeError):  # it is gone
                self._group.tell(last, rank)
        for thread in self._threads.values():
            thread.join(CLOSE_SECONDS)
        self._group.close()


async def serve(group: Group, call: Callable[..., Awaitable[Any]], facts: Mapping[str, Any]) -> Any:
    """Say what this process is, and `call(method, *args)` what rank 0 says until it ends; return its last word. When
    rank 0 is gone this process ends at once, whatever it is doing."""
    thread, about = OneThread("calls"), {"pid": os.getpid(), "host": platform.node(), "facts": facts}
    life = _thread(_outlive, group)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 has them too, and needs us for its checkpoint
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    with suppress(RuntimeError):  # rank 0 is gone
        await thread.call(group.tell, about)
        while (called := await thread.call(group.broadcast))[0] != "end":
            found, own = "", False
            try:
                await call(*called)
            except BaseException as error:
                found, own = f"{type(error).__name__}: {error}", not isinstance(error, ValueError | OSError)
                if own:
                    log.error(found, exc_info=True)
            if own:  # rank 0 does not have the same; or another one is gone, which it must hear before
                await asyncio.sleep(1)
            await thread.call(group.tell, found)
            if own:  # nobody must wait for this process
                os._exit(1)
        life.join(CLOSE_SECONDS)
        await thread.call(group.tell, "")
        return called[1]
    os._exit(1)


def _outlive(group: Group) -> None:
    """End this process at once when rank 0 is gone, or says that it has failed."""
    with suppress(RuntimeError):
        if not group.heard(0):
            return
    os._exit(1)


def _thread(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


class Gathered:
    """Publishes to an engine in the first process, which has the model `model` of its own: all processes gather each
    trained weight, and the engine takes them from `parameters` at its next update."""

    model_folder = dtype = ""
    rank: int | None = None

    def __init__(self, learner: Learner, model: Any) -> None:
        self._learner, self.model, self._found = learner, model, list[torch.Tensor]()

    @torch.no_grad()
    def publish(self, version: int) -> Weights:
        trained = (param for param in self._learner.model.parameters() if param.requires_grad)
        wholes = map(self._learner.processes.whole, trained)
        self._found = [whole.cpu() for whole in wholes if self.model is not None]
        return Weights(version)

    def parameters(self) -> Iterator[torch.Tensor]:
        found, self._found = iter(self._found), []
        for own in self.model.parameters():
            yield next(found) if own.requires_grad else own

    def close(self) -> None: ...
