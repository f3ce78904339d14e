"""`tfactory recipe`: real models learn real tasks, from the data to the figures, by one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Json

Options = Annotated[
    tuple[str, ...], Parameter(help="Options of that run, as key=value; may be given several times.")
]


def recipe(
    task: Literal["gsm8k", "wordnet"], /, *, data: str | None = None, model: str | None = None,
    out: Path | None = None, seed: int = 0, scale: Literal["full", "small"] = "full", final: bool = False,
    plain: bool = False, sft: Options = (), grpo: Options = (), as_json: Json = False,
) -> int:  # fmt: skip
    """Train a real model on a real task, from its data to the figures: SmolLM2 on GSM8K with a calculator, or on
    WordNet's nouns with three tools; by SFT and GRPO, both evaluated on held-out tasks. What is done is not done again.

    ```
    tfactory recipe gsm8k --data data/gsm8k --seed 1 --out runs/gsm8k-1 --final
    tfactory recipe gsm8k --out runs/groups-of-8 --grpo training.group_size=8
    tfactory recipe wordnet --data /usr/share/wordnet --model builtin:tiny --scale small
    ```

    Args:
        data: gsm8k: a folder with train.jsonl and test.jsonl, or a hub id, openai/gsm8k:main unless named; wordnet: a
            folder with data.noun and index.noun, /usr/share/wordnet unless named (Debian's wordnet-base).
        model: Another model than smollm2-135m.
        out: Folder for the rows, both runs, and results.json; if none is named runs/TASK, of the small scale
            runs/TASK-small.
        seed: For the order of rows and tasks, and for sampling.
        scale: small takes a few steps, to see on a CPU that everything goes together.
        final: Evaluate both on the test set as well, once: when nothing is to be chosen any more.
        plain: Without tools.
    """
    from TrainingFactory.apps.recipes.recipe import RUNS, Recipe

    made = Recipe(data, model, out, seed, scale, plain, sft, grpo, task)
    with Display() as display:
        made.prepare(display)
        for name in RUNS:
            display.task = name
            made.train(name, display)
        for part in made.parts(final):
            made.measure(part, display)
    found = made.results()
    print(json.dumps(found, indent=1, ensure_ascii=False)) if as_json else _show(found, made.out)
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
