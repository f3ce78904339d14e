"""State of the slots: which session uses which slot, and which tokens have keys and values in the cache. Numpy only.

A slot's sequence is `ids[slot, :known]`; the keys and values of its first `stored` tokens are in the cache.
A step feeds tokens from `stored` on; after the last known token, it samples the next one. A prompt that equals
another one shares all its pages, because the last token of a prompt is always fed again.

When the pages run out, closed sessions release theirs, the least recently used first. Then sessions younger than the
one that needs pages release theirs and are prefilled again later: idle sessions first, the youngest first.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from TrainingFactory.sampling.cache.pages import PAGE, CachePages
from TrainingFactory.sampling.cache.snapshots import Snapshots
from TrainingFactory.sampling.requests import AdmissionRound, EngineStats, SamplingRequest, SessionSlot
from TrainingFactory.types import Completion

CHUNK = 32  # deterministic mode: tokens of one prefill forward, which starts at a multiple of CHUNK
WAIT_FOR = 4  # a request waits for a prefix that is being computed if that saves at least this many tokens
MARGIN_TOKENS = 16  # tokens that the steps before the next reservation may add to a sequence
EVICT_AFTER = 0.2  # seconds that a session must be idle before a waiting request may evict it


class SlotTable:
    """State of all slots as arrays, so that a step has no Python loop over rows. A decoding row feeds up to `ride`
    tokens that follow a turn; longer replies are prefilled in chunks. `get_rope` maps a prompt to its rotary positions
    [3, N] and the position after them; None: rotary positions equal token positions."""

    def __init__(
        self, slots: int, max_length: int, *, deterministic: bool = False, ride: int = 1, get_rope: Any = None
    ) -> None:
        self.deterministic, self.ride, self.get_rope = deterministic, ride, get_rope
        self.state_snapshots = 0  # most snapshots of recurrent layers; 0: the model has none
        self.preempted: list[SamplingRequest] = []  # running turns that must be admitted again
        self.stats = EngineStats()
        self.resize(slots, max_length)

    def resize(self, num_slots: int, max_length: int) -> None:
        """Set the number of slots and the longest sequence. No session may be open."""
        self.num_slots, self.max_length = num_slots, max_length
        pages_per_slot = -(-max_length // PAGE)
        self.pages = CachePages(num_slots, max_length, [None], [num_slots * pages_per_slot], fixed=True)
        self.snapshots: Snapshots | None = None  # for models with recurrent layers
        self.ids = np.zeros((num_slots, max_length), np.int32)
        self.rope = np.zeros((num_slots, 3, max_length if self.get_rope else 0), np.int32)
        self.logprobs = np.zeros((num_slots, max_length), np.float32)
        self.stored = np.zeros(num_slots, np.int64)  # tokens whose keys and values are in the cache
        self.lengths = np.zeros(num_slots, np.int64)  # tokens of the sequence; stored < known while running
        self.copyable = np.zeros(num_slots, np.int64)  # leading tokens that other sessions may copy
        self.chunked = np.zeros(num_slots, np.int64)  # tokens before this position are prefilled in chunks
        self.running = np.zeros(num_slots, bool)
        self.limit = np.zeros(num_slots, np.int64)  # length of the sequence at which the turn ends
        self.used = np.zeros(num_slots, np.float64)  # time of the last use, in seconds (monotonic clock)
        self.seed = np.zeros(num_slots, np.uint64)
        self.temperature = np.ones(num_slots, np.float64)
        self.top_p = np.ones(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.stops = np.full((num_slots, 1), -1, np.int64)  # padded with -1
        self.hashes = np.zeros(num_slots, np.uint64)  # hash of the sequence: the sum of its tokens' hashes
        self.head = np.zeros(num_slots, np.int64)  # leading tokens that rows with the same hash share
        self.prompt_hashes = np.zeros(num_slots, np.uint64)  # hash of the session's first prompt
        self.in_flight = np.zeros(num_slots, np.int64)  # tokens in flight, which are counted as known
        self.epoch = np.zeros(num_slots, np.int64)  # increases whenever a turn ends
        # Random, so that nobody can construct two texts with the same hash.
        self._factors = np.random.default_rng().integers(0, 1 << 64, max_length, np.uint64) | np.uint64(1)
        self.session_slots: list[SessionSlot | None] = [None] * num_slots
        self.free = np.ones(num_slots, bool)  # no session has the slot
        self.requests: list[SamplingRequest | None] = [None] * num_slots
        self.num_changes = 0  # increases whenever a slot gets other tokens
        # Deterministic mode: session i uses slot i mod slots after session i - slots is closed.
        self._next_session_numbers = list(range(num_slots))
        self._closed_session_numbers: set[int] = set()

    # -- sessions

    def close_session(self, session_slot: SessionSlot) -> None:
        """Release the session's slot. Its keys and values stay in the cache until their pages are needed."""
        if session_slot.slot is not None:
            self.session_slots[session_slot.slot], self.free[session_slot.slot] = None, True
            session_slot.slot = None
        if self.deterministic:
            self._closed_session_numbers.add(session_slot.order)
            slot = session_slot.order % self.num_slots
            while self._next_session_numbers[slot] in self._closed_session_numbers:
                self._closed_session_numbers.remove(self._next_session_numbers[slot])
                self._next_session_numbers[slot] += self.num_slots

    def forget_tokens(self) -> None:
        """Invalidate all cached keys and values, because the weights have changed."""
        for array in (self.stored, self.copyable, self.chunked, self.lengths):
            array[:] = 0
        self.pages.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def clear(self) -> list[SamplingRequest]:
        """Release all slots and invalidate the cache after a failed step; return the requests that were running."""
        failed_requests = [request for request in self.requests if request is not None] + self.preempted
        self.preempted = []
        for session_slot in self.session_slots:
            if session_slot is not None:
                session_slot.slot = None
        self.session_slots, self.requests = [None] * self.num_slots, [None] * self.num_slots
        self.running[:], self.free[:] = False, True
        self.in_flight[:] = 0
        self.epoch += 1
        self.forget_tokens()
        return failed_requests

    # -- prefixes

    def find_common_lengths(self, prompt: np.ndarray) -> np.ndarray:
        """Return the length [slots] of the common prefix of each slot's sequence and the prompt."""
        num_compared = min(len(prompt), int(self.lengths.max()))
        if num_compared == 0:
            return np.zeros(self.num_slots, np.int64)
        is_different = self.ids[:, :num_compared] != prompt[:num_compared]
        first_difference = is_different.argmax(1)
        first_difference[~is_different[np.arange(self.num_slots), first_difference]] = num_compared
        return np.minimum(first_difference, self.lengths)

    def find_shared_prefix(self, slots: np.ndarray) -> int:
        """Return the length of the cached prefix that all these slots have in common."""
        num_compared = int(self.stored[slots].min())
        is_common = (self.ids[slots, :num_compared] == self.ids[slots[0], :num_compared]).all(0)
        return num_compared if is_common.all() else int(is_common.argmin())

    def admit_request(self, request: SamplingRequest, admission: AdmissionRound) -> bool:
        """Start the request if a slot and pages are available, and if no other session is just computing a longer
        prefix that the request could share. Return whether it started."""
        current_slot, num_tokens = request.session_slot.slot, len(request.prompt) - 1
        if current_slot is None and not self._has_slot(request.session_slot, admission):
            return False
        if current_slot is None and request.prompt.tobytes() in admission.waiting_prompts:
            return False
        stored_length = 0 if current_slot is None else int(self.stored[current_slot])
        is_continuation = 0 < stored_length <= num_tokens and np.array_equal(
            self.ids[current_slot, :stored_length], request.prompt[:stored_length]
        )
        if current_slot is not None and is_continuation:
            return self._continue_in_slot(request, current_slot, stored_length, is_continuation=True)
        if current_slot is None and not self.deterministic and self.snapshots is None:
            # A session that began with this prompt and has it in the cache: no other prefix is longer.
            prompt_hash = self.hash_tokens(request.prompt, np.arange(num_tokens + 1)).sum()
            has_prompt = (self.prompt_hashes == prompt_hash) & (self.copyable >= num_tokens)
            prefixes = self.pages.get_usable(np.where(has_prompt, num_tokens, 0))
            if prefixes.any():
                return self._share_prefix(request, int(prefixes.argmax()), num_tokens, prefixes)
        common_lengths = np.minimum(self.find_common_lengths(request.prompt), num_tokens)
        usable = self.pages.get_usable(np.minimum(common_lengths, self.copyable))
        prefixes = usable if self.snapshots is None else self.snapshots.get_usable(usable, self.stored)
        if current_slot is not None and self.snapshots is None:
            kept_length = int(self.pages.get_usable(np.minimum(common_lengths, self.stored))[current_slot])
            if kept_length > prefixes[current_slot]:
                # Deterministic mode: only this session may reuse the tokens that it has decoded.
                return self._continue_in_slot(request, current_slot, kept_length)
        source_slot = int(prefixes.argmax())
        num_shared = int(prefixes[source_slot])
        # Prefixes that are still being computed. A window may have released one that was computed.
        ends = np.minimum(common_lengths, self.chunked)
        next_lengths = np.where(self.running & (self.copyable == self.stored) & (self.stored < ends), ends, 0)
        if int(next_lengths.max()) >= num_shared + WAIT_FOR and self._pause_prefill_at(
            int(next_lengths.argmax()), next_lengths.max()
        ):
            admission.waiting_prompts.add(request.prompt.tobytes())
            return False
        if not self._share_prefix(request, source_slot, num_shared, prefixes):
            return False
        if self.snapshots is not None and (num_recomputed := int(usable.max()) - num_shared) > 0:
            self.stats.recomputed_tokens += num_recomputed
            if num_recomputed >= WAIT_FOR:
                # For the next prompt with this prefix.
                self._pause_prefill_at(self._get_request_slot(request), num_shared + num_recomputed)
        return True

    def _pause_prefill_at(self, slot: int, position: int) -> bool:
        """With recurrent layers, let the slot's prefill pause at `position` for a snapshot. Return whether the prefix
        up to there can then be shared. In deterministic mode, the prefix may end a few tokens earlier."""
        if self.snapshots is None:
            return True
        position = position // CHUNK * CHUNK if self.deterministic else int(position)
        if not self.stored[slot] < position <= self.chunked[slot]:
            return False
        self.snapshots.stops[slot].add(position)
        return True

    def find_chunk_end(self, slot: int) -> int:
        """Return the end of the chunk that the slot prefills next, if the token budget has room for all of it."""
        end = int(self.chunked[slot])
        return end if self.snapshots is None else self.snapshots.find_pause(slot, int(self.stored[slot]), end)

    def _continue_in_slot(
        self, request: SamplingRequest, slot: int, length: int, *, is_continuation: bool = False
    ) -> bool:
        """Start the request in the slot that its session holds, and keep the slot's first `length` tokens, if enough
        pages are available."""
        num_pages = self.pages.count_missing(slot, len(request.prompt) + MARGIN_TOKENS)
        num_pages += self.pages.count_copied_pages(slot, length)
        if not self._make_room(num_pages, request.session_slot, [slot]):
            if self.running.any():
                return False
            return self._share_prefix(request, slot, 0, np.zeros(self.num_slots, np.int64))
        self.stats.kept_tokens += length
        self.pages.truncate(slot, length)
        if self.snapshots is not None:
            self.snapshots.stops[slot].clear()
            if not self.deterministic:  # there, only the session itself may use what it has decoded
                self.snapshots.take_snapshot(slot, length)  # forks may begin at the end of this turn
        self._start_request(request, slot, length, is_continuation=is_continuation)
        return True

    def _share_prefix(
        self, request: SamplingRequest, source: int, num_shared: int, prefixes: np.ndarray
    ) -> bool:
        """Start the request in a slot that already has the prompt's first `num_shared` tokens, or in one that shares
        them with slot `source`, if enough pages are available. `prefixes` [slots] is the length of the prefix that the
        request could reuse from each slot."""
        session_slot = request.session_slot
        reserved_length = len(request.prompt) + MARGIN_TOKENS
        num_pages = self.pages.count_pages(reserved_length)
        if not self._make_room(num_pages - num_shared // PAGE + 1, session_slot, [source]):
            # No running turn will release pages, so place the request without the shared prefix.
            if self.running.any() or not self._make_room(num_pages, session_slot, []):
                return False
            num_shared = 0
        prefixes = np.minimum(prefixes, self.copyable if num_shared else 0)  # released slots share nothing
        previous_slot, slot = session_slot.slot, self._choose_slot(session_slot, prefixes, num_shared)
        if prefixes[slot] == num_shared:
            source = slot
            self.pages.truncate(slot, num_shared)
            if self.snapshots is not None:
                self.snapshots.stops[slot].clear()
                self.snapshots.restore(slot, num_shared, int(self.stored[slot]))
        else:
            self.pages.release(slot)
            self.pages.share(source, slot, num_shared, reserved_length)
            if self.snapshots is not None:
                self.snapshots.share(source, int(self.stored[source]), slot, num_shared)
            self.used[source] = time.monotonic()
        if previous_slot == source:
            self.stats.kept_tokens += num_shared
        else:
            self.stats.shared_tokens += num_shared
        self.session_slots[slot], self.free[slot], session_slot.slot = session_slot, False, slot
        self.copyable[slot] = num_shared
        self._start_request(request, slot, num_shared)
        return True

    def _has_slot(self, session_slot: SessionSlot, admission: AdmissionRound) -> bool:
        if self.deterministic:
            return self._next_session_numbers[session_slot.order % self.num_slots] == session_slot.order
        admission.is_full = admission.is_full or (not self.free.any() and self._find_longest_idle() is None)
        return not admission.is_full

    def _choose_slot(self, session_slot: SessionSlot, prefix_lengths: np.ndarray, num_shared: int) -> int:
        """Return the slot for a session: the slot that it holds, a free slot, or the slot of a session that it evicts.
        `_has_slot` must have returned True."""
        if session_slot.slot is not None:
            return session_slot.slot
        if self.deterministic:
            return session_slot.order % self.num_slots
        free_slots = np.flatnonzero(self.free)
        if num_shared and (fitting_slots := free_slots[prefix_lengths[free_slots] == num_shared]).size:
            return int(fitting_slots[0])
        if free_slots.size:
            return int(free_slots[np.lexsort((self.used[free_slots], self.stored[free_slots] > 0))[0]])
        slot = self._find_longest_idle()
        evicted_session = self.session_slots[slot] if slot is not None else None
        assert slot is not None and evicted_session is not None
        evicted_session.slot = None
        self.stats.evictions += 1
        return slot

    def _find_longest_idle(self) -> int | None:
        """Return the slot that has been idle for longest, for eviction. It must have been idle for EVICT_AFTER seconds,
        unless no turn runs at all, because then a parent session may be waiting for its child session. None if there is
        no such slot."""
        idle_slots = np.flatnonzero(~self.running)
        if not len(idle_slots):
            return None
        slot = int(idle_slots[self.used[idle_slots].argmin()])
        may_evict = not self.running.any() or time.monotonic() - self.used[slot] >= EVICT_AFTER
        return slot if may_evict else None

    # -- pages

    def _make_room(self, num_pages: int, session_slot: SessionSlot, kept_slots: list[int]) -> bool:
        """Free `num_pages` pages by releasing slots outside `kept_slots`. Return False if that is impossible."""
        if self.pages.fixed or self.pages.num_free >= num_pages:
            return True
        closed_slots = np.flatnonzero(self.free & (self.pages.count_held_pages() > 0))
        for slot in closed_slots[self.used[closed_slots].argsort()].tolist():
            if slot not in kept_slots:
                self._release_slot(slot)
            if self.pages.num_free >= num_pages:
                return True
        preemptible_slots = self._find_preemptible(session_slot, kept_slots)
        if self.pages.num_free + int(self.pages.count_held_pages()[preemptible_slots].sum()) < num_pages:
            return False
        for slot in preemptible_slots:
            self._preempt_slot(slot)
            if self.pages.num_free >= num_pages:
                return True
        return False

    def _find_preemptible(self, session_slot: SessionSlot, kept_slots: list[int]) -> list[int]:
        """Return the slots that may be preempted for a session: the slots of younger sessions. If no turn runs, add
        those of all idle sessions, because a parent session may be waiting for its child session. Idle sessions come
        first, younger ones before older ones."""
        is_idle = not self.running.any()
        session_orders = {
            slot: other.order
            for slot, other in enumerate(self.session_slots)
            if other is not None and slot not in kept_slots and (is_idle or other.order > session_slot.order)
        }
        return sorted(session_orders, key=lambda slot: (bool(self.running[slot]), -session_orders[slot]))

    def _preempt_slot(self, slot: int) -> None:
        """Take the slot and its pages from the session that holds it. A running turn is admitted again later, with its
        sampled tokens."""
        if self.running[slot]:
            request = self.stop_turn(slot)
            length = int(self.lengths[slot])
            turn_start = len(request.prompt) - len(request.sampled_logprobs)
            request.prompt = self.ids[slot, :length].copy()
            request.sampled_logprobs = self.logprobs[slot, turn_start:length].copy()
            self.preempted.append(request)
        session_slot = self.session_slots[slot]
        assert session_slot is not None
        session_slot.slot, self.session_slots[slot], self.free[slot] = None, None, True
        self._release_slot(slot)
        self.stats.preemptions += 1

    def _release_slot(self, slot: int) -> None:
        self.pages.release(slot)
        if self.snapshots is not None:
            self.snapshots.drop(slot)
        for slot_array in (self.stored, self.copyable, self.chunked, self.lengths):
            slot_array[slot] = 0

    def reserve_pages(self) -> None:
        """Reserve pages for the next tokens of all running slots. Preempt the youngest sessions if pages run out."""
        if self.pages.fixed:
            return
        capacity = self.pages.count_reserved_tokens()
        lacks_pages = np.minimum(self.lengths + MARGIN_TOKENS, self.max_length) > capacity
        if not (lacks_pages & self.running).any():
            return
        # Together with those that will be short soon, because the device's page table must be updated then.
        short_slots = np.flatnonzero(self.running & (self.lengths + (MARGIN_TOKENS + PAGE // 2) > capacity))
        if self.pages.reserve_many(short_slots, self.lengths[short_slots] + MARGIN_TOKENS + PAGE // 2):
            return
        for slot in sorted(short_slots.tolist(), key=lambda slot: self._get_session_slot(slot).order):
            if not self.running[slot]:
                continue
            length = int(self.lengths[slot]) + MARGIN_TOKENS + PAGE // 2
            if self._make_room(self.pages.count_missing(slot, length), self._get_session_slot(slot), [slot]):
                self.pages.reserve(slot, length)
            else:
                self._preempt_slot(slot)

    def _get_request_slot(self, request: SamplingRequest) -> int:
        slot = request.session_slot.slot
        assert slot is not None
        return slot

    def _get_session_slot(self, slot: int) -> SessionSlot:
        session_slot = self.session_slots[slot]
        assert session_slot is not None
        return session_slot

    def get_recent_tokens(self, slots: np.ndarray, ends: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return the `num_tokens` tokens before each position [len(slots), count]; 0 before a sequence's start."""
        positions = ends[:, None] - np.arange(num_tokens, 0, -1)
        return np.where(positions >= 0, self.ids[slots[:, None], positions], 0)

    def hash_tokens(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the hash of each token at its position, with random but constant factors."""
        return (tokens.astype(np.uint64) + np.uint64(1)) * self._factors[positions]

    # -- turns

    def _start_request(
        self, request: SamplingRequest, slot: int, num_stored: int, *, is_continuation: bool = False
    ) -> None:
        prompt, params, length = request.prompt, request.params, len(request.prompt)
        num_sampled = len(request.sampled_logprobs)  # before a preemption
        self.pages.reserve(slot, length + MARGIN_TOKENS)
        self.logprobs[slot, length - num_sampled : length] = request.sampled_logprobs
        is_first_turn = bool(num_stored <= self.copyable[slot]) if self.deterministic else not is_continuation
        self.num_changes += 1
        self.ids[slot, :length] = prompt
        if self.get_rope is not None:
            self.rope[slot, :, :length], next_position = self.get_rope(prompt)
            self.rope[slot, :, length:] = np.arange(next_position, next_position + self.max_length - length)
        self.lengths[slot] = length
        self.hashes[slot] = self.hash_tokens(prompt, np.arange(length)).sum()
        if not is_continuation or num_stored < self.head[slot]:
            self.head[slot], self.prompt_hashes[slot] = length - 1, self.hashes[slot]
        self.stored[slot] = num_stored
        self.copyable[slot] = min(int(self.copyable[slot]), num_stored)
        if self.deterministic:  # decoding rows, which run anyway, feed short replies token by token
            self.chunked[slot] = length - 1 if is_first_turn or length - num_stored > 32 else 0
        else:
            self.chunked[slot] = length if length - num_stored > (1 if is_first_turn else self.ride) else 0
        if self.snapshots is not None:
            # The last token of a prompt is fed alone, so that equal prompts can begin with the state before it.
            self.chunked[slot] = length - 1 if self.chunked[slot] else 0
            if is_first_turn:
                self._pause_prefill_at(slot, length - 1)
        self.limit[slot] = min(length - num_sampled + params.max_tokens, self.max_length)
        self.seed[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.temperature[slot] = params.temperature
        self.top_p[slot], self.top_k[slot], self.min_p[slot] = params.top_p, params.top_k, params.min_p
        if (num_missing := len(params.stop_ids) - self.stops.shape[1]) > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, num_missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(params.stop_ids)] = params.stop_ids
        self.running[slot] = True
        self.used[slot] = time.monotonic()
        self.requests[slot] = request

    def advance_stored(self, slots: np.ndarray, token_counts: np.ndarray | int) -> None:
        """Record that `token_counts` more tokens of these slots are in the cache."""
        old_lengths = self.stored[slots]
        self.stored[slots] = stored_lengths = old_lengths + token_counts
        if self.deterministic:  # other sessions may not copy what decoding rows have computed
            is_copyable = (self.copyable[slots] == old_lengths) & (old_lengths < self.chunked[slots])
            stored_lengths = np.where(is_copyable, stored_lengths, self.copyable[slots])
        self.copyable[slots] = stored_lengths
        self.pages.release_outside_window(slots, self.stored[slots])
        if self.snapshots is not None and any(self.snapshots.stops):
            self.snapshots.take_due(slots, self.stored, self.copyable)

    def append_in_flight(self, slots: np.ndarray) -> None:
        """Append an in-flight token to the sequence of each slot, with the placeholder id -1 - slot, so that the next
        step can be planned before the token is known."""
        self.ids[slots, self.lengths[slots]] = -1 - slots
        self.lengths[slots] += 1
        self.in_flight[slots] += 1

    def accept(
        self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray
    ) -> list[int]:
        """Append sampled tokens to the sequences of their slots. Return the slots whose turn has ended."""
        self.ids[slots, positions] = tokens
        self.logprobs[slots, positions] = logprobs
        np.maximum.at(self.lengths, slots, positions + 1)
        np.add.at(self.hashes, slots, self.hash_tokens(tokens, positions))
        is_finished = (positions + 1 >= self.limit[slots]) | self.are_stops(slots, tokens)
        return slots[is_finished].tolist() if is_finished.any() else []

    def are_stops(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return a mask of the tokens that are stop tokens of their slots."""
        return (self.stops[slots] == tokens[:, None]).any(1)

    def finish_turn(self, slot: int, version: int) -> tuple[SamplingRequest, Completion]:
        request = self.stop_turn(slot)
        turn_range = slice(len(request.prompt) - len(request.sampled_logprobs), int(self.lengths[slot]))
        tokens = self.ids[slot, turn_range].tolist()
        finish_reason = "stop" if tokens[-1] in request.params.stop_ids else "length"
        return request, Completion(tokens, self.logprobs[slot, turn_range].tolist(), finish_reason, version)

    def abandon_turn(self, slot: int) -> None:
        """Stop a turn before its end. With recurrent layers, release the slot if tokens are in flight, because they
        have changed its state."""
        in_flight = bool(self.in_flight[slot])
        self.stop_turn(slot)
        if in_flight and self.snapshots is not None:
            self._release_slot(slot)

    def stop_turn(self, slot: int) -> SamplingRequest:
        request = self.requests[slot]
        assert request is not None
        self.requests[slot] = None
        self.running[slot] = False
        self.used[slot] = time.monotonic()
        for array in (self.lengths, self.stored):  # drop tokens in flight
            array[slot] -= self.in_flight[slot]
        self.copyable[slot] = min(self.copyable[slot], self.stored[slot])
        self.in_flight[slot] = 0
        self.epoch[slot] += 1
        return request
