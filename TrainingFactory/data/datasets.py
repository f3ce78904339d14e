"""Rows of a dataset from files, folders, the hub or Python objects, read one at a time. Null columns are dropped."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from TrainingFactory.common.options import UnknownNameError
from TrainingFactory.common.texts import describe

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
FORMATS = "a JSONL, JSON, Parquet or CSV file, a folder saved by datasets, or a dataset id on the hub"
MAX_PROBLEMS = 10  # reported in one error
T = TypeVar("T")
LIST_KEYS = ("data", "rows", "examples")  # keys under which a JSON file may have its list


@dataclass(slots=True)
class DatasetRow:
    """Columns of one row of a dataset. `problem` is the reason why the row is invalid; error messages put the location
    `location` before it. Relative paths in a row of a local file start at `folder`."""

    location: str
    columns: dict[str, Any]
    problem: str | None = None
    folder: Path | None = None


def read_rows(
    source: Any, split: str = "train", columns: Mapping[str, str] | None = None
) -> Iterator[DatasetRow]:
    """Yield the rows of a path, a hub id (`name` or `name:configuration`), a `datasets.Dataset` or dicts. `columns`
    maps expected to actual column names: {"prompt": "question"}."""
    try:
        folder = _find_folder(source)
        for row in _read_rows(source, split):
            row.folder = row.folder or folder
            yield _rename_columns(row, columns) if columns else row
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error.reason}; expected {FORMATS}") from error


def _find_folder(source: Any) -> Path | None:
    path = Path(source).expanduser() if isinstance(source, str | Path) else None
    if path is None or not path.exists():
        return None
    return path if path.is_dir() else path.parent


def is_path(name: str) -> bool:
    """Return whether a name can only be a file or folder, not a hub id."""
    return name.lower().endswith(FILE_SUFFIXES) or name.startswith((".", "/", "~"))


def find_builtin_dataset(name: str) -> Path | None:
    """Return the file of a built-in dataset; None for other names."""
    path = Path(__file__).parent / "builtin" / f"{name}.jsonl"
    return path if path.parent.name == "builtin" and path.is_file() else None


def _read_rows(source: Any, split: str) -> Iterator[DatasetRow]:
    if not isinstance(source, str | Path):
        return _read_objects(source, split)
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, split)
    if path.is_file():
        readers = {".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
        return readers.get(path.suffix.lower(), _read_jsonl)(path)
    if (builtin_path := find_builtin_dataset(str(source))) is not None:
        return _read_jsonl(builtin_path)
    if is_path(str(source)):
        raise ValueError(f"data file not found: {path}; expected {FORMATS}")
    return _read_dicts(_load_from_hub(str(source), split), str(source), is_arrow=True)


def _read_jsonl(path: Path) -> Iterator[DatasetRow]:
    """Read JSONL. Invalid first lines are yielded only with a valid one, because a file without any valid line
    raises."""
    pending_rows: list[DatasetRow] = []
    has_valid_row = False
    # utf-8-sig: some programs write a byte order mark. surrogatepass: model output may contain lone surrogates.
    with path.open(encoding="utf-8-sig", errors="surrogatepass") as file:
        for line_number, line in enumerate(file, 1):
            if line.strip():
                pending_rows.append(_parse_line(line, f"{path}, line {line_number}"))
                has_valid_row = has_valid_row or pending_rows[-1].problem is None
            if has_valid_row:
                yield from pending_rows
                pending_rows.clear()
    if pending_rows:
        first_problem = f"{pending_rows[0].location} {pending_rows[0].problem}"
        raise ValueError(f"{first_problem}, and no line of the file is a JSON object; expected {FORMATS}")


def _parse_line(line: str, location: str) -> DatasetRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return DatasetRow(location, {}, f"is not valid JSON: {error}")
    if not isinstance(row, dict):
        return DatasetRow(
            location, {}, f"must be an object with the columns of the row, not {line.strip()[:40]}"
        )
    return DatasetRow(location, _drop_nulls(row, recursive=False))


def _read_json(path: Path) -> Iterator[DatasetRow]:
    """Read a list of objects, at the top level or under a key such as `data`; fall back to JSONL."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig", errors="surrogatepass") or "[]")
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_jsonl(path)
        raise ValueError(f"{path} is not valid JSON: {error}; expected {FORMATS}") from error
    if isinstance(rows, dict):
        rows = next((rows[key] for key in LIST_KEYS if isinstance(rows.get(key), list)), [rows])
    if not isinstance(rows, list):
        raise ValueError(f"{path} must contain a list of objects, not {str(rows)[:40]}")
    return _read_dicts(rows, str(path))


def _read_csv(path: Path) -> Iterator[DatasetRow]:
    csv.field_size_limit(2**31 - 1)  # characters; a conversation can be long
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            ragged = None in row or None in row.values()
            problem = f"must have {len(reader.fieldnames or ())} cells, like the header" if ragged else None
            columns = {name: cell for name, cell in row.items() if cell != ""}
            yield DatasetRow(f"{path}, line {reader.line_num}", columns, problem)


