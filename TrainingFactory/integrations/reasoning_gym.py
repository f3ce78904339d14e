"""Procedural tasks of reasoning-gym as environments: `reasoning_gym/chain_sum`.

The package generates the questions and scores the answers. Every scorer is first tested with junk answers. A model's
text reaches a scorer that evaluates text only if it is plain arithmetic. Details are in docs/BENCHMARKS.md.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import count as count_from
from itertools import islice
from typing import Any, ClassVar

from TrainingFactory.common.arithmetic import calculate
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.builtin.splits import in_split
from TrainingFactory.protocols import Episode
from TrainingFactory.types import Reward, Task

log = logging.getLogger(__name__)
CHUNK_ENTRIES = 500  # entries per dataset object, because some datasets generate all entries at construction
SEED_STRIDE = 2**20  # entry numbers per seed and split; an entry depends on its number alone
MAX_MISSES = 1000  # consecutive questions of the other split before a task iterator gives up
NUM_PROBES = 8  # entries that a scorer is tested on
MAX_JUNK_REWARD = 0.2  # mean reward; not 0, because the answer of another task may be right by chance
RANDOM_WORDS = "river stone lamp Tuesday quickly seven"
EVAL_NAMES = {"eval", "exec", "parse_expr", "parse_latex", "sympify"}  # the last three: sympy, calls eval


class ReasoningGymEnvironment(ToolEnvironment):
    """One question with a text answer and no tools; each dataset of the package has a subclass."""

    system_prompt = "Give the final answer between <answer> and </answer>."
    dataset: ClassVar[str]
    is_partial: ClassVar[bool]  # reward partially correct answers with the scorer's fraction
    is_exact: ClassVar[bool]  # compare answers exactly, because the scorer failed its test

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        return islice(_generate_tasks(cls.dataset, split, seed), count)

    def reward(self, episode: Episode) -> Reward:
        """Return 1 if the package's scorer gives full marks, else 0. If the scorer raises, the episode is unscored."""
        number = self.task.metadata.get("number")
        if not isinstance(number, int):
            raise ValueError(f"task {self.task.id} is not a task of reasoning_gym/{self.dataset}")
        score = _score_answer(self.dataset, extract_answer(episode.trajectory.answer), number, self.is_exact)
        return Reward(score if self.is_partial else float(score >= 1), parts={"score": score})


@cache
def make_environment_class(name: str) -> type[ReasoningGymEnvironment]:
    """Return the environment of one dataset, `chain_sum` or `chain_sum/partial`, after a test of its scorer."""
    dataset_name, slash, variant = name.partition("/")
    dataset_classes = _load_datasets()
    if dataset_name not in dataset_classes:
        hint = did_you_mean(nearest(dataset_name, dataset_classes))
        known_names = ", ".join(sorted(dataset_classes))
        raise ValueError(f"reasoning-gym has no dataset {dataset_name!r}{hint} (known: {known_names})")
    if slash and variant != "partial":
        raise ValueError(
            f"there is no environment reasoning_gym/{name}; did you mean {dataset_name}/partial?"
        )
    fault = _test_scorer(dataset_name, is_partial=bool(variant))
    if fault and not all(_find_answer(_load_entry(dataset_name, index)) for index in range(NUM_PROBES)):
        raise ValueError(
            f"reasoning_gym/{name} cannot be scored: its scorer {fault}, and it has no answers to compare exactly. "
            "Choose another dataset."
        )
    if fault:
        log.warning("reasoning_gym/%s: its scorer %s; answers are compared exactly instead", name, fault)
    class_members = {"dataset": dataset_name, "is_partial": bool(variant), "is_exact": fault is not None}
    return type(f"reasoning_gym/{name}", (ReasoningGymEnvironment,), class_members)


def extract_answer(text: str) -> str:
    """Return the content of the last <answer> tag, or the whole text if it has none."""
    return (re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [text])[-1].strip()


def _generate_tasks(dataset_name: str, split: str, seed: int) -> Iterator[Task]:
    first_seed = (2 * seed + (split == "heldout")) * SEED_STRIDE % 2**31  # numpy's seeds end at 2**32
    num_misses = 0
    for index in count_from(first_seed):
        entry = _load_entry(dataset_name, index)
        # Different seeds alone do not separate the splits: some datasets draw from few questions.
        if in_split(entry["question"], split):
            num_misses = 0
            yield Task(f"{dataset_name}-{index}", entry["question"], entry["answer"], {"number": index})
        elif (num_misses := num_misses + 1) == MAX_MISSES:
            raise ValueError(
                f"reasoning_gym/{dataset_name} has too few questions for {split!r}. Use fewer tasks."
            )


