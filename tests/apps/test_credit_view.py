"""Episodes coloured by what they were paid: the figures are those that training uses, and nobody's text is obeyed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.kits.algorithm import ALGORITHMS, groups_of
from tests.kits.html_report import HOSTILE, SHOWN, parsed, words
from tests.kits.tokenizers import qwen3
from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.rft import RFT
from TrainingFactory.apps.reports.credit_view import Credit, EpisodeCredit, compute_credit, decode_pieces
from TrainingFactory.cli import credit as printing
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Completion, Message, Reward, Sample, Task, Trajectory, Turn

TOKENIZER = qwen3()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def episode(
    member: int,
    texts: Sequence[str],
    outcome: float | None,
    steps: Sequence[float] = (),
    reply: str = "42",
    **fields: Any,
) -> Trajectory:
    """Every text is a turn; after all but the last a tool replies."""
    prompt, turns = ids("What is it?"), []
    for number, text in enumerate(texts):
        sampled = ids(text)
        message = Message("assistant", text)
        replies = [Message("tool", reply)] if number < len(texts) - 1 else []
        logprobs = [-0.25] * len(sampled)
        turns.append(Turn(list(prompt), Completion(sampled, logprobs, "stop", 7), message, replies))
        prompt += sampled + ids(reply)
    reward = None if outcome is None else Reward(outcome, list(steps))
    asked = [Message("user", "What is it?")]
    return Trajectory(Task("t", "?"), "0/t", member, asked, turns=turns, reward=reward, **fields)


def values(seen: EpisodeCredit) -> list[list[float]]:
    return [turn.values for turn in seen.turns]


def members(credit: Credit) -> list[EpisodeCredit]:
    [group] = credit.groups
    return group.episodes


@pytest.mark.parametrize("name", ["grpo", "grpo-scaled", "grpo-rloo", "ppo-head"])
def test_the_values_are_those_of_the_training_rows(name: str) -> None:
    algorithm, groups = ALGORITHMS[name], groups_of()
    credit = compute_credit([trajectory for group in groups for trajectory in group], algorithm, TOKENIZER)
    assert credit.measure == ("reward" if name == "ppo-head" else "advantage")
    seen, compared = {group.name: group for group in credit.groups}, 0
    for group in groups:
        wanted: list[float] = []
        for row in algorithm.samples(group):
            given = row.rewards if name == "ppo-head" else row.advantages
            wanted += [value for value, used in zip(given, row.loss_mask, strict=True) if used]
        shown = seen[group[0].group].episodes
        found = [value for each in shown for turn in each.turns for value in turn.values]
        assert found == pytest.approx(wanted, rel=1e-6)
        compared += len(found)
        for each, trajectory in zip(shown, group, strict=True):
            assert each.trajectory == trajectory
            for turn in each.turns:  # nothing but what was sampled, all of it
                assert [n for piece in turn.pieces for n in piece.token_ids] == turn.turn.completion.token_ids
    assert compared > 100
    largest = [group.max_value for group in credit.groups]
    assert largest == sorted(largest, reverse=True)


def test_credit_by_turn_and_by_trajectory() -> None:
    group = [episode(0, ["ask", "guess"], 1.0, [0.5, 0.0]), episode(1, ["ask", "guess"], 0.0, [0.5, -0.5])]
    by_turn = members(compute_credit(group, GRPO(), TOKENIZER))
    # to go, from the first turn on: 1.5 and 0, so +-0.75; from the second on: 1 and -0.5, so the same
    assert values(by_turn[0]) == [[0.75] * 3, [0.75] * 5] and values(by_turn[1]) == [[-0.75] * 3, [-0.75] * 5]
    group[1] = episode(1, ["ask", "guess"], 0.0, [-0.5, 0.5])  # 0 in all; 0.5 from the second turn on
    by_turn = members(compute_credit(group, GRPO(), TOKENIZER))
    assert [turn.values[0] for turn in by_turn[0].turns] == [0.75, 0.25]
    assert by_turn[1].turns[0].list_labels("advantage") == ["step reward -0.50", "advantage -0.75"]
    assert by_turn[1].turns[1].list_labels("advantage") == ["step reward +0.50", "advantage -0.25"]
    whole = members(compute_credit(group, GRPO(credit="trajectory"), TOKENIZER))
    assert [turn.values[0] for turn in whole[0].turns] == [0.75, 0.75]
    assert group[0].turns[0].completion.policy_version == 7  # as they were


def test_what_length_costs_is_in_the_total() -> None:
    group = [episode(0, ["ask"], 0.0), episode(1, ["ask " * 12], 0.0)]
    costly = GRPO(overlong_length=10, overlong_buffer=5, overlong_penalty=2.0)
    short, long = members(compute_credit(group, costly, TOKENIZER))
    assert short.reward == 0.0 and long.reward == -2.0
    assert short.turns[0].values[0] == 1.0 and long.turns[0].values[0] == -1.0
    assert group[1].reward == Reward(0.0)  # as it was


def test_what_takes_all_groups_of_a_step() -> None:
    first = [episode(0, ["a"], 1.0), episode(1, ["bbb"], 0.0)]
    second = [episode(0, ["a"], 5.0), episode(1, ["bb"], 0.0)]
    for trajectory in second:
        trajectory.group = "0/u"
    credit = compute_credit([*first, *second], GRPO(advantage="reinforce_plus_plus_baseline"), TOKENIZER)
    plain = np.array([0.5, *[-0.5] * 3, 2.5, -2.5, -2.5])
    wanted = (plain - plain.mean()) / plain.std()
    seen = {
        group.name: [v for e in group.episodes for vs in values(e) for v in vs] for group in credit.groups
    }
    assert [*seen["0/t"], *seen["0/u"]] == pytest.approx(wanted, rel=1e-5)
    assert credit.groups[0].name == "0/u" and credit.max_value == pytest.approx(abs(wanted).max(), rel=1e-5)


def test_rft_shows_what_was_kept() -> None:
    # The same words three times: only the reward and the order say which one is kept.
    group = [episode(0, ["a", "bb"], 0.0), episode(1, ["a", "bb"], 1.0), episode(2, ["a", "bb"], 1.0)]
    credit = compute_credit(group, RFT(threshold=1.0), TOKENIZER)
    left_out = [each.untrained_reason for each in members(credit)]
    assert credit.measure == "weight" and [each is None for each in left_out] == [False, True, False]
    assert values(members(credit)[1]) == [[1.0], [1.0, 1.0]] and values(members(credit)[0]) == [[], []]
    assert members(credit)[0].turns[0].list_labels("weight") == ["not trained"]


def test_ppo_shows_rewards_and_says_what_is_missing() -> None:
    credit = compute_credit([episode(0, ["ab", "cde"], 1.0, [0.5, 0.25])], PPO(), TOKENIZER)
    assert values(members(credit)[0]) == [[0.0, 0.5], [0.0, 0.0, 1.25]]
    assert members(credit)[0].turns[1].list_labels("reward") == ["step reward +0.25", "reward +1.25"]
    assert "critic" in credit.notes[0]


def test_why_an_episode_is_not_trained() -> None:
    group = [
        episode(0, ["a"], 1.0),
        episode(1, ["a"], None, error="the judge is silent"),
        episode(2, ["a"], 0.5, status="truncated"),
        episode(3, [], 0.0),
        episode(4, ["a"], 0.0),
    ]
    seen = members(compute_credit(group, GRPO(train_truncated=False), TOKENIZER))
    reasons = [None, "the judge is silent", "train_truncated is false", "no turn", None]
    for each, reason in zip(seen, reasons, strict=True):
        assert each.untrained_reason is None if reason is None else reason in (each.untrained_reason or "")
    assert [each.reward for each in seen] == [1.0, None, 0.5, 0.0, 0.0]
    same = members(compute_credit([episode(n, ["a"], 1.0) for n in range(2)], GRPO(), TOKENIZER))
    assert all("the same reward" in (each.untrained_reason or "") for each in same)
    assert compute_credit([], GRPO(), TOKENIZER).groups == []


@dataclass
class Rising(BaseAlgorithm):
    """A user's own algorithm: the advantage grows from token to token, and the first token of all is not trained."""

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        rows = [row for trajectory in group for row in to_samples(trajectory)]
        for row in rows:
            trained = [place for place, used in enumerate(row.loss_mask) if used]
            row.loss_mask[trained[0]] = False
            for number, place in enumerate(trained):
                row.advantages[place] = float(number)
        return rows

    def prepare(self, batches: Sequence[Any], step: int, total: Any = dict) -> None:
        raise AssertionError("needs a model")

    def loss(self, batch: Any, /) -> Any: ...


