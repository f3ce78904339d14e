"""Rows as prefix trees: whatever the rows, each of them is found again on its path."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.learner import ragged_rows
from TrainingFactory.data import packing
from TrainingFactory.data.packing import Pack, make_batch, pack
from TrainingFactory.types import Sample


def row(ids: list[int], mask: list[bool] | None = None, value: float = 0.0) -> Sample:
    size = len(ids)
    mask = [False] + [True] * (size - 1) if mask is None else mask
    return Sample(ids, mask, [value] * size, [value + 1] * size, [value + 2] * size, list(range(size)))


def path_to(tree: Pack, flat: int) -> list[int]:
    """The tokens that the token at a place sees, itself included."""
    number = next(n for n, node in enumerate(tree.nodes) if node.start <= flat < node.start + node.length)
    node = tree.nodes[number]
    tokens = tree.token_ids[node.start : flat + 1].tolist()
    while node.parent >= 0:
        above = tree.nodes[node.parent]
        assert node.level == above.level + 1 and node.depth == above.depth + above.length
        node = above
        tokens = tree.token_ids[node.start : node.start + node.length].tolist() + tokens
    assert node.level == node.depth == 0
    return tokens


def check(rows: list[Sample], packs: list[Pack]) -> None:
    """Every trained token stands once, with its own values, behind the tokens it was sampled after."""
    found = []
    for tree in packs:
        assert [node.start for node in tree.nodes] == [
            sum(node.length for node in tree.nodes[:number]) for number in range(len(tree.nodes))
        ]
        assert all(node.parent < number for number, node in enumerate(tree.nodes))
        assert tree.row_tokens == sum(len(rows[number].token_ids) for number in tree.rows)
        for at in range(len(tree.target)):
            before = path_to(tree, int(tree.source[at]))
            assert tree.positions[tree.source[at]] == len(before) - 1
            values = tree.logprobs[at], tree.advantages[at], tree.rewards[at], tree.versions[at]
            found.append((int(tree.row[at]), before, int(tree.target[at]), *(float(v) for v in values)))
    wanted = [
        (number, one.token_ids[:at], one.token_ids[at], *(float(np.float32(v)) for v in values))
        for number, one in enumerate(rows)
        for at, values in enumerate(
            zip(one.logprobs, one.advantages, one.rewards, one.policy_version, strict=True)
        )
        if one.loss_mask[at]
    ]
    assert sorted(found) == sorted(wanted)


def test_the_docs_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SAVED_TOKENS", 1)
    (tree,) = pack([row([9, 8, 7, 1, 1]), row([9, 8, 7, 2, 2, 2])])
    assert tree.token_ids.tolist() == [9, 8, 7, 1, 1, 2, 2, 2]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert [(node.parent, node.level) for node in tree.nodes] == [(-1, 0), (0, 1), (0, 1)]
    # each row trains 8 7 and its own tail, predicted by the token before it
    assert tree.source.tolist() == [0, 1, 2, 3, 0, 1, 2, 5, 6]
    assert tree.target.tolist() == [8, 7, 1, 1, 8, 7, 2, 2, 2]
    assert tree.row.tolist() == [0] * 4 + [1] * 5
    assert tree.row_tokens == 11


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 150, 400, 100_000])
@pytest.mark.parametrize("sharing", [True, False])
def test_ragged_rows_are_found_again(seed: int, budget: int, sharing: bool) -> None:
    rows = ragged_rows(seed)
    packs = pack(rows, budget, sharing)
    check(rows, packs)
    for tree in packs:
        assert len(tree.token_ids) <= budget or len(tree.rows) == 1
    if sharing and budget == 100_000:
        (tree,) = packs
        assert len(tree.token_ids) < 0.8 * tree.row_tokens
        assert max(node.level for node in tree.nodes) >= 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(1, 6),
)
def test_any_rows(ids: list[list[int]], budget: int, saving: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_SAVED_TOKENS", saving)
        rows = [row(one, value=number) for number, one in enumerate(ids)]
        packs = pack(rows, budget)
        check(rows, packs)
        assert all(len(tree.token_ids) <= budget or len(tree.rows) == 1 for tree in packs)


def test_a_comb_of_many_rows_stays_within_the_budget() -> None:
    """Each row shares ten tokens more with the next than with the one before: deeper than levels go."""
    rng = random.Random(0)
    spine = [rng.randrange(50) for _ in range(400)]
    rows = [row([*spine[: 10 * n], 60 + n % 30, 1]) for n in range(1, 40)]
    packs = pack(rows, 750)
    check(rows, packs)
    assert all(len(tree.token_ids) <= 750 for tree in packs)


def test_order_does_not_matter() -> None:
    rows = ragged_rows(1)
    other = list(range(len(rows)))
    random.Random(5).shuffle(other)
    for left, right in zip(pack(rows, 300), pack([rows[n] for n in other], 300), strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        assert left.nodes == right.nodes


def test_without_sharing_every_row_is_a_node_and_padding_counts() -> None:
    rows = ragged_rows(2)
    packs = pack(rows, 500, sharing=False)
    for tree in packs:
        assert len(tree.nodes) == len(tree.rows) and {node.parent for node in tree.nodes} == {-1}
        padded = len(tree.nodes) * max(node.length for node in tree.nodes)
        assert padded <= 500 or len(tree.nodes) == 1
    assert len(packs) < len(rows)


@pytest.mark.parametrize("seed", range(2))
def test_a_beginning_of_many_rows_is_there_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "COPY_SHARE", 2)
    start = [3] * 40
    rows = [row([*start, *one.token_ids], [False] * 40 + one.loss_mask) for one in ragged_rows(seed)]
    (whole,), (parted,) = pack(rows, 100_000), pack(rows, 100_000, split_above=150)
    check(rows, [parted])
    tops = [number for number, node in enumerate(parted.nodes) if node.parent < 0]
    assert len([node for node in whole.nodes if node.parent < 0]) == 1 < len(tops)
    # Each has more than 150 tokens but the last, and costs no more than its beginning.
    sizes = [parted.nodes[end].start - parted.nodes[first].start for first, end in pairwise(tops)]
    assert min(sizes) > 150
    assert len(parted.token_ids) <= 1.5 * len(whole.token_ids)


def test_what_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="row 1 trains its first token"):
        pack([row([1, 2]), row([1, 2], [True, True])])
    batch = make_batch([row([1, 2, 3], [False] * 3), row([4, 5])])
    assert (batch.num_rows, batch.num_tokens, len(batch.packs)) == (1, 1, 1)
    assert make_batch([]).packs == [] and make_batch([row([1, 2], [False, False])]).packs == []
