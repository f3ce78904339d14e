"""Engine that samples stock transformers models in slots with prefix sharing; a worker thread runs the steps.

With `deterministic=True` the same requests give bit-identical results whatever their timing, on the CPU of one machine
with a fixed number of threads. Session i (in the order of opening) waits for slot i mod slots. Nothing is evicted, so
sessions must be closed, and nested agents need a slot each. A decode step always has one row per slot; its rows also
feed short replies. A prompt is prefilled alone, in chunks of 32 tokens at multiples of 32, so that its keys and values
are a pure function of its tokens and can be shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from struct import pack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from TrainingFactory.common.image_tokens import VIRTUAL, find_image
from TrainingFactory.sampling.batches import SampledTokens
from TrainingFactory.sampling.cache.view import get_causal_lm, make_error, routes_tokens
from TrainingFactory.sampling.compaction import exchange_slots, find_exchanges
from TrainingFactory.sampling.drafts import CONTEXT_TOKENS, DraftTable
from TrainingFactory.sampling.flights import AsyncRunner, InFlightStep
from TrainingFactory.sampling.planning import GUESSED_TOKENS, StepPlan, StepPlanner
from TrainingFactory.sampling.requests import AdmissionRound, SamplingRequest, SessionSlot
from TrainingFactory.sampling.table import MARGIN_TOKENS, SlotTable
from TrainingFactory.types import Completion, SamplingParams, Weights

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

COMPACT_AFTER_STEPS = 3  # consecutive steps with fewer than half of the rows in use
# Consecutive steps launched ahead before one waits, to check whether drafts are available.
MAX_STEPS_AHEAD = 16


class NativeSession:
    """A sampling session of one episode. It samples one turn at a time."""

    def __init__(self, engine: NativeEngine, session_number: int) -> None:
        self._engine = engine
        self._session_slot = SessionSlot(session_number)
        self._is_busy = False

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if self._session_slot.is_closed:
            raise ValueError("this sampling session is closed")
        if self._is_busy:
            raise ValueError("a sampling session samples one turn at a time; open a session per episode")
        self._is_busy = True
        try:
            return await self._engine._submit_request(self._session_slot, prompt_ids, params)
        finally:
            self._is_busy = False

    def fork(self) -> NativeSession:
        """Open a session for a continuation. Its first turn shares the cache pages of the prompt with this session,
        unless they have been released. In deterministic mode, it computes the prompt again."""
        return self._engine.session()

    def close(self) -> None:
        if not self._session_slot.is_closed:
            self._session_slot.is_closed = True
            with self._engine._lock:
                self._engine.num_sessions -= 1
                self._engine._post_message(self._session_slot)

    def __del__(self) -> None:
        self.close()  # a session that is garbage collected must release its slot


class NativeEngine:
    """A `Sampler` over a transformers or PEFT model in this process. Without `source`, it shares the model's weights
    with the learner. With `source`, the learner's model, it has its own weights and copies them from `source` at every
    update."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 64,
        max_length: int = 4096,
        deterministic: bool = False,
        prefill_tokens: int | None = None,
        max_guesses: int = 7,  # most draft tokens of a row in one step; 0: no speculative decoding
        source: Any = None,  # the learner's model, whose weights `update` copies
        cache_bytes: int | None = None,  # most memory of the KV cache; None: a share of the free memory
        vision: Vision | None = None,  # of a model that sees images
    ) -> None:
        self._model, self._source_model, self._vision = model, source, vision
        causal = get_causal_lm(model)
        if deterministic and routes_tokens(causal):
            reason = "the batches of its experts depend on timing, so it has no deterministic mode"
            raise make_error(causal.config.model_type, reason)
        if deterministic and vision is not None and vision.sees_whole_images:
            reason = "its image tokens see later ones, so it has no deterministic mode with images"
            raise make_error(causal.config.model_type, reason)
        on_cuda = causal.device.type == "cuda"
        get_rope = vision.compute_rope if vision is not None and vision.has_rope else None
        self._table = SlotTable(slots, max_length, deterministic=deterministic, get_rope=get_rope)
        self._runner = AsyncRunner(causal, self._table, cache_bytes, vision)
        is_recurrent = bool(self._runner.states.shapes)
        if on_cuda and not self._runner.tiled and not is_recurrent and vision is None:
            # Steps that only decode are by far the cheapest, so decoding rows feed short replies token by token.
            self._table.ride = 32
        self._runner.launches_ahead = self._runner.tiled
        # The contents of the draft table depend on timing, so deterministic mode has none. Recurrent layers cannot take
        # back a wrong draft.
        self._drafts = DraftTable() if max_guesses and not deterministic and not is_recurrent else None
        max_guesses = min(max_guesses, MARGIN_TOKENS - 1)  # pages are reserved for MARGIN_TOKENS tokens
        token_budget = prefill_tokens or (8192 if self._runner.tiled else 4096 if on_cuda else 1024)
        self._planner = StepPlanner(self._table, token_budget, self._drafts, max_guesses, few_shapes=on_cuda)
        self._planner.tiled = self._runner.tiled
        self._planner.has_images = vision is not None
        self._planner.keeps_images_whole = vision is not None and vision.sees_whole_images
        self._flight: InFlightStep | None = None  # the launched step whose tokens have not been fetched
        self._steps_ahead = 0  # steps launched ahead since one waited; negative: drafts are worth waiting for
        self.policy_version = 0
        # Less than requested if the cache holds no sequence of that length.
        self.max_length = self._table.max_length
        self.num_sessions = 0  # currently open
        self.stats = self._table.stats
        self._deterministic = deterministic
        self._num_opened_sessions = 0  # sessions so far
        # Shared with the worker, under the lock: the inbox, whether the worker runs, whether new turns are held.
        self._lock = threading.RLock()  # the garbage collector may close a session in a thread that has it
        self._inbox: deque[SamplingRequest | SessionSlot] = deque()
        self._is_working = False
        # Hold new turns, and call this once when no turn runs.
        self._on_idle: Callable[[], object] | None = None
        # Used by the worker only.
        self._waiting_requests: deque[SamplingRequest] = deque()
        self._sparse_steps = 0  # consecutive steps with fewer than half of the rows in use
        initializer = partial(torch.cuda.set_device, causal.device) if on_cuda else None  # it is per thread
        self._pool = ThreadPoolExecutor(1, "native-engine", initializer)

    @property
    def model(self) -> Any:
        return self._model

    def session(self) -> NativeSession:
        if self._deterministic and not self.num_sessions:
            # The next session gets the first slot, so that a batch does not depend on earlier ones.
            while self._num_opened_sessions % self._table.num_slots:
                self._num_opened_sessions += 1
                self._post_message(SessionSlot(self._num_opened_sessions - 1, is_closed=True))
        self._num_opened_sessions += 1
        with self._lock:
            self.num_sessions += 1
        return NativeSession(self, self._num_opened_sessions - 1)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        with contextlib.closing(self.session()) as session:
            return await session.sample(prompt_ids, params)

    async def update(self, weights: Weights) -> None:
        """Switch to new weights. The engine lets the running turns finish while new turns wait, invalidates the cache,
        and then resumes."""
        if weights.folder != "shared":
            raise ValueError(
                f"the native engine shares the learner's weights; it cannot load {weights.folder}"
            )
        loop = asyncio.get_running_loop()
        idle_future = loop.create_future()
        with self._lock:
            assert self._on_idle is None, "one update at a time"
            self._on_idle = lambda: loop.call_soon_threadsafe(_settle_futures, [(idle_future, None)])
            if not self._is_working:
                idle_future.set_result(None)
        try:
            await idle_future
            if self._source_model is not None:
                await loop.run_in_executor(self._pool, self._copy_weights)
            self._table.forget_tokens()
            self._runner.refresh()
            if self._vision is not None and self._vision.is_trained:
                self._vision.clear_cache()
            self.policy_version = weights.version
        finally:
            with self._lock:
                self._on_idle = None
                self._start_worker()

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Copy the trained weights in place, because CUDA graphs read these tensors. Other weights are shared."""
        for target, source in zip(self._model.parameters(), self._source_model.parameters(), strict=True):
            if target is not source:
                target.copy_(source)

    def metrics(self) -> dict[str, float]:
        """Return counters since the engine's start: the peak share of used pages, preempted sessions and recomputed
        tokens."""
        pages, stats = self._table.pages, self.stats
        metrics = {}
        if self._table.snapshots is not None:
            metrics["cache/recomputed_tokens"] = float(stats.recomputed_tokens)
        if pages.fixed:
            return metrics
        return metrics | {
            "cache/peak_share": pages.peak_pages / pages.tables[0].num_pages,
            "cache/preemptions": float(stats.preemptions),
        }

    async def close(self) -> None:
        """Stop the worker thread. Afterwards the engine cannot sample."""
        self._pool.shutdown(wait=False)

    # -- called from event loops

    async def _submit_request(
        self, session_slot: SessionSlot, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Completion:
        future = asyncio.get_running_loop().create_future()
        request = SamplingRequest(session_slot, self._check_prompt(prompt_ids), params, future)
        self._post_message(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            request.is_cancelled = True
            self._post_message(request)
            raise

    def _check_prompt(self, prompt_ids: Sequence[int]) -> np.ndarray:
        num_tokens, max_tokens = len(prompt_ids), self.max_length - 1
        if not num_tokens:
            raise ValueError("the prompt is empty; it needs at least one token")
        if num_tokens > max_tokens:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, but max_length={max_tokens + 1} allows at most {max_tokens}"
            )
        num_ids = self._runner.vocabulary_size
        prompt = np.frombuffer(pack(f"{num_tokens}q", *prompt_ids), np.int64)  # twice as fast as np.array
        if prompt.view(np.uint64).max() >= num_ids:  # unsigned, so that negative ids are large
            invalid = [token for token in prompt_ids if not 0 <= token < num_ids]
            if self._vision is not None:  # unknown images raise ValueError
                invalid = [token for token in invalid if token < VIRTUAL or not find_image(token)]
            if invalid:
                raise ValueError(f"token id {invalid[0]} is not in the model's vocabulary of {num_ids}")
        return prompt.astype(np.int32)

    def _post_message(self, message: SamplingRequest | SessionSlot) -> None:
        with self._lock:
            self._inbox.append(message)
            self._start_worker()

    def _start_worker(self) -> None:
        """Start the worker if a request is waiting. The caller must have the lock."""
        if self._is_working or self._on_idle is not None:
            return
        if self._waiting_requests or any(isinstance(message, SamplingRequest) for message in self._inbox):
            self._is_working = True
            self._pool.submit(self._process_inbox)

    # -- called in the worker thread

    def _process_inbox(self) -> None:
        """Run steps until no request is running or can be admitted."""
        while True:
            with self._lock:
                # One by one: the garbage collector may close a session in this thread, which appends to the inbox.
                messages, on_idle = [self._inbox.popleft() for _ in range(len(self._inbox))], self._on_idle
            try:
                self._receive_requests(messages)
                # Before an update, turns that were preempted must still end under the weights that they began with.
                self._admit_requests(resumed_only=on_idle is not None)
                is_running = bool(self._table.running.any()) or self._flight is not None
                if is_running:
                    self._run_step()
            except BaseException as error:  # the model may raise anything, and all requests must get it
                self._fail_requests(error)
                continue
            if is_running:
                continue
            with self._lock:
                if not self._inbox and self._on_idle is on_idle:
                    self._is_working = False
                    break
        if on_idle is not None:
            on_idle()

    def _receive_requests(self, messages: list[SamplingRequest | SessionSlot]) -> None:
        """Queue new requests, drop cancelled ones, and release the slots of closed sessions."""
        for message in messages:
            if isinstance(message, SamplingRequest) and not message.is_cancelled:
                self._waiting_requests.append(message)
                continue
            session_slot = message if isinstance(message, SessionSlot) else message.session_slot
            running_request = None if session_slot.slot is None else self._table.requests[session_slot.slot]
            for request in [*self._waiting_requests, running_request]:
                if request is not None and (request is message or request.session_slot is message):
                    self._drop_request(request)
            if isinstance(message, SessionSlot):
                self._table.close_session(message)

    def _drop_request(self, request: SamplingRequest) -> None:
        slot = request.session_slot.slot
        if slot is not None and self._table.requests[slot] is request:
            self._table.abandon_turn(slot)
        else:
            self._waiting_requests.remove(request)
        if not request.is_cancelled:
            self._deliver_results([(request, ValueError("the session was closed while it was sampling"))])

    def _admit_requests(self, resumed_only: bool = False) -> None:
        """Start waiting requests in their order of arrival, as far as slots and pages are available. `resumed_only`:
        only requests that were preempted after they had sampled tokens."""
        if not self._waiting_requests:
            return
        admission, admit_request = AdmissionRound(), self._table.admit_request
        self._waiting_requests = deque(
            request
            for request in self._waiting_requests
            if (resumed_only and not len(request.sampled_logprobs)) or not admit_request(request, admission)
        )
        self._requeue_preempted()
        self._runner.copy_pages()

    def _requeue_preempted(self) -> None:
        """Put preempted requests at the front of the queue."""
        self._waiting_requests.extendleft(reversed(self._table.preempted))
        self._table.preempted.clear()

    def _run_step(self) -> None:
        self._compact_slots()
        self._table.reserve_pages()
        self._requeue_preempted()
        if self._runner.launches_ahead and (self._drafts is None or 0 <= self._steps_ahead < MAX_STEPS_AHEAD):
            self._launch_step(self._planner.plan(with_guesses=False))
            return
        self._fetch_in_flight_step()
        plan = self._planner.plan()
        if self._runner.launches_ahead and plan.guesses is None:
            self._launch_step(plan)
        elif len(plan.dense) or len(plan.slots):
            self._count_step(plan)
            self._record_sampled(self._runner.run(plan))
        self._steps_ahead = -1 if 2 * plan.guess_counts.sum() > len(plan.dense) else 0

    def _launch_step(self, plan: StepPlan) -> None:
        """Launch the next step, then record the tokens of the previous one. Tokens after a stop are dropped."""
        previous_step, self._flight = self._flight, None
        if len(plan.dense) or len(plan.slots):
            self._flight = self._runner.launch(plan)
            self._count_step(plan, 1 + (self._flight.num_first < len(self._flight.slots)))
        self._steps_ahead += 1
        if previous_step is not None:
            self._record_sampled(self._runner.fetch_tokens(previous_step))

    def _fetch_in_flight_step(self) -> None:
        in_flight_step, self._flight = self._flight, None
        if in_flight_step is not None:
            self._record_sampled(self._runner.fetch_tokens(in_flight_step))

    def _count_step(self, plan: StepPlan, num_forwards: int = 1) -> None:
        stats = self.stats
        stats.prefilled_tokens += int(plan.counts.sum())
        stats.guessed_tokens += int(plan.guess_counts.sum())
        stats.forwards += num_forwards
        stats.decode_forwards += num_forwards if plan.rows else 0
        stats.decoded_rows += (plan.rows if plan.feeds_unused else len(plan.dense)) * num_forwards

    def _record_sampled(self, sampled: SampledTokens) -> None:
        """Write the sampled tokens to the slot table, and deliver the completions of finished turns."""
        table = self._table
        self.stats.sampled_tokens += len(sampled.slots)
        finished_requests = [table.finish_turn(slot, self.policy_version) for slot in table.accept(*sampled)]
        if self._drafts is not None and len(sampled.slots) < GUESSED_TOKENS:  # with more rows, no drafts
            contexts = table.get_recent_tokens(sampled.slots, sampled.positions, CONTEXT_TOKENS)
            self._drafts.learn(contexts, sampled.tokens)
        if finished_requests:
            self._deliver_results(finished_requests)

    def _compact_slots(self) -> None:
        """Move running slots to the front after COMPACT_AFTER_STEPS sparse steps (CUDA graphs only)."""
        if not self._planner.few_shapes:
            return
        slot_pairs = find_exchanges(self._table)
        self._sparse_steps = self._sparse_steps + 1 if slot_pairs else 0
        if self._sparse_steps < COMPACT_AFTER_STEPS:
            return
        self._sparse_steps = 0
        self._fetch_in_flight_step()
        slot_pairs = find_exchanges(self._table)
        if not slot_pairs:
            return
        exchange_slots(self._table, slot_pairs)
        self._runner.copy_pages()

    def _deliver_results(self, results: Sequence[tuple[SamplingRequest, Completion | BaseException]]) -> None:
        """Pass results to their event loops, with one call per loop, because every call may cost the worker the GIL."""
        results_by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        for request, result in results:
            results_by_loop.setdefault(request.future.get_loop(), []).append((request.future, result))
        for loop, loop_results in results_by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(_settle_futures, loop_results)

    def _fail_requests(self, error: BaseException) -> None:
        """Deliver a step's error to every request, and reset the engine."""
        with self._lock:
            failed_requests = [message for message in self._inbox if isinstance(message, SamplingRequest)]
            self._inbox = deque(message for message in self._inbox if isinstance(message, SessionSlot))
        self._flight = None
        failed_requests += [*self._waiting_requests, *self._table.clear()]
        self._waiting_requests.clear()
        self._runner.cache = None
        self._deliver_results([(request, error) for request in failed_requests if not request.is_cancelled])


def _settle_futures(results: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set the results of the futures that are not cancelled. Runs in the event loop."""
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
