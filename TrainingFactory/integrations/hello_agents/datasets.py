"""GSM8K and datasets of its form, as the textbook's records and as what our trainers learn from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from TrainingFactory.data.datasets import FILES, Row, read_each, read_rows

GSM8K = "TFACTORY_GSM8K"  # environment variable: a folder with train.jsonl and test.jsonl
HUB = "openai/gsm8k"
NAMES = ("gsm8k", HUB)
FORMATS = ("sft", "rl")
SPLIT = re.compile(r"(\w+)(?:\[(\d*):(\d*)\])?")
Reader = Callable[..., list[dict]]  # of a source, a split, and how many rows
MESSAGE = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>", re.DOTALL)


def read_gsm8k(split: str = "train", count: int | None = None, folder: str | Path | None = None) -> list[Row]:
    """Return rows with `question` and `answer`: of `folder`, or of the one that TFACTORY_GSM8K names, or of the hub.
    `split` is train or test, or a part of it such as train[:1000]."""
    matched = SPLIT.fullmatch(split)
    if matched is None:
        raise ValueError(f"split is {split!r}; it looks like train, test or train[:1000]")
    name, start, stop = matched[1], int(matched[2] or 0), int(matched[3]) if matched[3] else None
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"max_samples is {count!r}; it must be 1 or more, or None for all")
    named = folder or os.environ.get(GSM8K)
    source = _file(Path(named).expanduser(), name) if named else f"{HUB}:main"
    try:
        return list(islice(read_rows(source, name), start, stop))[:count]
    except ValueError as error:
        raise ValueError(
            f"GSM8K could not be loaded from {source}. Put its train.jsonl and test.jsonl into a folder, and name that "
            f"by the environment variable {GSM8K} or by data.tasks=FOLDER. ({error})"
        ) from error


def _file(folder: Path, split: str) -> Path:
    """Return the file with that split, which the folder may be itself."""
    endings = (folder / f"{split}{ending}" for ending in FILES)
    places = [folder, *endings, *folder.glob(f"main/{split}-*.parquet")]
    return next((path for path in places if path.is_file()), folder / f"{split}.jsonl")


def asked(question: str) -> str:
    return f"Question: {question}\n\nLet's solve this step by step:"


def truth_of(answer: Any) -> str:
    """Return what an answer comes to: what follows ####, or all of it."""
    return str(answer).rpartition("####")[2].strip()


def sft_record(row: Mapping[str, Any]) -> dict[str, str]:
    """Return `prompt`, `completion` and `text`; an answer without #### is the final one, without reasoning."""
    reasoning = str(row["answer"]).rpartition("####")[0].strip()
    prompt = asked(row["question"]) + "\n"
    completion = f"{reasoning}\n\nFinal Answer: {truth_of(row['answer'])}".lstrip()
    return {"prompt": prompt, "completion": completion, "text": prompt + completion}


def rl_record(row: Mapping[str, Any], tokenizer: Any = None) -> dict[str, str]:
    """Return `question`, `prompt` (as the chat template writes it), `ground_truth` and `full_answer`."""
    question, answer = row["question"], str(row["answer"])
    prompt = asked(question)
    if tokenizer is not None:
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return {"question": question, "prompt": prompt, "ground_truth": truth_of(answer), "full_answer": answer}


def format_rows(rows: Any, format_type: str, tokenizer: Any = None) -> list[dict]:
    """Return rows with `question` and `answer` as records of the format `sft` or `rl`."""

    def read(row: Row, number: int) -> dict[str, Any]:
        if missing := [key for key in ("question", "answer") if key not in row.columns]:
            raise ValueError(f"has no {' and no '.join(missing)}; its keys are: {', '.join(row.columns)}")
        return sft_record(row.columns) if format_type == "sft" else rl_record(row.columns, tokenizer)

    if format_type not in FORMATS:
        raise ValueError(f"format is {format_type!r}; it must be sft or rl")
    return read_each(rows, 'rows with "question" and "answer"', read)


def unchanged(rows: Any, split: str = "train", count: int | None = None) -> list[dict]:
    return read_each(rows, "rows", lambda row, number: row.columns, split, count)


