"""`tfactory recipe`: real models learn real tasks, from the data to the figures, by one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Json
from TrainingFactory.data.gsm8k import HUB

recipe = App(name="recipe", help="Train a real model on a real task, from its data to the figures.")
Options = Annotated[
    tuple[str, ...], Parameter(help="Options of that run, as key=value; may be given several times.")
]


@recipe.command
def gsm8k(
    *, data: str = HUB, model: str | None = None, out: Path = Path("runs/gsm8k"), seed: int = 0,
    scale: Literal["full", "small"] = "full", final: bool = False, plain: bool = False,
    sft: Options = (), grpo: Options = (), as_json: Json = False,
) -> int:  # fmt: skip
    """Train SmolLM2 on GSM8K with a calculator: rows with tool calls from its training set, SFT, GRPO, and both
    evaluated on a part of the training set that is held out. What is done already is not done again.

    ```
    tfactory recipe gsm8k
    tfactory recipe gsm8k --data data/gsm8k --seed 1 --out runs/gsm8k-1 --final
    tfactory recipe gsm8k --out runs/groups-of-8 --grpo training.group_size=8
    tfactory recipe gsm8k --model builtin:tiny --scale small
    ```

    Args:
        data: A folder with train.jsonl and test.jsonl, or a hub id.
        model: Another model than smollm2-135m.
        out: Folder for the rows, both runs, and results.json.
        seed: For the order of rows and tasks, and for sampling.
        scale: small takes a few steps, to see on a CPU that everything goes together.
        final: Evaluate both on the test set as well, once: when nothing is to be chosen any more.
        plain: Without the calculator.
    """
    from TrainingFactory.services.recipes.gsm8k import RUNS, Recipe

    made = Recipe(data, model, out, seed, scale, plain, sft, grpo)
    with Display() as display:
        made.prepare(display)
        for name in RUNS:
            display.task = name
            made.train(name, display)
        for part in made.parts(final):
            made.measure(part, display)
    found = made.results()
    print(json.dumps(found, indent=1, ensure_ascii=False)) if as_json else _show(found, out)
    return 0


def _show(found: dict[str, Any], out: Path) -> None:
    def share(side: dict[str, float]) -> str:
        return f"{side['success']:.3f} ({side['success_low']:.3f} to {side['success_high']:.3f})"

    rows = [
        (part, how, str(each["tasks"]), share(each["sft"]), share(each["grpo"]),
         f"{each['difference']:+.3f} ({each['difference_low']:+.3f} to {each['difference_high']:+.3f})")
        for part, by_how in found["evaluations"].items() for how, each in by_how.items()
    ]  # fmt: skip
    show.columns(["tasks of", "", "", "sft (95 %)", "grpo (95 %)", "difference"], rows)
    took = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in found["seconds"].items())
    show.note(f"{took}; all figures: {out / 'results.json'}")
