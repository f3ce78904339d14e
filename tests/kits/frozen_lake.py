"""FrozenLake of the real Gymnasium, which `make servers` installs: a scripted warm start that takes the right step half
of the time, and a GRPO run from there. `python -m tests.kits.frozen_lake` prints the table of docs/ENVIRONMENTS.md."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.kits import lessons
from TrainingFactory.common import catalog
from TrainingFactory.runs.folder import TrainingReport
from TrainingFactory.types import Message, Task

FOLDER = Path(__file__).resolve().parents[2] / ".servers" / "envs"
needs_gymnasium = pytest.mark.skipif(
    not FOLDER.with_suffix(".installed").exists(), reason="gymnasium is not installed: make servers"
)
LAKE = "gymnasium:FrozenLake-v1"
OPTIONS: dict[str, Any] = {
    "python": str(FOLDER / "gymnasium" / "bin" / "python"),
    "args": {"is_slippery": False},
}
ACTIONS = ("left", "down", "right", "up")
# The right action on every square from which the goal can be reached, by its number.
RIGHT = {
    0: "down", 1: "right", 2: "down", 3: "left", 4: "down", 6: "down", 8: "right", 9: "right", 10: "down", 13: "right",
    14: "right",
}  # fmt: skip
MAX_TURNS = 12


def lake(**options: Any) -> Any:
    return catalog.find("environment", LAKE).from_options(OPTIONS | options).as_environment()


def square(board: str) -> int:
    """Return the number of the square with brackets."""
    row, line = next((row, line) for row, line in enumerate(board.split("\n")) if "[" in line)
    return 4 * row + line.index("[")


async def walk(environment: Any, rng: random.Random, skill: float) -> tuple[list[Message], bool]:
    """Play an episode that takes the right step with probability `skill`, else a random one. Return the conversation
    and whether it reaches the goal."""
    messages = await environment.reset()
    for _ in range(MAX_TURNS):
        right = RIGHT.get(square(messages[-1].content), "up")
        action = right if rng.random() < skill else rng.choice(ACTIONS)
        step = await environment.step(Message("assistant", action))
        messages = [*messages, Message("assistant", action), *step.replies]
        if step.done:
            break
    goal = "[G]" in messages[-1].content
    await environment.close()
    return messages[: -1 if messages[-1].role == "user" else None], goal


async def walks(count: int, skill: float, seed: int) -> list[tuple[list[Message], bool]]:
    factory = lake()
    try:
        tasks = [Task(f"walk-{number}", "") for number in range(count)]
        rngs = [random.Random(f"{seed} {number}") for number in range(count)]
        return await asyncio.gather(
            *(walk(factory(task), rng, skill) for task, rng in zip(tasks, rngs, strict=True))
        )
    finally:
        await factory.pool.close()


def warm_start(folder: Path, rows: int = 300, steps: int = 60) -> str:
    """Train the built-in model on the scripted episodes; return the model's folder."""
    episodes = asyncio.run(walks(rows, 0.5, 1))
    return lessons.warm_start(folder, [messages for messages, _ in episodes], 32, steps)


def learn(folder: Path, model: str, steps: int, **training: Any) -> TrainingReport:
    """Train with GRPO in FrozenLake, with an evaluation before and after."""
    environment = {"environment_id": LAKE, "options": OPTIONS, "max_turns": MAX_TURNS}
    return lessons.learn(folder, model, environment, steps, **training)


def success_by_chance() -> float:
    episodes = asyncio.run(walks(200, 0.0, 2))
    return sum(reached for _, reached in episodes) / len(episodes)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(f"random actions: {success_by_chance():.2f}")
        results = lessons.evaluations(learn(Path(name), warm_start(Path(name)), 30, eval_every=10))
        print("warm start, after 10, 20 and 30 steps:", " ".join(f"{share:.2f}" for share in results))
