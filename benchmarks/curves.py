"""Train every algorithm with its config configs/tiny_NAME.yaml and draw its learning curve for docs/algorithms.

    python -m benchmarks.curves                  # all runs, about half an hour on two cores
    python -m benchmarks.curves --only grpo dpo
    python -m benchmarks.curves --draw           # only the pictures, from docs/results/curves.json

Runs are written to the current folder's runs/curves; finished ones are reused. The figures go to
docs/results/curves.json, the pictures to docs/algorithms/curves. Their colours suit a light and a dark page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "curves.json"
PICTURES = ROOT / "docs" / "algorithms" / "curves"
RUNS = Path("runs/curves")
START = f"model.name={RUNS}/demo-warm-start/model"
EPISODES = RUNS / "episodes.jsonl"  # sampled by the warm start

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 46, 34, 42
GREY, BLUE, ORANGE = "#7d8590", "#3b82f6", "#e8710a"  # readable on white and on dark pages


@dataclass(frozen=True)
class Experiment:
    """A run and the two metrics of its curve: one on held-out data, one of every training step."""

    title: str
    options: Sequence[str]
    heldout: str = "eval/success"
    training: str = "reward"


@dataclass
class Curve:
    """Points (step, value) of a run. The last points of `heldout` are at the end of the run."""

    command: str
    heldout: list[tuple[int, float]]
    training: list[tuple[int, float]]


EXPERIMENTS = {
    "sft": Experiment("SFT", [], training="loss"),
    "rft": Experiment("RFT", [START, "training.max_steps=20"]),
    "grpo": Experiment("GRPO", [START, "training.max_steps=30"]),
    "ppo": Experiment("PPO", [START, "training.max_steps=20"]),
    "dpo": Experiment("DPO", [START, "training.max_steps=36", f"data.dataset={EPISODES}"], training="loss"),
    "kto": Experiment("KTO", [START, f"data.dataset={EPISODES}"], training="loss"),
    "reward_model": Experiment(
        "Reward model",
        [f"data.dataset={RUNS}/train.jsonl", f"data.heldout={RUNS}/heldout.jsonl", "training.eval_every=10"],
        heldout="eval/accuracy",
        training="loss",
    ),
}


def tfactory(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "TrainingFactory.cli", *words], check=True)


def make_warm_start() -> None:
    """Run the demo, whose warm start the runs begin with, and sample the episodes of the offline algorithms."""
    if not (RUNS / "demo-warm-start" / "model").is_dir():
        tfactory("demo", "--out", str(RUNS / "demo"))
    if not EPISODES.is_file():
        config = str(ROOT / "configs" / "tiny_dpo.yaml")
        tfactory("rollout", config, START, "--tasks", "256", "--group-size", "8", "--out", str(EPISODES))
        lines = EPISODES.read_text(encoding="utf-8").splitlines(keepends=True)
        (RUNS / "train.jsonl").write_text("".join(lines[:1536]), encoding="utf-8")
        (RUNS / "heldout.jsonl").write_text("".join(lines[1536:]), encoding="utf-8")


def train(name: str, experiment: Experiment) -> Curve:
    """Train, or read the finished run."""
    config = f"configs/tiny_{name}.yaml"
    rows = metrics_of(RUNS / name)
    if not rows:
        words = [str(ROOT / config), *experiment.options, f"logging.output_dir={RUNS}", "--name", name]
        tfactory("train", *words)
        rows = metrics_of(RUNS / name)
    return Curve(
        command=" ".join(["tfactory train", config, *experiment.options]),
        heldout=points(rows, experiment.heldout),
        training=points(rows, experiment.training),
    )


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a finished run, else nothing."""
    status = run / "status.json"
    if not status.is_file() or json.loads(status.read_text(encoding="utf-8"))["status"] != "finished":
        return []
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def points(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row["step"], round(row[key], 4)) for row in rows if key in row]


def draw(experiment: Experiment, curve: Curve) -> str:
    """Return the curve as an SVG picture."""
    last_step = max(step for step, _ in [*curve.heldout, *curve.training])
    loss = experiment.training == "loss"
    scale = max(value for _, value in curve.training) if loss else 1.0
    measured = "accuracy" if experiment.heldout.endswith("accuracy") else "success"
    parts = [axes(last_step, scale if loss else None)]
    parts.append(polyline(curve.training, last_step, scale, ORANGE, 1.5))
    parts.append(polyline(curve.heldout, last_step, 1.0, BLUE, 2.5))
    parts += [
        f'<circle cx="{x(step, last_step):.1f}" cy="{y(value, 1.0):.1f}" r="4" fill="{BLUE}"/>'
        for step, value in curve.heldout
    ]
    right = WIDTH - RIGHT
    parts.append(text(LEFT, 18, f"held-out {measured}", BLUE, "start"))
    parts.append(text(right, 18, "training loss" if loss else "training reward", ORANGE, "end"))
    parts.append(text((LEFT + right) / 2, HEIGHT - 6, f"{experiment.title}: training step", GREY, "middle"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f'{head} font-family="sans-serif" font-size="13">\n' + "\n".join(parts) + "\n</svg>\n"


def axes(last_step: int, loss_scale: float | None) -> str:
    """Return grid and labels; the left axis is from 0 to 1, the right one is that of the loss."""
    lines = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        height = y(share, 1.0)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" '
            f'stroke="{GREY}" stroke-opacity="0.35"/>'
        )
        lines.append(text(LEFT - 8, height + 4, f"{share:g}", GREY, "end"))
        if loss_scale is not None:
            lines.append(text(WIDTH - RIGHT + 8, height + 4, f"{share * loss_scale:.2g}", ORANGE, "start"))
    for quarter in range(5):
        step = round(last_step * quarter / 4)
        lines.append(text(x(step, last_step), HEIGHT - BOTTOM + 18, str(step), GREY, "middle"))
    return "\n".join(lines)


def x(step: float, last_step: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step


def y(value: float, scale: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / scale


def text(left: float, top: float, words: str, colour: str, anchor: str) -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def polyline(
    values: Sequence[tuple[int, float]], last_step: int, scale: float, colour: str, width: float
) -> str:
    places = " ".join(f"{x(step, last_step):.1f},{y(value, scale):.1f}" for step, value in values)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def read_curves() -> dict[str, Curve]:
    return {name: Curve(**curve) for name, curve in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def write_curves(curves: dict[str, Curve]) -> None:
    ordered = {name: asdict(curves[name]) for name in EXPERIMENTS if name in curves}
    rows = [f" {json.dumps(name)}: {json.dumps(curve)}" for name, curve in ordered.items()]
    RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=EXPERIMENTS, help="algorithms; all without it")
    parser.add_argument(
        "--draw", action="store_true", help="draw the recorded figures again, without training"
    )
    options = parser.parse_args()
    curves = read_curves() if RESULTS.is_file() else {}
    if not options.draw:
        make_warm_start()
        for name in options.only or EXPERIMENTS:
            curves[name] = train(name, EXPERIMENTS[name])
            write_curves(curves)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, curve in curves.items():
        (PICTURES / f"{name}.svg").write_text(draw(EXPERIMENTS[name], curve), encoding="utf-8")


if __name__ == "__main__":
    main()
