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
    """Questions that need two searches, because the second query is the result of the first."""

    system_prompt = "Search, then answer with one word."

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        return islice(generate_tasks("search", split, seed, _make_task), count)

    @tool
    async def search(self, query: str) -> str:
        """Find facts."""
        words = set(re.findall(r"\w+", query.lower()))
        matches = [(len(words & set(key.lower().split())), text) for key, text in self.task.metadata["facts"]]
        best_score = max(score for score, _ in matches)
        best_texts = [text for score, text in matches if score == best_score][:MAX_FACTS]
        return " ".join(best_texts) if best_score else "Nothing found."

    async def fork(self) -> Self:
        """Return another environment of the task; searches change no state that it would have to copy."""
        return type(self)(self.task)

    def expert(self) -> Iterator[Message]:
        """Yield the turns of the reference solution."""
        seller, thing, buyer = (self.task.metadata[key] for key in ("seller", "thing", "buyer"))
        yield _call_search(f"{seller} {thing}")
        yield _call_search(buyer)
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        """Yield turns with a typical mistake, so that a warm start on them leaves room for RL to improve."""
        seller, thing, buyer = (self.task.metadata[key] for key in ("seller", "thing", "buyer"))
        mistake = rng.choice(("guesses", "stops early", "guesses after one search"))
        if mistake == "guesses":
            yield Message("assistant", rng.choice(PLACES))
            return
        yield _call_search(f"{seller} {thing}")
        yield Message("assistant", buyer if mistake == "stops early" else rng.choice(PLACES))


def _call_search(query: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall("search", {"query": query})])


def _make_task(task_id: str, rng: random.Random) -> Task:
    """Generate a task about one sale. Its facts also include distractors (the seller's other sale, and another seller's
    sale of the same thing) and the home of every person."""
    seller, other_seller, *buyers = rng.sample(NAMES, 5)
    thing, other_thing = rng.sample(THINGS, 2)
    sales = list(zip((seller, seller, other_seller), (thing, other_thing, thing), buyers, strict=True))
    homes_by_name = dict(zip((seller, other_seller, *buyers), rng.sample(PLACES, 5), strict=True))
    # Each fact has keywords, by which the search finds it.
    facts = [[f"{person} {thing}", f"{person} sold {thing} to {buyer}."] for person, thing, buyer in sales]
    facts += [[person, f"{person} lives in {city}."] for person, city in homes_by_name.items()]
    rng.shuffle(facts)
    metadata = {"seller": seller, "thing": thing, "buyer": buyers[0], "facts": facts}
    return Task(task_id, f"{seller} sold {thing}. Where is it?", homes_by_name[buyers[0]], metadata)
