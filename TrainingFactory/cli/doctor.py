"""`tfactory doctor`: pre-flight checks of a config or a model."""

from __future__ import annotations

import json

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json, Overrides
from TrainingFactory.config import load_config

PROBLEMS_FOUND = 1  # exit status


def doctor(
    config_or_model: str, /, *overrides: Overrides, gpu: str | None = None, model_size: str | None = None,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Check a config or a model before a run.

    Makes all checks of a run, then two groups of episodes and one update with the real model, tools and reward, in a
    temporary folder. Exit status 1: the run would fail.

    ```
    tfactory doctor configs/tiny_grpo.yaml
    tfactory doctor configs/qwen3_grpo.yaml model.name=qwen3-0.6b training.batch_size=4
    tfactory doctor qwen3-4b lora.enabled=true
    tfactory doctor configs/qwen3_grpo.yaml --model-size 8B --gpu h100 lora.enabled=true
    ```

    Args:
        config_or_model: Config file (YAML), or a model: short name, hub id, folder or run.
        gpu: Only estimate memory and time on this GPU, which need not be present: h200, h100 or a100.
        model_size: Only estimate, for a model of this size (135M, 0.6B, 1.7B, 4B, 8B, ...) instead of the config's.
    """
    if config_or_model.endswith((".yaml", ".yml")):
        from TrainingFactory.assembly.named_files import read_config

        config = read_config(config_or_model, overrides)
    else:
        from TrainingFactory.evaluation.evaluation import make_overrides, make_sections
        from TrainingFactory.resolve.model_names import find_model

        sections = {"model": make_sections(find_model(config_or_model))["model"]}
        config = load_config(None, [*make_overrides(sections), *overrides])
    # Imported here because it is slow: --help and config errors should appear at once.
    from TrainingFactory.apps.doctor.examination import examine, forecast
    from TrainingFactory.runs.tracking import PlainLines

    estimate_only = gpu is not None or model_size is not None
    report = forecast(config, model_size, gpu or "h200") if estimate_only else examine(config, PlainLines())
    if as_json:
        print(json.dumps(report.as_json, indent=1, ensure_ascii=False))
    else:
        show.print_table([*report.facts.items()])
        rows = [(row.severity, row.name, f"{row.sentence}. {row.remedy}") for row in report.sorted_findings]
        if rows:
            show.print_columns(["", "finding", "description and remedy"], rows)
        else:
            print("No problems found.")
    return PROBLEMS_FOUND if report.failed else 0
