"""`tfactory plan`: forecast step time, GPU split, memory and cost of a run."""

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
    """Forecast step time, bottleneck, sampler/learner split, memory and GPU-hours of a config on N GPUs.

    A second table lists the input values of the forecast and whether each is measured, user-provided or assumed.

    ```
    tfactory plan configs/qwen3_grpo_ray.yaml --gpus 64 --model-size 32B training.gradient_checkpointing=true
    tfactory plan configs/qwen3_grpo_ray.yaml --gpus 8 --from-run runs/small --rate update_mfu=0.35
    ```

    Args:
        config: Config file (YAML).
        gpus: Total number of GPUs.
        gpu: GPU type: h200, h100 or a100.
        model_size: Forecast a model of this size (4B, 8B, 14B, 32B, 70B, ...) instead of the config's.
        learners: Number of learner GPUs. Default: the number with the shortest step.
        from_run: Run whose measured lengths, turns, tool seconds and reward seconds are used.
        rate: Input value as NAME=VALUE, such as tool_seconds=lognormal:2:1.2; repeatable.
        rates: YAML file with such values.
    """
    # Imported here because it is slow: --help should appear at once.
    from TrainingFactory.apps.plan.planning import RunPlanner
    from TrainingFactory.assembly.named_files import read_config

    planner = RunPlanner(read_config(config, overrides), gpus, gpu, model_size, from_run, rates, rate)
    forecast = planner.plan(learners)
    if as_json:
        print(json.dumps(forecast, indent=1, ensure_ascii=False))
        return
    show.print_table(_make_summary_rows(forecast))
    print()
    rows = [(name, *map(str, figure.values())) for name, figure in forecast["figures"].items()]
    show.print_columns(["input", "value", "", "source"], rows)
    num_assumed = sum("assumed" in source for *_, source in rows)
    show.note(f"{num_assumed} of {len(rows)} inputs are assumed. Provide your own with --rate or --from-run.")


def _make_summary_rows(forecast: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the forecast as table rows, most important first."""
    gpu_memory, learners, step = forecast["gpu_memory_gib"], forecast["learners"], forecast["step_seconds"]
    step_seconds_without = forecast["step_seconds_without"]
    faster_parts = {part: seconds for part, seconds in step_seconds_without.items() if seconds < 0.99 * step}
    seconds_by_mode = {
        f"max_staleness {staleness}" if staleness else "synchronous": seconds
        for staleness, seconds in forecast["step_seconds_by_bound"].items()
    }
    seconds_by_learners = {
        num_learners: seconds
        for num_learners, seconds in forecast["step_seconds_by_learners"].items()
        if num_learners == learners or num_learners.bit_count() == 1
    }
    split = f"{forecast['samplers']} x {show.pluralize(forecast['gpus_per_sampler'], 'GPU')} for sampling, "
    split += f"{show.pluralize(learners, 'GPU')} for learning"
    steps = show.pluralize(forecast["figures"]["steps"]["value"], "step")
    if forecast["gpus"] == 1:
        split = "one GPU for both sampling and learning"
    return [
        ("step", f"{_format(step)} s, {_format(forecast['tokens_per_second'])} sampled tokens/s"),
        ("bottleneck", forecast["bottleneck"]),
        ("split", f"{split}; {forecast['episodes_per_sampler']} concurrent episodes per sampler"),
        ("learner memory", _format_memory(forecast["learner_gib"], gpu_memory)),
        ("sampler memory", _format_memory(forecast["sampler_gib"], gpu_memory)),
        ("cost", f"{_format(forecast['gpu_hours'])} GPU-hours for {steps}"),
        *((f"try {key}", reason) for key, reason in forecast["advice"].items()),
        ("step without", _format_seconds(faster_parts)),
        ("step by mode", _format_seconds(seconds_by_mode)),
        ("step by learners", _format_seconds(seconds_by_learners)),
        ("model", f"{forecast['model']}, {forecast['parameters']:,} weights"),
    ]


def _format_memory(gib_by_part: dict[str, float], gpu_memory: float) -> str:
    listing = ", ".join(f"{name} {gib:.1f}" for name, gib in gib_by_part.items() if gib)
    return f"{sum(gib_by_part.values()):.1f} of {gpu_memory} GiB per GPU: {listing}"


def _format_seconds(seconds_by_name: Mapping[Any, float]) -> str:
    return ", ".join(f"{name}: {_format(seconds)} s" for name, seconds in seconds_by_name.items())


def _format(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
