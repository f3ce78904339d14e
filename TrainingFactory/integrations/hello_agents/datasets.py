"""GSM8K and datasets of its form, as the textbook's records and as what our trainers learn from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from TrainingFactory.data.datasets import FILES, Row, read_each, read_rows

GSM8K = "TFACTORY_GSM8K"  # environment variable: a folder with train.jsonl and test.jsonl
HUB = "openai/gsm8k"
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
SPLIT = re.compile(r"(\w+)(?:\[(\d*):(\d*)\])?")
MESSAGE = re.compile(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>", re.DOTALL)


def read_gsm8k(
    split: str = "train", count: int | None = None, folder: str | Path | None = None
) -> list[dict[str, Any]]:
    """Return rows with `question` and `answer`: of `folder`, or of the one that TFACTORY_GSM8K names, or of the hub.
    `split` is train or test, or a part of it such as train[:1000]."""
    matched = SPLIT.fullmatch(split)
    if matched is None:
        raise ValueError(f"split is {split!r}; it looks like train, test or train[:1000]")
    name, start, stop = matched[1], int(matched[2] or 0), int(matched[3]) if matched[3] else None
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"max_samples is {count!r}; it must be 1 or more, or None for all")
    named = folder or os.environ.get(GSM8K)
    source = _local(Path(named).expanduser(), name) if named else f"{HUB}:main"
    try:
        rows = list(islice(read_rows(source, name), start, stop))
    except ValueError as error:
        if named:
            raise
        raise ValueError(
            f"GSM8K could not be loaded from the hub. Put its train.jsonl and test.jsonl into a folder, and name that "
            f"by the environment variable {GSM8K} or by data.tasks=FOLDER. ({error})"
        ) from error
    return read_each(rows, 'rows with "question" and "answer"', _question, count=count)


def _local(folder: Path, split: str) -> Path:
    if folder.is_file():
        return folder
    places = [*(folder / f"{split}{ending}" for ending in FILES), *folder.glob(f"main/{split}-*.parquet")]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ValueError(
            f"GSM8K: there is no {folder / split}.jsonl; the folder (data.tasks, or {GSM8K}) holds train.jsonl and "
            "test.jsonl"
        )
    return found


def _question(row: Row, number: int) -> dict[str, Any]:
    if missing := [key for key in ("question", "answer") if key not in row.columns]:
        raise ValueError(f"has no {' and no '.join(missing)}; its keys are: {', '.join(row.columns)}")
    return row.columns


def asked(question: str) -> str:
    return f"Question: {question}\n\nLet's solve this step by step:"


def sft_record(row: Mapping[str, Any]) -> dict[str, str]:
    """Return `prompt`, `completion` and `text`; an answer without #### is the final one, without reasoning."""
    reasoning, _, final = str(row["answer"]).rpartition("####")
    prompt = asked(row["question"]) + "\n"
    completion = f"{reasoning.strip()}\n\nFinal Answer: {final.strip()}".lstrip()
    return {"prompt": prompt, "completion": completion, "text": prompt + completion}


def rl_record(row: Mapping[str, Any], tokenizer: Any = None) -> dict[str, str]:
    """Return `question`, `prompt` (as the chat template writes it), `ground_truth` and `full_answer`."""
    prompt = asked(row["question"])
    if tokenizer is not None:
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    answer = str(row["answer"])
    truth = answer.rpartition("####")[2].strip()
    return {"question": row["question"], "prompt": prompt, "ground_truth": truth, "full_answer": answer}


def format_rows(rows: Iterable[Mapping[str, Any]], format_type: str, tokenizer: Any = None) -> list[dict]:
    """Return the rows as records of the format `sft` or `rl`."""
    if format_type not in ("sft", "rl"):
        raise ValueError(f"format is {format_type!r}; it must be sft or rl")
    return [sft_record(row) if format_type == "sft" else rl_record(row, tokenizer) for row in rows]


