"""What the demo's warm start is taught: shares of mistakes, which tokens are trained, drills, and their order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from TrainingFactory.apps.demo.lessons import LESSONS, Lessons, demonstrate
from TrainingFactory.data.examples import load_examples
from TrainingFactory.data.samples import to_samples
from TrainingFactory.envs import CalculatorEnvironment, SearchEnvironment
from TrainingFactory.models import chat_format
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.training.tokenized_dataset import TokenizedDataset
from TrainingFactory.types import Sample, Trajectory

TOKENIZER = make_tiny_tokenizer()
CHAT = chat_format(TOKENIZER)


def shown(environment: type, count: int, mistakes: float) -> list[Trajectory]:
    tasks = list(environment.tasks("train", 0, count))
    return demonstrate(environment, CHAT, tasks, mistakes, random.Random(0))


@pytest.mark.parametrize("environment", [SearchEnvironment, CalculatorEnvironment])
def test_the_share_of_mistakes(environment: type) -> None:
    mixed = shown(environment, 300, 0.5)
    assert 0.4 < sum(episode.reward.outcome for episode in mixed if episode.reward) / 300 < 0.62
    assert all(episode.status == "done" and episode.reward is not None for episode in mixed)


def test_search_novices_never_chain() -> None:
    """The second search is what there is to learn, so no mistake may show it."""
    calls = {sum(len(turn.message.tool_calls) for turn in e.turns) for e in shown(SearchEnvironment, 60, 1.0)}
    assert calls == {0, 1}
    assert {len(episode.turns) for episode in shown(SearchEnvironment, 10, 0.0)} == {3}


def rows(path: Path, lessons: Lessons, environment: type = SearchEnvironment) -> list[Sample]:
    """What an SFT run makes of the lessons."""
    tasks = list(environment.tasks("train", 0, lessons.num_demonstrations))
    lessons.write(path, environment, CHAT, tasks, random.Random(0))
    found = TokenizedDataset(load_examples(str(path), "sft"), CHAT, max_length=512)
    return [
        row for number in range(len(found)) for episode in found.group(number) for row in to_samples(episode)
    ]


def trained(row: Sample) -> list[int]:
    return [token for token, wanted in zip(row.token_ids, row.loss_mask, strict=True) if wanted]


def test_exactly_what_the_agent_says_is_trained(tmp_path: Path) -> None:
    episodes = shown(SearchEnvironment, 12, 0.5)
    played = {tuple(row.token_ids): row for episode in episodes for row in to_samples(episode)}
    for row in rows(
        tmp_path / "rows.jsonl",
        Lessons(num_drills=0, num_short_rows=0, num_dialogues=20, num_demonstrations=12, novice_share=0.5),
    ):
        assert row.loss_mask == played[tuple(row.token_ids)].loss_mask  # the very tokens of the episodes
        text = TOKENIZER.decode(trained(row))
        assert text.endswith("<|im_end|>")
        assert "<tool_response>" not in text and "Where is it?" not in text


def test_drills_come_first_then_demonstrations_without_their_system_part(tmp_path: Path) -> None:
    found = rows(
        tmp_path / "rows.jsonl",
        Lessons(num_drills=3, num_short_rows=4, num_dialogues=5, num_demonstrations=8),
    )
    texts = [TOKENIZER.decode(row.token_ids) for row in found]
    assert len(texts) == 12
    assert all(text.startswith("<|im_start|>user\n") for text in texts[:7])
    assert not any("Where is it?" in text for text in texts[:3])
    assert all("Where is it?" in text and "# Tools" not in text for text in texts[3:7])
    assert all(text.startswith("<|im_start|>system\n") and "# Tools" in text for text in texts[7:])


@pytest.mark.parametrize("name", sorted(LESSONS.keys() - {"screen"}))  # whose drills are pictures
def test_drills_are_copies_in_other_tokens(name: str, tmp_path: Path) -> None:
    lessons = Lessons(
        LESSONS[name].make_drill, num_drills=20, num_short_rows=0, num_dialogues=0, num_demonstrations=1
    )
    for row in rows(tmp_path / "rows.jsonl", lessons):
        given, _, written = TOKENIZER.decode(row.token_ids).partition("<|im_end|>\n<|im_start|>assistant\n")
        words = written.removesuffix("<|im_end|>").split()
        assert words == given.removeprefix("<|im_start|>user\n").split() and len(words) >= 4
        assert TOKENIZER.decode(trained(row)) == written
