"""The GSM8K run on a GPU: `python -m benchmarks.gpu_run --data FOLDER` (CPU: `--model builtin:tiny --scale small`).

By the configs of `tfactory recipe gsm8k`: SFT, then steps of GRPO without evaluations, alone on the device. Measured,
of all steps but the first two: sampled tokens a second of generation, and the share of generation, of updates and of
both together in which a kernel was running (`nvidia-smi`, which looks every 50 ms; none on a CPU); and the seconds
that each thread had a processor. `--profile FILE` also tells where the threads were, by a look every 10 ms, which costs
some of the speed. FOLDER has GSM8K's train.jsonl and test.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from TrainingFactory.apps.recipes.recipe import Recipe
from TrainingFactory.runs.tracking import PlainLines

WARM_UP = 2
ASK = ["nvidia-smi", "--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "50"]


def processor_seconds() -> dict[str, float]:
    """Return what the threads of this process have taken so far, by name: those of a pool together."""
    spent = Counter[str]()
    for thread in threading.enumerate():
        spent[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    return dict(spent)


class Phases(PlainLines):
    """Notes when phases began, and what steps say; from the first step that counts on lets `look` begin."""

    def __init__(self, profile: Path | None = None) -> None:
        self.begun: list[tuple[float, str]] = []
        self.steps: list[dict[str, float]] = []
        self.before, self.profile = processor_seconds(), profile

    def phase(self, name: str) -> None:
        self.begun.append((time.time(), name if len(self.steps) >= WARM_UP else "warm-up"))

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        super().step(step, total, metrics)
        self.steps.append(metrics)
        if len(self.steps) == WARM_UP:
            self.before = processor_seconds()
            if self.profile is not None:
                threading.Thread(target=look, args=(self.profile,), name="look", daemon=True).start()
        self.after = processor_seconds()


@contextmanager
def watched(file: Path) -> Iterator[None]:
    """Let nvidia-smi write how busy the GPU is, where there is one."""
    try:
        with file.open("w") as out:
            looking = subprocess.Popen(ASK, stdout=out)
    except FileNotFoundError:
        file.unlink()
        yield
        return
    try:
        yield
    finally:
        looking.terminate()
        looking.wait()


def busy(file: Path, phases: Phases) -> dict[str, float]:
    """Return the mean share of time with a running kernel, by phase."""
    starts, found = [at for at, _ in phases.begun], dict[str, list[float]]()
    for line in file.read_text().splitlines() if file.is_file() else []:
        stamp, _, share = line.partition(",")
        place = bisect_right(starts, datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp()) - 1
        name = phases.begun[place][1] if place >= 0 else "load"
        for key in (name, "both") if name in ("generate", "update") else (name,):
            found.setdefault(key, []).append(float(share) / 100)
    return {name: statistics.mean(shares) for name, shares in found.items()}


def look(file: Path) -> None:
    """Write again and again in which functions the threads were, the innermost and all that led there."""
    counts: dict[str, Counter[str]] = {}
    written = time.monotonic()
    while True:
        time.sleep(0.01)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in list(sys._current_frames().items()):
            if (name := names.get(ident, "?")) == "look":
                continue
            stack, at = [], frame
            while at is not None:
                stack.append(f"{Path(at.f_code.co_filename).name}:{at.f_code.co_qualname}")
                at = at.f_back
            counts.setdefault(name, Counter()).update({f"in {stack[0]}", *stack, "all"})
        if time.monotonic() - written > 5:
            told = {name: seen.most_common(120) for name, seen in counts.items() if seen["all"] > 50}
            file.write_text(json.dumps(told, indent=0))
            written = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl; else from the hub")
    parser.add_argument("--model")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3, help="of SFT")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-run"))
    parser.add_argument("--profile", type=Path)
    asked = parser.parse_args()
    grpo = [f"training.max_steps={asked.steps}", "training.eval_every=", "logging.keep_best=false"]
    sft = [f"training.num_epochs={asked.epochs}"]
    recipe = Recipe(asked.data, asked.model, asked.out, scale=asked.scale, sft=sft, grpo=grpo)
    recipe.prepare(phases := Phases())
    recipe.train("sft", phases)
    phases, seen = Phases(asked.profile), asked.out / "gpu.csv"
    with watched(seen):
        recipe.train("grpo", phases)
    steps = phases.steps[WARM_UP:] or phases.steps
    sums = {
        key: sum(step.get(key, 0.0) for step in steps)
        for key in ("sampled_tokens", "seconds/generate", "seconds/update")
    }
    result = {
        "tokens_per_second": sums["sampled_tokens"] / sums["seconds/generate"],
        "busy": busy(seen, phases),
        "steps": len(steps),
        "generate_s": sums["seconds/generate"] / len(steps),
        "update_s": sums["seconds/update"] / len(steps),
        "tail_share": statistics.mean(step.get("tail_share", 0.0) for step in steps),
        "logprob_diff": [step["logprob_diff"] for step in phases.steps if "logprob_diff" in step],
        "processor_s": {
            name: spent / len(steps)
            for name, till in phases.after.items()
            if (spent := till - phases.before.get(name, 0.0)) > 0.01 * len(steps)
        },
        "sft_s": recipe.state["seconds"].get("sft"),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
