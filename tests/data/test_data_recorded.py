"""Datasets in tokens: written once by the model's own chat layer, in groups with rewards; and training on them."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.kits.data import loaded, pairs, played, tool_dialogues, write
from tests.kits.run import Quiet, assert_same_run
from tests.kits.tokenizers import QWEN3, from_wheel
from TrainingFactory.common.openai_format import message_from_dict
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.examples import Examples, Form, load_examples
from TrainingFactory.data.rewriting import UnparsableCallError, rerender
from TrainingFactory.data.samples import to_samples
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.models import chat_format
from TrainingFactory.runs.folder import RunFolder, TrainingReport
from TrainingFactory.trainers.training_run import Training, resume
from TrainingFactory.training.tokenized_dataset import TokenizedDataset
from TrainingFactory.types import Message, Reward, Trajectory


def in_tokens(
    source: Any, form: Form = "sft", chat: Any = None, limit: int = 4096, **options: Any
) -> TokenizedDataset:
    examples = source if isinstance(source, Examples) else load_examples(source, form, **options)
    return TokenizedDataset(examples, chat or loaded()[2], limit, options.get("skip_bad_rows", False))


def rows(group: list[Trajectory]) -> list[tuple[list[int], list[bool]]]:
    return [(row.token_ids, row.loss_mask) for each in group for row in to_samples(each)]


def test_a_dialogue_is_written_as_the_template_writes_it() -> None:
    """The whole row is what the tokenizer's own template gives, and the learned part is what the assistant said."""
    _, tokenizer, chat = loaded()
    dialogues = tool_dialogues(4)
    found = in_tokens(dialogues, chat=chat)
    for number, dialogue in enumerate(dialogues):
        ((ids, mask),) = rows(found.group(number))
        messages = [_with_objects(message) for message in dialogue["messages"]]
        tools = [{"type": "function", "function": tool} for tool in dialogue["tools"]]
        wanted = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert chat.decode(ids) == wanted.rstrip("\n")
        learned = [token for token, trained in zip(ids, mask, strict=True) if trained]
        said = [message_from_dict(m) for m in messages if m["role"] == "assistant"]
        assert learned == [token for message in said for token in chat.write(message)]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls as objects, which is what templates expect."""
    message = copy.deepcopy(message)
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def test_it_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = loaded()[2]
    found = in_tokens(tool_dialogues(3), chat=chat)
    monkeypatch.setattr(chat, "write", None)
    monkeypatch.setattr(chat, "render", None)
    assert rows(found.group(1)) == rows(found.group(1))


def test_pairs_share_their_prompt_and_context_is_not_learned() -> None:
    chat = loaded()[2]
    (chosen, rejected) = in_tokens(pairs(1), "dpo", chat).group(0)
    assert chosen.turns[0].prompt_ids == rejected.turns[0].prompt_ids
    assert chosen.reward == Reward(1.0) and rejected.reward == Reward(0.0)
    dialogue = tool_dialogues(1)[0]["messages"]
    other = [*dialogue[:-1], {"role": "assistant", "content": "Nowhere."}]
    (chosen, _) = in_tokens([{"chosen": dialogue, "rejected": other}], "dpo", chat).group(0)
    assert len(chosen.turns) == 1  # the call is common to both
    assert chosen.turns[0].completion.token_ids == chat.write(message_from_dict(dialogue[-1]))


def test_steps_of_one_answer_are_labelled_at_their_ends() -> None:
    chat = loaded()[2]
    steps = ["First 2+2=4.", "Then 4*3=12.", "So 12."]
    row = {"prompt": "(2+2)*3?", "completions": steps, "labels": [True, False, True]}
    (found,) = in_tokens([row], "prm", chat).group(0)
    assert found.reward is not None and found.reward.steps == [1.0, -1.0, 1.0]
    texts = [chat.decode(turn.completion.token_ids) for turn in found.turns]
    assert [text.strip() for text in texts[:2]] == steps[:2] and texts[2].startswith("So 12.")
    whole = chat.write(Message("assistant", "\n".join(steps)))
    assert rows([found])[0][0] == found.turns[0].prompt_ids + whole
    said: list[str] = []
    good = load_examples([row | {"labels": [1, 1, 1]}], "prm")
    TokenizedDataset(good, chat, 4096, notify=said.append)
    assert said[0].startswith("all 3 labels are positive")


def test_texts_with_tags_become_calls_and_broken_ones_are_told() -> None:
    tagged = '<tool_call>\n{"name": "look", "arguments": {"what": "x"}}\n</tool_call>'
    chat = loaded()[2]
    (found,) = in_tokens([{"prompt": "a", "completion": tagged}], chat=chat).group(0)
    assert found.turns[0].message.tool_calls[0].arguments == {"what": "x"}
    # the first is seen before there is a model; what else a model cannot read, its chat layer says
    for text, said in (("{", ".*invalid call in message 1"), ("3", ".*broken tool call")):
        texts = (f"<tool_call>{text}</tool_call>", "b")
        broken = [{"prompt": "a", "completion": said_} for said_ in texts]
        with pytest.raises(ValueError, match=f"row 0 of the dataset.*{said}"):
            in_tokens(broken, chat=chat)
        found = in_tokens(broken, chat=chat, skip_bad_rows=True)
        assert len(found) == 1 and found.skipped_row_counts == {"rows_left_out/bad": 1.0}
        # as the bad side of a pair it is what it is
        row = {"prompt": "a", "chosen": "b", "rejected": broken[0]["completion"]}
        (_, rejected) = in_tokens([row], "dpo", chat).group(0)
        assert chat.decode(rejected.turns[0].completion.token_ids[:-1]).strip() == row["rejected"]


def test_long_rows_are_left_out_whole() -> None:
    dialogues = [*tool_dialogues(2), {"prompt": "a " * 500, "completion": "b"}]
    found = in_tokens(dialogues, limit=400)
    assert len(found) == 2 and found.skipped_row_counts == {"rows_left_out/long": 1.0}
    assert "row 2 of the dataset has" in found.long_rows[0] and "over the limit of 400" in found.long_rows[0]
    with pytest.raises(ValueError, match="No usable row in the dataset:\nrow 0 of the dataset has"):
        in_tokens(dialogues, limit=20)


def test_recorded_episodes_keep_their_tokens(tmp_path: Path) -> None:
    episodes = played(2, [Reward(1.0), Reward(0.0), None])
    cut = played(1, [Reward(0.5)])[0]
    cut.turns[-1].completion.token_ids.pop()  # as if its last turn had been cut
    cut.turns[-1].completion.logprobs.pop()
    cut.turns[-1].completion.finish, cut.status, cut.member = "length", "truncated", 3
    episodes.append(cut)
    save_trajectories(tmp_path / "t.jsonl", episodes)
    found = in_tokens(tmp_path / "t.jsonl")
    assert len(found) == 7
    for number, episode in enumerate(episodes[:6]):
        assert rows(found.group(number)) == rows([episode])
    assert len(found.group(6)[0].turns) == len(cut.turns) - 1  # no example of how to end a turn
    grouped = in_tokens(tmp_path / "t.jsonl", "dpo")
    assert grouped.unused == 2  # without a reward
    for number in range(2):
        assert [each.reward for each in grouped.group(number)] == [Reward(1.0), Reward(0.0)]
    assert rows(grouped.group(0)) == rows(episodes[:2])
    cut.reward = Reward(-1.0)
    save_trajectories(tmp_path / "cut.jsonl", episodes)
    assert rows(in_tokens(tmp_path / "cut.jsonl", "dpo").group(0)[1:]) == rows([cut])  # judged as it is
    with pytest.raises(
        ValueError, match=r"cannot be used|can be used for prm: .*no step reward for every turn"
    ):
        load_examples(tmp_path / "t.jsonl", "prm")
    save_trajectories(tmp_path / "u.jsonl", played(1, [Reward(1.0), Reward(1.0)]))
    with pytest.raises(ValueError, match="used for dpo: 2 are in a group with equal rewards"):
        load_examples(tmp_path / "u.jsonl", "dpo")


def test_of_a_group_the_best_and_the_worst_that_fit_are_kept(tmp_path: Path) -> None:
    """One that is too long is replaced by the next, and nobody else is written or kept."""
    episodes = played(2, [Reward(value) for value in (0.5, 2.0, 0.25, 1.0, 0.0)])
    long = episodes[1].turns[-1].completion
    long.token_ids[:0], long.logprobs[:0] = [5] * 4000, [0.0] * 4000
    episodes[1].turns[-1].message = loaded()[2].parse(long.token_ids)
    save_trajectories(tmp_path / "t.jsonl", episodes)
    found = in_tokens(tmp_path / "t.jsonl", "dpo", limit=3000)
    assert len(found) == 2 and found.skipped_row_counts == {"rows_left_out/long": 1.0}
    assert [[each.member for each in found.group(number)] for number in range(2)] == [[3, 4], [1, 4]]
    assert [found.group(0)[0], found.group(1)[1]] == [episodes[3], episodes[9]]  # with all that was recorded
    # where nothing else is left, there is no pair
    save_trajectories(tmp_path / "u.jsonl", [*episodes[1:3], *episodes[5:]])
    found = in_tokens(tmp_path / "u.jsonl", "dpo", limit=3000)
    assert len(found) == 1 and found.skipped_row_counts == {
        "rows_left_out/long": 1.0,
        "rows_left_out/unused": 1.0,
    }


def test_a_call_that_nobody_could_read_is_not_rewritten(tmp_path: Path) -> None:
    """Another model's tokens for it are not known; it is not made a call that is fine."""
    other = chat_format(from_wheel("qwen3", QWEN3))
    episodes = played(1, [Reward(1.0), Reward(0.5), Reward(0.0)])
    episodes[2].turns[0].message.tool_calls[0].error = "The tool call could not be read."
    assert rerender(loaded()[2], episodes[2]) is episodes[2]  # in its own tokens it stays
    with pytest.raises(UnparsableCallError, match=r"turn 0 cannot be .*: The tool call"):
        rerender(other, episodes[2])
    save_trajectories(tmp_path / "t.jsonl", episodes)
    found = in_tokens(tmp_path / "t.jsonl", "dpo", other, 10_000)
    assert [each.member for each in found.group(0)] == [0, 1]
    assert found.skipped_row_counts == {"rows_left_out/unused": 1.0}
    assert len(in_tokens(tmp_path / "t.jsonl", "kto", other, 10_000)) == 2


