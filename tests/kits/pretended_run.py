"""A run without a model: `train` and `runs resume` as processes that write what a run writes, a step every moment,
until the steps are over or Ctrl-C comes. A model called `broken` ends it before it has a folder."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from TrainingFactory.config import load_config
from TrainingFactory.runs.folder import METRICS, RunFolder, Status


def main(arguments: list[str]) -> int:
    stopped: list[None] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(print("asked to stop", flush=True)))
    if arguments[0] == "train":
        config = load_config(arguments[1], [arguments[2]])
        if config.model.name == "broken":
            print("loading\nerror: model.name: there is no such model", flush=True)
            return 2
        run = RunFolder.create(config, arguments[4], {}, config.training.max_steps or 1)
    else:
        run = RunFolder.find(arguments[2], Path(arguments[4]))
        run.lock()
    steps, first = run.config.training.max_steps or 1, run.status.step
    run.write_status(Status("running", first, steps))
    for step in range(first + 1, steps + 1):
        if stopped:
            time.sleep(0.5)  # a checkpoint takes a while
            run.write_status(Status("interrupted", step - 1, steps))
            return 130
        run.append(METRICS, {"step": step, "time": time.time(), "reward": step / steps})
        run.write_status(Status("running", step, steps))
        print(f"step {step}/{steps} \x1b[31m<b>", flush=True)
        time.sleep(0.05)
    run.write_status(Status("finished", steps, steps))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
