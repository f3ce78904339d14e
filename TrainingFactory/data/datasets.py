"""Read the rows of a dataset, wherever it is, one at a time; a column that is null counts as not there."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from TrainingFactory.common.options import Unknown
from TrainingFactory.common.texts import describe

FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
KINDS = "a JSONL, JSON, Parquet or CSV file, a folder saved by datasets, or the id of a dataset on the hub"
MAX_PROBLEMS = 10  # told at once
Made = TypeVar("Made")
WRAPPERS = ("data", "rows", "examples")  # where a JSON file has its list under a name


@dataclass(slots=True)
class Row:
    """Holds the columns of a row; `problem` says why there are none, after `where` in messages."""

    where: str
    columns: dict[str, Any]
    problem: str | None = None


def read_rows(source: Any, split: str = "train", columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """Yield the rows of a path, a hub id (`name` or `name:configuration`), a `datasets.Dataset` or dicts; `columns`
    says for names of ours which column has them: {"prompt": "question"}."""
    try:
        rows = _rows(source, split)
        yield from (_renamed(row, columns) for row in rows) if columns else rows
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not a UTF-8 text: {error.reason}; rows come from {KINDS}") from error


def is_path(name: str) -> bool:
    """Tell a name that can only be that of a file or folder."""
    return name.lower().endswith(FILES) or name.startswith((".", "/", "~"))


def builtin_dataset(name: str) -> Path | None:
    """Return the file of a dataset that comes with TrainingFactory; None for other names."""
    path = Path(__file__).parent / "builtin" / f"{name}.jsonl"
    return path if path.parent.name == "builtin" and path.is_file() else None


def _rows(source: Any, split: str) -> Iterator[Row]:
    if not isinstance(source, str | Path):
        return _of_objects(source, split)
    path = Path(source).expanduser()
    if path.is_dir():
        return _of_folder(path, split)
    if path.is_file():
        readers = {".json": _of_json, ".parquet": _of_parquet, ".csv": _of_csv}
        return readers.get(path.suffix.lower(), _of_lines)(path)
    if (own := builtin_dataset(str(source))) is not None:
        return _of_lines(own)
    if is_path(str(source)):
        raise ValueError(f"there is no file of data at {path}; rows come from {KINDS}")
    return _of_dicts(_from_hub(str(source), split), str(source), arrow=True)


def _of_lines(path: Path) -> Iterator[Row]:
    """Read an object a line; bad lines wait for a good one, for where there is none the file has another format."""
    waiting: list[Row] = []
    good = False
    # utf-8-sig: some programs put a mark at the beginning. surrogatepass: what a model wrote may hold half a character.
    with path.open(encoding="utf-8-sig", errors="surrogatepass") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                waiting.append(_of_line(line, f"{path}, line {number}"))
                good = good or waiting[-1].problem is None
            if good:
                yield from waiting
                waiting.clear()
    if waiting:
        first = f"{waiting[0].where} {waiting[0].problem}"
        raise ValueError(f"{first}, and no line of the file is an object in JSON; rows come from {KINDS}")


def _of_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(where, {}, f"is not valid JSON: {error}")
    if not isinstance(row, dict):
        return Row(where, {}, f"must be an object with the columns of the row, not {line.strip()[:40]}")
    return Row(where, _there(row, deep=False))


def _of_json(path: Path) -> Iterator[Row]:
    """Read a list of objects, alone or under a name such as `data`; or one object a line after all."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig", errors="surrogatepass") or "[]")
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _of_lines(path)
        raise ValueError(f"{path} is not valid JSON: {error}; rows come from {KINDS}") from error
    if isinstance(value, dict):
        value = next((value[key] for key in WRAPPERS if isinstance(value.get(key), list)), [value])
    if not isinstance(value, list):
        raise ValueError(f"{path} must hold a list of objects, not {str(value)[:40]}")
    return _of_dicts(value, str(path))


def _of_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # characters; a conversation can be long
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            short = None in row or None in row.values()
            problem = f"has not the {len(reader.fieldnames or ())} cells of the first line" if short else None
            columns = {name: cell for name, cell in row.items() if cell != ""}
            yield Row(f"{path}, line {reader.line_num}", columns, problem)