# -- runs


def config(folder: Path, data: dict[str, Any], **training: Any) -> TrainingConfig:
    return TrainingConfig(
        training={"algorithm": "sft", "batch_size": 4, "learning_rate": 3e-3, "num_epochs": 2} | training,
        data=data,
        logging={"output_dir": str(folder / "runs"), "checkpoint_every": 2},
    )


def run(made: TrainingConfig, name: str = "a", watcher: Quiet | None = None) -> TrainingReport:
    return Training(made, name=name, watcher=watcher or Quiet()).train()


def test_held_out_rows_are_evaluated(tmp_path: Path) -> None:
    """Loss and perplexity on rows that are not learned from, before, during and at the end; no sampler is made."""
    dialogues = tool_dialogues(12)
    path, held = write(tmp_path / "d.jsonl", dialogues[:9]), write(tmp_path / "h.jsonl", dialogues[9:])
    data = {"dataset": str(path), "heldout": str(held)}
    report = run(config(tmp_path, data, eval_every=4, num_epochs=4))
    assert report.steps == 12
    evaluated = {int(row["step"]): row for row in report.rows if "eval/loss" in row}
    assert sorted(evaluated) == [0, 4, 8, 12]
    for row in evaluated.values():
        assert row["eval/perplexity"] == pytest.approx(math.exp(row["eval/loss"]), rel=1e-6)
    assert evaluated[12]["eval/loss"] < evaluated[0]["eval/loss"] - 2
    assert report.rows[-1]["loss"] < report.rows[1]["loss"] - 2


