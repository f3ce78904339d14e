"""Coordination of a sharded learner's ranks. Rank 0 runs the training loop: it broadcasts every call and executes it
like all other ranks, each with its own learner over its shard of the weights."""

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
FIRST_COMPLETED = asyncio.FIRST_COMPLETED
# Timeout between two calls, which may contain any amount of sampling.
CALL_INTERVAL_TIMEOUT = timedelta(days=60)
CALL_TIMEOUT = timedelta(hours=2)  # timeout within a call
GRACE_SECONDS = 10.0  # to wait for an error to show up on all ranks, or for a lost rank to be detected
CLOSE_SECONDS = 10.0


def open_store(host: str) -> tuple[Store, int]:
    """Open torch's rendezvous store on this address only; return it and its port."""
    server = socket.create_server((host, 0), backlog=128)
    port = server.getsockname()[1]
    return TCPStore(host, port, None, True, CALL_TIMEOUT, False, master_listen_fd=server.detach()), port


class RankGroup:
    """Process groups of the ranks that train together. Weights and gradients use torch's default group. Two further
    groups carry messages: one the calls from rank 0 to all ranks, one the answers to rank 0. Receiving in them fails at
    once if the peer has ended. `store` is rank 0's rendezvous store or its port; None: the launcher's."""

    def __init__(
        self, rank: int, num_ranks: int, store: Store | int | None, host: str, uses_cuda: bool
    ) -> None:
        self.num_ranks, self.has_ended = num_ranks, False
        if host in ("127.0.0.1", "localhost") and sys.platform == "linux":  # else gloo resolves the hostname
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")
        self._owns_store = store is not None  # else it is the launcher's, which may use it for another run
        if not dist.is_initialized():
            store = TCPStore(host, store, None, False) if isinstance(store, int) else store
            options: dict[str, Any] = {"timeout": CALL_TIMEOUT}
            options |= {} if store is None else {"store": store, "rank": rank, "world_size": num_ranks}
            dist.init_process_group("cpu:gloo,cuda:nccl" if uses_cuda else "gloo", **options)
        self._call_group: Any = dist.new_group(backend="gloo", timeout=CALL_INTERVAL_TIMEOUT)
        self._answer_group: Any = dist.new_group(backend="gloo", timeout=CALL_INTERVAL_TIMEOUT)

    def broadcast(self, *call: Any) -> list[Any]:
        """Send a call from rank 0 to all ranks; on other ranks, receive and return it. Torch pickles the call, because
        pickle is twice as fast for rows as other formats, and safe because all ranks belong to one program."""
        object_list = [call]
        dist.broadcast_object_list(object_list, 0, group=self._call_group)
        return [*object_list[0]]

    def send(self, message: Any, rank: int = 0) -> None:
        dist.send_object_list([message], rank, group=self._answer_group)

    def receive_from(self, rank: int) -> Any:
        """Wait for a message of a rank; raise RuntimeError if its process has ended."""
        object_list = [None]
        dist.recv_object_list(object_list, rank, group=self._answer_group)
        return object_list[0]

    def close(self) -> None:
        self.has_ended = True
        for group in (self._call_group, self._answer_group, *([None] if self._owns_store else [])):
            dist.destroy_process_group(group)


