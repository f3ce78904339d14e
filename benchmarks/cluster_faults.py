"""Random kills over real runs on Ray and vLLM: `python -m benchmarks.cluster_faults --kills 50 --vllm 8`; `--kills 6`
to try it out, `--only N` for one of them again.

Each run is `tfactory train` as a process of its own: GRPO from the small warm model of the tests, 5 steps, a checkpoint
after each, a tool and a reward that take a moment, two native samplers and two reward workers in Ray actors, or vLLM
beside the run or in an actor. Most join one Ray that serves all, every seventh starts its own. At a moment that the
seed chooses SIGKILL goes to a sampler, to vLLM's engine core, to a reward worker or to the driver. A run that has ended
early is gone on with by its own command. Then:
- bound 0: every step has the metrics of the undisturbed run. Turns have the same seeds wherever they are sampled, so
  tokens, rewards and counts are equal; which turns are computed together depends on time, and rounding on that: loss
  and the norm of the gradient are equal within GAP (float32; in half precision near-ties would be drawn otherwise);
- every bound: the ledger shows each group once, each group has all its episodes, no group is staler than the bound;
- no process of the run is left, no segment of shared memory that nobody holds, no port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from TrainingFactory.cluster.ray_session import RaySession, require_ray
from TrainingFactory.training.ledger import find_ledger_errors

HERE = Path(__file__).resolve().parents[1]
MARK = "TFACTORY_FAULTS"  # in the environment of all processes of a campaign
STEPS, GROUPS, MEMBERS = 5, 4, 4
EXACT = ("episodes", "reward", "reward_std", "sampled_tokens", "trained_tokens", "turns", "tool_calls")
CLOSE, GAP = ("loss", "grad_norm"), 1e-3  # relative, to at least 0.01
HELD = re.compile(r"/dev/shm/((?:psm_|sem\.mp-|tfactory-|torch_|vllm)[^/\s]+)")
GRACE = 90.0  # seconds for what a run has started to end; where a driver was killed Ray's agents take 60
LONGEST = 600.0  # seconds of one command
ENVIRONMENT = """
import asyncio
from tests.kits.warm import Homes as Plain

class Homes(Plain):
    async def step(self, message):
        await asyncio.sleep(0.1 * len(message.tool_calls))
        return await super().step(message)
"""
REWARD = """
import time

def score(trajectory):
    time.sleep(0.02)
    right = trajectory.turns[-1].message.content == str(trajectory.task.answer)
    return float(right) + 0.01 * len(trajectory.turns)