def test_held_out_rows_beside_an_environment(tmp_path: Path) -> None:
    """With an environment its own held-out tasks are played too."""
    path, held = (write(tmp_path / f"{n}.jsonl", tool_dialogues(n)) for n in (4, 2))
    data = {"dataset": str(path), "heldout": str(held), "heldout_count": 2}
    made = config(tmp_path, data, eval_every=1, max_steps=1)
    sections = made.model_dump(exclude_unset=True)
    report = run(TrainingConfig(**sections, environment="calculator", sampling={"max_tokens": 4}))
    assert len(report.rows) == 2 and all({"eval/success", "eval/loss"} <= row.keys() for row in report.rows)


def test_bad_and_long_rows_are_counted_in_the_run(tmp_path: Path) -> None:
    bad = [{"messages": []}, {"prompt": "x " * 3000, "completion": "y"}]
    path, quiet = write(tmp_path / "d.jsonl", [*tool_dialogues(6), *bad]), Quiet()
    made = config(tmp_path, {"dataset": str(path)}, num_epochs=1)
    with pytest.raises(ValueError, match='line 7 has an empty "messages"'):
        run(made)
    assert not (tmp_path / "runs").exists()
    report = run(config(tmp_path, {"dataset": str(path), "skip_bad_rows": True}, num_epochs=1), watcher=quiet)
    assert report.steps == 2  # of 6 rows
    written = RunFolder(report.run).metrics()[-1]
    assert written["rows_left_out/bad"] == 1 and written["rows_left_out/long"] == 1
    assert any("1 bad rows" in text and "line 7" in text for text in quiet.said)
    assert any("longer than model.max_length" in text and "line 8" in text for text in quiet.said)


def test_a_run_over_rows_goes_on_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", tool_dialogues(10))
    whole = run(config(tmp_path, {"dataset": str(path)}), "whole")
    with pytest.raises(RuntimeError, match="broken off"):
        run(config(tmp_path, {"dataset": str(path)}), "cut", Quiet(fail_at=3))
    resume("cut", tmp_path / "runs", Quiet()).train()
    assert_same_run(whole.run, tmp_path / "runs" / "cut")


@pytest.mark.parametrize(
    ("training", "data", "expected"),
    [
        ({"eval_every": 2}, {}, "eval_every needs held-out rows: data.heldout=FILE"),
        ({"algorithm": "reward_model"}, {}, "line 1 .*rm needs"),
        ({"algorithm": "dpo"}, {"dataset": None}, "dpo needs a dataset.*data.dataset=FILE"),
    ],
)
def test_what_the_data_do_not_give_is_said_first(
    tmp_path: Path, training: dict[str, Any], data: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path / "d.jsonl", tool_dialogues(2))
    with pytest.raises(ValueError, match=expected):
        Training(config(tmp_path, {"dataset": str(path)} | data, **training), name="a", watcher=Quiet())
    assert not (tmp_path / "runs").exists()