class ShardedPolicy:
    """Rank 0's `Policy` over all ranks: every call runs on `local_policy` in this process and on the policies of all
    other ranks. When a rank is lost, `on_lost` is called on the running event loop at once, even during a call.
    `log_note` tells the user where the rank's log is."""

    def __init__(self, group: RankGroup, on_lost: Callable[[OSError], object], log_note: str) -> None:
        self._group, self._on_lost, self._log_note = group, on_lost, log_note
        self.local_policy: Any = None  # the policy of this process, set by the owner
        self.rank_infos: dict[int, dict[str, Any]] = {}
        self._steps_done = self._steps_saved = 0  # trained steps, and those in the last checkpoint
        self._broadcast_thread, self._loop = OneThread("ranks"), asyncio.get_running_loop()
        self._failure: asyncio.Future[OSError] = self._loop.create_future()
        self._running_call: asyncio.Future[Any] | None = None
        self._reset_answers()
        self._threads = {rank: _start_thread(self._listen, rank) for rank in self._answers}

    async def wait_for_ranks(self) -> None:
        """Wait until every rank has introduced itself."""
        introductions = await self._await_or_fail(asyncio.gather(*self._answers.values()))
        self.rank_infos = dict(zip(self._answers, introductions, strict=True))

    async def call(self, method: str, args: Sequence[Any], run_local: Callable[[], Awaitable[T]]) -> T:
        """Broadcast the call, run `run_local` here and return its result. If the previous caller, such as an
        evaluation, was cancelled, wait for its call to end first, because its answers would be taken for this
        call's."""
        if self._running_call is not None and not self._running_call.done():
            await asyncio.wait({self._running_call, self._failure}, return_when=FIRST_COMPLETED)
        self._reset_answers()
        self._running_call = asyncio.ensure_future(self._run_call(method, args, run_local))
        return await self._await_or_fail(self._running_call)

    async def _call_policy(self, method: str, *args: Any) -> Any:
        result = await self.call(method, args, lambda: getattr(self.local_policy, method)(*args))
        if method in ("step", "load"):
            self._steps_done = args[1] + 1 if method == "step" else result["step"]
        if method in ("save", "load"):
            self._steps_saved = self._steps_done
        return result

    step = partialmethod(_call_policy, "step")
    evaluate = partialmethod(_call_policy, "evaluate")
    score = partialmethod(_call_policy, "score")
    save = partialmethod(_call_policy, "save")
    load = partialmethod(_call_policy, "load")
    publish = partialmethod(_call_policy, "publish")

    async def close(self, report: Any = None) -> None:
        """End the other ranks; if a call is running, end them immediately. Further calls of `close` do nothing."""
        if self._group.has_ended:
            return
        self._group.has_ended, last_message = True, "failed"
        if not self._failure.done() and all(answer.done() for answer in self._answers.values()):
            with suppress(RuntimeError):
                await self._broadcast_thread.call(self._group.broadcast, "end", report)
                last_message = ""
        await in_thread(self._disconnect, last_message)
        self._broadcast_thread.close()
        if self.local_policy is not None:
            await self.local_policy.close()

    async def _await_or_fail(self, call: asyncio.Future[T]) -> T:
        await asyncio.wait({call, self._failure}, return_when=FIRST_COMPLETED)
        if self._failure.done():
            call.cancel()  # it may never end without the lost rank
            raise self._failure.result()
        return call.result()

    async def _run_call(self, method: str, args: Sequence[Any], run_local: Callable[[], Awaitable[T]]) -> T:
        try:
            await self._broadcast_thread.call(self._group.broadcast, method, *args)
            result = await run_local()
        except RuntimeError:  # usually because another rank is lost, which is reported in a moment
            await asyncio.sleep(GRACE_SECONDS)
            raise
        except (ValueError, OSError):  # other ranks raise the same before they receive the next call
            await asyncio.wait(self._answers.values(), timeout=GRACE_SECONDS)
            raise
        for rank, answer_future in self._answers.items():
            if await answer_future:
                self._report_lost_rank(rank, "has failed")
        return result

    def _reset_answers(self) -> None:
        self._answers = {rank: self._loop.create_future() for rank in range(1, self._group.num_ranks)}

    def _listen(self, rank: int) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            try:
                failure = self._group.receive_from(rank)
                while not self._group.has_ended:
                    self._loop.call_soon_threadsafe(self._on_answer, rank, failure)
                    failure = self._group.receive_from(rank)
            except RuntimeError:
                self._loop.call_soon_threadsafe(self._report_lost_rank, rank, "is gone")

    def _on_answer(self, rank: int, failure: str) -> None:
        self._answers[rank].set_result(failure)
        # Ranks that do not fail too may wait for it for ever.
        if failure and (call := self._running_call) is not None:
            self._loop.call_later(
                GRACE_SECONDS, lambda: call.done() or self._report_lost_rank(rank, "has failed")
            )

    def _report_lost_rank(self, rank: int, failure: str) -> None:
        if self._failure.done() or self._group.has_ended:
            return
        rank_info, answer = self.rank_infos.get(rank, {"pid": "?", "host": "?"}), self._answers[rank]
        reason = f": {answer.result()}" if answer.done() and answer.result() else ""
        learner_name = f"learner {rank} (process {rank_info['pid']} on {rank_info['host']}{self._log_note})"
        num_unsaved_steps = self._steps_done - self._steps_saved
        steps_note = f"steps since the last checkpoint, to be repeated after a resume: {num_unsaved_steps}"
        self._failure.set_result(OSError(f"{learner_name} {failure}{reason}; {steps_note}"))
        self._on_lost(self._failure.result())

    def _disconnect(self, last_message: str) -> None:
        """Send the last message to all ranks and join the listening threads, because a thread that waits in torch at
        interpreter exit crashes."""
        for rank in self._threads:
            with suppress(RuntimeError):  # the rank has ended
                self._group.send(last_message, rank)
        for thread in self._threads.values():
            thread.join(CLOSE_SECONDS)
        self._group.close()


