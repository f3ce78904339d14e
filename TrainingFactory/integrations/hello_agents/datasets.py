"""GSM8K and datasets with the same columns, converted to the textbook's records and to rows for our trainers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from TrainingFactory.data.datasets import FILE_SUFFIXES, DatasetRow, parse_rows, read_rows

GSM8K_VARIABLE = "TFACTORY_GSM8K"  # environment variable: a folder with train.jsonl and test.jsonl
HUB_NAME = "openai/gsm8k"
GSM8K_NAMES = ("gsm8k", HUB_NAME)
FORMATS = ("sft", "rl")
SPLIT_PATTERN = re.compile(r"(\w+)(?:\[(\d*):(\d*)\])?")
RowReader = Callable[..., list[dict]]  # (source, split, count) -> rows
MESSAGE_PATTERN = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>", re.DOTALL)


def read_gsm8k(
    split: str = "train", count: int | None = None, folder: str | Path | None = None
) -> list[DatasetRow]:
    """Return rows with `question` and `answer`, from `folder`, the folder in TFACTORY_GSM8K, or the hub.

    `split` is train or test, or a slice such as train[:1000]. `count` None: all rows."""
    match = SPLIT_PATTERN.fullmatch(split)
    if match is None:
        raise ValueError(f"split is {split!r}; it must be like train, test or train[:1000]")
    split_name, start, stop = (match[1], int(match[2] or 0), int(match[3]) if match[3] else None)
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"max_samples is {count!r}; it must be 1 or more, or None for all")
    path = folder or os.environ.get(GSM8K_VARIABLE)
    data_source = _split_file(Path(path).expanduser(), split_name) if path else f"{HUB_NAME}:main"
    try:
        return list(islice(read_rows(data_source, split_name), start, stop))[:count]
    except ValueError as error:
        raise ValueError(
            f"GSM8K could not be loaded from {data_source}. Put its train.jsonl and test.jsonl into a folder and set "
            f"the environment variable {GSM8K_VARIABLE} or data.tasks=FOLDER. ({error})"
        ) from error


def _split_file(folder: Path, split: str) -> Path:
    """Return the file of a split in a folder, or `folder` if it is a file itself."""
    files = (folder / f"{split}{ending}" for ending in FILE_SUFFIXES)
    candidates = [folder, *files, *folder.glob(f"main/{split}-*.parquet")]
    return next((path for path in candidates if path.is_file()), folder / f"{split}.jsonl")


def make_question_prompt(question: str) -> str:
    return f"Question: {question}\n\nLet's solve this step by step:"


def extract_result(answer: Any) -> str:
    """Return the final result of an answer: the text after ####, or all of it."""
    return str(answer).rpartition("####")[2].strip()


def make_sft_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Return `prompt`, `completion` and `text`. An answer without #### has no reasoning."""
    reasoning = str(row["answer"]).rpartition("####")[0].strip()
    prompt = make_question_prompt(row["question"]) + "\n"
    completion = f"{reasoning}\n\nFinal Answer: {extract_result(row['answer'])}".lstrip()
    return {"prompt": prompt, "completion": completion, "text": prompt + completion}


def make_rl_row(row: Mapping[str, Any], tokenizer: Any = None) -> dict[str, str]:
    """Return `question`, `prompt` (after the tokenizer's chat template, if given), `ground_truth` and `full_answer`."""
    question, answer = row["question"], str(row["answer"])
    prompt = make_question_prompt(question)
    if tokenizer is not None:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {
        "question": question,
        "prompt": prompt,
        "ground_truth": extract_result(answer),
        "full_answer": answer,
    }


def format_rows(rows: Any, format_type: str, tokenizer: Any = None) -> list[dict]:
    """Convert rows with `question` and `answer` to records of the format `sft` or `rl`."""

    def convert(row: DatasetRow, row_number: int) -> dict[str, Any]:
        if missing := [key for key in ("question", "answer") if key not in row.columns]:
            raise ValueError(f"has no {' and no '.join(missing)}. Its keys are: {', '.join(row.columns)}")
        return make_sft_row(row.columns) if format_type == "sft" else make_rl_row(row.columns, tokenizer)

    if format_type not in FORMATS:
        raise ValueError(f"format is {format_type!r}; it must be sft or rl")
    return parse_rows(rows, 'rows with "question" and "answer"', convert)


def read_plain_rows(rows: Any, split: str = "train", count: int | None = None) -> list[dict]:
    return parse_rows(rows, "rows", lambda row, number: row.columns, split, count)


