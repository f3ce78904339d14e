"""Many processes use one registry, some of them killed in the middle of it: nothing is lost, nothing is half."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kits.registry import model_folder, operations, replayed
from TrainingFactory.registry.catalogue import Catalogue

FORKS = multiprocessing.get_context("forkserver")


def campaign(folder: Path, processes: int, each: int, kills: int, rng: random.Random) -> dict[str, int]:
    """Let processes make so many operations each, with kill -9 at random moments, and compare what is there."""
    FORKS.set_forkserver_preload(["tests.kits.registry"])
    path = folder / "registry.sqlite"
    for content in "abcd":
        model_folder(folder / content, content * 200_000)
    logs = [folder / f"{number}.log" for number in range(processes)]

    def start(number: int) -> Any:
        process = FORKS.Process(target=operations, args=(path, logs[number], number, each))
        process.start()
        return process

    running = {number: start(number) for number in range(processes)}
    killed = 0
    while running:
        time.sleep(rng.random() * 0.15)
        for number, process in list(running.items()):
            if not process.is_alive() and process.exitcode is not None:
                process.join()
                assert process.exitcode in (0, -9)
                del running[number]
                if process.exitcode != 0:
                    running[number] = start(number)
        if killed < kills and running:
            process = running[rng.choice(list(running))]
            if process.is_alive() and lines(logs) > processes:
                process.kill()
                killed += 1
    return check(path, logs) | {"killed": killed}


def lines(logs: list[Path]) -> int:
    return sum(log.read_bytes().count(b"\n") for log in logs if log.exists())


def check(path: Path, logs: list[Path]) -> dict[str, int]:
    """Compare each process's own model with what its log says; of those that were killed one operation is in doubt."""
    catalogue, done, doubtful = Catalogue(path), 0, 0
    acknowledged, begun = 0, 0
    for number, log in enumerate(logs):
        states: list[list[dict[str, Any]]] = [[]]
        pending: dict[str, Any] | None = None
        for line in log.read_text().splitlines():
            row = json.loads(line[1:])
            if line[0] == "!":
                states = [[*rows, row] for rows in states] if not row["refused"] else states
                done, pending = done + 1, None
                continue
            if pending is not None:  # begun by a process that was killed: it was made, or it was not
                states += [[*rows, pending] for rows in states]
                doubtful += 1
            pending = row
        assert pending is None
        versions = {each.number: each.lineage["folder"] for each in catalogue.versions(f"own-{number}")}
        aliases = {a: each.number for each in catalogue.versions(f"own-{number}") for a in each.aliases}
        possible = [replayed(rows) for rows in states]
        assert {"versions": versions, "aliases": aliases} in [
            {"versions": each["versions"], "aliases": each["aliases"]} for each in possible
        ], (number, versions, aliases, possible)
        acknowledged += min(each["shared"] for each in possible)
        begun += max(each["shared"] for each in possible)
    shared = [each.number for each in catalogue.versions("shared")]
    assert shared == list(range(1, len(shared) + 1)) and acknowledged <= len(shared) <= begun
    assert catalogue.verify() == {}
    catalogue.remove_unused_files()
    needed = set().union(*(each.digests for each in catalogue.versions()))
    assert {entry.name for entry in catalogue.store.path.iterdir()} == needed
    return {"operations": done, "doubtful": doubtful, "versions": len(catalogue.versions())}


def test_eight_processes_lose_nothing_though_some_are_killed(tmp_path: Path) -> None:
    found = campaign(tmp_path, processes=8, each=6, kills=3, rng=random.Random(1))
    assert found["operations"] == 48 and found["versions"] > 8


@pytest.mark.slow
def test_a_thousand_operations_under_kills(tmp_path: Path) -> None:
    found = campaign(tmp_path, processes=8, each=125, kills=60, rng=random.Random(2))
    print(found)
    assert found["operations"] == 1000 and found["killed"] == 60
