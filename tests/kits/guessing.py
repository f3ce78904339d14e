"""Guessing a number from 1 to 15 in 4 turns, in TextArena's GuessTheNumber and on a server of OpenEnv: a scripted warm
start that halves the interval in half of its turns, and a GRPO run from there. `python -m tests.kits.guessing` prints
the table of docs/ENVIRONMENTS.md."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits import lessons
from TrainingFactory.assembly.environment import as_environment_factory, find_environment
from TrainingFactory.runs.folder import TrainingReport
from TrainingFactory.types import Message, Task

SERVERS = Path(__file__).resolve().parents[2] / ".servers"
ENVS = SERVERS / "envs"
OPENENV = SERVERS / "openenv"
SERVER = Path(__file__).resolve().parents[1] / "servers" / "openenv_server.py"
needs_openenv = pytest.mark.skipif(
    not (OPENENV.with_suffix(".installed").exists() and (ENVS / "openenv").is_dir()),
    reason="a server of openenv is not installed: make servers agents",
)
GAME = "textarena:GuessTheNumber-v0"
HIGHEST = 15
MAX_TURNS = 4
MAX_SESSIONS = 256  # of the server of OpenEnv


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test if the environment's package is not installed."""
    is_installed = (ENVS / name / "requirements.lock").is_file()
    targets = "agents" if name.startswith("verifiers") else "servers"
    return pytest.mark.skipif(not is_installed, reason=f"{name} is not installed: make {targets}")


def options_of(environment_id: str, **options: Any) -> dict[str, Any]:
    """Return `environment.options` for an environment that `make servers` installs."""
    return {"python": str(ENVS / environment_id.partition(":")[0] / "bin" / "python")} | options


def factory_of(environment_id: str, **options: Any) -> Any:
    return as_environment_factory(find_environment(environment_id), options_of(environment_id, **options))


@contextlib.contextmanager
def openenv_server(kind: str = "guess", port: int = 0) -> Iterator[str]:
    """Start a server of the real OpenEnv; yield its environment_id."""
    command = [OPENENV / "bin" / "python", SERVER, kind, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"openenv:http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()
            server.wait()


def game_options(environment_id: str) -> dict[str, Any]:
    args = {"args": {"max_number": HIGHEST}} if environment_id == GAME else {}
    return options_of(environment_id, **args)


class Guesser:
    """Takes the middle of the interval with probability `skill`, else a random number."""

    def __init__(self, rng: random.Random, skill: float) -> None:
        self._rng, self._skill = rng, skill
        self._low, self._high = 1, HIGHEST

    def guess(self) -> str:
        self._last = (self._low + self._high) // 2
        if self._rng.random() >= self._skill:
            self._last = self._rng.randint(1, HIGHEST)
        return str(self._last)

    def hear(self, reply: str) -> None:
        if "igher" in reply.split("\n")[-1]:
            self._low = max(self._low, self._last + 1)
        elif "ower" in reply.split("\n")[-1]:
            self._high = min(self._high, self._last - 1)


async def play(environment: Any, guesser: Guesser) -> tuple[list[Message], bool]:
    """Play an episode. Return the conversation up to the last guess, and whether it is right."""
    messages, signals = await environment.reset(), {}
    for _ in range(MAX_TURNS):
        guess = guesser.guess()
        step = await environment.step(Message("assistant", guess))
        messages = [*messages, Message("assistant", guess)]
        signals = step.signals
        if step.done:
            break
        messages += step.replies
        guesser.hear(step.replies[-1].content)
    await environment.close()
    is_right = "stop/won" in signals or "stop/done" in signals
    return messages[: -1 if messages[-1].role == "user" else None], is_right


async def games(environment_id: str, count: int, skill: float, seed: int) -> list[tuple[list[Message], bool]]:
    factory = as_environment_factory(find_environment(environment_id), game_options(environment_id))
    gate = asyncio.Semaphore(MAX_SESSIONS // 2)

    async def game(number: int) -> tuple[list[Message], bool]:
        async with gate:
            task = Task(f"game-{seed}-{number}", "")
            return await play(factory(task), Guesser(random.Random(f"{seed} {number}"), skill))

    try:
        return await asyncio.gather(*(game(number) for number in range(count)))
    finally:
        await factory.pool.close()


def success_by_chance(environment_id: str) -> float:
    episodes = asyncio.run(games(environment_id, 200, 0.0, 2))
    return sum(right for _, right in episodes) / len(episodes)


def warm_start(folder: Path, environment_id: str, rows: int = 600, steps: int = 120) -> str:
    """Train the built-in model on the scripted episodes; return the model's folder."""
    episodes = asyncio.run(games(environment_id, rows, 0.5, 1))
    return lessons.warm_start(folder, [messages for messages, _ in episodes], 32, steps)


def learn(folder: Path, model: str, environment_id: str, steps: int, **training: Any) -> TrainingReport:
    """Train with GRPO, with an evaluation before and after."""
    options = game_options(environment_id)
    environment = {"environment_id": environment_id, "options": options, "max_turns": MAX_TURNS}
    return lessons.learn(folder, model, environment, steps, **training)


def print_results(environment_id: str, steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        print(
            f"{environment_id.partition(':')[0]}: random {success_by_chance(environment_id):.2f}", flush=True
        )
        model = warm_start(Path(name), environment_id)
        results = lessons.evaluations(learn(Path(name), model, environment_id, steps, eval_every=steps // 3))
        print(
            "  warm start, then after each third:", " ".join(f"{share:.2f}" for share in results), flush=True
        )


if __name__ == "__main__":
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    print_results(GAME, num_steps)
    with openenv_server() as address:
        print_results(address, num_steps)
