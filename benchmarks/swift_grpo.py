"""ms-swift's GRPO trainer learns in our `search` environment: `python -m benchmarks.swift_grpo PYTHON`

PYTHON is the interpreter of an environment with ms-swift and its dependencies, such as .servers/swift-env/bin/python
(`make agents`). The model is the built-in one after the warm start of `tfactory demo`; `tfactory swift export` writes
what ms-swift needs. Prints the mean reward of each step, which is the share of right answers, and the episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.apps.demo.demo import Demo
from TrainingFactory.config import TrainingConfig
from TrainingFactory.integrations.swift.exporting import SCRIPT_FILE, export_config
from TrainingFactory.runs.tracking import PlainLines

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ["--model_type", "qwen3", "--template", "qwen3_nothinking", "--agent_template", "hermes"]
LOCAL = ["--torch_dtype", "float32", "--report_to", "none", "--save_strategy", "no"]
BATCH, MEMBERS = 8, 8


def warm_start(folder: Path) -> Path:
    """Return the model of the demo's first run."""
    demo = Demo("search", 0, folder / "demo")
    demo.warm_start(PlainLines())
    return demo.warm_folder / "model"


def train(python: Path, model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Export a config and train it with ms-swift. Return the rewards of all steps and the last line of our plugin."""
    sections = {
        "model": {"name": str(model), "thinking": False},
        "environment": {"environment_id": "search", "max_turns": 4},
        "training": {
            "algorithm": "grpo", "learning_rate": 5e-4, "warmup_steps": 4, "schedule": "linear",
            "batch_size": BATCH, "group_size": MEMBERS, "max_steps": steps,
        },
        "data": {"count": BATCH * steps},
        "sampling": {"temperature": 1.0, "max_tokens": 40},
    }  # fmt: skip
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(sections))
    out = folder / "swift"
    export_config(TrainingConfig(**sections), out, print)
    env = {
        "HOME": str(folder), "PATH": f"{python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin", "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = ["sh", str(out / SCRIPT_FILE), *TEMPLATE, *LOCAL]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ms-swift failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    [log] = out.glob("output/*/logging.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rewards = [float(row["reward"]) for row in rows if "reward" in row]
    summary = [line for line in done.stdout.splitlines() if line.startswith("TrainingFactory: ")][-1]
    return {"rewards": rewards, "episodes": summary.removeprefix("TrainingFactory: ")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path, help="interpreter of ms-swift's environment")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = train(options.python.absolute(), warm_start(folder), folder, options.steps)
    for step, reward in enumerate(result["rewards"], 1):
        print(json.dumps({"step": step, "reward": round(reward, 3)}))
    print(json.dumps({"episodes": result["episodes"]}))


if __name__ == "__main__":
    main()