def _of_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}; rows come from {KINDS}") from error
    return _of_dicts((row for batch in batches for row in batch.to_pylist()), str(path), arrow=True)


def _of_folder(path: Path, split: str) -> Iterator[Row]:
    if (path / "trajectories.jsonl").is_file():  # a run
        return _of_lines(path / "trajectories.jsonl")
    if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        files = [path / f"{split}{ending}" for ending in FILES]
        if (found := next((file for file in files if file.is_file()), None)) is not None:
            return _rows(found, split)
        raise ValueError(
            f"the folder {path} is no dataset: there is neither dataset_info.json nor {split}.jsonl in it"
        )
    import datasets

    found = _split_of(datasets.load_from_disk(str(path)), str(path), split)
    return _of_dicts(found, str(path), arrow=True)


def _from_hub(source: str, split: str) -> Any:
    import datasets

    name, _, configuration = source.partition(":")
    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # foreign code, at the far end of a network
        text = f"{source} is no file here, and the hub did not give its split {split!r}"
        raise Unknown(source, f"{text}: {describe(error)}. Rows come from {KINDS}") from error


def _split_of(dataset: Any, name: str, split: str) -> Any:
    if not isinstance(dataset, Mapping):
        return dataset
    if split not in dataset:
        raise ValueError(f"{name} has no split {split!r}; its splits are: {', '.join(map(str, dataset))}")
    return dataset[split]


def _of_objects(source: Any, split: str) -> Iterator[Row]:
    source = _split_of(source, "the dataset", split)
    if not isinstance(source, Iterable):
        raise ValueError(f"rows come from {KINDS}, or a list of dicts, not a {type(source).__name__}")
    return _of_dicts(source, None, arrow=type(source).__module__.startswith("datasets."))


def _of_dicts(rows: Iterable[Any], name: str | None, arrow: bool = False) -> Iterator[Row]:
    for number, row in enumerate(rows):
        where = f"row {number} of the dataset" if name is None else f"{name}, row {number}"
        if isinstance(row, Row):  # read before
            yield row
        elif isinstance(row, Mapping):
            yield Row(where, _there(row, deep=arrow))
        else:
            yield Row(where, {}, f"must be an object with the columns of the row, not {str(row)[:40]}")


def _there(value: Any, deep: bool) -> Any:
    """Drop the keys that are null; `deep` where Arrow gave every nested object the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _there(item, deep) if deep else item for key, item in value.items() if item is not None}
    return [_there(item, deep) for item in value] if isinstance(value, list) else value


def column_at(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column by its name, or what stands in one by a path such as `reward_model.ground_truth`."""
    first, dot, rest = name.partition(".")
    if name in columns or not dot:
        return columns.get(name)
    inner = columns.get(first)
    return column_at(inner, rest) if isinstance(inner, Mapping) else None


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    found = {ours: column_at(row.columns, theirs) for ours, theirs in names.items()}
    missing = [f"{names[ours]!r} for {ours}" for ours, value in found.items() if value is None]
    if missing and row.problem is None:
        there = ", ".join(map(str, row.columns)) or "none"
        row.problem = f"has not what data.columns names: {', '.join(missing)}; its columns are: {there}"
    row.columns = row.columns | found
    return row


def read_each(
    source: Any,
    what: str,
    read: Callable[[Row, int], Made],
    split: str = "train",
    count: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[Made]:
    """Return what `read` makes of the first `count` rows and their numbers; its ValueError goes on after the row's
    place, such as "FILE, line N"."""
    made: list[Made] = []
    problems: list[str] = []
    for number, row in enumerate(islice(read_rows(source, split, columns), count), 1):
        try:
            if row.problem is not None:
                raise ValueError(row.problem)
            made.append(read(row, number))
        except ValueError as error:
            problems.append(f"{row.where} {error}")
    if problems:
        raise ValueError(in_one(problems))
    if not made:
        name = source if isinstance(source, str | Path) else "the dataset"
        raise ValueError(f"{name} is empty: there must be {what} in it, one a row")
    return made


def in_one(problems: Sequence[str]) -> str:
    """Return the first of them, and how many more there are."""
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return "\n".join([*problems[:MAX_PROBLEMS], *more])
