"""`tfactory data`: convert recorded episodes to datasets, let a teacher play; show, check and write datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast, get_args

from cyclopts import App, Parameter, validators

from TrainingFactory.apps.recipes.gsm8k import HUB_ID, PreparedRows
from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import RunsFolder
from TrainingFactory.cli.teach import teach
from TrainingFactory.data.convert import Filters, Layout, to_swift_row
from TrainingFactory.data.convert import convert as converted
from TrainingFactory.data.examples import Form
from TrainingFactory.data.provider_rows import OPENAI_MIN_ROWS, Provider, to_provider_rows

data = App(
    name="data", help="Convert episodes to datasets, let a teacher play new ones; show and check datasets."
)
Dataset = Annotated[str, Parameter(help="File (JSONL, JSON, Parquet, CSV), saved dataset, hub id, or run.")]
Split = Annotated[str, Parameter(help="Split to read, if the dataset has several.")]
Algorithm = Literal["sft", "dpo", "kto", "reward_model", "rm", "prm"]
MAX_CHECKED_ROWS = 500  # rows read to find the algorithms that a dataset fits


@data.command
def convert(
    source: str, *, to: Form | Provider, out: Path,
    layout: Annotated[Layout | Provider, Parameter(name="--format")] = "trl",
    filters: Annotated[Filters | None, Parameter(name="*")] = None, force: bool = False, runs: RunsFolder = "runs"
) -> int:  # fmt: skip
    """Convert the recorded episodes of a run to training rows for SFT, DPO, KTO or a reward model.

    ```
    tfactory data convert search-1 --to sft --out good.jsonl --min-reward 1 --dedupe
    tfactory data convert runs/search-1/trajectories.jsonl --to dpo --out pairs.jsonl
    tfactory data convert search-1 --to gemini --out gemini.jsonl --min-reward 1
    tfactory data convert search-1 --to dpo --format openai --out openai.jsonl
    ```

    Args:
        source: Run name or folder, or a file of trajectories.
        to: Training method: sft, dpo, kto, rm (outcome reward model) or prm (process reward model); or openai,
            gemini or bedrock: sft in the format of that provider's tuning jobs.
        out: JSONL file to write.
        layout: trl: OpenAI-style messages in TRL's columns. swift: the format of ms-swift. openai, gemini, bedrock: the
            format of the provider's tuning jobs, for sft and dpo; untested against the providers themselves.
        force: Overwrite an existing file.
    """
    from TrainingFactory.assembly.datasets import find_trajectories, write_rows
    from TrainingFactory.data.datasets import read_rows

    if out.exists() and not force:
        raise ValueError(f"{out} exists already. Choose another file, or overwrite it with --force.")
    if to in get_args(Provider):
        to, layout = "sft", cast(Provider, to)
    form = cast(Form, to)
    path = find_trajectories(source, runs)
    with Display() as display:
        conversion = converted(display.track(read_rows(path), "episodes"), form, filters)
    if layout in get_args(Provider):
        conversion.rows = to_provider_rows(conversion.rows, cast(Provider, layout), conversion.dropped)
        if layout == "openai" and 0 < len(conversion.rows) < OPENAI_MIN_ROWS:
            conversion.note = f"OpenAI rejects files with fewer than {OPENAI_MIN_ROWS} rows"
    rows = [("episodes read", f"{conversion.num_read} from {path}")]
    rows += [(f"  {reason}", f"{count} skipped") for reason, count in conversion.dropped.items() if count]
    show.print_table([*rows, ("rows", str(len(conversion.rows)))])
    if not conversion.rows:
        show.print_error(f"no episode is usable for {to}; {out} was not written. Relax the filters.")
        return 1
    if conversion.note:
        show.note(f"note: {conversion.note}")
    output_rows = [to_swift_row(row) for row in conversion.rows] if layout == "swift" else conversion.rows
    write_rows(out, output_rows, conversion.images)
    usage_note = f"train on them with data.dataset={out}"
    if layout in get_args(Provider):
        usage_note = f"upload the file to {layout} yourself"
    show.note(f"saved {show.pluralize(len(conversion.rows), 'row')} to {out}; {usage_note}")
    return 0


data.command(teach)


@data.command(name="show")
def show_(
    source: Dataset, *, rows: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 3,
    split: Split = "train", runs: RunsFolder = "runs"
) -> None:  # fmt: skip
    """Print rows of a dataset as conversations, and list the algorithms that it fits.

    ```
    tfactory data show pairs.jsonl --rows 1
    ```

    Args:
        rows: Number of rows to print.
    """
    from TrainingFactory.assembly.datasets import find_dataset, fit_forms

    fit = fit_forms(find_dataset(source, runs), split, MAX_CHECKED_ROWS)
    first_examples = next(iter(fit.examples_by_form.values()), None)
    for example in first_examples.usable[:rows] if first_examples else []:
        for number, dialogue in enumerate(example.conversations, 1):
            reward = dialogue.reward
            title = f"{example.location}: {example.id}"
            if len(example.conversations) > 1:
                title += f", {number} of {len(example.conversations)}"
            title += f", reward {reward.outcome:g}" if reward else ""
            title += f", steps {reward.steps}" if reward and reward.steps else ""
            show.print_conversation(title, dialogue.messages, dialogue.tools)
    summary = [
        ("rows", f"{fit.num_rows} read{' (the dataset has more)' if fit.has_more_rows else ''}"),
        ("columns", ", ".join(fit.columns)),
        ("fits", ", ".join(fit.examples_by_form) or "no algorithm"),
    ]
    show.print_table(summary + [(f"not {form}", reason) for form, reason in fit.problem_by_form.items()])


@data.command
def check(
    source: Dataset, *, algorithm: Annotated[Algorithm, Parameter(name="--for")], split: Split = "train",
    runs: RunsFolder = "runs"
) -> int:  # fmt: skip
    """Check every row of a dataset for an algorithm and report all invalid rows. Exit status 1: some are invalid.

    ```
    tfactory data check pairs.jsonl --for dpo
    ```

    Args:
        algorithm: sft, dpo, kto, reward_model (or rm), or prm (process reward model).
    """
    from TrainingFactory.assembly.datasets import find_dataset
    from TrainingFactory.data.examples import load_examples
    from TrainingFactory.training.dataset import find_call_problem

    form = "rm" if algorithm == "reward_model" else algorithm
    dataset = find_dataset(source, runs)
    examples = load_examples(dataset, form, split=split, skip_bad_rows=True, check_call=find_call_problem)
    for problem in examples.row_problems:
        show.print_error(problem)
    summary = [("rows", str(examples.num_rows)), ("usable", f"{len(examples)} examples for {form}")]
    summary += [
        (f"  {reason}", f"{show.pluralize(count, 'episode')} skipped")
        for reason, count in examples.unused_counts.items()
    ]
    show.print_table([*summary, ("invalid rows", str(len(examples.row_problems)))])
    for note in examples.notes:
        show.note(f"note: {note}")
    return 1 if examples.row_problems else 0


@data.command
def lessons(environment: Literal["search", "calculator"] = "search", /, *, out: Path, seed: int = 0) -> int:
    """Write the demo's SFT demonstrations for the built-in model: correct ones, and deliberate mistakes that leave room
    for RL to improve the model.

    ```
    tfactory data lessons search --out lessons.jsonl
    tfactory train configs/tiny_sft.yaml data.dataset=lessons.jsonl data.shuffle=false training.schedule=linear
    ```

    Args:
        environment: Environment whose tasks are demonstrated.
        out: JSONL file to write; an existing file is replaced.
        seed: Random seed for the tasks and the mistakes.
    """
    from TrainingFactory.apps.demo.demo import write_lessons
    from TrainingFactory.apps.demo.lessons import LESSONS
    from TrainingFactory.common import catalog

    write_lessons(out, catalog.find("environment", environment), seed, LESSONS[environment])
    show.note(f"wrote {out}")
    return 0


@data.command
def gsm8k(source: str = HUB_ID, /, *, out: Path = Path("gsm8k"), plain: bool = False) -> int:
    """Convert GSM8K to SFT rows, in which calculator calls replace the marked calculations, and to RL tasks for
    training (tasks), development (dev, a fixed part of the training set) and the final test (test).

    ```
    tfactory data gsm8k --out gsm8k
    tfactory data gsm8k downloads/grade-school-math --out gsm8k
    ```

    Args:
        source: Folder with train.jsonl and test.jsonl, or a hub id.
        out: Folder for the JSONL files; existing files are replaced.
        plain: Write the solutions without tool calls and without calculation marks.
    """
    from TrainingFactory.apps.recipes.recipe import write_gsm8k

    return _print_files(out, write_gsm8k(source, out, plain))


@data.command
def wordnet(folder: str = "/usr/share/wordnet", /, *, out: Path = Path("wordnet")) -> int:
    """Write questions about WordNet's nouns as SFT rows, which find the answer by tool calls, and as RL tasks. The
    tasks for development (dev) and the final test (test) use other words than the training tasks.

    ```
    tfactory data wordnet /usr/share/wordnet --out wordnet
    ```

    Args:
        folder: Folder with WordNet's data.noun and index.noun, as in the Debian package wordnet-base.
        out: Folder for the JSONL files; existing files are replaced.
    """
    from TrainingFactory.apps.recipes.recipe import write_wordnet

    return _print_files(out, write_wordnet(folder, out))


@data.command
def text2sql(*, out: Path = Path("text2sql")) -> int:
    """Write questions about generated databases as RL tasks. Each database has its own tables and columns, which the
    prompt does not show. The tasks for development (dev) and the final test (test) are about other domains.

    ```
    tfactory data text2sql --out text2sql
    ```

    Args:
        out: Folder for the JSONL files; existing files are replaced.
    """
    from TrainingFactory.apps.recipes.recipe import write_text2sql

    return _print_files(out, write_text2sql("generated", out))


@data.command
def screen(*, out: Path = Path("screen"), model: str | None = None) -> int:
    """Write the data of the recipe `screen`: demonstrations of taps in pictures, tasks, and a SmolVLM of a text model's
    weights and of a new vision part that is aligned with its words.

    ```
    tfactory data screen --out screen
    ```

    Args:
        out: Folder for the JSONL files and the model; existing files are replaced.
        model: Text model. Default: smollm2-135m.
    """
    from TrainingFactory.apps.recipes.recipe import Recipe, write_screen

    options = Recipe(task="screen", out=out).configs["grpo"].environment.options
    return _print_files(out, write_screen(options, model, out))


def _print_files(folder: Path, prepared: PreparedRows) -> int:
    rows = [
        (str(folder / f"{split}.jsonl"), show.pluralize(count, "row"))
        for split, count in prepared.row_counts.items()
    ]
    show.print_table(
        rows + [(f"  {reason}", f"{count} skipped") for reason, count in prepared.dropped.items()]
    )
    return 0