def _read_parquet(path: Path) -> Iterator[DatasetRow]:
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}; expected {FORMATS}") from error
    return _read_dicts((row for batch in batches for row in batch.to_pylist()), str(path), is_arrow=True)


def _read_folder(path: Path, split: str) -> Iterator[DatasetRow]:
    if (path / "trajectories.jsonl").is_file():  # a run folder
        return _read_jsonl(path / "trajectories.jsonl")
    if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        split_files = [path / f"{split}{suffix}" for suffix in FILE_SUFFIXES]
        if (split_file := next((file for file in split_files if file.is_file()), None)) is not None:
            return _read_rows(split_file, split)
        raise ValueError(
            f"folder {path} is not a dataset: it has neither dataset_info.json nor {split}.jsonl"
        )
    import datasets

    dataset = _select_split(datasets.load_from_disk(str(path)), str(path), split)
    return _read_dicts(dataset, str(path), is_arrow=True)


def _load_from_hub(source: str, split: str) -> Any:
    import datasets

    dataset_name, _, configuration = source.partition(":")
    try:
        return datasets.load_dataset(dataset_name, configuration or None, split=split)
    except Exception as error:  # any error of the library or the network
        message = f"{source} is not a local file, and loading its split {split!r} from the hub failed"
        raise UnknownNameError(source, f"{message}: {describe(error)}. Expected {FORMATS}") from error


def _select_split(dataset: Any, name: str, split: str) -> Any:
    if not isinstance(dataset, Mapping):
        return dataset
    if split not in dataset:
        raise ValueError(f"{name} has no split {split!r}; its splits are: {', '.join(map(str, dataset))}")
    return dataset[split]


def _read_objects(source: Any, split: str) -> Iterator[DatasetRow]:
    source = _select_split(source, "the dataset", split)
    if not isinstance(source, Iterable):
        raise ValueError(f"a dataset must be {FORMATS}, or a list of dicts, not a {type(source).__name__}")
    return _read_dicts(source, None, is_arrow=type(source).__module__.startswith("datasets."))


def _read_dicts(rows: Iterable[Any], name: str | None, is_arrow: bool = False) -> Iterator[DatasetRow]:
    for index, row in enumerate(rows):
        location = f"row {index} of the dataset" if name is None else f"{name}, row {index}"
        if isinstance(row, DatasetRow):  # already read
            yield row
        elif isinstance(row, Mapping):
            yield DatasetRow(location, _drop_nulls(row, recursive=is_arrow))
        else:
            yield DatasetRow(
                location, {}, f"must be an object with the columns of the row, not {str(row)[:40]}"
            )


def _drop_nulls(value: Any, recursive: bool) -> Any:
    """Drop null keys. `recursive`: also in nested objects, to which Arrow adds the keys of all rows."""
    if isinstance(value, Mapping):
        fields = {key: child for key, child in value.items() if child is not None}
        return {key: _drop_nulls(child, recursive) for key, child in fields.items()} if recursive else fields
    return [_drop_nulls(child, recursive) for child in value] if isinstance(value, list) else value


def get_column(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column by name, or a nested value by a path such as `reward_model.ground_truth`. None: missing."""
    outer_name, separator, inner_name = name.partition(".")
    if name in columns or not separator:
        return columns.get(name)
    nested_columns = columns.get(outer_name)
    return get_column(nested_columns, inner_name) if isinstance(nested_columns, Mapping) else None


def _rename_columns(row: DatasetRow, actual_names: Mapping[str, str]) -> DatasetRow:
    renamed = {expected: get_column(row.columns, actual) for expected, actual in actual_names.items()}
    missing_columns = [
        f"{actual_names[expected]!r} for {expected}" for expected, value in renamed.items() if value is None
    ]
    if missing_columns and row.problem is None:
        names = ", ".join(map(str, row.columns)) or "none"
        row.problem = f"lacks columns of data.columns: {', '.join(missing_columns)}; its columns are: {names}"
    row.columns = row.columns | renamed
    return row


def parse_rows(
    source: Any,
    row_description: str,
    parse_row: Callable[[DatasetRow, int], T],
    split: str = "train",
    count: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[T]:
    """Parse the first `count` rows with `parse_row`; report all ValueErrors in one, with the rows'
    locations."""
    parsed_rows: list[T] = []
    problems: list[str] = []
    for row_number, row in enumerate(islice(read_rows(source, split, columns), count), 1):
        try:
            if row.problem is not None:
                raise ValueError(row.problem)
            parsed_rows.append(parse_row(row, row_number))
        except ValueError as error:
            problems.append(f"{row.location} {error}")
    if problems:
        raise ValueError(join_problems(problems))
    if not parsed_rows:
        dataset_name = source if isinstance(source, str | Path) else "the dataset"
        raise ValueError(f"{dataset_name} is empty; it must contain {row_description}, one per row")
    return parsed_rows


def join_problems(problems: Sequence[str]) -> str:
    """Join the first `MAX_PROBLEMS` problems, with the number of further ones."""
    omission_note = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return "\n".join([*problems[:MAX_PROBLEMS], *omission_note])