async def serve(group: RankGroup, run_call: Callable[..., Awaitable[Any]], facts: Mapping[str, Any]) -> Any:
    """Introduce this process to rank 0, run `run_call(method, *args)` for each of its broadcasts until rank 0 ends, and
    return rank 0's report. If rank 0 is lost, this process exits immediately, even during a call."""
    call_thread = OneThread("calls")
    process_info = {"pid": os.getpid(), "host": platform.node(), "facts": facts}
    watch_thread = _start_thread(_exit_with_rank_0, group)
    if threading.current_thread() is threading.main_thread():
        # Rank 0 gets the signals too, and needs this rank for its checkpoint.
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, lambda: None)
    with suppress(RuntimeError):  # rank 0 is lost
        await call_thread.call(group.send, process_info)
        while (message := await call_thread.call(group.broadcast))[0] != "end":
            failure, is_fatal = "", False
            try:
                await run_call(*message)
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
                is_fatal = not isinstance(error, ValueError | OSError)  # those are raised on rank 0 too
                if is_fatal:
                    log.error(failure, exc_info=True)
            if is_fatal:  # if the cause is another lost rank, rank 0 must learn of that one first
                await asyncio.sleep(1)
            await call_thread.call(group.send, failure)
            if is_fatal:  # exit, so that no rank waits for this one
                os._exit(1)
        watch_thread.join(CLOSE_SECONDS)
        await call_thread.call(group.send, "")
        return message[1]
    os._exit(1)


def _exit_with_rank_0(group: RankGroup) -> None:
    """Exit this process immediately when rank 0 is lost or reports a failure."""
    with suppress(RuntimeError):
        if not group.receive_from(0):
            return
    os._exit(1)


def _start_thread(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


class GatheringPublisher:
    """Publisher of a sharded learner's weights for an engine on rank 0 that samples from its own copy `model` (None on
    other ranks). All ranks gather the trained weights, and the engine reads them from `parameters` at its next
    update."""

    model_folder = dtype = ""
    adapter_rank: int | None = None

    def __init__(self, learner: Learner, model: Any) -> None:
        self._learner, self.model, self._gathered_weights = learner, model, list[torch.Tensor]()

    @torch.no_grad()
    def publish(self, version: int) -> Weights:
        trainable_params = (param for param in self._learner.model.parameters() if param.requires_grad)
        full_tensors = map(self._learner.processes.gather, trainable_params)
        self._gathered_weights = [tensor.cpu() for tensor in full_tensors if self.model is not None]
        return Weights(version)

    def parameters(self) -> Iterator[torch.Tensor]:
        gathered_weights, self._gathered_weights = iter(self._gathered_weights), []
        for param in self.model.parameters():
            yield next(gathered_weights) if param.requires_grad else param

    def close(self) -> None: ...