def test_differences_within_a_turn_are_shown() -> None:
    credit = compute_credit([episode(0, ["abc", "d"], 1.0)], Rising(), TOKENIZER)
    [seen] = members(credit)
    assert [piece.value for piece in seen.turns[0].pieces] == [None, 1.0, 2.0] and values(seen)[1] == [3.0]
    assert seen.turns[0].list_labels("advantage") == ["advantage +1.50 on average (+1.00 to +2.00)"]
    assert [credit.get_shade(value) for value in (None, 0.0, 0.001, 1.5, 3.0, -3.0)] == [0, 0, 1, 4, 8, -8]


def test_characters_of_several_tokens_stay_whole() -> None:
    text = "é 天気 🙂!<|im_end|>"
    parts = list(decode_pieces(ids(text), TOKENIZER.decode))
    assert [part for *_, part in parts] == ["é", " ", "天", "気", " ", "🙂", "!", "<|im_end|>"]
    assert [end - start for start, end, _ in parts] == [2, 1, 3, 3, 1, 4, 1, 1]
    assert parts[0][0] == 0 and all(one[1] == other[0] for one, other in pairwise(parts))
    half = ids("a🙂")[:-2]  # cut by a length limit
    assert [part for *_, part in decode_pieces(half, TOKENIZER.decode)] == ["a", "\ufffd"]
    group = [episode(0, ["🙂"], 1.0), episode(1, ["x"], 0.0)]
    [piece] = members(compute_credit(group, GRPO(), TOKENIZER))[0].turns[0].pieces
    assert piece.text == "🙂" and piece.values == [0.5] * 4 and len(piece.logprobs) == 4


