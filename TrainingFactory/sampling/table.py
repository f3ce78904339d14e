"""Keep the books of the slots: who sits in which, and which tokens have their keys and values there. Numpy only.

A slot's sequence is `ids[slot, :known]`; the keys and values of its first `stored` tokens are in the cache.
A step feeds tokens from `stored` on; where it feeds the last known token, the next one is sampled. So two
prompts that are equal need nothing but a copy: the last token of a prompt is always fed again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from TrainingFactory.types import Completion, SamplingParams

WAIT_FOR = 4  # a request waits for a prefix that is being computed if it saves at least so many tokens
EVICT_AFTER = 0.2  # seconds that a session must have been idle before a waiting request may take its slot


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made."""

    prefilled: int = 0  # prompt and reply tokens fed in chunks, also where `twins` computes some once
    shared: int = 0  # prompt tokens copied from another slot, or found in a freed one
    kept: int = 0  # tokens of earlier turns still in the session's slot
    sampled: int = 0
    forwards: int = 0
    decodes: int = 0  # forwards with decoding rows
    rows: int = 0  # decoding rows fed, unused ones included where these are fed
    guessed: int = 0  # tokens fed on a guess
    evictions: int = 0


@dataclass(slots=True, eq=False)
class Seat:
    """Holds what the table knows of a session."""

    order: int  # sessions are numbered as they are opened
    slot: int | None = None
    closed: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One turn to be sampled."""

    seat: Seat
    prompt: np.ndarray  # int32
    params: SamplingParams
    future: asyncio.Future[Completion]
    cancelled: bool = False


@dataclass(slots=True)
class Round:
    """Remembers one round of admissions. Copies are made at its end, all at once."""

    moved: dict[int, int] = field(default_factory=dict)  # slot that is to get a prefix: where that lies
    must_wait: set[bytes] = field(default_factory=set)  # prompts; equal ones must wait too
    full: bool = False  # no slot is left, and none can be taken from an idle session


class SlotTable:
    """Keeps the books of all slots as arrays, so that a step costs no Python per row."""

    def __init__(self, slots: int, max_length: int, *, deterministic: bool = False, ride: int = 1) -> None:
        """`ride`: what follows a turn goes with the decoding rows if it has at most so many tokens."""
        self.slots, self.max_length, self.deterministic, self.ride = slots, max_length, deterministic, ride
        self.ids = np.zeros((slots, max_length), np.int32)
        self.logprobs = np.zeros((slots, max_length), np.float32)
        self.stored = np.zeros(slots, np.int64)  # tokens whose keys and values are in the cache
        self.known = np.zeros(slots, np.int64)  # tokens of the sequence; stored < known while running
        self.pure = np.zeros(slots, np.int64)  # leading tokens that another session may copy
        self.chunked = np.zeros(slots, np.int64)  # prefill in chunks up to here, in dense rows from here on
        self.running = np.zeros(slots, bool)
        self.limit = np.zeros(slots, np.int64)  # the length at which the turn ends
        self.used = np.zeros(slots, np.float64)  # when the slot was last of use
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float64)
        self.top_p = np.ones(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots, np.float64)
        self.stops = np.full((slots, 1), -1, np.int64)  # padded with -1
        self.hashes = np.zeros(slots, np.uint64)  # of the sequence: the sum of its tokens' marks
        self.head = np.zeros(slots, np.int64)  # leading tokens that rows with the same mark have in common
        self.mark = np.zeros(slots, np.uint64)  # the hash of the prompt that the session began with
        self.flying = np.zeros(slots, np.int64)  # tokens that are being sampled, counted as known already
        self.epoch = np.zeros(slots, np.int64)  # goes up with each turn that begins or ends
        # Nobody can know them beforehand, so nobody can write two texts of the same hash.
        self._factors = np.random.default_rng().integers(0, 1 << 64, max_length, np.uint64) | np.uint64(1)
        self.seats: list[Seat | None] = [None] * slots
        self.free = np.ones(slots, bool)  # nobody sits there
        self.requests: list[Request | None] = [None] * slots
        self.stats = EngineStats()
        self.changes = 0  # how often a slot has been given other tokens
        # Deterministic mode: session i sits in slot i mod slots, after session i - slots has been closed.
        self._turn = list(range(slots))
        self._gone: set[int] = set()

    # -- sessions

    def close(self, seat: Seat) -> None:
        """Free the slot for others; what is stored in it stays until it is overwritten."""
        if seat.slot is not None:
            self.seats[seat.slot], self.free[seat.slot] = None, True
            seat.slot = None
        if self.deterministic:
            self._gone.add(seat.order)
            slot = seat.order % self.slots
            while self._turn[slot] in self._gone:
                self._gone.remove(self._turn[slot])
                self._turn[slot] += self.slots

    def forget(self) -> None:
        """Drop all that is stored, because the weights have changed."""
        for array in (self.stored, self.pure, self.chunked, self.known):
            array[:] = 0

    def clear(self) -> list[Request]:
        """Free all slots and drop what is stored, after a failed step; return what was running."""
        failed = [request for request in self.requests if request is not None]
        for seat in self.seats:
            if seat is not None:
                seat.slot = None
        self.seats, self.requests = [None] * self.slots, [None] * self.slots
        self.running[:], self.free[:] = False, True
        self.flying[:] = 0
        self.epoch += 1
        self.forget()
        return failed

    # -- prefixes

    def common(self, prompt: np.ndarray) -> np.ndarray:
        """Return [slots] how many tokens each slot's sequence has in common with the prompt."""
        width = min(len(prompt), int(self.known.max()))
        if width == 0:
            return np.zeros(self.slots, np.int64)
        differ = self.ids[:, :width] != prompt[:width]
        first = differ.argmax(1)
        first[~differ[np.arange(self.slots), first]] = width
        return np.minimum(first, self.known)

    def trunk(self, slots: np.ndarray) -> int:
        """Return how many leading tokens all these slots have in common and in the cache."""
        width = int(self.stored[slots].min())
        same = (self.ids[slots, :width] == self.ids[slots[0], :width]).all(0)
        return width if same.all() else int(same.argmin())

    def place(self, request: Request, this: Round) -> bool:
        """Seat the request if there is a slot for it and no better prefix on its way."""
        seat, own, need = request.seat, request.seat.slot, len(request.prompt) - 1
        if own is None and (not self._may_sit(seat, this) or request.prompt.tobytes() in this.must_wait):
            return False
        stored = 0 if own is None else int(self.stored[own])
        same = 0 < stored <= need and np.array_equal(self.ids[own, :stored], request.prompt[:stored])
        if own is not None and same:
            self.stats.kept += stored
            self._start(request, own, stored, continues=True)
            return True
        if own is None and not self.deterministic:
            # Who began with this very prompt, and has it in the cache: a search would find no more.
            alike = (self.mark == self.marks(request.prompt, np.arange(need + 1)).sum()) & (self.pure >= need)
            if alike.any():
                self._copy(request, this, int(alike.argmax()), need, np.where(alike, need, 0))
                return True
        common = np.minimum(self.common(request.prompt), need)
        have = np.minimum(common, self.pure)
        if own is not None and (mine := min(int(common[own]), stored)) > have[own]:
            self.stats.kept += mine  # deterministic mode: what this session has decoded is its own and stays
            self._start(request, own, mine)
            return True
        source = int(have.argmax())
        best = int(have[source])
        coming = np.where(self.running & (self.pure == self.stored), np.minimum(common, self.chunked), 0)
        if int(coming.max()) >= best + WAIT_FOR:
            this.must_wait.add(request.prompt.tobytes())
            return False
        self._copy(request, this, source, best, have)
        return True

    def _copy(self, request: Request, this: Round, source: int, best: int, have: np.ndarray) -> None:
        """Start the request in a slot that has its first `best` tokens, or is to get them from `source`."""
        seat = request.seat
        own, slot = seat.slot, self._slot_for(seat, have, best)
        if have[slot] == best:
            source = slot
        else:
            this.moved[slot] = this.moved.get(source, source)
            self.used[source] = time.monotonic()
        self.stats.kept += best if own == source else 0
        self.stats.shared += best if own != source else 0
        self.seats[slot], self.free[slot], seat.slot = seat, False, slot
        self.pure[slot] = best
        self._start(request, slot, best)

    def _may_sit(self, seat: Seat, this: Round) -> bool:
        if self.deterministic:
            return self._turn[seat.order % self.slots] == seat.order
        this.full = this.full or (not self.free.any() and self._longest_idle() is None)
        return not this.full

    def _slot_for(self, seat: Seat, have: np.ndarray, best: int) -> int:
        """Return its own slot, a free one, or that of an idle session; `_may_sit` has said that there is one."""
        if seat.slot is not None:
            return seat.slot
        if self.deterministic:
            return seat.order % self.slots
        free = np.flatnonzero(self.free)
        if best and (fitting := free[have[free] == best]).size:
            return int(fitting[0])
        if free.size:
            return int(free[np.lexsort((self.used[free], self.stored[free] > 0))[0]])
        slot = self._longest_idle()
        evicted = self.seats[slot] if slot is not None else None
        assert slot is not None and evicted is not None
        evicted.slot = None
        self.stats.evictions += 1
        return slot

    def _longest_idle(self) -> int | None:
        """Return a slot that may be taken: idle for long, or if nothing runs (a parent waits for its child) at all."""
        idle = np.flatnonzero(~self.running)
        if not len(idle):
            return None
        slot = int(idle[self.used[idle].argmin()])
        enough = not self.running.any() or time.monotonic() - self.used[slot] >= EVICT_AFTER
        return slot if enough else None

    def recent(self, slots: np.ndarray, ends: np.ndarray, count: int) -> np.ndarray:
        """Return [len(slots), count] the tokens before these places; 0 where a sequence has not begun."""
        places = ends[:, None] - np.arange(count, 0, -1)
        return np.where(places >= 0, self.ids[slots[:, None], places], 0)

    def marks(self, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return a number for each token at its place, random but always the same."""
        return (tokens.astype(np.uint64) + np.uint64(1)) * self._factors[places]

    # -- turns

    def _start(self, request: Request, slot: int, stored: int, *, continues: bool = False) -> None:
        prompt, params, size = request.prompt, request.params, len(request.prompt)
        first = bool(stored <= self.pure[slot]) if self.deterministic else not continues
        self.changes += 1
        self.ids[slot, :size] = prompt
        self.known[slot] = size
        self.hashes[slot] = self.marks(prompt, np.arange(size)).sum()
        if not continues or stored < self.head[slot]:
            self.head[slot], self.mark[slot] = size - 1, self.hashes[slot]
        self.stored[slot] = stored
        self.pure[slot] = min(int(self.pure[slot]), stored)
        if self.deterministic:  # short replies go token by token with the decoding rows, which step anyway
            self.chunked[slot] = size - 1 if first or size - stored > 32 else 0
        else:
            self.chunked[slot] = size if size - stored > (1 if first else self.ride) else 0
        self.limit[slot] = min(size + params.max_tokens, self.max_length)
        self.seed[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.temperature[slot] = params.temperature
        self.top_p[slot], self.top_k[slot], self.min_p[slot] = params.top_p, params.top_k, params.min_p
        if (missing := len(params.stop_ids) - self.stops.shape[1]) > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(params.stop_ids)] = params.stop_ids
        self.running[slot] = True
        self.used[slot] = time.monotonic()
        self.requests[slot] = request

    def advance(self, slots: np.ndarray, counts: np.ndarray | int) -> None:
        """Note that so many more tokens of these slots are in the cache."""
        before = self.stored[slots]
        self.stored[slots] = after = before + counts
        if self.deterministic:  # what decoding has computed is not for others
            pure = (self.pure[slots] == before) & (before < self.chunked[slots])
            after = np.where(pure, after, self.pure[slots])
        self.pure[slots] = after

    def expect(self, slots: np.ndarray) -> None:
        """Count a token that is being sampled as known, so that the next step can be planned; -1 - slot is its id."""
        self.ids[slots, self.known[slots]] = -1 - slots
        self.known[slots] += 1
        self.flying[slots] += 1

    def accept(
        self, slots: np.ndarray, places: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray
    ) -> list[int]:
        """Enter sampled tokens, each right behind what is known; return the slots whose turn has ended."""
        self.ids[slots, places] = tokens
        self.logprobs[slots, places] = logprobs
        np.maximum.at(self.known, slots, places + 1)
        np.add.at(self.hashes, slots, self.marks(tokens, places))
        done = (places + 1 >= self.limit[slots]) | self.stopped(slots, tokens)
        return slots[done].tolist() if done.any() else []

    def stopped(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return which of the tokens end the turns of their slots."""
        return (self.stops[slots] == tokens[:, None]).any(1)

    def finish(self, slot: int, version: int) -> tuple[Request, Completion]:
        request = self.stop(slot)
        new = slice(len(request.prompt), int(self.known[slot]))
        tokens = self.ids[slot, new].tolist()
        finish = "stop" if tokens[-1] in request.params.stop_ids else "length"
        return request, Completion(tokens, self.logprobs[slot, new].tolist(), finish, version)

    def stop(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None
        self.requests[slot] = None
        self.running[slot] = False
        self.used[slot] = time.monotonic()
        for array in (self.known, self.stored):  # tokens on their way are dropped
            array[slot] -= self.flying[slot]
        self.pure[slot] = min(self.pure[slot], self.stored[slot])
        self.flying[slot] = 0
        self.epoch[slot] += 1
        return request

    # -- compaction

    def scattered(self) -> list[tuple[int, int]]:
        """Return pairs of slots to exchange so that the running ones lie at the front, when that halves the rows."""
        running = np.flatnonzero(self.running)
        count = len(running)
        if self.deterministic or not count or running[-1] + 1 < max(2 * count, 4):
            return []
        high = running[running >= count]
        low = np.flatnonzero(~self.running[:count])
        return list(zip(low.tolist(), high.tolist(), strict=True))

    def exchange(self, pairs: list[tuple[int, int]]) -> None:
        low, high = (np.array(side) for side in zip(*pairs, strict=True))
        both, swapped = np.concatenate((low, high)), np.concatenate((high, low))
        self.changes += 1
        for array in (
            self.ids, self.logprobs, self.stored, self.known, self.pure, self.chunked, self.running,
            self.used, self.limit, self.seed, self.stops, self.temperature, self.top_p, self.top_k,
            self.min_p, self.hashes, self.head, self.mark, self.free,
        ):  # fmt: skip
            array[both] = array[swapped]
        for a, b in pairs:
            self.seats[a], self.seats[b] = self.seats[b], self.seats[a]
            self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
            for slot in (a, b):
                if (seat := self.seats[slot]) is not None:
                    seat.slot = slot
