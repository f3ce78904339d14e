"""Keyword search against dense retrieval: `python -m benchmarks.retrieval ENCODER`

Each of the passages answers two questions: `keywords` repeats words of the passage, `paraphrase` means the same in
other words. `hit@1` and `hit@3` are the shares of questions whose passage is first, or among the first three.
`bm25` is the tool `search`, `dense` the tool `retrieval` with the sentence encoder in the folder ENCODER.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from TrainingFactory.retrieval import RetrievalTool
from TrainingFactory.tools.custom_tools import SearchTool

Find = Callable[[str, int], list[tuple[str, str, str, float]]]


class Question(NamedTuple):
    passage: str
    keywords: str
    paraphrase: str


QUESTIONS = [
    Question(*line.split(" | "))
    for line in """
The museum is closed on Mondays. | museum closed on Mondays | When can I not visit the gallery?
Tomatoes ripen faster next to a banana. | tomatoes ripen banana | How do I speed up unripe vegetables?
A physician examined the boy's broken arm. | physician broken arm | Who treated the child's fracture?
The ferry to the island leaves at noon. | ferry island noon | What time does the boat depart?
Ice on the runway delayed every flight. | ice runway flight | Why were the planes late?
She repaired the bicycle's flat tyre herself. | repaired flat tyre | Who fixed the puncture?
The bakery sells rye loaves until they run out. | bakery rye loaves | Where can I buy dark bread?
Our attorney drafted the contract. | attorney drafted contract | Which lawyer wrote the agreement?
The kitten is afraid of thunder. | kitten afraid thunder | What scares the young cat?
Rent is due on the first of each month. | rent due first month | When must tenants pay?
The novel was translated into forty languages. | novel translated languages | How widely is the book read abroad?
Solar panels cover the roof of the school. | solar panels roof school | How is electricity made for the pupils?
He lost his purse at the railway station. | lost purse railway station | Where did the wallet go missing?
The river burst its banks after the storm. | river banks storm | What caused the flooding?
Children under six travel free of charge. | children under six free | Do toddlers need a ticket?
The orchestra rehearses in the old brewery. | orchestra rehearses brewery | Where do the musicians practise?
A vaccine against measles is given at one year. | vaccine measles one year | At which age is a baby immunised?
The company dismissed a third of its staff. | company dismissed staff | How many employees were laid off?
The lake froze for the first time in a decade. | lake froze decade | Was it a very cold winter for the water?
Use a password of at least twelve letters. | password twelve letters | How long should my login secret be?
The chef is allergic to shellfish. | chef allergic shellfish | Which food can the cook not eat?
Bees pollinate the almond orchards in spring. | bees pollinate almond | Which insects help the nut trees?
The thief escaped through a cellar window. | thief escaped cellar window | How did the burglar get away?
Petrol prices rose sharply last week. | petrol prices rose | Is fuel more expensive now?
""".strip().splitlines()
]


def passages() -> list[dict[str, Any]]:
    return [{"id": str(number), "text": question.passage} for number, question in enumerate(QUESTIONS)]


def hits_at(count: int, find: Find, kind: str = "paraphrase") -> int:
    """Return the number of questions whose passage is among the first `count`."""
    queries = [getattr(question, kind) for question in QUESTIONS]
    return sum(
        str(number) in [name for name, *_ in find(query, count)] for number, query in enumerate(queries)
    )


def measure(encoder: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "passages.jsonl")
        corpus.write_text("".join(json.dumps(row) + "\n" for row in passages()))
        finders: dict[str, Find] = {
            "bm25": SearchTool(corpus, index_dir=folder).find,
            "dense": RetrievalTool(corpus, encoder, index_dir=folder).find,
        }
        return [
            {
                "tool": name,
                "questions": kind,
                "count": len(QUESTIONS),
                **{f"hit@{top}": round(hits_at(top, find, kind) / len(QUESTIONS), 3) for top in (1, 3)},
            }
            for name, find in finders.items()
            for kind in ("keywords", "paraphrase")
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoder", help="folder with a sentence encoder")
    for row in measure(parser.parse_args(arguments).encoder):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
