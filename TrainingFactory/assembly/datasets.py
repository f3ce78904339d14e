"""Datasets for `tfactory data`: find a dataset, check which dataset forms it fits, write its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from TrainingFactory.common.images import ImageStore
from TrainingFactory.data.datasets import read_rows
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.data.examples import Examples, Form, load_examples
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder, is_run
from TrainingFactory.training.dataset import find_call_problem
from TrainingFactory.types import Image


@dataclass(slots=True)
class DatasetFit:
    """Dataset forms that the first rows of a dataset fit, and the first problem with each other form."""

    num_rows: int
    has_more_rows: bool
    columns: list[str]
    examples_by_form: dict[Form, Examples] = field(default_factory=dict)
    problem_by_form: dict[Form, str] = field(default_factory=dict)


def find_trajectories(run_or_file: str, runs: str | Path = "runs") -> Path:
    """Return the trajectories file of a run, which is given by name or folder; return a file unchanged."""
    path = Path(run_or_file).expanduser()
    if path.is_file():
        return path
    run = RunFolder.find(run_or_file, runs)
    trajectories_file = run.path / TRAJECTORIES
    if not trajectories_file.is_file():
        raise ValueError(
            f"run {run.name} has no {TRAJECTORIES}: it sampled no episodes, or logging.save_trajectories is off"
        )
    return trajectories_file


def find_dataset(run_or_dataset: str, runs: str | Path = "runs") -> str:
    """Resolve a source to a value for `data.dataset`: a run to its trajectories, others unchanged."""
    path = Path(run_or_dataset).expanduser()
    is_run_name = not path.exists() and is_run(Path(runs).expanduser() / run_or_dataset)
    return str(find_trajectories(run_or_dataset, runs)) if is_run_name or is_run(path) else run_or_dataset


def fit_forms(source: str, split: str, max_rows: int) -> DatasetFit:
    """Parse the first `max_rows` rows in each dataset form; return the forms that fit, and the error of each other
    form."""
    rows = list(islice(read_rows(source, split), max_rows + 1))
    first_rows = rows[:max_rows]
    if not first_rows:
        raise ValueError(f"{source} is empty")
    columns = dict.fromkeys(name for row in first_rows for name in row.columns)
    fit = DatasetFit(len(first_rows), len(rows) > max_rows, [str(name) for name in columns])
    for form in get_args(Form):
        try:
            examples = load_examples(first_rows, form, check_call=find_call_problem)
        except ValueError as error:
            fit.problem_by_form[form] = str(error).partition("\n")[0]
        else:
            fit.examples_by_form[form] = examples
    return fit


def write_rows(path: Path, rows: Sequence[dict[str, Any]], images: Mapping[str, Image] | None = None) -> None:
    """Write a JSON Lines file, and the images of its rows beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image_store = ImageStore.for_file(path)
    for image in {image for row in rows for image in row.get("images", ())} & (images or {}).keys():
        image_store.add((images or {})[image])
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
