"""The procedural tasks of reasoning-gym as environments: `reasoning_gym/chain_sum`.

The package makes the questions and scores the answers. A scorer is tried with junk before it is trusted, and what a
model wrote never reaches one that evaluates text unless it is plain arithmetic; docs/BENCHMARKS.md says it in full.
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
from itertools import count as endlessly
from itertools import islice
from typing import Any, ClassVar

from TrainingFactory.common.arithmetic import calculate
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.builtin.splits import belongs
from TrainingFactory.protocols import Episode
from TrainingFactory.types import Reward, Task

log = logging.getLogger(__name__)
CHUNK = 500  # entries of one dataset object: some make all of them when they are made
SPAN = 2**20  # between the first numbers of two seeds: an entry is made from its number alone
MAX_MISSES = 1000  # questions in a row that belong to the other split
PROBES = 8  # entries that a scorer is tried on
MOST_FOR_JUNK = 0.2  # mean reward: the answer of another task may be right by chance, or alike
WORDS = "river stone lamp Tuesday quickly seven"
EVALUATORS = {"eval", "exec", "parse_expr", "parse_latex", "sympify"}  # the last three are sympy's, over eval


class ReasoningGymEnvironment(ToolEnvironment):
    """One question, answered in words; a subclass is made for each dataset of the package."""

    system_prompt = "Give the final answer between <answer> and </answer>."
    dataset: ClassVar[str]
    partial: ClassVar[bool]  # what is nearly right gets the part of 1 that the scorer gives
    exact: ClassVar[bool]  # the scorer is not trusted

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        return islice(_tasks(cls.dataset, split, seed), count)

    def reward(self, episode: Episode) -> Reward:
        """Return 1 if the package's scorer gives full marks, else 0; what it raises leaves the episode unscored."""
        number = self.task.metadata.get("number")
        if not isinstance(number, int):
            raise ValueError(f"task {self.task.id} is none that reasoning_gym/{self.dataset} has made")
        score = _score(self.dataset, final_answer(episode.trajectory.answer), number, self.exact)
        return Reward(score if self.partial else float(score >= 1), parts={"score": score})


@cache
def environment(name: str) -> type[ReasoningGymEnvironment]:
    """Return the environment of one dataset of the package, whose scorer has been tried: `chain_sum`, or
    `chain_sum/partial`."""
    dataset, slash, kind = name.partition("/")
    known = _datasets()
    if dataset not in known:
        hint = did_you_mean(nearest(dataset, known))
        raise ValueError(
            f"reasoning-gym has no dataset {dataset!r}{hint} (it has {', '.join(sorted(known))})"
        )
    if slash and kind != "partial":
        raise ValueError(f"there is no environment reasoning_gym/{name}; did you mean {dataset}/partial?")
    fault = _fault(dataset, partial=bool(kind))
    if fault and not all(_answer_of(_entry(dataset, number)) for number in range(PROBES)):
        raise ValueError(
            f"reasoning_gym/{name} is refused: its scorer {fault}, and it has no answers to compare with instead"
        )
    if fault:
        log.warning("reasoning_gym/%s: its scorer %s; answers are compared exactly instead", name, fault)
    members = {"dataset": dataset, "partial": bool(kind), "exact": fault is not None}
    return type(f"reasoning_gym/{name}", (ReasoningGymEnvironment,), members)


def final_answer(text: str) -> str:
    """Return what stands in the last <answer> tag, or the whole text where there is none."""
    return (re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [text])[-1].strip()


def _tasks(name: str, split: str, seed: int) -> Iterator[Task]:
    first = (2 * seed + (split == "heldout")) * SPAN % 2**31  # numpy's seeds end at 2**32
    misses = 0
    for number in endlessly(first):
        entry = _entry(name, number)
        # Seeds alone do not part the splits: some datasets draw from few questions.
        if belongs(entry["question"], split):
            misses = 0
            yield Task(f"{name}-{number}", entry["question"], entry["answer"], {"number": number})
        elif (misses := misses + 1) == MAX_MISSES:
            raise ValueError(f"reasoning_gym/{name} has too few questions for a split {split!r}")