def examples(rows: Any, split: str = "train", count: int | None = None) -> list[dict]:
    """Return rows for the trainers that learn from dialogues: questions with answers become prompts with completions,
    under the same prompt that is sampled from later; others stay what they are."""

    def read(row: Row, number: int) -> dict[str, Any]:
        columns = row.columns
        whole = columns.keys() & {"completion", "messages", "chosen"}
        if {"question", "answer"} <= columns.keys() and not whole:
            columns = sft_record(columns)
        return _untemplated(columns)

    return read_each(rows, "examples", read, split, count)


def tasks(rows: Any, split: str = "train", count: int | None = None) -> list[dict]:
    """Return rows for the trainers that sample: the question as the user's text, all columns for the reward."""

    def read(row: Row, number: int) -> dict[str, Any]:
        columns = row.columns
        if "answer" in columns:
            columns = {"ground_truth": truth_of(columns["answer"])} | columns
        if "question" in columns:
            return columns | {"prompt": asked(columns["question"])}
        return _untemplated(columns)

    return read_each(rows, "tasks", read, split, count)


def _untemplated(columns: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose prompt a chat template has written already with what that was made of: trainers apply the
    template themselves, once."""
    prompt = columns.get("prompt")
    if not isinstance(prompt, str):
        return columns
    messages = [{"role": role, "content": content} for role, content in MESSAGE.findall(prompt)]
    if [each["role"] for each in messages] == ["user"]:
        return columns | {"prompt": messages[0]["content"]}
    return columns | {"prompt": messages or prompt.strip()}


class GSM8KDataset:
    """Holds a split of GSM8K; items are records of `format_type`."""

    def __init__(
        self, split: str = "train", max_samples: int | None = None, format_type: str = "sft", tokenizer: Any = None
    ) -> None:  # fmt: skip
        self.split, self.max_samples, self.format_type = split, max_samples, format_type
        self.tokenizer = tokenizer
        rows = read_gsm8k(split, max_samples)
        self.dataset = [row.columns for row in rows]
        self._records = format_rows(rows, format_type, tokenizer)

    def format_for_sft(self, example: Mapping[str, Any]) -> dict[str, str]:
        return sft_record(example)

    def format_for_rl(self, example: Mapping[str, Any]) -> dict[str, str]:
        return rl_record(example, self.tokenizer)

    def get_dataset(self) -> Any:
        return _dataset(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self._records[index]


def create_math_dataset(
    dataset_name: str = "gsm8k", split: str = "train", max_samples: int | None = None, format_type: str = "sft",
    tokenizer: Any = None,
) -> Any:  # fmt: skip
    """Return GSM8K as a `datasets.Dataset`; ValueError for another name."""
    if dataset_name not in NAMES:
        raise ValueError(
            f"there is no dataset {dataset_name!r}; there is gsm8k (see also format_math_dataset)"
        )
    return GSM8KDataset(split, max_samples, format_type, tokenizer).get_dataset()


def create_sft_dataset(max_samples: int | None = 1000, split: str = "train") -> Any:
    return create_math_dataset("gsm8k", split, max_samples, "sft")


def create_rl_dataset(
    max_samples: int | None = 500, split: str = "train", model_name: str | None = None
) -> Any:
    """Return tasks of GSM8K, written by the chat template of `model_name`; without one the prompts are plain text, and
    the trainer writes them by the template of the model that it trains."""
    return create_math_dataset("gsm8k", split, max_samples, "rl", tokenizer_of(model_name))


def format_math_dataset(dataset: Any, format_type: str = "sft", model_name: str | None = None) -> Any:
    """Return a dataset with `question` and `answer` in the records of `format_type`."""
    tokenizer = tokenizer_of(model_name) if format_type == "rl" else None
    return _dataset(format_rows(dataset, format_type, tokenizer))


def preview_dataset(dataset: Any, num_samples: int = 3) -> None:
    """Print the first records, each value cut after 200 characters."""
    for number in range(min(num_samples, len(dataset))):
        print(f"--- {number + 1} / {len(dataset)}")
        for key, value in dataset[number].items():
            text = str(value)
            print(f"{key}: {text[:200]}{'...' if len(text) > 200 else ''}")


def tokenizer_of(model_name: str | None) -> Any:
    if model_name is None:
        return None
    from TrainingFactory.models.loading import load_tokenizer
    from TrainingFactory.resolve.model_names import find_model

    return load_tokenizer(find_model(model_name).name)


def _dataset(records: list[dict]) -> Any:
    import datasets

    return datasets.Dataset.from_list(records)
