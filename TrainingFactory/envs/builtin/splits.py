"""Train and held-out tasks, disjoint by construction: the question itself decides where it belongs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import count as endlessly

from TrainingFactory.types import Task

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 5  # one question in so many is held out


def belongs(question: str, split: str) -> bool:
    """Tell whether a question is of this split, whatever the seed and however many are asked for."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; the splits are {' and '.join(SPLITS)}")
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    heldout = int.from_bytes(digest, "big") % HELDOUT_SHARE == 0
    return heldout == (split == "heldout")


def made_up(
    name: str,
    split: str,
    seed: int,
    make: Callable[[str, random.Random], Task],
    question: Callable[[Task], str] = lambda task: str(task.prompt),
) -> Iterator[Task]:
    """Yield tasks of the split without end; `question` is what decides where one belongs."""
    rng = random.Random(f"{name} {seed}")
    tasks = (make(f"{name}-{seed}-{number}", rng) for number in endlessly())
    return (task for task in tasks if belongs(question(task), split))