def _score(name: str, text: str, number: int, exact: bool) -> float:
    entry = _entry(name, number)
    if exact or not harmless(text, _evaluators(name)):
        return float(bool(text) and text == _answer_of(entry))
    return float(_dataset(name, number // CHUNK).score_answer(text, entry))


def _answer_of(entry: dict[str, Any]) -> str:
    return "" if entry["answer"] is None else str(entry["answer"]).strip()


def _fault(name: str, partial: bool) -> str | None:
    """Return what the scorer does wrong when it is tried with junk and with the right answers; None: nothing."""
    entries = [_entry(name, number) for number in range(PROBES)]
    answers = [_answer_of(entry) for entry in entries]
    others = [
        next((other for other in answers[i:] + answers if other != answers[i]), "") for i in range(PROBES)
    ]
    # Where 0 is in the right answer it is no junk, nor is anything that happens to be right.
    zeros = [answer if re.search(r"(?<![\d.])0(\.0+)?(?![\d.])", answer) else "0" for answer in answers]
    junk = {
        "an empty text": [""] * PROBES,
        "random words": [WORDS] * PROBES,
        "the question itself": [entry["question"].strip() for entry in entries],
        "the answer of another task": others,
        "a plain 0": zeros,
    }
    for kind, texts in junk.items():
        tried = _tried(name, [None if text == entries[i]["answer"] else text for i, text in enumerate(texts)])
        scores = tried if partial else [float(score >= 1) for score in tried]
        if scores and (mean := sum(scores) / len(scores)) > MOST_FOR_JUNK:
            return f"gives {mean:.2f} of 1 to {kind}"
    right = _tried(name, answers) if all(answers) else [1.0]
    return None if right and min(right) >= 1 else "does not give its own answers full marks"


def _tried(name: str, texts: Sequence[str | None]) -> list[float]:
    """Return the scores of the texts, without those that are None and those on which the scorer raises: such an episode
    is unscored, which rewards nothing."""
    scores = []
    for number, text in enumerate(texts):
        with suppress(Exception):  # foreign code
            scores += [] if text is None else [_score(name, text, number, exact=False)]
    return scores


@cache
def _evaluators(name: str) -> set[str]:
    """Return what the file of a dataset calls that runs text as code; functions of its own are none."""
    tree = ast.parse(inspect.getsource(sys.modules[_datasets()[name].__module__]))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {func.id for func in called if isinstance(func, ast.Name)} - own
    return EVALUATORS & (names | {func.attr for func in called if isinstance(func, ast.Attribute)})


def harmless(text: str, evaluators: set[str]) -> bool:
    """Tell text that may be evaluated: plain arithmetic, and for Python's own eval literals and what is no Python."""
    if not evaluators:
        return True
    with suppress(ValueError, ZeroDivisionError, RecursionError):
        calculate(text)
        return True
    if not evaluators <= {"eval", "exec"}:  # sympy reads what stands inside a text once more
        return False
    try:
        ast.literal_eval(text)
    except SyntaxError:  # which eval would raise as well
        return True
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


@cache
def _datasets() -> dict[str, type]:
    try:
        from reasoning_gym.factory import DATASETS  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"environment reasoning_gym/NAME needs the package reasoning-gym ({error}): "
            'pip install "training-factory[gym]"'
        ) from error
    # `composite` mixes others, which it would have to be told.
    return {name: made_of[0] for name, made_of in DATASETS.items() if name != "composite"}


@lru_cache(maxsize=16)
def _dataset(name: str, chunk: int) -> Any:
    from reasoning_gym.factory import create_dataset  # type: ignore[reportMissingImports]

    return create_dataset(name, seed=chunk * CHUNK, size=CHUNK)


@lru_cache(maxsize=4096)
def _entry(name: str, number: int) -> dict[str, Any]:
    """Make the entry of a number, which is the same whenever it is made."""
    return _dataset(name, number // CHUNK)[number % CHUNK]
