"""Two-hop questions over a small knowledge base that is generated for each task.

    Anna sold silver. Where is it?   search("Anna silver") -> Anna sold silver to Boris.
                                     search("Boris")       -> Boris lives in Oslo.          Oslo

The facts cannot be memorized, and the second search needs the result of the first. Every name, place and thing is one
token of the built-in model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Self

from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.builtin.splits import generate_tasks
from TrainingFactory.models.words import NAMES, PLACES, THINGS
from TrainingFactory.tools import tool
from TrainingFactory.types import Message, Task, ToolCall

MAX_FACTS = 3  # per tool reply


class SearchEnvironment(ToolEnvironment):
    """Questions that need two searches: the second is about the result of the first."""

    system_prompt = "Search, then answer with one word."

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        return islice(generate_tasks("search", split, seed, _task), count)

    @tool
    async def search(self, query: str) -> str:
        """Find facts."""
        words = set(re.findall(r"\w+", query.lower()))
        hits = [(len(words & set(keys.lower().split())), text) for keys, text in self.task.metadata["facts"]]
        top = max(hit for hit, _ in hits)
        return " ".join([text for hit, text in hits if hit == top][:MAX_FACTS]) if top else "Nothing found."

    async def fork(self) -> Self:
        """Return another environment of the task. It needs no copied state, because searches change nothing."""
        return type(self)(self.task)

    def expert(self) -> Iterator[Message]:
        """Yield the turns of the reference solution."""
        seller, item, buyer = (self.task.metadata[key] for key in ("seller", "thing", "buyer"))
        yield _search(f"{seller} {item}")
        yield _search(buyer)
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        """Yield turns with a typical mistake: a warm start on such turns leaves something for RL to improve."""
        seller, item, buyer = (self.task.metadata[key] for key in ("seller", "thing", "buyer"))
        mistake = rng.choice(("guesses", "stops early", "guesses after one search"))
        if mistake == "guesses":
            yield Message("assistant", rng.choice(PLACES))
            return
        yield _search(f"{seller} {item}")
        yield Message("assistant", buyer if mistake == "stops early" else rng.choice(PLACES))


def _search(query: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall("search", {"query": query})])


def _task(task_id: str, rng: random.Random) -> Task:
    """Generate a task about one sale. Its facts also include distractors (the seller's other sale, and another seller's
    sale of the same thing) and the home of every person."""
    seller, other_seller, *buyers = rng.sample(NAMES, 5)
    item, second = rng.sample(THINGS, 2)
    sales = list(zip((seller, seller, other_seller), (item, second, item), buyers, strict=True))
    homes_by_name = dict(zip((seller, other_seller, *buyers), rng.sample(PLACES, 5), strict=True))
    # Each fact has keywords, by which the search finds it.
    facts = [[f"{person} {item}", f"{person} sold {item} to {whom}."] for person, item, whom in sales]
    facts += [[person, f"{person} lives in {city}."] for person, city in homes_by_name.items()]
    rng.shuffle(facts)
    metadata = {"seller": seller, "thing": item, "buyer": buyers[0], "facts": facts}
    return Task(task_id, f"{seller} sold {item}. Where is it?", homes_by_name[buyers[0]], metadata)
