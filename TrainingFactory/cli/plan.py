"""`tfactory plan`: forecast step time, split, memory and cost of a run on GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Count, Json, Overrides


def plan(
    config: str, /, *overrides: Overrides, gpus: Count, gpu: str = "h200", model_size: str | None = None,
    learners: Count | None = None, from_run: str | None = None, rate: tuple[str, ...] = (),
    rates: Path | None = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Forecast a config on N GPUs: step time, bottleneck, samplers and learners, memory, GPU-hours. A second table
    lists the figures behind the forecast: measured, given or assumed.

    ```
    tfactory plan configs/qwen3_grpo_ray.yaml --gpus 64 --model-size 32B training.gradient_checkpointing=true
    tfactory plan configs/qwen3_grpo_ray.yaml --gpus 8 --from-run runs/small --rate update_mfu=0.35
    ```

    Args:
        config: A config (a YAML file).
        gpus: How many GPUs there are.
        gpu: Their kind: h200, h100 or a100.
        model_size: Take a model of this size (4B, 8B, 14B, 32B, 70B, ...) instead of the config's.
        learners: GPUs of the learner; by default the number with the shortest step.
        from_run: A run whose lengths, turns, tool and reward seconds are taken.
        rate: A figure of the table as NAME=VALUE, such as tool_seconds=lognormal:2:1.2; may be given several times.
        rates: A YAML file of such figures.
    """
    # Imported here, so that help does not wait for it.
    from TrainingFactory.apps.plan.planning import Planner
    from TrainingFactory.assembly.named_files import read_config

    planner = Planner(read_config(config, overrides), gpus, gpu, model_size, from_run, rates, rate)
    found = planner.plan(learners)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    show.table(_answer(found))
    print()
    figures = [(name, *map(str, figure.values())) for name, figure in found["figures"].items()]
    show.columns(["figure", "value", "", "where it comes from"], figures)
    assumed = sum("assumed" in source for *_, source in figures)
    show.note(f"{assumed} of {len(figures)} figures are assumed: give your own by --rate or --from-run")


def _answer(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the plan in the order that a reader asks for it."""
    whole, best, step = found["gpu_memory_gib"], found["learners"], found["step_seconds"]
    shorter = {part: less for part, less in found["step_seconds_without"].items() if less < 0.99 * step}
    modes = {
        f"max_staleness {n}" if n else "synchronous": seconds
        for n, seconds in found["step_seconds_by_bound"].items()
    }
    splits = {
        n: seconds
        for n, seconds in found["step_seconds_by_learners"].items()
        if n == best or n.bit_count() == 1
    }
    split = f"{found['samplers']} x {show.count(found['gpus_per_sampler'], 'GPU')} for sampling, "
    split += f"{show.count(best, 'GPU')} for learning"
    steps = show.count(found["figures"]["steps"]["value"], "step")
    if found["gpus"] == 1:
        split = "one GPU for both sampling and learning"
    return [
        ("step", f"{_number(step)} s, {_number(found['tokens_per_second'])} sampled tokens/s"),
        ("bottleneck", found["bottleneck"]),
        ("split", f"{split}; {found['episodes_per_sampler']} episodes at a time in each sampler"),
        ("memory of a learner", _memory(found["learner_gib"], whole)),
        ("memory of a sampler", _memory(found["sampler_gib"], whole)),
        (
            "cost",
            f"{_number(found['gpu_hours'])} GPU-hours for {steps}",
        ),
        *((f"try {key}", why) for key, why in found["advice"].items()),
        ("step without", _seconds(shorter)),
        ("step by mode", _seconds(modes)),
        ("step by learners", _seconds(splits)),
        ("model", f"{found['model']}, {found['parameters']:,} weights"),
    ]


def _memory(parts: dict[str, float], whole: float) -> str:
    listed = ", ".join(f"{name} {count:.1f}" for name, count in parts.items() if count)
    return f"{sum(parts.values()):.1f} of {whole} GiB on each GPU: {listed}"


def _seconds(values: Mapping[Any, float]) -> str:
    return ", ".join(f"{name}: {_number(seconds)} s" for name, seconds in values.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
