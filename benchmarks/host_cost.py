"""What episodes cost the host beside the model: `python -m benchmarks.host_cost`.

1,024 episodes of four turns (three calls of the calculator and an answer, in groups of 16) are played by the driver of
a run, with its reward and its recording, and a sampler that answers at once with the ids of a recorded dialogue; then
they get their credit and are written to disk. So all that is left is the host's own work: reading a turn, the call,
what follows a turn in tokens, asyncio, recording.

The dialogues are written once, by a script that goes through the same code, in the chat format of the model in
examples/own_agent/model; the numbers in them differ from episode to episode, so that hardly a text is there twice but
the prompt of a group. Log-probs are made up.

`ms_per_turn` is CPU time of the whole process, all threads, over turns: the best of `--rounds`, because a machine that
does something else as well shows more, never less. `calls_per_turn` counts the function calls of one round: compare
commits by it where times are noisy. `parts` says where the time goes: each part is done again alone, over the same
episodes, and `rest` is what no part explains: asyncio, rewards, the episode's own lines, garbage collection, and that a
part which is done among others finds the processor's caches cold. `credit` and `writing` are done on other threads in a
run, the latter beside the update. `fingerprint` is of all token ids, masks, log-probs and advantages, and of the files
on disk without their times: it stays the same when code becomes faster. `--profile` shows functions.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import hashlib
import json
import pstats
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.assembly.rewards import make_reward
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.rollout import RolloutEngine, play
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.recording import CALLS_FILE, EpisodeKey
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.types import (
    Completion,
    Message,
    Sample,
    SamplingParams,
    Task,
    ToolCall,
    Trajectory,
    Weights,
)

GROUPS, MEMBERS, TURNS, LIMIT = 64, 16, 4, 0.25
WARM = Path(__file__).parents[1] / "examples" / "own_agent" / "model"
CONFIG: dict[str, Any] = {
    "model": {"name": str(WARM)},
    "training": {"algorithm": "grpo"},
    "tools": [{"name": "calculator"}],
    "reward": {"type": "rule_based", "options": {"rule": "numeric"}},
}


class Recorded:
    """A sampler, and the session of an episode, that answers with what was recorded, a loop's turn later."""

    policy_version, max_length = 0, 4096

    def __init__(self, episodes: Sequence[Sequence[Completion]]) -> None:
        self._episodes, self._opened = episodes, 0
        self._waiting: list[tuple[asyncio.Future[Completion], Completion]] = []

    def session(self) -> _Session:
        self._opened += 1
        return _Session(self, self._episodes[(self._opened - 1) % len(self._episodes)])

    async def answer(self, completion: Completion) -> Completion:
        """Settle all that wait in one call, as an engine does whose turns end in the same step."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._settle)
        future: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((future, completion))
        return await future

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future, completion in waiting:
            future.set_result(completion)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        raise NotImplementedError

    async def update(self, weights: Weights) -> None: ...
    async def close(self) -> None: ...


class _Session:
    def __init__(self, sampler: Recorded, turns: Sequence[Completion]) -> None:
        self._sampler, self._turns = sampler, iter(turns)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        kept = next(self._turns)
        return await self._sampler.answer(Completion(list(kept.token_ids), list(kept.logprobs), kept.finish))

    def close(self) -> None: ...


def make_tasks(groups: int) -> list[Task]:
    rng = random.Random(1)
    return [
        Task(f"task-{number}", f"A shop sells {rng.randint(11, 99)} boxes of {rng.randint(11, 99)} pens each at "
             f"{rng.randint(2, 9)} coins a pen, and pays {rng.randint(100, 900)} coins rent. What is left?", "7")
        for number in range(groups)
    ]  # fmt: skip


def script(task: Task, member: int) -> list[Message]:
    rng = random.Random(f"{task.id} {member}")
    turns = []
    for what in ("There are", "They bring in", "After the rent it has"):
        expression = f"{rng.randint(10, 9999)}{rng.choice('+-*')}{rng.randint(10, 9999)}"
        text = f"{what} {expression} of {rng.randint(1, 99)}, so I calculate it."
        turns.append(Message("assistant", text, [ToolCall("calculator", {"expression": expression})]))
    return [*turns, Message("assistant", f"What is left is {rng.randint(1, 9999)}\n#### {rng.randint(1, 9)}")]


async def record(environment: Any, chat: ChatFormat, tasks: Sequence[Task]) -> list[list[Completion]]:
    """Write the dialogues, and make log-probs up for them: of the precision that a model's have."""
    numbers, episodes = np.random.default_rng(0), []
    for task in tasks:
        for member in range(MEMBERS):
            played = await play(environment(task), chat, script(task, member), reward=lambda episode: 0.0)
            assert played.status == "done" and len(played.turns) == TURNS, (played.status, played.error)
            sizes = [len(turn.completion.token_ids) for turn in played.turns]
            made = [(-numbers.exponential(0.5, size)).astype(np.float32).tolist() for size in sizes]
            ids = [turn.completion.token_ids for turn in played.turns]
            episodes.append([Completion(*both, "stop") for both in zip(ids, made, strict=True)])
    return episodes


