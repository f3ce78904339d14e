"""Train and held-out splits, disjoint by construction: a hash of the question determines its split."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator

from TrainingFactory.types import Task

SPLIT_NAMES = ("train", "heldout")
HELDOUT_ONE_IN = 5  # one question in HELDOUT_ONE_IN is held out


def in_split(question: str, split: str) -> bool:
    """Return whether a question belongs to a split, independently of seed and number of tasks."""
    if split not in SPLIT_NAMES:
        raise ValueError(f"unknown split {split!r}; use {' or '.join(SPLIT_NAMES)}")
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    is_heldout = int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0
    return is_heldout == (split == "heldout")


def generate_tasks(
    name: str,
    split: str,
    seed: int,
    make_task: Callable[[str, random.Random], Task],
    get_question: Callable[[Task], str] = lambda task: str(task.prompt),
) -> Iterator[Task]:
    """Yield tasks of a split without end. `get_question` returns the text whose hash determines a task's split."""
    rng = random.Random(f"{name} {seed}")
    tasks = (make_task(f"{name}-{seed}-{index}", rng) for index in itertools.count())
    return (task for task in tasks if in_split(get_question(task), split))
