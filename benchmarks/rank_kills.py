"""Random kills of the processes of a learner: `python -m benchmarks.rank_kills --kills 20`; `--kills 2` to try it out,
`--only N` for one of them again.

Each run is `tfactory train` with two learners, which it starts itself or torchrun has started: GRPO from the small warm
model of the tests, deterministic, 4 steps, a checkpoint after each. At a moment that the seed chooses SIGKILL goes to
the driver or to the other rank. All processes must end by themselves, and `tfactory runs resume` must bring the run to
the metrics of the undisturbed one, to the bit; no process, port or folder in shared memory is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster_faults import MARK, Processes

HERE = Path(__file__).resolve().parents[1]
STEPS, GRACE, LONGEST = 4, 40.0, 600.0
CHILD, TITLE = "common/workers/child.py", "TrainingFactory.cli"
CONFIG = {
    "model": {"name": str(HERE / "examples" / "own_agent" / "model"), "dtype": "float32"},
    "training": {"algorithm": "grpo", "learning_rate": 6e-4, "max_steps": STEPS, "batch_size": 4, "group_size": 4},
    "environment": {"environment_id": "homes.py:Homes", "max_turns": 3},
    "data": {"count": 100}, "sampling": {"max_tokens": 24, "deterministic": True},
    "logging": {"checkpoint_every": 1}, "compute": {"learners": 2},
}  # fmt: skip
KEPT = ("loss", "grad_norm", "reward", "sampled_tokens", "trained_tokens", "turns", "entropy")


class Campaign:
    def __init__(self, folder: Path, processes: Processes) -> None:
        self._folder, self._processes = folder, processes
        (folder / "run.yaml").write_text(json.dumps(CONFIG), encoding="utf-8")
        (folder / "homes.py").write_text("from tests.kits.warm import Homes\n", encoding="utf-8")

    def start(self, way: str, *arguments: str) -> subprocess.Popen[bytes]:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if way == "torchrun" else []
        command = [sys.executable, *launcher, "-m", TITLE, *arguments]
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / "runs" / name / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [{key: json.loads(line)[key] for key in KEPT} for line in text.split("\n")[:-1]]

    def victim(self, way: str, driver: subprocess.Popen[bytes], kind: str) -> psutil.Process | None:
        if way == "own" and kind == "driver":
            return psutil.Process(driver.pid)
        rank = {"driver": "0", "rank": "1"}[kind]
        for each, title in self._processes.look().items():
            with suppress(psutil.Error):
                if CHILD in title if way == "own" else TITLE in title and each.environ().get("RANK") == rank:
                    return each
        return None

    def play(self, number: int, seed: int) -> dict[str, Any]:
        """Make a run with a kill and return what was found."""
        rng, name = random.Random(f"ranks {seed} {number}"), f"kill-{number}"
        way, kind = ("own", "torchrun")[number % 2], ("rank", "driver")[number // 2 % 2]
        step, delay = rng.randrange(STEPS), rng.uniform(0.0, 2.0)
        driver, until = self.start(way, "train", "run.yaml", "--name", name), time.monotonic() + LONGEST
        while len(self.rows(name)) < step or (found := self.victim(way, driver, kind)) is None:
            if driver.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} has ended by itself: {self._folder}/log")
            time.sleep(0.1)
        time.sleep(delay)
        struck, began = found.is_running(), time.monotonic()
        with suppress(psutil.NoSuchProcess):
            found.send_signal(signal.SIGKILL)
        status, left = driver.wait(LONGEST), self.left()
        ended = time.monotonic() - began
        there = (self._folder / "runs" / name).is_dir()
        again = ["runs", "resume", name] if there else ["train", "run.yaml", "--name", name]
        resumed = self.start("own", *again).wait(LONGEST) if status or not there else 0
        equal = self.rows(name) == self.rows("calm")
        what = f"{way} {kind} {delay:.2f} s after step {step}"
        return {
            "number": number, "what": what, "struck": struck, "seconds": round(ended, 1), "ok": equal and not left,
            "resumed": resumed, "left": left + self.left(),
        }  # fmt: skip

    def left(self) -> list[str]:
        """Return what is left a little time after a run has ended."""
        until = time.monotonic() + GRACE
        while (found := self._processes.left()) and time.monotonic() < until:
            time.sleep(0.2)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill processes of learners.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of kills to repeat")
    asked = parser.parse_args()
    mark, began = f"{os.getpid()}-{time.time_ns()}", time.monotonic()
    folder, processes = Path(tempfile.mkdtemp(prefix="tfactory-ranks-")), Processes(mark)
    os.environ |= {MARK: mark, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    processes.lasting = {psutil.Process()}
    campaign = Campaign(folder, processes)
    print(f"the log and the runs are in {folder}", flush=True)
    if campaign.start("own", "train", "run.yaml", "--name", "calm").wait(LONGEST):
        raise SystemExit("the undisturbed run failed")
    found = []
    for number in asked.only or range(asked.kills):
        found.append(campaign.play(number, asked.seed))
        print("ok    " if found[-1]["ok"] else "NOT ok", found[-1], flush=True)
    processes.end()
    failed, seconds = [each for each in found if not each["ok"]], [each["seconds"] for each in found]
    sums = {"kills": sum(each["struck"] for each in found), "equal": len(found) - len(failed)}
    sums |= {"slowest_end": max(seconds), "seconds": round(time.monotonic() - began), "failed": failed}
    print("RESULT", json.dumps(sums))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
