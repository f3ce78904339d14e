"""Sessions and requests of the engine, and its counters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from TrainingFactory.types import Completion, SamplingParams


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine, since it was created."""

    prefilled_tokens: int = 0  # of prompts and replies, fed in chunks; twins count, though computed only once
    shared_tokens: int = 0  # prompt tokens shared with another slot, or still present in a freed one
    kept_tokens: int = 0  # tokens of earlier turns that are still in the session's slot
    sampled_tokens: int = 0
    forwards: int = 0
    decode_forwards: int = 0  # forwards with decoding rows
    decoded_rows: int = 0  # decoding rows fed, including unused rows if they are fed
    guessed_tokens: int = 0  # draft tokens fed
    evictions: int = 0  # sessions that lost their slot to another one
    preemptions: int = 0  # sessions that released their pages to an older one
    # Cached tokens fed again, because no state of the recurrent layers was stored after them.
    recomputed_tokens: int = 0


@dataclass(slots=True, eq=False)
class SessionSlot:
    """A session's entry in the slot table: its number and the slot that it holds."""

    order: int  # number of the session, in the order of opening
    slot: int | None = None
    is_closed: bool = False


@dataclass(slots=True, eq=False)
class SamplingRequest:
    """A request to sample one turn of a session."""

    session_slot: SessionSlot
    prompt: np.ndarray  # int32
    params: SamplingParams
    future: asyncio.Future[Completion]
    is_cancelled: bool = False
    # Log-probs of the tokens at the end of `prompt` that were sampled before a preemption.
    sampled_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(slots=True)
class AdmissionRound:
    """State of one pass over the waiting requests, which start in free slots."""

    waiting_prompts: set[bytes] = field(default_factory=set)  # prompts that wait; equal prompts wait too
    is_full: bool = False  # no slot is free, and no idle session can be evicted
