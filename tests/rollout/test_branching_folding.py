"""Episodes that fork and fold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.rollout import FakeSampler, call_text, rollout
from TrainingFactory.data.samples import to_samples
from TrainingFactory.rollout.branching import Branching
from TrainingFactory.rollout.folding import Folding

LONG = "x" * 40


def say(session: int, turn: int, prompt: str) -> str:
    """Calls with long results, then the answer; a summary when asked."""
    if prompt.endswith("SUM?"):
        return f"summary of {session}"
    return call_text("echo", text=f"{LONG}{session}.{turn}") if turn < 6 else "ok"


@pytest.mark.parametrize("in_waves", [False, True])
@pytest.mark.parametrize("kind", ["window", "summary"])
def test_a_fork_folds_like_its_parent(kind: Any, in_waves: bool) -> None:
    """Before, at and after the first fold. In waves the parent has ended before the fork begins: what the parent has
    folded since is not in the fork."""
    options: dict[str, Any] = {"template": "SUM?"} if kind == "summary" else {}
    folding = Folding(kind, 300, **options)
    [[plain]] = rollout(say=say, max_turns=10, folding=folding, sampler=FakeSampler(say))
    first = next(number for number, turn in enumerate(plain.turns) if turn.fold)
    for after in range(1, first + 2):
        rules = Branching(at="turns", turns=[after], max_forks=1, in_waves=in_waves)
        [played] = rollout(say=say, max_turns=10, folding=folding, sampler=FakeSampler(say), branching=rules)
        root = played[0]
        for child in played[1:]:
            assert child.status == "done" and child.turns[: child.fork_turn] == root.turns[: child.fork_turn]
            begins, other = child.turns[child.fork_turn], root.turns[child.fork_turn]
            assert (begins.prompt_ids, begins.fold, begins.summary) == (
                other.prompt_ids, other.fold, other.summary
            )  # fmt: skip
            if not in_waves:  # where the fake session of a fork ends with its parent's
                assert len(to_samples(child)) > 1 and any(turn.fold for turn in child.turns)
