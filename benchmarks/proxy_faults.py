"""Agents that fail in every way they can, at one endpoint: `python -m benchmarks.proxy_faults --episodes 200`.

The agent of examples/own_agent plays against the small warm model of the tests, by `environment.command`. In turn it
plays well, kills itself in mid-conversation, raises, says no reward, never calls, sleeps past its time with a child of
its own, sends malformed requests, hangs up on streams (also before a request is whole), or tries other keys. Then:
- every episode is scored, or has a status and an error that name what happened;
- every prompt of an episode asks what its own task asks; tasks side by side ask about others;
- no key is in what was logged or in the file of episodes;
- no process of an agent is left, and nothing listens any more.

The openai package must be importable: PYTHONPATH is handed to the agent.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from TrainingFactory.config import TrainingConfig
from TrainingFactory.evaluation.rollouts import Rollouts
from TrainingFactory.models import chat_format
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.types import Trajectory

HERE = Path(__file__).resolve().parents[1]
MARK = "FAULTS_KEYS"  # in the environment of all agents: the file to which they write their keys
# what an episode with this fault ends as: its status, and the beginning of its error
EXPECTED: dict[str, tuple[set[str], str]] = {
    "none": ({"done", "truncated"}, ""),
    "killed": ({"error"}, "the program ended with SIGKILL"),
    "raises": ({"error"}, "the program ended with status 1: RuntimeError: no luck with ***"),
    "silent": ({"done", "truncated"}, "scoring failed: the program neither printed"),
    "mute": ({"error"}, "the program made no successful request"),
    "late": ({"error"}, "the episode took longer"),
    "malformed": ({"done", "truncated"}, ""),
    "hangup": ({"done", "truncated"}, ""),
    "stranger": ({"done", "truncated"}, ""),
}


def tasks(count: int, folder: Path, seed: int, kinds: Sequence[str]) -> Path:
    rng, file = random.Random(seed), folder / "tasks.jsonl"
    faults = [kind for _ in range(count // len(kinds) + 1) for kind in kinds][:count]
    rng.shuffle(faults)
    rows = [json.loads(line) for line in (HERE / "examples/own_agent/train.jsonl").read_text().splitlines()]
    named = list({row["name"]: row for row in rows}.values())  # so that those side by side ask about others
    with file.open("w") as out:
        for number, fault in enumerate(faults):
            row = named[number % len(named)] | {"id": f"case-{seed}-{number}", "fault": fault}
            out.write(json.dumps(row) + "\n")
    return file


def campaign(
    episodes: int,
    seed: int = 0,
    processes: int = 4,
    timeout: float = 40.0,
    kinds: Sequence[str] = tuple(EXPECTED),
) -> dict[str, Any]:
    """Play them all, with these faults in turn; return what was counted, and all that is wrong."""
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger().addHandler(handler)
    with tempfile.TemporaryDirectory(prefix="tfactory-faults-") as name:
        folder = Path(name)
        os.environ[MARK] = str(folder / "keys")
        agent = shlex.join([sys.executable, str(HERE / "benchmarks" / "proxy_faults_agent.py")])
        names = [MARK, *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else [])]
        config = TrainingConfig(
            model={"name": str(HERE / "examples" / "own_agent" / "model")},
            environment={
                "command": agent, "options": {"env": names, "processes": processes}, "episode_timeout": timeout,
            },
            data={"tasks": str(tasks(episodes, folder, seed, kinds))},
            sampling={"max_tokens": 24},
        )  # fmt: skip
        try:
            report = Rollouts(config, folder / "episodes.jsonl").run()
        finally:
            logging.getLogger().removeHandler(handler)
        keys = (folder / "keys").read_text().split()
        texts = {"log": logged.getvalue(), "file of episodes": (folder / "episodes.jsonl").read_text()}
        wrong = [
            f"a key is in the {place}" for place, text in texts.items() if any(key in text for key in keys)
        ]
        wrong += [] if len(set(keys)) == len(keys) else ["two episodes had one key"]
        wrong += left_running(str(folder / "keys"))
    chat = chat_format(make_tiny_tokenizer())
    wrong += [problem for each in report.trajectories for problem in problems(each, chat)]
    if len(report.trajectories) != episodes:
        wrong.append(f"{len(report.trajectories)} of {episodes} episodes came back")
    counts = {key: value for key, value in report.metrics.items() if key.startswith(("proxy/", "episodes"))}
    ends = Counter(f"{each.task.metadata['fault']}: {end_of(each)}" for each in report.trajectories)
    return {"counts": counts, "ends": dict(sorted(ends.items())), "wrong": wrong}


def end_of(episode: Trajectory) -> str:
    return "scored" if episode.reward is not None else f"{episode.status}, {episode.error}"


def problems(episode: Trajectory, chat: ChatFormat) -> list[str]:
    """Return what is wrong with one episode."""
    found, name = list[str](), f"{episode.task.id} ({episode.task.metadata['fault']})"
    status, text = EXPECTED[episode.task.metadata["fault"]]
    late = (episode.error or "").startswith("the episode took longer")  # a busy machine
    if not late and (episode.status not in status or not (episode.error or "").startswith(text)):
        found.append(f"{name} ended as {episode.status}: {episode.error}")
    if (episode.reward is None) != (bool(text) or late):
        found.append(f"{name} has the reward {episode.reward}")
    for turn in episode.turns:
        asked = set(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", chat.decode(turn.prompt_ids)))
        if asked != {str(episode.task.prompt)}:
            found.append(f"{name} has a prompt about {asked}")
    return found


def left_running(mark: str) -> list[str]:
    """Name the processes that know of this campaign and are not ours."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                left.append(f"process {process.pid} is left: {process.name()}")
        except psutil.Error:
            continue
    return left


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=4)
    given = parser.parse_args()
    started = time.perf_counter()
    found = campaign(given.episodes, given.seed, given.processes)
    print(json.dumps(found, indent=1))
    print(
        f"{given.episodes} episodes in {time.perf_counter() - started:.0f} s, {len(found['wrong'])} things wrong"
    )
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