class Bench:
    """Everything that a step needs up to the update, as `trainers/training_run.py` makes it."""

    def __init__(self, folder: Path, groups: int) -> None:
        self.folder, self.tasks = folder, make_tasks(groups)
        self.config = TrainingConfig.model_validate(CONFIG | {"logging": {"output_dir": str(folder)}})
        self.tools = RunTools(self.config, (), None)
        # The model itself is not used, but a run loads one, and what it brings weighs on every garbage collection.
        self.loaded = load_model(str(WARM), device="cpu")
        self.chat = chat_format(self.loaded.tokenizer, stop_ids=self.loaded.stop_ids)
        self.algorithm, self.step = GRPO(), 0

    async def open(self) -> None:
        self.environment = await self.tools.equip(ToolEnvironment)
        self.episodes = await record(self.environment, self.chat, self.tasks)
        self.tools.record_to(self.folder)
        self.rollouts = RolloutEngine(
            self.environment, self.chat, SamplingParams(), reward=RewardClock(make_reward(self.config)),
            max_turns=12, runtime=self.tools.runtime,
        )  # fmt: skip

    async def play(self) -> list[list[Trajectory]]:
        return await self.rollouts.rollout_batch(self.tasks, Recorded(self.episodes), MEMBERS, self.step)

    def credit(self, groups: list[list[Trajectory]]) -> list[Sample]:
        return [row for group in groups for row in self.algorithm.samples(group)]

    def write(self, groups: list[list[Trajectory]]) -> None:
        self.tools.commit()
        save_trajectories(self.folder / "trajectories.jsonl", (each for group in groups for each in group))

    async def round(self) -> tuple[list[float], list[list[Trajectory]], list[Sample]]:
        """One step: CPU seconds of playing, credit and writing."""
        (self.folder / CALLS_FILE).write_text("")
        times = [time.process_time()]
        groups = await self.play()
        times.append(time.process_time())
        rows = self.credit(groups)
        times.append(time.process_time())
        self.write(groups)
        times.append(time.process_time())
        played = [each for group in groups for each in group]
        assert len(played) == len(self.episodes)
        assert all(each.reward is not None and len(each.turns) == TURNS for each in played)
        return [end - start for start, end in pairwise(times)], groups, rows