"""
SETTINGS = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip
TITLES = {"sampler": "ray::EngineActor", "reward": "ray::Host", "engine": "VLLM::EngineCore"}


@dataclass(frozen=True)
class Case:
    """One run and its kill: `delay` seconds after the run has written `step` steps."""

    number: int
    victim: str
    engine: str = "native"
    where: str = "shared"  # Ray: shared, own; or none
    samplers: int = 2
    bound: int = 0
    order: str = "number"
    step: int = 0
    delay: float = 0.0

    @property
    def told(self) -> str:
        way = f"{self.engine} x{self.samplers}, Ray {self.where}, bound {self.bound} by {self.order}"
        return f"{self.number}: {way}; {self.victim} {self.delay:.2f} s after step {self.step}"

    @property
    def overrides(self) -> list[str]:
        found = [f"sampling.engine={self.engine}"]
        if self.where != "none":
            found += ["compute.backend=ray", f"compute.samplers={self.samplers}"]
        if self.bound:
            ahead = {"async_rollout": "true", "max_staleness": self.bound, "async_order": self.order}
            found += [f"optimization.{key}={value}" for key, value in ahead.items()]
        return found


def plan(kills: int, vllm: int, seed: int) -> list[Case]:
    """Choose runs and moments; victims and bounds take turns."""
    with_vllm = {round((n + 0.5) * kills / vllm) for n in range(vllm)} if vllm else set()
    ways = ((0, "number"), (1, "number"), (0, "number"), (2, "arrival"), (1, "arrival"), (2, "number"))
    cases, natives, others = list[Case](), 0, 0
    for number in range(kills):
        rng = random.Random(f"faults {seed} {number}")
        step = rng.randrange(STEPS - 1)
        if number in with_vllm:
            bound, order = ((0, "number"), (0, "number"), (1, "number"), (2, "arrival"))[others // 2 % 4]
            victim = "driver" if others % 8 in (3, 6) else "engine"  # once on Ray, once beside the run
            where, samplers = ("shared", 1 + others // 4 % 2) if others % 2 else ("none", 1)
            given, others = ("vllm", where, samplers, bound, order), others + 1
        else:
            victim = ("sampler", "driver", "reward")[natives % 3]
            bound, order = ways[natives // 3 % len(ways)]
            given = ("native", "own" if natives % 7 == 5 else "shared", 2, bound, order)
            natives += 1
        # Before the first step: from the victim's begin, and reward workers begin late.
        longest = 0.8 if step else {"reward": 1.0, "sampler": 6.0}.get(victim, 12.0)
        cases.append(Case(number, victim, *given, step, rng.uniform(0.0, longest)))
    return cases


class Processes:
    """Knows what a campaign has started, directly or not, and what that holds: others may use the machine too."""

    def __init__(self, mark: str) -> None:
        self._mark, self._held, self._asked = mark, set[str](), dict[psutil.Process, bool]()
        self._parents: dict[psutil.Process, psutil.Process | None] = {}
        self.lasting: set[psutil.Process] = set()  # what serves all runs

    def look(self) -> dict[psutil.Process, str]:
        """Return those that live with their titles, without what serves all runs; note what they hold."""
        every = _every()
        for each in every:
            if each not in self._asked:
                with suppress(psutil.Error):  # it may end meanwhile
                    self._parents[each] = parent = each.parent()
                    mine = parent is not None and self._asked.get(parent, False)
                    self._asked[each] = mine or each.environ().get(MARK) == self._mark
        found = {each: title for each, title in every.items() if self._asked.get(each)}
        self._held |= _held_by(found)
        return {each: title for each, title in found.items() if title and each not in self.lasting}

    def end(self) -> None:
        for each in self.look():
            with suppress(psutil.Error):
                each.kill()

    def left(self) -> list[str]:
        """Return what lives, what nobody holds any more, and what listens. Ray for all keeps idle workers."""
        kept = {each for each, parent in self._parents.items() if parent in self.lasting}
        every = self.look().items()
        living = {each.pid: title for each, title in every if "ray::IDLE" not in title or each not in kept}
        there = {each.name for each in Path("/dev/shm").iterdir()} & self._held
        lost = there - _held_by(_every()) if there else set()
        ports = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        found = [f"process {pid} {title[:80]}" for pid, title in living.items()]
        found += [f"shared memory {name}" for name in sorted(lost)]
        return found + [f"port {each.laddr.port}" for each in ports if each.pid in living and each.laddr]


def _every() -> dict[psutil.Process, str]:
    """Return the processes of this machine with their titles; of those that have ended there are none."""
    found = sorted(psutil.process_iter(["cmdline"]), key=lambda each: each.pid)
    return {each: " ".join(each.info["cmdline"] or []).strip() for each in found}


def _held_by(processes: dict[psutil.Process, str]) -> set[str]:
    """Return the names in shared memory that processes map, or have in their titles."""
    texts = list(processes.values())
    for each in processes:
        with suppress(OSError):
            texts.append(Path(f"/proc/{each.pid}/maps").read_text(encoding="utf-8", errors="replace"))
    return set(HELD.findall("\n".join(texts)))


class Campaign:
    def __init__(self, folder: Path, processes: Processes, address: str) -> None:
        self.folder, self._processes, self._address = folder, processes, address
        self.gap = 0.0  # the largest
        shape = {"max_steps": STEPS, "batch_size": GROUPS, "group_size": MEMBERS}
        config = {
            "model": {"name": str(HERE / "examples" / "own_agent" / "model"), "dtype": "float32"},
            "training": {"algorithm": "grpo", "learning_rate": 6e-4, **shape},
            "environment": {"environment_id": "homes.py:Homes", "max_turns": 3},
            "reward": {"type": "function", "options": {"function": "scoring.py:score"}},
            "optimization": {"distributed_reward": True, "reward_workers": 2},
            "data": {"count": 100}, "sampling": {"max_tokens": 24}, "logging": {"checkpoint_every": 1},
        }  # fmt: skip
        files = {"run.yaml": json.dumps(config), "homes.py": ENVIRONMENT, "scoring.py": REWARD}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    def all(self, cases: list[Case], again: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Play the cases; return sums, and what failed."""
        kills, sums, failed = Counter[str](), Counter[str](), list[dict[str, Any]]()
        for case in cases:
            began, found = time.monotonic(), self.play(case)
            wrong, left = found["wrong"], found["left"]
            what = f"{case.engine} {case.victim} bound {case.bound}" if found["struck"] else "ended before"
            kills[what] += 1
            sums["bound_0"] += not case.bound
            sums["equal"] += not case.bound and not wrong
            sums["resumed"] += found["resumed"]
            sums["ledger_ok"] += not any(text.startswith(("ledger", "its metrics")) for text in wrong)
            sums["left_behind"] += bool(left)
            notes = ["gone on with"] * found["resumed"] + ["no kill"] * (not found["struck"]) + wrong + left
            notes.append(f"{time.monotonic() - began:.0f} s")
            print(f"{'NOT ok' if wrong or left else 'ok':8}{case.told}: {'; '.join(notes)}", flush=True)
            if wrong or left:
                print(f"        again: {again} --only {case.number}", flush=True)
                failed.append({"number": case.number, "wrong": wrong, "left": left})
        return {"kills": dict(kills), **sums}, failed

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "TrainingFactory.cli", *arguments]
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )

    def train(self, name: str, case: Case) -> subprocess.Popen[bytes]:
        address = [f"compute.address={self._address}"] if case.where == "shared" else []
        return self.start(name, "train", "run.yaml", "--name", name, *case.overrides, *address)

    def rows(self, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.folder / "runs" / name / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def ended(self, driver: subprocess.Popen[bytes]) -> int:
        until = time.monotonic() + LONGEST
        while driver.poll() is None:
            self._processes.look()
            if time.monotonic() > until:
                raise TimeoutError(f"it took longer than {LONGEST:g} s")
            time.sleep(0.7)
        return driver.returncode

    def calm(self, engine: str) -> list[dict[str, Any]]:
        """Return the metrics of an undisturbed run, which is made once."""
        name, case = f"calm-{engine}", Case(-1, "nobody", engine, "none" if engine == "vllm" else "shared")
        if not self.rows(name) and self.ended(self.train(name, case)):
            raise SystemExit(f"the undisturbed run failed: {self.folder}/{name}.log")
        return self.rows(name)

    def strike(self, driver: subprocess.Popen[bytes], name: str, case: Case) -> bool:
        """Wait for the moment and kill; tell whether anybody was killed before the run ended."""

        def victims() -> list[Any]:
            if case.victim == "driver":
                return [driver]
            found = self._processes.look().items()
            return [each for each, title in found if title.startswith(TITLES[case.victim])]

        until = time.monotonic() + LONGEST
        while len(self.rows(name)) < case.step or not victims():
            if driver.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.2)
        time.sleep(case.delay)
        if driver.poll() is None and (found := victims()):
            with suppress(ProcessLookupError):
                os.kill(random.Random(case.number).choice(found).pid, signal.SIGKILL)
                return True
        return False

    def play(self, case: Case) -> dict[str, Any]:
        """Make a run with a kill and return what was found: struck, resumed, and what is wrong in words."""
        name = f"case-{case.number}"
        driver = self.train(name, case)
        found = {"struck": self.strike(driver, name, case), "resumed": False, "wrong": [], "left": []}
        try:
            if self.ended(driver):
                found["resumed"] = True
                found["left"] += self.left()
                there = (self.folder / "runs" / name).is_dir()
                if self.ended(self.start(name, "runs", "resume", name) if there else self.train(name, case)):
                    found["wrong"].append("it could not be gone on with")
        except TimeoutError as error:
            found["wrong"].append(str(error))
            self._processes.end()
        found["wrong"] += self.wrong(name, case)
        found["left"] += self.left()
        self._processes.end()
        return found

    def wrong(self, name: str, case: Case) -> list[str]:
        rows = self.rows(name)
        if (steps := [row["step"] for row in rows]) != list(range(1, STEPS + 1)):
            return [f"its metrics have the steps {steps}"]
        found = [f"ledger: {text}" for text in find_ledger_errors(self.rows(name, "consumed.jsonl"))]
        episodes = Counter(each["group"] for each in self.rows(name, "trajectories.jsonl"))
        if len(episodes) != STEPS * GROUPS or set(episodes.values()) != {MEMBERS}:
            found.append(f"ledger: its groups have the episodes {dict(episodes)}")
        stale = [row["step"] for row in rows if row.get("staleness/max", 0) > case.bound]
        found += [f"ledger: the steps {stale} are staler than {case.bound}"] if stale else []
        if case.bound:
            return found
        for row, other in zip(rows, self.calm(case.engine), strict=True):
            gaps = {key: abs(row[key] - other[key]) / max(abs(other[key]), 0.01) for key in EXACT + CLOSE}
            self.gap = max(self.gap, *(gaps[key] for key in CLOSE))
            far = [key for key, gap in gaps.items() if not gap <= (GAP if key in CLOSE else 0.0)]
            found += [f"step {row['step']}: {key} {row[key]}, calm {other[key]}" for key in far]
        return found

    def left(self) -> list[str]:
        """Return what is left when a run has ended and a little time has passed."""
        until = time.monotonic() + GRACE
        while (found := self._processes.left()) and time.monotonic() < until:
            time.sleep(0.5)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill processes of real runs.")
    for key, default in (("kills", 50), ("vllm", 0), ("seed", 0)):
        parser.add_argument(f"--{key}", type=int, default=default)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of kills to repeat")
    asked = parser.parse_args()
    cases = plan(asked.kills, asked.vllm, asked.seed)
    cases = [case for case in cases if asked.only is None or case.number in asked.only]
    mark, began, session = f"{os.getpid()}-{time.time_ns()}", time.monotonic(), RaySession()
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    os.environ |= {MARK: mark, "PYTHONPATH": path, **SETTINGS}
    folder, processes = Path(tempfile.mkdtemp(prefix="tfactory-faults-")), Processes(mark)
    print(f"logs and runs are in {folder}", flush=True)
    asyncio.run(session.open())
    processes.lasting = {each for each, title in processes.look().items() if "ray::IDLE" not in title}
    campaign = Campaign(folder, processes, require_ray().get_runtime_context().gcs_address)
    try:
        again = f"--kills {asked.kills} --vllm {asked.vllm} --seed {asked.seed}"
        result, failed = campaign.all(cases, f"python -m benchmarks.cluster_faults {again}")
    finally:
        processes.end()
        asyncio.run(session.close())
    processes.lasting = set()
    if left := campaign.left():
        failed.append({"number": "Ray for all", "wrong": [], "left": left})
    result |= {"largest_gap": campaign.gap, "seconds": round(time.monotonic() - began), "failed": failed}
    print("RESULT", json.dumps(result))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
