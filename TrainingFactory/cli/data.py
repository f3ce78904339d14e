"""`tfactory data`: recorded episodes as datasets, and datasets as they will be read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators

from TrainingFactory.apps.recipes.gsm8k import HUB, Prepared
from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Where
from TrainingFactory.data.convert import Filters, Layout, swift_row
from TrainingFactory.data.convert import convert as converted
from TrainingFactory.data.examples import Form

data = App(name="data", help="Turn recorded episodes into datasets; show and check datasets.")
Dataset = Annotated[
    str, Parameter(help="A file (JSONL, JSON, Parquet, CSV), a saved dataset, a hub id, or a run.")
]
Split = Annotated[str, Parameter(help="Which split, where there are several.")]
Algorithm = Literal["sft", "dpo", "kto", "reward_model", "rm", "prm"]
SAMPLE = 500  # rows from which is told what a file is good for


@data.command
def convert(
    source: str,
    *,
    to: Form,
    out: Path,
    layout: Annotated[Layout, Parameter(name="--format")] = "trl",
    filters: Annotated[Filters | None, Parameter(name="*")] = None,
    force: bool = False,
    where: Where = "runs",
) -> int:
    """Turn the recorded episodes of a run into rows that sft, dpo, kto or a reward model learns from.

    ```
    tfactory data convert search-1 --to sft --out good.jsonl --min-reward 1 --dedupe
    tfactory data convert runs/search-1/trajectories.jsonl --to dpo --out pairs.jsonl
    ```

    Args:
        source: A run (name or folder), or a file of trajectories.
        to: What the rows are for: sft, dpo, kto, rm (outcome reward model), prm (process reward model).
        out: JSONL file to write.
        layout: trl is OpenAI-style messages in the columns that TRL has; swift is what ms-swift reads.
        force: Write over the file if it is there.
    """
    from TrainingFactory.assembly.datasets import trajectories_of, write_rows
    from TrainingFactory.data.datasets import read_rows

    if out.exists() and not force:
        raise ValueError(f"{out} is there already; choose another file, or write over it with --force")
    path = trajectories_of(source, where)
    with Display() as display:
        done = converted(display.counted(read_rows(path), "episodes"), to, filters)
    rows = [("episodes read", f"{done.read} from {path}")]
    rows += [(f"  {why}", f"{count} left out") for why, count in done.dropped.items() if count]
    show.table([*rows, ("rows", str(len(done.rows)))])
    if not done.rows:
        show.fail(f"no episode is left for {to}; nothing is written")
        return 1
    if done.note:
        show.note(f"note: {done.note}")
    write_rows(out, [swift_row(row) for row in done.rows] if layout == "swift" else done.rows)
    show.note(f"saved {show.count(len(done.rows), 'row')} to {out}; learn from them with data.dataset={out}")
    return 0


@data.command(name="show")
def show_(
    source: Dataset,
    *,
    rows: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 3,
    split: Split = "train",
    where: Where = "runs",
) -> None:
    """Show rows of a dataset as conversations, and which algorithms it fits.

    ```
    tfactory data show pairs.jsonl --rows 1
    ```

    Args:
        rows: How many rows to print.
    """
    from TrainingFactory.assembly.datasets import dataset_of, fitting

    found = fitting(dataset_of(source, where), split, SAMPLE)
    first = next(iter(found.fits.values()), None)
    for example in first.found[:rows] if first else []:
        for number, each in enumerate(example.conversations, 1):
            title = f"{example.where}: {example.id}"
            if len(example.conversations) > 1:
                title += f", {number} of {len(example.conversations)}"
            title += f", reward {each.reward.outcome:g}" if each.reward else ""
            title += f", steps {each.reward.steps}" if each.reward and each.reward.steps else ""
            show.conversation(title, each.messages, each.tools)
    told = [
        ("rows", f"{found.rows} read{' (there are more)' if found.more else ''}"),
        ("columns", ", ".join(found.columns)),
        ("fits", ", ".join(found.fits) or "no algorithm"),
    ]
    show.table(told + [(f"not {form}", why) for form, why in found.misfits.items()])


@data.command
def check(
    source: Dataset,
    *,
    algorithm: Annotated[Algorithm, Parameter(name="--for")],
    split: Split = "train",
    where: Where = "runs",
) -> int:
    """Check every row of a dataset for an algorithm, and tell all that is wrong. The exit status is 1 if anything is.

    ```
    tfactory data check pairs.jsonl --for dpo
    ```

    Args:
        algorithm: sft, dpo, kto, reward_model (or rm), prm (a process reward model).
    """
    from TrainingFactory.assembly.datasets import dataset_of
    from TrainingFactory.data.examples import load_examples
    from TrainingFactory.training.dataset import arguments_fit

    form = "rm" if algorithm == "reward_model" else algorithm
    found = dataset_of(source, where)
    examples = load_examples(found, form, split=split, skip_bad_rows=True, fits=arguments_fit)
    for problem in examples.bad:
        show.fail(problem)
    told = [("rows", str(examples.rows)), ("usable", f"{len(examples)} examples for {form}")]
    told += [(f"  {why}", f"{count} episodes left out") for why, count in examples.unused.items()]
    show.table([*told, ("bad rows", str(len(examples.bad)))])
    for note in examples.notes:
        show.note(f"note: {note}")
    return 1 if examples.bad else 0


@data.command
def lessons(environment: Literal["search", "calculator"] = "search", /, *, out: Path, seed: int = 0) -> int:
    """Write the demo's demonstrations for the built-in model, good ones and mistakes: what sft learns from them,
    rewards can better.

    ```
    tfactory data lessons search --out lessons.jsonl
    tfactory train configs/tiny_sft.yaml data.dataset=lessons.jsonl data.shuffle=false training.schedule=linear
    ```

    Args:
        environment: Whose tasks are demonstrated.
        out: The JSONL file; one that is there is replaced.
        seed: For the tasks and the mistakes.
    """
    from TrainingFactory.apps.demo.demo import write_lessons
    from TrainingFactory.apps.demo.lessons import LESSONS
    from TrainingFactory.common import catalog

    write_lessons(out, catalog.find("environment", environment), seed, LESSONS[environment])
    show.note(f"wrote {out}")
    return 0


@data.command
def gsm8k(source: str = HUB, /, *, out: Path = Path("gsm8k"), plain: bool = False) -> int:
    """Write GSM8K as rows for sft, whose marked sums are calls of the calculator, and as tasks for training (tasks),
    development (dev, a fixed part of the training set) and the last test.

    ```
    tfactory data gsm8k --out gsm8k
    tfactory data gsm8k downloads/grade-school-math --out gsm8k
    ```

    Args:
        source: A folder with train.jsonl and test.jsonl, or a hub id.
        out: Folder for the JSONL files; those that are there are replaced.
        plain: Without calls: the solutions as they are, their marks left out.
    """
    from TrainingFactory.apps.recipes.recipe import write_gsm8k

    return _written(out, write_gsm8k(source, out, plain))


@data.command
def wordnet(folder: str = "/usr/share/wordnet", /, *, out: Path = Path("wordnet")) -> int:
    """Write questions about nouns as rows for sft, whose calls of WordNet's tools lead to the answer, and as tasks;
    those for development (dev) and the last test are about other words.

    ```
    tfactory data wordnet /usr/share/wordnet --out wordnet
    ```

    Args:
        folder: With WordNet's data.noun and index.noun; the Debian package wordnet-base has them.
        out: Folder for the JSONL files; those that are there are replaced.
    """
    from TrainingFactory.apps.recipes.recipe import write_wordnet

    return _written(out, write_wordnet(folder, out))


def _written(out: Path, done: Prepared) -> int:
    rows = [(str(out / f"{part}.jsonl"), f"{count} rows") for part, count in done.counts.items()]
    show.table(rows + [(f"  {why}", f"{count} left out") for why, count in done.dropped.items()])
    return 0