def examples(rows: Any, split: str = "train", count: int | None = None) -> list[dict[str, Any]]:
    """Return rows for the trainers that learn from dialogues: questions with answers become prompts with completions,
    under the same prompt that is sampled from later; others stay what they are."""

    def read(row: Row, number: int) -> dict[str, Any]:
        columns = row.columns
        if {"question", "answer"} <= columns.keys() and not {
            "completion",
            "messages",
            "chosen",
        } & columns.keys():
            columns = sft_record(columns)
        prompt = columns.get("prompt")
        return columns | ({"prompt": _untemplated(prompt)} if isinstance(prompt, str) else {})

    return read_each(rows, "examples", read, split, count)


def tasks(rows: Any, split: str = "train", count: int | None = None) -> list[dict[str, Any]]:
    """Return rows for the trainers that sample: the question as the user's text, all columns for the reward."""

    def read(row: Row, number: int) -> dict[str, Any]:
        columns = dict(row.columns)
        if "question" in columns:
            columns["prompt"] = asked(columns["question"])
        elif isinstance(columns.get("prompt"), str):
            columns["prompt"] = _untemplated(columns["prompt"])
        if "ground_truth" not in columns and "answer" in columns:
            columns["ground_truth"] = str(columns["answer"]).rpartition("####")[2].strip()
        return columns

    return read_each(rows, "tasks", read, split, count)


def _untemplated(prompt: str) -> Any:
    """Return a prompt that a chat template has written already as what it was made of: trainers apply the template
    themselves, once."""
    found = MESSAGE.findall(prompt)
    if not found:
        return prompt.strip()
    messages = [{"role": role, "content": content} for role, content in found]
    return messages[0]["content"] if [each["role"] for each in messages] == ["user"] else messages


class GSM8KDataset:
    """Holds a split of GSM8K; items are records of `format_type`."""

    def __init__(
        self,
        split: str = "train",
        max_samples: int | None = None,
        format_type: str = "sft",
        tokenizer: Any = None,
    ) -> None:
        self.split, self.max_samples, self.format_type = split, max_samples, format_type
        self.tokenizer = tokenizer
        self.dataset = read_gsm8k(split, max_samples)
        self._records = format_rows(self.dataset, format_type, tokenizer)

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
    dataset_name: str = "gsm8k",
    split: str = "train",
    max_samples: int | None = None,
    format_type: str = "sft",
    tokenizer: Any = None,
) -> Any:
    """Return GSM8K as a `datasets.Dataset`; ValueError for another name."""
    if dataset_name not in ("gsm8k", HUB):
        raise ValueError(
            f"there is no dataset {dataset_name!r}; there is gsm8k (see also format_math_dataset)"
        )
    return GSM8KDataset(split, max_samples, format_type, tokenizer).get_dataset()


def create_sft_dataset(max_samples: int | None = 1000, split: str = "train") -> Any:
    return create_math_dataset("gsm8k", split, max_samples, "sft")


def create_rl_dataset(
    max_samples: int | None = 500, split: str = "train", model_name: str = DEFAULT_MODEL
) -> Any:
    return create_math_dataset("gsm8k", split, max_samples, "rl", _tokenizer(model_name))


def format_math_dataset(dataset: Any, format_type: str = "sft", model_name: str = DEFAULT_MODEL) -> Any:
    """Return a dataset with `question` and `answer` in the records of `format_type`."""
    rows = read_each(dataset, 'rows with "question" and "answer"', _question)
    return _dataset(format_rows(rows, format_type, _tokenizer(model_name) if format_type == "rl" else None))


def preview_dataset(dataset: Any, num_samples: int = 3) -> None:
    """Print the first records, each value cut after 200 characters."""
    for number in range(min(num_samples, len(dataset))):
        print(f"--- {number + 1} / {len(dataset)}")
        for key, value in dataset[number].items():
            text = str(value)
            print(f"{key}: {text[:200]}{'...' if len(text) > 200 else ''}")


def _tokenizer(model_name: str) -> Any:
    from TrainingFactory.models.loading import load_tokenizer

    return load_tokenizer(model_name)


def _dataset(records: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(records)
