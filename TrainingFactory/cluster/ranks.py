"""The processes of a learner on several devices. Rank 0 is the run itself: it says what is done next, and does it as
all others do, each of which has a learner of its own over its share of the weights."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from TrainingFactory.running import OneThread
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Sample, Weights

T = TypeVar("T")
log = logging.getLogger(__name__)
FIRST = asyncio.FIRST_COMPLETED
LONG = timedelta(days=60)  # between two calls: rollouts take as long as they take
WAIT = timedelta(hours=2)  # within a call
GRACE = 10.0  # seconds in which an error of one process must be that of all, and its end be noticed
CLOSE_SECONDS = 10.0
GONE = "gone"  # the last word of a rank 0 that has failed
ROWS = ("step", "evaluate", "score")  # methods whose first argument they are
KINDS = {
    "token_ids": int, "loss_mask": bool, "logprobs": float, "advantages": float, "rewards": float,
    "policy_version": int, "reference": float,
}  # fmt: skip


def pack(method: str, args: Sequence[Any]) -> bytearray:
    """Write a call: JSON, and behind it the lists of rows as float64, which holds all of them exactly."""
    rows, args = (args[0], args[1:]) if method in ROWS else ((), args)
    about = [
        [len(row.token_ids), row.reference is not None, row.episode, row.pair, row.label] for row in rows
    ]
    head = json.dumps([method, about, list(args)]).encode()
    lists = [[getattr(row, name) or [0] * len(row.token_ids) for name in KINDS] for row in rows]
    numbers = [np.array(each, "<f8") for each in lists]
    body = np.concatenate(numbers, 1).tobytes() if numbers else b""
    return bytearray(b"".join([len(head).to_bytes(8, "little"), head, body]))


def unpack(message: bytearray) -> tuple[str, list[Any]]:
    start = 8 + int.from_bytes(message[:8], "little")
    method, about, args = json.loads(message[8:start])
    if method not in ROWS:
        return method, args
    numbers = np.frombuffer(message[start:], "<f8").reshape(len(KINDS), -1)
    lists = [each.astype(kind).tolist() for each, kind in zip(numbers, KINDS.values(), strict=True)]
    ends, rows = [0, *itertools.accumulate(row[0] for row in about)], list[Sample]()
    for (_, known, *rest), (begin, end) in zip(about, itertools.pairwise(ends), strict=True):
        *six, reference = (each[begin:end] for each in lists)
        rows.append(Sample(*six, *rest, reference if known else None))
    return method, [rows, *args]


def listening(host: str) -> tuple[dist.TCPStore, int]:
    """Open the store by which processes find each other, on this address alone; return its port too."""
    taken = socket.create_server((host, 0), backlog=128)
    port = taken.getsockname()[1]
    return dist.TCPStore(host, port, None, True, WAIT, False, master_listen_fd=taken.detach()), port


class Group:
    """The processes that train together. Weights and gradients go over torch's own group; beside it are two for what is
    said: calls of rank 0 to all, and answers to it. Whoever listens there hears at once that a process is gone."""

    def __init__(self, rank: int, count: int, store: dist.Store | None, host: str, cuda: bool) -> None:
        self.count, self.ended = count, False
        if host in ("127.0.0.1", "localhost") and sys.platform == "linux":  # else by the name of the machine
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")
        self._own = not dist.is_initialized()  # a script may have opened it before
        if self._own:
            given = {} if store is None else {"store": store, "rank": rank, "world_size": count}
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=WAIT, **given)
        self._calls, self._answers = (dist.new_group(backend="gloo", timeout=LONG) for _ in range(2))

    def broadcast(self, message: bytearray | None = None) -> bytearray:
        """Say it to all others, as rank 0; elsewhere return what it says."""
        size = torch.tensor([len(message or b"")])
        dist.broadcast(size, 0, group=self._calls)
        message = message or bytearray(int(size))
        dist.broadcast(torch.frombuffer(message, dtype=torch.uint8), 0, group=self._calls)
        return message

    def tell(self, text: str, rank: int = 0) -> None:
        body = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        dist.send(torch.tensor([len(body)]), rank, group=self._answers)
        dist.send(body, rank, group=self._answers)

    def heard(self, rank: int) -> str:
        """Wait for what a process has to say; raise RuntimeError when it is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._answers)
        body = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(body, rank, group=self._answers)
        return body.numpy().tobytes().decode().strip()

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
        self._threads = {
            rank: threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in self._answers
        }
        for thread in self._threads.values():
            thread.start()

    async def hello(self) -> None:
        """Wait until each has said what it is."""
        every = await self._or_lost(asyncio.gather(*self._answers.values()))
        self.about = dict(zip(self._answers, map(json.loads, every), strict=True))

    async def call(self, method: str, args: Sequence[Any], own: Callable[[], Awaitable[T]]) -> T:
        """Do `own` here and the same in all others, and return what it returns."""
        self._expect()
        self._doing = asyncio.ensure_future(self._do(method, args, own))
        return await self._or_lost(self._doing)

    async def step(self, rows: Sequence[Sample], step: int) -> dict[str, float]:
        metrics = await self._all("step", rows, step)
        self._done = step + 1
        return metrics

    async def evaluate(self, rows: Sequence[Sample], step: int) -> dict[str, float]:
        return await self._all("evaluate", rows, step)

    async def score(self, rows: Sequence[Sample]) -> list[list[float]]:
        return await self._all("score", rows)

    async def save(self, folder: str, state: dict[str, Any]) -> None:
        await self._all("save", folder, state)
        self._saved = self._done

    async def load(self, folder: str) -> dict[str, Any]:
        state = await self._all("load", folder)
        self._done = self._saved = state["step"]
        return state

    async def publish(self) -> Weights:
        return await self._all("publish")

    async def close(self, report: Any = None) -> None:
        """Let the others end, at once where they are in the middle of something; again does nothing."""
        if self._group.ended:
            return
        self._group.ended, last = True, GONE
        if not self._gone.done() and (self._doing is None or self._doing.done()):
            with suppress(RuntimeError):
                await self._thread.call(self._group.broadcast, pack("end", [report]))
                last = ""
        await in_thread(self._part, last)
        self._thread.close()
        if self.own is not None:
            await self.own.close()

    async def _all(self, method: str, *args: Any) -> Any:
        return await self.call(method, args, lambda: getattr(self.own, method)(*args))

    async def _or_lost(self, doing: asyncio.Future[T]) -> T:
        await asyncio.wait({doing, self._gone}, return_when=FIRST)
        if self._gone.done():
            doing.cancel()  # what it has begun may never end
            raise self._gone.result()
        return doing.result()

    async def _do(self, method: str, args: Sequence[Any], own: Callable[[], Awaitable[T]]) -> T:
        try:
            await self._thread.call(lambda: self._group.broadcast(pack(method, args)))
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
                while (heard := self._group.heard(rank)) is not None and not self._group.ended:
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
    life = threading.Thread(target=_outlive, args=(group,), daemon=True)
    life.start()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 has them too, and needs us for its checkpoint
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    with suppress(RuntimeError):  # rank 0 is gone
        await thread.call(group.tell, json.dumps(about))
        while (called := unpack(await thread.call(group.broadcast)))[0] != "end":
            outcome, same = "", True
            try:
                await call(called[0], *called[1])
            except BaseException as error:
                outcome, same = f"{type(error).__name__}: {error}", isinstance(error, ValueError | OSError)
            if not same:  # rank 0 does not have it: whoever waits for this process must not
                log.exception("learner")
                await asyncio.sleep(1)  # it may be because another one is gone, which is heard before
            await thread.call(group.tell, outcome)
            if not same:
                os._exit(1)
        life.join(CLOSE_SECONDS)
        await thread.call(group.tell, "")
        return called[1][0]
    os._exit(1)


def _outlive(group: Group) -> None:
    """Wait for the last word of rank 0, or its end."""
    try:
        last = group.heard(0)
    except RuntimeError:
        last = GONE
    if last == GONE:
        os._exit(1)