def fingerprint(folder: Path, groups: list[list[Trajectory]], rows: list[Sample]) -> str:
    """Of the rows that are trained and of what is on disk, without times."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: 0 if key == "seconds" else timeless(item) for key, item in value.items()}
        return [timeless(item) for item in value] if isinstance(value, list) else value

    found = hashlib.sha256()
    for name in ("trajectories.jsonl", CALLS_FILE):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            found.update(json.dumps(timeless(json.loads(line))).encode())
    for row in rows:
        parts = (row.token_ids, row.loss_mask, row.logprobs, row.advantages, row.rewards, row.policy_version)
        found.update(repr(parts).encode())
    found.update(repr([[turn.prompt_ids for turn in each.turns] for each in groups[-1]]).encode())
    return found.hexdigest()[:16]


async def parts(bench: Bench, groups: list[list[Trajectory]]) -> dict[str, float]:
    """CPU milliseconds per turn of each part alone."""
    played = [each for group in groups for each in group]
    turns = [(each, turn) for each in played for turn in each.turns]
    chat, found = bench.chat, dict[str, float]()

    def measure(name: str, function: Callable[[], object]) -> None:
        best = min(_timed(function) for _ in range(3))
        found[name] = best * 1000 / len(turns)

    measure("render", lambda: [chat.render(each.prompt, each.tools) for each in played])
    measure("parse", lambda: [chat.parse(t.completion.token_ids, t.prompt_ids, e.tools) for e, t in turns])
    replied = [turn for _, turn in turns if turn.replies]
    measure("extend", lambda: [chat.extend(turn, turn.replies) for turn in replied])
    measure("cut", lambda: [chat.truncate(reply.content, 1024) for turn in replied for reply in turn.replies])
    measure("environment", lambda: [bench.environment(each.task) for each in played])

    def executors() -> list[tuple[AsyncToolExecutor, Trajectory]]:
        made = [(bench.environment(each.task).executor, each) for each in played]
        for number, (executor, each) in enumerate(made):
            key = EpisodeKey(-1, each.task.id, number)
            executor.attach(bench.tools.runtime, key, "", None)
        return made

    best = float("inf")
    for _ in range(3):
        ready = executors()
        started = time.process_time()
        for executor, each in ready:
            for turn in each.turns[:-1]:
                await executor.batch_execute(turn.message.tool_calls)
        best = min(best, time.process_time() - started)
    bench.tools.drop(lambda key: key.step == -1)
    found["calls"] = best * 1000 / len(turns)
    return found


def _timed(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


async def measure(groups_of_16: int, rounds: int, profile: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), groups_of_16)
        await bench.open()
        await bench.round()  # warm up
        profiler = cProfile.Profile()
        profiler.enable()
        await bench.round()
        profiler.disable()
        calls: Any = pstats.Stats(profiler)
        if profile:
            calls.sort_stats("tottime").print_stats(45).sort_stats("cumtime").print_stats(70)
        found = [await bench.round() for _ in range(rounds)]
        best, groups, rows = min(found, key=lambda each: sum(each[0]))
        turns, mb = len(bench.episodes) * TURNS, (bench.folder / "trajectories.jsonl").stat().st_size / 1e6
        shares = await parts(bench, groups)
        playing, credit, writing = (seconds * 1000 / turns for seconds in best)
        shares["rest"] = playing - sum(shares.values())
        shares |= {"credit": credit, "writing": writing}
        sampled = sum(len(turn.completion.token_ids) for group in groups for e in group for turn in e.turns)
        result = {
            "ms_per_turn": sum(best) * 1000 / turns,
            "calls_per_turn": round(calls.total_calls / turns, 1),
            "playing": playing,
            "parts": {name: round(value, 4) for name, value in shares.items()},
            "rounds": [round(sum(each[0]) * 1000 / turns, 4) for each in found],
            "tokens_per_turn": sampled / turns,
            "megabytes": mb,
            "fingerprint": fingerprint(bench.folder, groups, rows),
        }
        await bench.tools.close()
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"of {MEMBERS} episodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="show where functions spend their time")
    given = parser.parse_args()
    result = asyncio.run(measure(given.groups, given.rounds, given.profile))
    for name, value in result["parts"].items():
        print(f"{name:12} {value:.4f} ms a turn")
    print("PASS" if result["ms_per_turn"] <= LIMIT else "FAIL", f"limit {LIMIT} ms a turn")
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
