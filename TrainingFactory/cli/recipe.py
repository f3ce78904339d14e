"""`tfactory recipe`: end-to-end training of real models on real tasks, from data to results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Json

Options = Annotated[tuple[str, ...], Parameter(help="Config override of that run as key=value; repeatable.")]


def recipe(
    task: Literal["gsm8k", "wordnet", "text2sql", "screen"], /, *, data: str | None = None, model: str | None = None,
    out: Path | None = None, seed: int = 0, scale: Literal["full", "small"] = "full", final: bool = False,
    plain: bool = False, sft: Options = (), grpo: Options = (), as_json: Json = False,
) -> int:  # fmt: skip
    """Train a model end to end and evaluate it before and after GRPO on held-out tasks.

    The tasks are GSM8K with a calculator, WordNet's nouns with three tools, queries for generated databases that the
    model explores by SQL, and buttons in pictures that the model taps. SFT comes first, except for Qwen2.5-Coder on
    GSM8K. Completed stages are skipped.

    ```
    tfactory recipe gsm8k --data data/gsm8k --seed 1 --out runs/gsm8k-1 --final
    tfactory recipe gsm8k --model qwen2.5-coder-1.5b --out runs/coder --final
    tfactory recipe text2sql --seed 1 --out runs/text2sql-1 --final
    tfactory recipe screen --final
    tfactory recipe gsm8k --out runs/groups-of-8 --grpo training.group_size=8
    tfactory recipe wordnet --data /usr/share/wordnet --model builtin:tiny --scale small
    ```

    Args:
        task: Task to train on.
        data: gsm8k: folder with train.jsonl and test.jsonl, or a hub id; default openai/gsm8k:main. wordnet: folder
            with data.noun and index.noun; default /usr/share/wordnet (Debian package wordnet-base). text2sql
            and screen generate their tasks.
        model: Model to train. Default: smollm2-135m, for text2sql qwen2.5-coder-1.5b. gsm8k has settings for both
            and for gemma3-270m; another model is trained with the settings of the default. screen puts a new
            vision part before a text model and aligns it with the model's words.
        out: Folder for the datasets, the runs and results.json. Default: runs/TASK, or runs/TASK-small.
        seed: Random seed for the order of rows and tasks, and for sampling.
        scale: small runs only a few steps, to test the whole recipe on a CPU.
        final: Also evaluate on the test set. Do it once, after all choices are made.
        plain: Train without tools.
    """
    from TrainingFactory.apps.recipes.recipe import Recipe

    stages = Recipe(data, model, out, seed, scale, plain, sft, grpo, task)
    with Display() as display:
        stages.prepare(display)
        for name in stages.runs:
            display.task = name
            stages.train(name, display)
        for split in stages.choose_splits(final):
            stages.measure(split, display)
    results = stages.write_results()
    if as_json:
        print(json.dumps(results, indent=1, ensure_ascii=False))
    else:
        _print_results(results, list(stages.models), stages.out)
    return 0


def _print_results(results: dict[str, Any], models: list[str], folder: Path) -> None:
    def format_success(result: dict[str, float]) -> str:
        return f"{result['success']:.3f} ({result['success_low']:.3f} to {result['success_high']:.3f})"

    rows = [
        (split, decoding, str(result["tasks"]), *(format_success(result[model]) for model in models),
         f"{result['difference']:+.3f} ({result['difference_low']:+.3f} to {result['difference_high']:+.3f})")
        for split, split_results in results["evaluations"].items() for decoding, result in split_results.items()
    ]  # fmt: skip
    show.print_columns(["split", "", "tasks", *(f"{model} (95 %)" for model in models), "difference"], rows)
    for split, split_results in results.get("blind", {}).items():
        for decoding, result in split_results.items():
            show.note(f"grpo with empty pictures, {split}, {decoding}: {format_success(result)}")
    stage_times = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in results["seconds"].items())
    show.note(f"{stage_times}; all results: {folder / 'results.json'}")
