"""`tfactory doctor`: what would go wrong in a run, before it is started."""

from __future__ import annotations

import json

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json, Overrides
from TrainingFactory.config import load_config

FOUND = 1  # exit status


def doctor(
    config_or_model: str, /, *overrides: Overrides, gpu: str | None = None, model_size: str | None = None,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Examine a config, or a model, before a run: every check that a run makes, then two groups of episodes and one
    update with the real model, tools and reward, in a folder of their own. Status 1: something would go wrong.

    ```
    tfactory doctor configs/tiny_grpo.yaml
    tfactory doctor configs/qwen3_grpo.yaml model.name=qwen3-0.6b training.batch_size=4
    tfactory doctor qwen3-4b lora.enabled=true
    tfactory doctor configs/qwen3_grpo.yaml --model-size 8B --gpu h100 lora.enabled=true
    ```

    Args:
        config_or_model: A config (a YAML file); or a model: a short name, a hub id, a folder, a run.
        gpu: Only say how much memory, and time, it takes on one of these, which need not be there: h200, h100 or a100.
        model_size: The same for a model of this size (135M, 0.6B, 1.7B, 4B, 8B, ...) instead of the config's.
    """
    if config_or_model.endswith((".yaml", ".yml")):
        from TrainingFactory.assembly.named_files import read_config

        config = read_config(config_or_model, overrides)
    else:
        from TrainingFactory.evaluation.evaluation import overrides_of, sections_of
        from TrainingFactory.resolve.model_names import find_model

        model = {"model": sections_of(find_model(config_or_model))["model"]}
        config = load_config(None, [*overrides_of(model), *overrides])
    # Imported here, so that help and a wrong config do not wait for it.
    from TrainingFactory.apps.doctor.examination import examine, forecast
    from TrainingFactory.runs.tracking import PlainLines

    asked = gpu is not None or model_size is not None
    found = forecast(config, model_size, gpu or "h200") if asked else examine(config, PlainLines())
    if as_json:
        print(json.dumps(found.as_json, indent=1, ensure_ascii=False))
    else:
        show.table([*found.facts.items()])
        rows = [(each.severity, each.name, f"{each.sentence}. {each.remedy}") for each in found.sorted]
        if rows:
            show.columns(["", "finding", "what, and what to do"], rows)
        else:
            print("No problems found.")
    return FOUND if found.failed else 0
