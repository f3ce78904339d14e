"""Reward models: their losses against TRL and plain formulas, and what they learn."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from tests.kits.engine import VOCABULARY, tiny
from tests.kits.learner import far, gradients, make_learner, samples_of, words
from tests.kits.preference import Group, bare_trainer, dialogue, model_gradients, pair_groups
from tests.kits.reward_model import chat, good_and_bad, one_bad_turn, row_scores
from TrainingFactory.algorithms.reward_model import RewardModel
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.heads import make_head
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.reward_models import RewardScorer
from TrainingFactory.models import load_model
from TrainingFactory.types import Reward

PAD = VOCABULARY  # a token that no row has
CASES = [
    RewardModel(),
    RewardModel(margin=True),
    RewardModel(center=0.3),
    RewardModel(margin=True, center=0.3),
]
PROCESS = RewardModel("process")


def headed_learner(seed: int = 0) -> Learner:
    model: Any = tiny(seed=seed)
    head = make_head(model)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return make_learner(model, head=head)


def labelled_groups(seed: int) -> list[Group]:
    """Dialogues whose turns are labelled, two about each task."""
    rng = random.Random(seed)
    groups = pair_groups(seed)
    for trajectory in (each for group in groups for each in group):
        trajectory.reward = Reward(0.0, [rng.choice((1.0, 0.0, -1.0)) for _ in trajectory.turns])
    return groups


# -- rows


def test_a_pair_is_the_best_and_the_worst_scored_at_their_ends() -> None:
    rng = random.Random(0)
    prompt = words(rng, 9)
    group = [dialogue(rng, prompt, 3, reward) for reward in (0.5, None, 0.1, 1.5)]
    better, worse = RewardModel().samples(group)
    assert (better.label, worse.label) == (1.5, 0.1) and better.pair == worse.pair
    for row, trajectory in ((better, group[3]), (worse, group[2])):
        last = trajectory.turns[-1]
        assert row.token_ids == last.prompt_ids + last.completion.token_ids
        assert row.loss_mask == [False] * (len(row.token_ids) - 1) + [True]
    assert RewardModel().samples([dialogue(rng, prompt, 1, 1.0) for _ in range(3)]) == []


def test_only_the_last_row_of_an_episode_has_its_end() -> None:
    rng = random.Random(0)
    group = [dialogue(rng, words(rng, 9), 3, reward) for reward in (1.0, 0.0)]
    first = group[0].turns[2].prompt_ids = words(rng, 20)  # what came before was elided
    batch = make_batch(RewardModel().samples(group))
    assert (batch.num_rows, batch.num_tokens, batch.num_pairs) == (2, 2, 1)
    [better], [worse] = (group[side].turns[2].completion.token_ids[-1:] for side in (0, 1))
    pack = batch.packs[0]
    ends = dict(zip(pack.episode.tolist(), pack.target.tolist(), strict=True))
    assert [ends[number] for number in pack.pairs[0].tolist()] == [better, worse]
    assert pack.token_ids.tolist().count(first[0]) >= 1


def test_a_process_row_is_labelled_at_the_end_of_each_turn() -> None:
    rng = random.Random(1)
    trajectory = dialogue(rng, words(rng, 9), 3, 0.0)
    unlabelled = dialogue(rng, words(rng, 9), 3, 1.0)
    trajectory.reward = Reward(1.0, [1.0, -0.5, 0.0])
    [row] = PROCESS.samples([trajectory, unlabelled, dialogue(rng, [1], 1, None)])
    ends = [len(turn.prompt_ids) + len(turn.completion.token_ids) - 1 for turn in trajectory.turns]
    assert [place for place, trained in enumerate(row.loss_mask) if trained] == ends
    assert [row.rewards[place] for place in ends] == [1.0, -0.5, 0.0]


# -- values


def classifier(learner: Learner) -> Any:
    """The same weights as transformers has them for a sequence classifier of one label."""
    model: Any = learner.causal_lm
    config = type(model.config)(**model.config.to_dict() | {"vocab_size": VOCABULARY + 1, "num_labels": 1})
    config.pad_token_id = PAD
    other: Any = Qwen3ForSequenceClassification(config).train()
    state = {f"model.{name}": value.clone() for name, value in model.model.state_dict().items()}
    embedding = state["model.embed_tokens.weight"]
    state["model.embed_tokens.weight"] = torch.cat([embedding, torch.zeros(1, embedding.shape[1])])
    assert learner.head is not None
    other.load_state_dict(state | {"score.weight": learner.head.weight.detach()})
    return other


@pytest.mark.parametrize("algorithm", CASES)
def test_outcome_equals_trl(algorithm: RewardModel) -> None:
    from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer  # takes a second

    learner = headed_learner()
    samples = samples_of(algorithm, pair_groups(3))
    pairs = list(zip(samples[::2], samples[1::2], strict=True))
    other = classifier(learner)
    args = SimpleNamespace(center_rewards_coefficient=algorithm.center or None)
    trainer = bare_trainer(RewardTrainer, None, None, args=args)
    trainer.model = other
    rows = [
        {"chosen_ids": w.token_ids, "rejected_ids": v.token_ids, "margin": w.label - v.label}
        for w, v in pairs
    ]
    if not algorithm.margin:
        rows = [{key: value for key, value in row.items() if key != "margin"} for row in rows]
    wanted = trainer.compute_loss(other, DataCollatorForPreference(PAD)(rows))
    for budget in (10_000, 100):
        batch = make_batch(samples, budget)
        found = learner.evaluate(batch, algorithm.loss, algorithm.needs)
        assert found["loss"] == pytest.approx(wanted.item(), rel=1e-5)
        for name in ("accuracy", "margin"):
            assert found[name] == pytest.approx(trainer._metrics["train"][name][0], rel=1e-5)
    theirs = model_gradients(other, wanted)
    theirs["head.weight"] = theirs.pop("score.weight")
    theirs["model.embed_tokens.weight"] = theirs["model.embed_tokens.weight"][:-1]
    ours = gradients(learner, make_batch(samples, 100), algorithm.loss, algorithm.needs)
    bias = ours.pop("head.bias")  # TRL's head has none; a constant cancels but for the centring
    assert bool(bias.abs() > 1e-4) == bool(algorithm.center)
    assert far(ours, theirs) < 1e-5


@pytest.mark.parametrize(("algorithm", "seed"), [(PROCESS, 4), (RewardModel("process", threshold=-0.5), 5)])
def test_process_equals_plain_rows(algorithm: RewardModel, seed: int) -> None:
    """TRL has no such trainer: against the formula, a row at a time. 0 is good where only penalties are bad."""
    learner = headed_learner(1)
    samples = samples_of(algorithm, labelled_groups(seed))
    parts, right, whole, labels = [], [], [], []
    for row in samples:
        good = [
            reward > algorithm.threshold
            for reward, trained in zip(row.rewards, row.loss_mask, strict=True)
            if trained
        ]
        scores = row_scores(learner, row)
        parts += [-(s if y else -s).sigmoid().log() for s, y in zip(scores.double(), good, strict=True)]
        judged = [(s > 0) == y for s, y in zip(scores.tolist(), good, strict=True)]
        right += judged
        labels += good
        whole.append(all(judged))
    wanted = torch.stack(parts).mean()
    assert 0 < sum(right) < len(right) and 0 < sum(whole) < len(whole)
    for budget in (10_000, 120):
        found = learner.evaluate(make_batch(samples, budget), algorithm.loss, algorithm.needs)
        assert found["loss"] == pytest.approx(wanted.item(), rel=1e-5)
        assert found["good"] == pytest.approx(sum(labels) / len(labels))
        assert found["accuracy"] == pytest.approx(sum(right) / len(right))
        assert found["dialogues_right"] == pytest.approx(sum(whole) / len(whole))
    ours = gradients(learner, make_batch(samples, 120), algorithm.loss, algorithm.needs)
    assert learner.head is not None
    model = torch.nn.ModuleDict({"m": learner.model, "head": learner.head})
    theirs = {name.removeprefix("m."): value for name, value in model_gradients(model, wanted).items()}
    assert far(ours, theirs) < 1e-5


# -- learning


def taught(algorithm: RewardModel, groups: list[Group], steps: int, batch: int = 8) -> RewardScorer:
    loaded, rng = load_model("builtin:tiny", seed=0), random.Random(0)
    options = OptimizerOptions("muon", 0.004, matrix_learning_rate=0.02, schedule="linear", total_steps=steps)
    learner = Learner(loaded.model, options, head=make_head(loaded.model))
    for _ in range(steps):
        learner.update(
            make_batch(samples_of(algorithm, rng.sample(groups, batch))), algorithm.loss, algorithm.needs
        )
    assert learner.head is not None
    return RewardScorer(loaded.model, learner.head, chat(), algorithm.kind)


def test_an_outcome_model_tells_good_from_bad() -> None:
    scorer = taught(RewardModel(center=0.01), good_and_bad("train", 48), steps=8)
    heldout = [pair for pair in good_and_bad("heldout", 40) if pair[1].reward and pair[1].reward.outcome == 0]
    good, bad = ([reward.outcome for reward in scorer.score(side)] for side in zip(*heldout, strict=True))
    assert sum(g > b for g, b in zip(good, bad, strict=True)) / len(heldout) > 0.9


def test_a_process_model_finds_the_bad_turn() -> None:
    scorer = taught(PROCESS, one_bad_turn("train", 96), steps=16, batch=6)
    heldout = [trajectory for [trajectory] in one_bad_turn("heldout", 40)]
    places = [each.reward.steps.index(0.0) for each in heldout if each.reward]
    assert len(set(places)) >= 3  # a constant guess will not do
    found = [scores.index(min(scores)) for scores in scorer.compute_scores(heldout)]
    assert sum(f == p for f, p in zip(found, places, strict=True)) / len(heldout) > 0.9