def test_blanks_of_tokenizers_that_strip_the_first() -> None:
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    assert words.decode([1]) == "cat"
    assert [part for *_, part in decode_pieces([0, 1, 2, 1], words.decode)] == ["the", " cat", "s", " cat"]


# pages and terminals


def hostile() -> Credit:
    plain = HOSTILE.replace("\x1b", "").replace("\u202e", "")
    group = [episode(0, [HOSTILE, plain], 1.0, reply=HOSTILE), episode(1, ["no"], None, error=HOSTILE)]
    group += [episode(2, ["é"], 0.0)]
    group[0].task.id = group[0].prompt[0].content = HOSTILE
    assert group[0].reward is not None
    group[0].reward.parts = {HOSTILE: 1.0}
    return compute_credit(group, GRPO(), TOKENIZER)


def test_the_page_is_well_formed_and_obeys_nobody() -> None:
    root = parsed(hostile().page(HOSTILE))
    assert {link.attrib["href"] for link in root.iter("a")} == {"#g0"}
    assert not any("style" in element.attrib for element in root.iter())
    # title, heading, table, task, prompt, parts, both turns, the tool's reply, the error
    assert words(root).count(SHOWN) == 10


def test_the_page_colours_what_was_sampled_and_nothing_else() -> None:
    group = [episode(0, ["ab", "c"], 1.0, reply="REPLY"), episode(1, ["é"], 0.0)]
    root = parsed(compute_credit(group, GRPO(), TOKENIZER).page("x"))
    spans = [span for span in root.iter("span") if "title" in span.attrib]
    assert [(span.text, span.attrib["class"]) for span in spans] == [
        ("a", "p8"), ("b", "p8"), ("c", "p8"), ("é", "n8")
    ]  # fmt: skip
    assert spans[0].attrib["title"] == f"'a', token {ids('a')[0]}, log-prob -0.2500, advantage +0.5000"
    assert spans[3].attrib["title"].count("advantage -0.5000") == 2  # of both tokens
    texts = ["".join(part.itertext()) for part in root.iter("p")]
    assert "tool REPLY" in texts and "turn 1: advantage +0.50" in texts and "reward 1" in texts
    style = root.findtext("head/style") or ""
    assert "color-scheme: light dark" in style and ".p8 {" in style and ".n8 {" in style


def test_a_terminal_with_and_without_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    group = [episode(0, ["ab", "c"], 1.0, reply="REPLY"), episode(1, ["d"], 0.0, error=None)]
    credit = compute_credit(group, GRPO(), TOKENIZER)
    printing.print_groups(credit, credit.groups)
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert re.search(r"turn 1 +advantage \+0.50", plain) and re.search(r"turn 1 +advantage -0.50", plain)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    printing.print_groups(credit, credit.groups)
    styled = capsys.readouterr().out
    ground = re.findall(r"\x1b\[[\d;]*48;2;([\d;]+)m([^\x1b]*)\x1b", styled)
    assert ground == [("64;190;100", "a"), ("64;190;100", "b"), ("64;190;100", "c"), ("245;95;95", "d")]
    monkeypatch.setenv("NO_COLOR", "1")
    printing.print_groups(credit, credit.groups)
    assert not re.search(r"\x1b\[[\d;]*[34]8;", capsys.readouterr().out)
    printing.print_groups(hostile(), hostile().groups)
    assert "\x1b[31m" not in capsys.readouterr().out
