"""`tfactory data`: recorded episodes become rows that teach the very same tokens; filters; showing and checking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_data_recorded import in_tokens, rows
from tests.kits.cli import Run
from tests.kits.data import loaded, played, tool_dialogues, write
from TrainingFactory.algorithms.preferences import pick_best_and_worst
from TrainingFactory.data.convert import Filters, Layout, convert, to_swift_row
from TrainingFactory.data.datasets import read_rows
from TrainingFactory.data.examples import Form, load_examples
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.training.dataset import find_call_problem
from TrainingFactory.types import Message, Reward, Trajectory


def saved(folder: Path, episodes: list[Trajectory]) -> Path:
    save_trajectories(folder / "t.jsonl", episodes)
    return folder / "t.jsonl"


REWARDS = [Reward(1.0, [0.5, 0.0, 0.5]), Reward(0.0, [0.0, 0.5, 0.0])]


TRL_FORMS: list[Form] = ["sft", "kto", "prm", "dpo", "rm"]


@pytest.mark.parametrize(
    ("form", "layout"),
    [*((form, "trl") for form in TRL_FORMS), ("sft", "swift"), ("kto", "swift")],
)
def test_rows_teach_the_tokens_of_the_episodes(tmp_path: Path, form: Form, layout: Layout) -> None:
    """With tool calls in them; and what is good and bad is the same too."""
    path = saved(tmp_path, played(3, REWARDS))
    made = convert(read_rows(path), form)
    assert made.num_read == 6 and len(made.rows) == (3 if form in ("dpo", "rm") else 6) and not made.dropped
    assert not any("token" in json.dumps(row) for row in made.rows)
    write(tmp_path / "rows.jsonl", made.rows if layout == "trl" else [to_swift_row(row) for row in made.rows])
    chat = loaded()[2]
    there = in_tokens(load_examples(tmp_path / "rows.jsonl", form, check_call=find_call_problem), form, chat)
    here = in_tokens(path, form, chat)
    assert len(there) == len(here)
    assert any(turn.message.tool_calls for turn in there.group(0)[0].turns)
    for number in range(len(here)):
        assert rows(there.group(number)) == rows(here.group(number))
        for one, other in zip(there.group(number), here.group(number), strict=True):
            assert one.reward is not None or form == "sft"
            if form == "prm" and one.reward and other.reward:
                assert one.reward.steps == [1.0 if step > 0 else -1.0 for step in other.reward.steps]
            elif form == "kto" and one.reward and other.reward:
                assert one.reward.outcome == float(other.reward.outcome > 0.5)
    if form == "dpo":
        assert all(row["margin"] == 1.5 for row in made.rows)


def test_shared_turns_of_forked_episodes_are_announced(tmp_path: Path) -> None:
    root, child = played(1, REWARDS)
    assert convert(read_rows(saved(tmp_path, [root, child])), "sft").note is None
    child.parent, child.fork_turn = root.member, 1
    made = convert(read_rows(saved(tmp_path, [root, child])), "sft")
    assert len(made.rows) == 2 and made.note is not None and "1 episodes were forked" in made.note


def test_folded_episodes_are_skipped_counted_and_announced(tmp_path: Path) -> None:
    plain, folded = played(1, REWARDS)
    folded.turns[1].fold = "window"
    made = convert(read_rows(saved(tmp_path, [plain, folded])), "sft")
    assert len(made.rows) == 1 and made.dropped == {"was folded": 1}
    assert made.note is not None and "1 folded episodes were skipped" in made.note


def test_answers_in_a_prompt_stay_a_prompt(tmp_path: Path) -> None:
    (episode,) = played(1, [Reward(1.0)])
    episode.prompt += [Message("assistant", "Yes?"), Message("user", "Go on.")]
    (row,) = convert(read_rows(saved(tmp_path, [episode])), "sft").rows
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "user"][
        -len(row["prompt"]) :
    ]
    (found,) = load_examples([row], "sft").usable
    assert found.conversations[0].start == len(episode.prompt)


def test_filters(tmp_path: Path) -> None:
    episodes = played(3, [Reward(1.0), Reward(0.2), Reward(0.4), None])
    episodes[0].status = "max_turns"
    episodes[1].status = "error"
    episodes[4].turns[-1].completion.finish = "length"
    episodes[5].turns[0].message.tool_calls[0].error = "not JSON"
    path = saved(tmp_path, episodes)

    def kept(to: Form, **options: Any) -> tuple[int, dict[str, int]]:
        made = convert(read_rows(path), to, Filters(**options))
        assert made.num_read == 12
        return len(made.rows), {why: count for why, count in made.dropped.items() if count}

    always = {"ended with status error": 1, "has an unparsable call": 1}
    assert kept("sft") == (10, always)  # the cut one without its last turn
    assert kept("kto") == (6, always | {"was truncated": 1, "have no reward": 3})
    assert kept("sft", min_reward=1.0) == (3, {"ended with status error": 1, "--min-reward": 8})
    assert kept("sft", max_reward=0.4)[1]["--max-reward"] == 6
    assert kept("sft", status=["max_turns"]) == (1, {"ended with status error": 1, "--status": 10})
    assert kept("sft", tasks=["search-0-*"])[0] == 10 and kept("sft", tasks=["x-*"])[0] == 0
    assert kept("sft", max_per_task=1) == (3, always | {"--max-per-task": 7})
    assert kept("sft", dedupe=True) == (8, always | {"--dedupe": 2})  # of a task, two episodes say the same
    # pairs: of the first task 1.0 against 0.4, whose texts are the same; nothing is left of the second's best
    assert kept("dpo")[0] == 1
    assert kept("dpo", min_margin=0.9)[1]["pair: --min-margin"] == 1
    first, second, again = (
        [row["id"] for row in convert(read_rows(path), "sft", Filters(max_per_task=1, seed=seed)).rows]
        for seed in (0, 5, 0)
    )
    assert first == again != second


def test_turns_are_good_over_the_threshold(tmp_path: Path) -> None:
    """Where 0 is fine and penalties are negative, it lies between them."""
    path = saved(tmp_path, played(1, [Reward(1.0, [0.0, -1.0, 0.0])]))
    made = convert(read_rows(path), "prm")
    assert made.rows[0]["labels"] == [False] * 3
    assert made.note is not None and "all 3 labels are negative at --threshold 0" in made.note
    assert "from -1 to 0" in made.note
    made = convert(read_rows(path), "prm", Filters(threshold=-0.5))
    assert made.rows[0]["labels"] == [True, False, True] and made.note is None
    made = convert(read_rows(path), "kto", Filters(threshold=-0.5))  # 0 in all
    assert made.rows[0]["label"] is True and made.note is not None
    assert convert(read_rows(path), "kto").rows[0]["label"] is False


def test_what_is_a_pair_is_the_same_everywhere(tmp_path: Path) -> None:
    """Rewards that differ by rounding only are equal: to the filters, to the reader, and to the algorithms."""
    group = played(1, [Reward(0.1, [0.2]), Reward(0.3)])
    assert pick_best_and_worst(group) is None
    path = saved(tmp_path, group)
    assert convert(read_rows(path), "dpo").dropped == {"pair: equal rewards or completions": 1}
    with pytest.raises(ValueError, match="equal rewards"):
        load_examples(path, "dpo")


def test_the_command(tmp_path: Path, tfactory: Run) -> None:
    source, out = saved(tmp_path, played(2, REWARDS)), tmp_path / "sft.jsonl"
    status, shown, said = tfactory("data", "convert", source, "--to", "sft", "--out", out, "--min-reward", 1)
    assert status == 0 and "--min-reward  2 " in shown and "saved 2 rows" in said
    row = json.loads(out.read_text().splitlines()[0])
    assert row["messages"][-1]["role"] == "assistant" and row["tools"][0]["function"]["name"] == "search"
    assert row["reward"] == 2.0
    status, _, said = tfactory("data", "convert", source, "--to", "sft", "--out", out)
    assert status == 2 and str(out) in "".join(said.split()) and "--force" in said
    assert (
        tfactory("data", "convert", source, "--to", "dpo", "--out", out, "--force", "--format", "swift")[0]
        == 0
    )
    assert "rejected_messages" in json.loads(out.read_text().splitlines()[0])
    assert tfactory("data", "convert", source, "--to", "dpo", "--out", out, "--force")[0] == 0
    assert json.loads(out.read_text().splitlines()[0])["margin"] == 1.5
    options = ("--to", "sft", "--out", tmp_path / "x")
    status, _, said = tfactory("data", "convert", source, *options, "--tasks", "no")
    assert status == 1 and "sft" in said and not (tmp_path / "x").exists()
    status, _, said = tfactory("data", "convert", "nothing", *options)
    assert status == 2 and "no run 'nothing'" in said


def test_show_and_check(tmp_path: Path, tfactory: Run) -> None:
    good = write(tmp_path / "good.jsonl", [row | {"label": True} for row in tool_dialogues(3)])
    status, shown, _ = tfactory("data", "show", good, "--rows", 1)
    assert status == 0 and "fits     sft, kto" in shown
    assert "look" in shown and "Where is town 0?" in shown and "town 1?" not in shown
    assert "dpo needs" in shown
    status, shown, _ = tfactory("data", "check", good, "--for", "sft")
    assert status == 0 and "3 examples for sft" in shown
    bad = write(tmp_path / "bad.jsonl", [*tool_dialogues(2), *[{"messages": []}] * 12])
    status, shown, said = tfactory("data", "check", bad, "--for", "sft")
    assert status == 1 and "rows  12" in shown and said.count('has an empty "messages"') == 12
    status, _, said = tfactory("data", "check", good, "--for", "reward_model")
    assert status == 2 and "line 1 " in said and "rm needs" in said
