"""Writes TrainingFactory/data/builtin/ds_tool_calling_v1.jsonl, the small dataset behind `ds_tool_calling_v1`:

    python examples/make_tool_calling_data.py FILE.jsonl

48 short conversations with four tools, in six kinds: one call, two calls in one turn, two calls in turn, a call after
one that failed, a question that needs no tool, and one that no tool can answer. All of it is made up here, and the same
in every run; change the lists to make your own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CITIES = {
    "Oslo": 4,
    "Lima": 19,
    "Cairo": 31,
    "Quito": 14,
    "Perth": 23,
    "Turin": 12,
    "Accra": 29,
    "Sapporo": -2,
}
STOCK = {"tea": 12, "rice": 40, "lamps": 7, "ropes": 15, "nails": 250, "paper": 80, "soap": 33, "flour": 21}
PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana"]
FACTS = [
    ("What is the opposite of north?", "South."),
    ("How many days has a week?", "Seven."),
    ("Which letter comes after B?", "C."),
    ("What do bees make?", "Honey."),
    ("How many sides has a triangle?", "Three."),
    ("Is ice cold?", "Yes."),
    ("What colour is snow?", "White."),
    ("Say hello.", "Hello!"),
]


def tool(name: str, description: str, /, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    tool("weather", "The temperature in a city, in degrees Celsius.", city="Name of the city"),
    tool("stock", "How many pieces of an article there are.", article="Name of the article"),
    tool("calculator", "The value of an arithmetic expression.", expression="Such as 2 * (3 + 4)"),
    tool("book_table", "Book a table for two.", name="Who books", time="Such as 18:30"),
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*made: tuple[str, dict[str, str], str]) -> list[dict[str, Any]]:
    """The turn that makes these calls, each (tool, arguments, result), and the messages of their results."""
    functions = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments, _) in enumerate(made)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": result}
        for number, (name, _, result) in enumerate(made)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": functions}, *results]


def conversations() -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    pairs = list(zip(CITIES.items(), STOCK.items(), PEOPLE, FACTS, strict=True))
    for number, ((city, degrees), (article, count), person, (question, answer)) in enumerate(pairs):
        (other, warmth), _, friend, _ = pairs[(number + 3) % len(pairs)]
        time, price = f"{17 + number % 4}:{30 * (number % 2):02d}", number + 2
        weather = "weather", {"city": city}, str(degrees)
        ask = f"How warm is it in {city}?"
        found += [
            [user(ask), *calls(weather), says(f"It is {degrees} degrees in {city}.")],
            [
                user(f"Is it warmer in {city} or in {other}?"),
                *calls(weather, ("weather", {"city": other}, str(warmth))),
                says(f"It is warmer in {city if degrees > warmth else other}."),
            ],
            [
                user(f"One piece of our {article} costs {price}. What is all of it worth?"),
                *calls(("stock", {"article": article}, str(count))),
                *calls(("calculator", {"expression": f"{count} * {price}"}, str(count * price))),
                says(f"There are {count}, which are worth {count * price}."),
            ],
            [
                user(f"Book a table at {time} for {person}, or else an hour later."),
                *calls(("book_table", {"name": person, "time": time}, "error: no table is free then")),
                *calls(("book_table", {"name": person, "time": f"{int(time[:2]) + 1}{time[2:]}"}, "booked")),
                says(f"{time} was taken, so I have booked a table for {person} an hour later."),
            ],
            [user(question), says(answer)],
            [
                user(f"What is the telephone number of {friend}?"),
                says("I cannot look up telephone numbers: none of my tools has them."),
            ],
        ]
    return found


def main(path: str) -> None:
    rows = ({"messages": messages, "tools": TOOLS} for messages in conversations())
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