def _score_answer(dataset_name: str, text: str, index: int, is_exact: bool) -> float:
    entry = _load_entry(dataset_name, index)
    if is_exact or not is_safe_to_evaluate(text, _find_evaluators(dataset_name)):
        return float(bool(text) and text == _find_answer(entry))
    return float(_make_dataset(dataset_name, index // CHUNK_ENTRIES).score_answer(text, entry))


def _find_answer(entry: dict[str, Any]) -> str:
    return "" if entry["answer"] is None else str(entry["answer"]).strip()


def _test_scorer(dataset_name: str, is_partial: bool) -> str | None:
    """Test a scorer with junk and correct answers; return its fault, or None if it passes."""
    entries = [_load_entry(dataset_name, index) for index in range(NUM_PROBES)]
    answers = [_find_answer(entry) for entry in entries]
    wrong_answers = [
        next((answer for answer in answers[i:] + answers if answer != answers[i]), "")
        for i in range(NUM_PROBES)
    ]
    # Correct answers are not junk and are skipped below; so is 0 if the correct answer contains a 0.
    zero_texts = [answer if re.search(r"(?<![\d.])0(\.0+)?(?![\d.])", answer) else "0" for answer in answers]
    junk_texts = {
        "an empty text": [""] * NUM_PROBES,
        "random words": [RANDOM_WORDS] * NUM_PROBES,
        "the question itself": [entry["question"].strip() for entry in entries],
        "the answer of another task": wrong_answers,
        "a plain 0": zero_texts,
    }
    for junk_name, texts in junk_texts.items():
        wrong_texts = [None if text == entries[i]["answer"] else text for i, text in enumerate(texts)]
        scores = _score_probes(dataset_name, wrong_texts)
        if not is_partial:
            scores = [float(score >= 1) for score in scores]
        if scores and (mean := sum(scores) / len(scores)) > MAX_JUNK_REWARD:
            return f"gives {mean:.2f} of 1 to {junk_name}"
    correct_scores = _score_probes(dataset_name, answers) if all(answers) else [1.0]
    return None if correct_scores and min(correct_scores) >= 1 else "does not give its own answers full marks"


def _score_probes(dataset_name: str, texts: Sequence[str | None]) -> list[float]:
    """Score one text per entry; skip None and texts on which the scorer raises, as episodes would be unscored."""
    scores = []
    for index, text in enumerate(texts):
        if text is not None:
            with suppress(Exception):  # foreign code
                scores.append(_score_answer(dataset_name, text, index, is_exact=False))
    return scores


@cache
def _find_evaluators(dataset_name: str) -> set[str]:
    """Return the names in EVAL_NAMES that a dataset's module calls, except functions that the module itself defines."""
    tree = ast.parse(inspect.getsource(sys.modules[_load_datasets()[dataset_name].__module__]))
    defined_names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    callees = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called_names = {func.id for func in callees if isinstance(func, ast.Name)} - defined_names
    return EVAL_NAMES & (called_names | {func.attr for func in callees if isinstance(func, ast.Attribute)})


def is_safe_to_evaluate(text: str, evaluators: set[str]) -> bool:
    """Return whether evaluators can safely run on a text: arithmetic; for eval and exec also literals, invalid code."""
    if not evaluators:
        return True
    with suppress(ValueError, ZeroDivisionError, RecursionError):
        calculate(text)
        return True
    if not evaluators <= {"eval", "exec"}:  # sympy also evaluates the content of string literals
        return False
    try:
        ast.literal_eval(text)
    except SyntaxError:  # eval raises it as well
        return True
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


@cache
def _load_datasets() -> dict[str, type]:
    try:
        from reasoning_gym.factory import DATASETS  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"environment reasoning_gym/NAME needs the package reasoning-gym ({error}). "
            'Run: pip install "training-factory[gym]"'
        ) from error
    # `composite` mixes other datasets and needs a configuration.
    return {name: dataset_class for name, (dataset_class, *_) in DATASETS.items() if name != "composite"}


@lru_cache(maxsize=16)
def _make_dataset(dataset_name: str, chunk_index: int) -> Any:
    from reasoning_gym.factory import create_dataset  # type: ignore[reportMissingImports]

    return create_dataset(dataset_name, seed=chunk_index * CHUNK_ENTRIES, size=CHUNK_ENTRIES)


@lru_cache(maxsize=4096)
def _load_entry(dataset_name: str, index: int) -> dict[str, Any]:
    """Return entry `index` of a dataset; it is deterministic."""
    return _make_dataset(dataset_name, index // CHUNK_ENTRIES)[index % CHUNK_ENTRIES]
