from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from TrainingFactory.data.samples import Span, find_mismatched_samples, to_samples, turn_spans
from TrainingFactory.types import Completion, Message, Sample, Task, Trajectory, Turn


def turn(prompt_ids: list[int], sampled: list[int], version: int = 0) -> Turn:
    logprobs = [-token / 10 for token in sampled]
    return Turn(prompt_ids, Completion(sampled, logprobs, "stop", version), Message("assistant"))


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(Task("t", "p"), "g", turns=list(turns))


def test_turns_merge_into_one_row():
    # P = 1 2 3, A0 = 4 5, E0 = 6 7, A1 = 8
    played = trajectory(turn([1, 2, 3], [4, 5], version=1), turn([1, 2, 3, 4, 5, 6, 7], [8], version=2))
    [row] = to_samples(played, advantages=[0.5, -1.0], rewards=[0.25, 2.0])
    assert row == Sample(
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        loss_mask=[False, False, False, True, True, False, False, True],
        logprobs=[0, 0, 0, -0.4, -0.5, 0, 0, -0.8],
        advantages=[0, 0, 0, 0.5, 0.5, 0, 0, -1.0],
        rewards=[0, 0, 0, 0, 0.25, 0, 0, 2.0],
        policy_version=[1, 1, 1, 1, 1, 2, 2, 2],
    )


@pytest.mark.parametrize(
    ("chosen", "trained"),
    [({"tokens": "last"}, [4, 7]), ({"turns": "last"}, [7]), ({"turns": "last", "tokens": "last"}, [7])],
)
def test_what_is_trained_of_a_row_has_its_own_numbers(chosen: dict, trained: list[int]):
    played = trajectory(turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5, 6, 7], [8]))
    [row] = to_samples(played, advantages=[0.5, -1.0], **chosen)
    assert [place for place, used in enumerate(row.loss_mask) if used] == trained
    everything = [0, 0, 0, -0.4, -0.5, 0, 0, -0.8], [0, 0, 0, 0.5, 0.5, 0, 0, -1.0]
    for found, values in zip((row.logprobs, row.advantages), everything, strict=True):
        assert found == [value if place in trained else 0 for place, value in enumerate(values)]


def test_every_token_keeps_the_version_that_sampled_it():
    """Weights may land within a turn: what is too old, and what is fresh, is told by the token."""
    played = trajectory(turn([1, 2], [3, 4, 5], version=6), turn([1, 2, 3, 4, 5, 9], [7], version=8))
    played.turns[0].completion.versions = [6, 7, 7]
    [row] = to_samples(played)
    assert row.policy_version == [6, 6, 6, 7, 7, 8, 8]


def test_no_answer_makes_a_row_longer_than_all_others():
    """A long answer after a long prompt might not fit anywhere."""
    sizes = {(100, 190): 10, (0, 10): 90, (20, 40): 30}
    made = [trajectory(turn(list(range(*prompt)), [7] * size)) for prompt, size in sizes.items()]
    rows = [row for each in made for row in to_samples(each)]
    # answers move on by one: 90 + 30 and 20 + 90 are over 100, 10 + 10 is not
    assert [len(row.token_ids) for row in find_mismatched_samples(rows)] == [20]


def test_a_new_row_starts_where_a_prompt_does_not_continue():
    # The third turn's prompt has lost token 6: what was sampled before is context there, not trained again.
    played = trajectory(
        turn([1, 2], [3]),
        turn([1, 2, 3, 6], [4]),
        turn([1, 2, 3, 4, 7], [5]),
        turn([1, 2, 3, 4, 7, 5, 8], [9]),
    )
    first, second = to_samples(played, advantages=[1, 2, 3, 4])
    assert first.token_ids == [1, 2, 3, 6, 4]
    assert first.loss_mask == [False, False, True, False, True]
    assert second.token_ids == [1, 2, 3, 4, 7, 5, 8, 9]
    assert second.loss_mask == [False] * 5 + [True, False, True]
    assert second.advantages == [0] * 5 + [3, 0, 4]
    assert turn_spans(played) == [Span(0, 2, 3), Span(0, 4, 5), Span(1, 5, 6), Span(1, 7, 8)]
    # nor does one that is shorter than the row
    first, second = to_samples(trajectory(turn([1, 2], [3, 4]), turn([1, 2, 3], [5])))
    assert first.token_ids == [1, 2, 3, 4] and second.token_ids == [1, 2, 3, 5]


def test_one_value_per_turn():
    with pytest.raises(ValueError, match="is longer"):
        to_samples(trajectory(turn([1], [2])), advantages=[1.0, 2.0])
    assert to_samples(trajectory()) == []


def test_the_trajectory_is_left_alone():
    played = trajectory(turn([1], [2]), turn([1, 2, 3], [4]))
    [row] = to_samples(played)
    row.token_ids.append(99)
    row.logprobs.append(99.0)
    assert played == trajectory(turn([1], [2]), turn([1, 2, 3], [4]))


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.booleans(), IDS, IDS), min_size=1, max_size=5))
def test_every_sampled_token_is_trained_exactly_once(parts: list[tuple[bool, list[int], list[int]]]):
    """Whatever the prompts: the masked tokens are the sampled ones in order, each after the context it was
    sampled in."""
    turns: list[Turn] = []
    for continues, context, sampled in parts:
        before = turns[-1].prompt_ids + turns[-1].completion.token_ids if turns and continues else []
        turns.append(turn(before + context, sampled))
    rows = to_samples(trajectory(*turns))
    trained = [
        (row.token_ids[:at], token, row.logprobs[at])
        for row in rows
        for at, token in enumerate(row.token_ids)
        if row.loss_mask[at]
    ]
    expected = [
        (turn.prompt_ids + turn.completion.token_ids[:at], token, turn.completion.logprobs[at])
        for turn in turns
        for at, token in enumerate(turn.completion.token_ids)
    ]
    assert trained == expected
