"""`tfactory plan`: what a run would take on GPUs that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Count, Json, Overrides


def plan(
    config: str, /, *overrides: Overrides, gpus: Count, gpu: str = "h200", model_size: str | None = None,
    learners: Count | None = None, from_run: str | None = None, rate: tuple[str, ...] = (),
    rates: Path | None = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Simulate steps of a config on so many GPUs: seconds, bottleneck, samplers to learners, memory, GPU-hours. A table
    says which figures were measured, given or assumed.

    ```
    tfactory plan configs/qwen3_grpo_ray.yaml --gpus 64 --model-size 32B training.gradient_checkpointing=true
    tfactory plan configs/qwen3_grpo_ray.yaml --gpus 8 --from-run runs/small --rate update_mfu=0.35
    ```

    Args:
        config: A config (a YAML file).
        gpus: How many GPUs there are.
        gpu: Their kind: h200, h100 or a100.
        model_size: Take a model of this size (4B, 8B, 14B, 32B, 70B, ...) instead of the config's.
        learners: GPUs of the learner; without it the best number is looked for.
        from_run: A run whose lengths, turns, tool and reward seconds are taken.
        rate: A figure of the table as NAME=VALUE, such as tool_seconds=lognormal:2:1.2; may be given several times.
        rates: A YAML file of such figures.
    """
    # Imported here, so that help does not wait for it.
    from TrainingFactory.services.build.named_files import read_config
    from TrainingFactory.services.plan.planning import Planner
    from TrainingFactory.services.plan.shapes import DATA

    read = read_config(config, overrides)
    found = Planner(read, gpus, gpu, model_size, from_run, rates, rate).plan(learners)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    figures = [(name, *map(str, each.values())) for name, each in found.pop("figures").items()]
    show.columns(["figure", "value", "", "where it comes from"], figures)
    told = ((name, _said(value), DATA["plan"].get(name, "")) for name, value in found.items())
    show.columns(["plan", "", "what that is"], [(name.replace("_", " "), *rest) for name, *rest in told])
    assumed = sum("assumed" in source for *_, source in figures)
    show.note(f"{assumed} of {len(figures)} figures are assumed: give your own by --rate or --from-run")


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_said(each)}" for name, each in value.items())
    return str(value) if isinstance(value, str) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
