"""`tfactory export`: write a trained model or adapter for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from TrainingFactory.cli import show


def export(
    run: Annotated[str, Parameter(name="run-or-checkpoint")], /, *, out: Path, merge: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> int:  # fmt: skip
    """Export a trained model or adapter to a folder that transformers, vLLM and other programs can load.

    ```
    tfactory export runs/grpo-search-1 --out my-model
    tfactory export runs/sft-lora/checkpoints/step-000100 --out my-model --merge --dtype bfloat16
    ```

    Args:
        run: Run name or folder (its last checkpoint; sft@step-40 selects another), checkpoint, or registered model
            (agent, agent:3, agent@champion).
        out: New folder to write.
        merge: Merge the adapter into its base model.
        dtype: Data type of the exported weights. Default: that of the model.
    """
    from TrainingFactory.assembly.export import export as write_model

    exported = write_model(run, out, merge, dtype)
    titles = {"model": "the model", "adapter": "the adapter", "merged": "the model with its adapter merged"}
    print(f"wrote {titles[exported.kind]} of {exported.source} to {exported.path}")
    for note in exported.notes:
        show.note(f"note: {note}")
    model = str(exported.path)
    if exported.kind == "adapter":
        print(f"loading it also loads its base model {exported.base}; --merge exports a standalone model")
        model = f"{exported.base} model.adapter={exported.path}"
    if exported.reward_model:
        print(f"use it as a reward: reward.type=learned reward.model={exported.path}")
    else:
        print(f'load it in Python: {exported.auto_class}.from_pretrained("{exported.path}")')
        print(f"evaluate it: tfactory eval {model} --env NAME")
    return 0
