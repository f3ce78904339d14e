"""`tfactory export`: what a run has made, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from TrainingFactory.cli import show


def export(
    run: Annotated[str, Parameter(name="run-or-checkpoint")],
    /,
    *,
    out: Path,
    merge: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> int:
    """Write a trained model or adapter as a folder that transformers, vLLM and others load.

    ```
    tfactory export runs/grpo-search-1 --out my-model
    tfactory export runs/sft-lora/checkpoints/step-000100 --out my-model --merge --dtype bfloat16
    ```

    Args:
        run: A run (its name or folder; its last checkpoint is taken, or sft@step-40), a checkpoint, or a
            registered model (agent, agent:3, agent@champion).
        out: The new folder.
        merge: Fold the adapter into the model under it.
        dtype: Number format of the weights; that of the model if none is named.
    """
    from TrainingFactory.assembly.export import export as write

    done = write(run, out, merge, dtype)
    what = {"model": "the model", "adapter": "the adapter", "merged": "the model with its adapter merged"}
    print(f"wrote {what[done.kind]} of {done.source} to {done.path}")
    for text in done.notes:
        show.note(f"note: {text}")
    trial = str(done.path)
    if done.kind == "adapter":
        print(f"it needs {done.base}, which is loaded with it; --merge makes a model that stands alone")
        trial = f"{done.base} model.adapter={done.path}"
    if done.reward_model:
        print(f"as a reward: reward.type=learned reward.model={done.path}")
    else:
        print(f'in Python: AutoModelForCausalLM.from_pretrained("{done.path}")')
        print(f"to try it: tfactory eval {trial} --env NAME")
    return 0
