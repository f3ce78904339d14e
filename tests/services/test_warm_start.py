"""What a warm start is taught: shares of mistakes, which tokens are trained, drills that can be solved."""

from __future__ import annotations

import random

import pytest

from TrainingFactory.data.samples import to_samples
from TrainingFactory.envs import CalculatorEnvironment, SearchEnvironment
from TrainingFactory.learning.learner import Learner
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.tiny import tiny_tokenizer
from TrainingFactory.models.words import THINGS
from TrainingFactory.services.demo.warm_start import (
    DRILLS,
    Lessons,
    WarmStartPlan,
    common_start,
    demonstrate,
    teach,
    without_first,
    word_drill,
)
from TrainingFactory.types import Trajectory

TOKENIZER = tiny_tokenizer()
CHAT = chat_format(TOKENIZER)


def shown(environment: type, count: int, mistakes: float) -> list[Trajectory]:
    tasks = list(environment.tasks("train", 0, count))
    return demonstrate(environment, CHAT, tasks, mistakes, random.Random(0))


def success(episodes: list[Trajectory]) -> float:
    return sum(episode.reward.outcome for episode in episodes if episode.reward) / len(episodes)


@pytest.mark.parametrize("environment", [SearchEnvironment, CalculatorEnvironment])
def test_the_share_of_mistakes(environment: type) -> None:
    assert success(shown(environment, 30, 0.0)) == 1.0
    assert success(shown(environment, 60, 1.0)) < 0.1
    mixed = shown(environment, 300, 0.5)
    assert 0.4 < success(mixed) < 0.62
    assert all(episode.status == "done" and episode.reward is not None for episode in mixed)


def test_search_novices_never_chain() -> None:
    """The second search is what there is to learn, so no mistake may show it."""
    calls = {sum(len(turn.message.tool_calls) for turn in e.turns) for e in shown(SearchEnvironment, 60, 1.0)}
    assert calls == {0, 1}
    assert {len(episode.turns) for episode in shown(SearchEnvironment, 10, 0.0)} == {3}


def test_exactly_what_the_agent_says_is_trained() -> None:
    for episode in shown(SearchEnvironment, 12, 0.5):
        [row] = to_samples(episode)
        trained = [token for token, wanted in zip(row.token_ids, row.loss_mask, strict=True) if wanted]
        assert trained == [token for turn in episode.turns for token in CHAT.write(turn.message)]
        text = TOKENIZER.decode(trained)
        assert text.count("<|im_end|>") == len(episode.turns)
        assert "<tool_response>" not in text and "Where is it?" not in text


def test_rows_without_the_system_part() -> None:
    episodes = shown(SearchEnvironment, 30, 0.5)
    start = common_start(episodes)
    prompts = [episode.turns[0].prompt_ids for episode in episodes]
    assert start > 100 and all(prompt[:start] == prompts[0][:start] for prompt in prompts)
    assert len({prompt[start] for prompt in prompts}) > 1
    for episode in episodes:
        [whole], [short] = to_samples(episode), to_samples(without_first(episode, start))
        assert short.token_ids == whole.token_ids[start:] and short.loss_mask == whole.loss_mask[start:]
    lessons = Lessons(TOKENIZER, episodes, word_drill, random.Random(0))
    [short] = lessons.demonstrations(1, with_system=False)
    assert TOKENIZER.decode(short.token_ids).startswith("<|im_start|>user\n")
    [whole] = lessons.demonstrations(1, with_system=True)
    assert TOKENIZER.decode(whole.token_ids).startswith("<|im_start|>system\n")


@pytest.mark.parametrize("name", list(DRILLS))
def test_drills_are_copies(name: str) -> None:
    rng = random.Random(0)
    for _ in range(20):
        [row] = to_samples(DRILLS[name](TOKENIZER, rng))
        wanted = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        given = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if not mask]
        words = [TOKENIZER.decode([token]).strip() for token in wanted]
        assert words == [TOKENIZER.decode([token]).strip() for token in given[1:-1]]
        assert given[0] == TOKENIZER.eos_token_id and given[-1] == TOKENIZER.pad_token_id


def test_word_drills_want_the_forms_that_calls_and_answers_have() -> None:
    [row] = to_samples(word_drill(TOKENIZER, random.Random(1)))
    wanted = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    for text in map(TOKENIZER.decode, ([token] for token in wanted)):
        assert text.startswith(" ") == (text.strip() in THINGS)


def test_teaching_lowers_the_loss() -> None:
    loaded = load_model("builtin:tiny", seed=0)
    plan = WarmStartPlan(drill_steps=3, drill_rows=4, steps=25, rows=4)
    lessons = Lessons(loaded.tokenizer, shown(SearchEnvironment, 40, 0.5), word_drill, random.Random(0))
    told: list[tuple[int, int, float]] = []
    teach(Learner(loaded.model, plan.optimizer), lessons, plan, lambda *step: told.append(step))
    assert [step[:2] for step in told] == [(number, 28) for number in range(1, 29)]
    assert told[-1][2] < 0.5 * told[3][2]