def read_examples(rows: Any, split: str = "train", count: int | None = None) -> list[dict]:
    """Return rows for offline algorithms; questions with answers become prompts with completions."""

    def convert(row: DatasetRow, row_number: int) -> dict[str, Any]:
        columns = row.columns
        answer_columns = columns.keys() & {"completion", "messages", "chosen"}
        if {"question", "answer"} <= columns.keys() and not answer_columns:
            columns = make_sft_row(columns)
        return _unwrap_template(columns)

    return parse_rows(rows, "examples", convert, split, count)


def read_tasks(rows: Any, split: str = "train", count: int | None = None) -> list[dict]:
    """Return tasks for algorithms that sample: the question as user message, and all columns for the reward."""

    def convert(row: DatasetRow, row_number: int) -> dict[str, Any]:
        columns = row.columns
        if "answer" in columns:
            columns = {"ground_truth": extract_result(columns["answer"])} | columns
        if "question" in columns:
            return columns | {"prompt": make_question_prompt(columns["question"])}
        return _unwrap_template(columns)

    return parse_rows(rows, "tasks", convert, split, count)


def _unwrap_template(columns: dict[str, Any]) -> dict[str, Any]:
    """Convert a prompt with a rendered chat template back to messages, because trainers apply the template."""
    prompt = columns.get("prompt")
    if not isinstance(prompt, str):
        return columns
    messages = [{"role": role, "content": content} for role, content in MESSAGE_PATTERN.findall(prompt)]
    if [message["role"] for message in messages] == ["user"]:
        return columns | {"prompt": messages[0]["content"]}
    return columns | {"prompt": messages or prompt.strip()}


class GSM8KDataset:
    """A split of GSM8K as records of `format_type`, sft or rl."""

    def __init__(
        self, split: str = "train", max_samples: int | None = None, format_type: str = "sft", tokenizer: Any = None
    ) -> None:  # fmt: skip
        self.split = split
        self.max_samples = max_samples
        self.format_type = format_type
        self.tokenizer = tokenizer
        rows = read_gsm8k(split, max_samples)
        self.dataset = [row.columns for row in rows]
        self._records = format_rows(rows, format_type, tokenizer)

    def format_for_sft(self, example: Mapping[str, Any]) -> dict[str, str]:
        return make_sft_row(example)

    def format_for_rl(self, example: Mapping[str, Any]) -> dict[str, str]:
        return make_rl_row(example, self.tokenizer)

    def get_dataset(self) -> Any:
        return _make_dataset(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self._records[index]


def create_math_dataset(
    dataset_name: str = "gsm8k", split: str = "train", max_samples: int | None = None, format_type: str = "sft",
    tokenizer: Any = None,
) -> Any:  # fmt: skip
    """Return GSM8K as a `datasets.Dataset`. Raise ValueError for any other name."""
    if dataset_name not in GSM8K_NAMES:
        raise ValueError(f"there is no dataset {dataset_name!r}. Use gsm8k, or format_math_dataset.")
    return GSM8KDataset(split, max_samples, format_type, tokenizer).get_dataset()


def create_sft_dataset(max_samples: int | None = 1000, split: str = "train") -> Any:
    return create_math_dataset("gsm8k", split, max_samples, "sft")


def create_rl_dataset(
    max_samples: int | None = 500, split: str = "train", model_name: str | None = None
) -> Any:
    """Return tasks of GSM8K, rendered with the chat template of `model_name`. None: prompts stay plain text, and the
    trainer applies the template of the model that it trains."""
    return create_math_dataset("gsm8k", split, max_samples, "rl", load_model_tokenizer(model_name))


def format_math_dataset(dataset: Any, format_type: str = "sft", model_name: str | None = None) -> Any:
    """Convert a dataset with `question` and `answer` to records of `format_type`."""
    tokenizer = load_model_tokenizer(model_name) if format_type == "rl" else None
    return _make_dataset(format_rows(dataset, format_type, tokenizer))


def preview_dataset(dataset: Any, num_samples: int = 3) -> None:
    """Print the first records, with values truncated to 200 characters."""
    for index in range(min(num_samples, len(dataset))):
        print(f"--- {index + 1} / {len(dataset)}")
        for key, value in dataset[index].items():
            text = str(value)
            print(f"{key}: {text[:200]}{'...' if len(text) > 200 else ''}")


def load_model_tokenizer(model_name: str | None) -> Any:
    if model_name is None:
        return None
    from TrainingFactory.models.loading import load_tokenizer
    from TrainingFactory.resolve.model_names import find_model

    return load_tokenizer(find_model(model_name).name)


def _make_dataset(records: list[dict]) -> Any:
    import datasets

    return datasets.Dataset.from_list(records)
