"""Reward models: their losses against TRL and plain formulas, what they learn, and how they score episodes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForSequenceClassification
from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer

from tests.kits.algorithm import made
from tests.kits.engine import VOCABULARY, tiny
from tests.kits.learner import far, gradients, make_learner, words
from tests.kits.preference import Group, bare_trainer, dialogue, model_gradients, pair_groups
from tests.kits.run import Quiet, small
from tests.kits.tokenizers import QWEN3, from_wheel
from TrainingFactory.algorithms.reward_model import RewardModel
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.rewriting import written_by
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.learning.checkpoints import save_checkpoint
from TrainingFactory.learning.heads import head_for
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.reward_models import About, RewardScorer
from TrainingFactory.models import LoadedModel, chat_format, load_model
from TrainingFactory.models.words import NAMES, PLACES
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rollout import play
from TrainingFactory.rollout.scoring import score
from TrainingFactory.services.build import learner as assemble_learner
from TrainingFactory.services.build import rewards as assemble_rewards
from TrainingFactory.services.build.training import Training
from TrainingFactory.services.demo.lessons import demonstrate
from TrainingFactory.types import Message, Reward, Sample, Task, ToolCall, Trajectory

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
    head = head_for(model)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return make_learner(model, head=head)


def rows_of(algorithm: RewardModel, groups: Sequence[Group]) -> list[Sample]:
    return [row for group in groups for row in algorithm.samples(group)]


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
    assert (batch.rows, batch.tokens, batch.pairs) == (2, 2, 1)
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


def test_options_are_checked() -> None:
    wrong: list[dict[str, Any]] = [
        {"center": -1.0}, {"kind": "both"}, {"margin": True, "kind": "process"}, {"center": 0.1, "kind": "process"},
        {"threshold": 0.5}, {"threshold": float("nan"), "kind": "process"},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            made("reward_model", **options)
    assert all(algorithm.needs == {"scores"} for algorithm in (*CASES, PROCESS))


# -- values


def classifier(learner: Learner) -> Any:
    """The same weights as transformers has them for a sequence classifier of one label."""
    model: Any = learner.causal
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
    learner = headed_learner()
    samples = rows_of(algorithm, pair_groups(3))
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


def row_scores(learner: Learner, row: Sample) -> torch.Tensor:
    """One row, no packing, the model's own attention: the head at the trained tokens."""
    states = learner.causal.base_model(torch.tensor([row.token_ids]), use_cache=False).last_hidden_state[0]
    assert learner.head is not None
    return learner.head(states[torch.tensor(row.loss_mask)])


@pytest.mark.parametrize(("algorithm", "seed"), [(PROCESS, 4), (RewardModel("process", threshold=-0.5), 5)])
def test_process_equals_plain_rows(algorithm: RewardModel, seed: int) -> None:
    """TRL has no such trainer: against the formula, a row at a time. 0 is good where only penalties are bad."""
    learner = headed_learner(1)
    samples = rows_of(algorithm, labelled_groups(seed))
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


def test_a_fresh_head_prefers_nothing() -> None:
    model: Any = tiny()
    learner = make_learner(model, head=head_for(model))
    for algorithm, groups in ((RewardModel(center=0.1), pair_groups(0)), (PROCESS, labelled_groups(0))):
        found = learner.evaluate(make_batch(rows_of(algorithm, groups)), algorithm.loss, algorithm.needs)
        assert found["loss"] == pytest.approx(0.6931472, rel=1e-6)


# -- learning


@cache
def fresh() -> LoadedModel:
    return load_model("builtin:tiny", seed=0)


def chat() -> Any:
    return chat_format(fresh().tokenizer, stop_ids=fresh().stop_ids)


def good_and_bad(split: str, count: int) -> list[Group]:
    """Each task done well and badly."""
    tasks, rng, writes = list(SearchEnvironment.tasks(split, 0, count)), random.Random(split), chat()
    good, bad = (demonstrate(SearchEnvironment, writes, tasks, mistakes, rng) for mistakes in (0.0, 1.0))
    return [list(pair) for pair in zip(good, bad, strict=True)]


def one_bad_turn(split: str, count: int) -> list[Group]:
    """The expert's dialogue with one turn too many, a search for a place, or with a person for an answer."""
    rng, writes = random.Random(split), chat()

    async def all_dialogues() -> list[Group]:
        found = []
        for task in SearchEnvironment.tasks(split, 0, count):
            environment = SearchEnvironment(task)
            script, bad = list(environment.expert()), rng.randrange(4)
            if bad == 3:
                script[-1] = Message("assistant", rng.choice(NAMES))
            else:
                call = ToolCall("search", {"query": rng.choice(PLACES)})
                script.insert(bad, Message("assistant", tool_calls=[call]))
            trajectory = await play(environment, writes, script)
            at = min(bad, len(script) - 1)
            trajectory.reward = Reward(0.0, [float(number != at) for number in range(len(script))])
            found.append([trajectory])
        return found

    return asyncio.run(all_dialogues())


def numbered(groups: list[Group]) -> list[Group]:
    """As rollouts name them: those about the same task are one group."""
    return [
        [replace(each, group=f"g{number}", member=member) for member, each in enumerate(group)]
        for number, group in enumerate(groups)
    ]


def taught(algorithm: RewardModel, groups: list[Group], steps: int, batch: int = 8) -> RewardScorer:
    loaded, rng = load_model("builtin:tiny", seed=0), random.Random(0)
    options = OptimizerOptions("muon", 0.004, matrix_learning_rate=0.02, schedule="linear", total_steps=steps)
    learner = Learner(loaded.model, options, head=head_for(loaded.model))
    for _ in range(steps):
        learner.update(
            make_batch(rows_of(algorithm, rng.sample(groups, batch))), algorithm.loss, algorithm.needs
        )
    assert learner.head is not None
    return RewardScorer(loaded.model, learner.head, chat(), algorithm.kind)


def test_an_outcome_model_tells_good_from_bad() -> None:
    scorer = taught(RewardModel(center=0.01), good_and_bad("train", 80), steps=12)
    heldout = [pair for pair in good_and_bad("heldout", 60) if pair[1].reward and pair[1].reward.outcome == 0]
    good, bad = ([reward.outcome for reward in scorer.score(side)] for side in zip(*heldout, strict=True))
    assert sum(g > b for g, b in zip(good, bad, strict=True)) / len(heldout) > 0.9


def test_a_process_model_finds_the_bad_turn() -> None:
    scorer = taught(PROCESS, one_bad_turn("train", 250), steps=36)
    heldout = [trajectory for [trajectory] in one_bad_turn("heldout", 60)]
    places = [each.reward.steps.index(0.0) for each in heldout if each.reward]
    assert len(set(places)) >= 3  # a constant guess will not do
    found = [scores.index(min(scores)) for scores in scorer.scores(heldout)]
    assert sum(f == p for f, p in zip(found, places, strict=True)) / len(heldout) > 0.9


# -- a trained model on disk


def saved(folder: Path, kind: Any = "outcome", lora: bool = False) -> Learner:
    """A checkpoint with random numbers in its head, as a run of training.algorithm=reward_model leaves it."""
    loaded = load_model("builtin:tiny", seed=0)
    model = add_lora(loaded.model, seed=1) if lora else loaded.model
    head = head_for(loaded.model, {"kind": kind, "base": "builtin:tiny"})
    with torch.no_grad():
        for number, param in enumerate((*model.parameters(), *head.parameters())):
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            param += 0.1 * noise if param.requires_grad else 0.0
    learner = Learner(model, OptimizerOptions(), head=head)
    save_checkpoint(folder, learner, loaded.tokenizer, {})
    return learner


def test_a_base_in_a_folder_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may be started with a path relative to where it was; its reward model is loaded from elsewhere."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    section = {"name": "base", "quantization": "4bit"}
    config = TrainingConfig(model=section, training={"algorithm": "reward_model"}, lora={"enabled": True})
    about = assemble_learner.about_reward_model(config, frozenset({"scores"}))
    assert about is not None and about["base"] == str(tmp_path / "base")
    assert About(**about).quantization == "4bit"
    config = TrainingConfig(model="tiny", training={"algorithm": "reward_model"})
    assert (assemble_learner.about_reward_model(config, frozenset({"scores"})) or {})["base"] == "tiny"


def test_the_base_is_loaded_as_it_was_trained(tmp_path: Path) -> None:
    saved(tmp_path / "rm", lora=True)
    about = json.loads((tmp_path / "rm" / "reward_model.json").read_text())
    (tmp_path / "rm" / "reward_model.json").write_text(json.dumps(about | {"quantization": "4bit"}))
    with pytest.raises(ValueError, match="quantization is 4bit, but builtin:tiny is read as it is"):
        RewardScorer.load(tmp_path / "rm")


def cut(trajectory: Trajectory) -> Trajectory:
    """The same episode, as if its last turn had reached the length limit."""
    *before, last = trajectory.turns
    completion = replace(
        last.completion,
        token_ids=last.completion.token_ids[:-1],
        logprobs=last.completion.logprobs[:-1],
        finish="length",
    )
    return replace(trajectory, turns=[*before, replace(last, completion=completion)], status="truncated")


@pytest.mark.parametrize("lora", [False, True])
def test_what_was_saved_scores_as_what_was_trained(tmp_path: Path, lora: bool) -> None:
    learner = saved(tmp_path / "rm", "process", lora)
    learner.model.eval()
    episodes = [each for [each] in one_bad_turn("train", 5)]
    episodes[2] = cut(episodes[2])
    found = RewardScorer.load(tmp_path / "rm").scores(episodes)
    for trajectory, scores in zip(episodes, found, strict=True):
        [row] = PROCESS.samples([trajectory])
        with torch.no_grad():
            assert scores == pytest.approx(row_scores(learner, row).tolist(), abs=1e-5)
    assert [len(scores) for scores in found] == [len(each.turns) for each in episodes]


def test_one_by_one_an_episode_always_gets_the_same_score(tmp_path: Path) -> None:
    saved(tmp_path / "rm", "process")
    episodes = [each for [each] in one_bad_turn("train", 4)]
    alone = RewardScorer.load(tmp_path / "rm", together=False)
    together = RewardScorer.load(tmp_path / "rm", token_budget=100_000)
    rewards = alone.score(episodes)
    assert rewards == [alone.score([each])[0] for each in reversed(episodes)][::-1]
    # Rounding depends on what is computed beside it; a reward has no digits that show it.
    assert rewards == together.score(episodes) == [together.score([each])[0] for each in episodes]


def test_scores_become_rewards(tmp_path: Path) -> None:
    learner = saved(tmp_path / "rm")
    assert learner.head is not None
    episodes = [each for [each] in one_bad_turn("train", 3)]
    outcome = RewardScorer(learner.model, learner.head, chat(), "outcome", token_budget=10)
    process = RewardScorer(learner.model, learner.head, chat(), "process")
    for trajectory, plain, judged, [last], every in zip(
        episodes, outcome.score(episodes), process.score(episodes), outcome.scores(episodes),
        process.scores(episodes), strict=True,
    ):  # fmt: skip
        assert plain == Reward(round(last, 4)) and last == pytest.approx(every[-1], abs=1e-5)
        chances = [float(torch.tensor(round(value, 4)).sigmoid()) for value in every]
        least = [min(chances[: number + 1]) for number in range(len(chances))]
        assert judged.outcome == pytest.approx(2 * least[-1] - 1, abs=1e-6)
        assert judged.steps == pytest.approx(
            [now - before for before, now in zip([1.0, *least], least, strict=False)], abs=1e-6
        )
        assert len(judged.steps) == len(trajectory.turns) and max(judged.steps) <= 0


def test_episodes_of_another_tokenizer_are_rewritten() -> None:
    """What a byte tokenizer sampled is scored as if the reward model's own had written it."""
    [own] = [each for [each] in one_bad_turn("train", 1)]
    foreign = written_by(chat_format(from_wheel("qwen3", QWEN3)), own)
    assert foreign.turns[0].prompt_ids != own.turns[0].prompt_ids
    back = written_by(chat(), foreign)
    assert [turn.prompt_ids for turn in back.turns] == [turn.prompt_ids for turn in own.turns]
    assert [turn.completion.token_ids for turn in back.turns] == [
        turn.completion.token_ids for turn in own.turns
    ]
    ended = written_by(chat(), cut(foreign)).turns[-1].completion
    assert ended.token_ids == own.turns[-1].completion.token_ids[:-1] and ended.finish == "length"


def test_tokens_that_were_sampled_stay() -> None:
    """A model may write a text in tokens that its tokenizer would not choose; they are scored as they are."""
    [own] = [each for [each] in one_bad_turn("train", 1)]
    last = own.turns[-1]
    text = chat().decode(last.completion.token_ids[:-1])
    odd = [
        token for letter in text for token in fresh().tokenizer(letter, add_special_tokens=False).input_ids
    ]
    odd = [*odd, last.completion.token_ids[-1]]
    assert odd != last.completion.token_ids
    last.completion = replace(last.completion, token_ids=odd, logprobs=[0.0] * len(odd))
    assert written_by(chat(), own) is own


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [("scalar_head.safetensors", None, "has no scalar_head"), ("reward_model.json", None, "is a critic"),
     ("reward_model.json", "{", "cannot be read"), ("reward_model.json", '{"kind": "best"}', "'outcome' or 'process'")],
)  # fmt: skip
def test_a_folder_without_a_reward_model(tmp_path: Path, name: str, text: str | None, wrong: str) -> None:
    (tmp_path / "scalar_head.safetensors").touch()
    (tmp_path / "reward_model.json").write_text('{"kind": "outcome"}')
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=wrong):
        RewardScorer.load(tmp_path)


def test_what_cannot_be_scored_is_an_error(tmp_path: Path) -> None:
    learner = saved(tmp_path / "rm")
    scorer = RewardScorer.load(tmp_path / "rm")
    [[own]] = one_bad_turn("train", 1)
    with pytest.raises(ValueError, match="has no turn"):
        scorer.score([own, Trajectory(Task("t", "p"), "g")])
    limit = learner.causal.config.max_position_embeddings
    last = own.turns[-1]
    last.completion = replace(last.completion, token_ids=[5] * limit, logprobs=[0.0] * limit, finish="length")
    last.message = chat().parse(last.completion.token_ids)
    with pytest.raises(ValueError, match=rf"has \d+ tokens; the reward model takes {limit}"):
        scorer.score([own])


# -- as a reward


class Lengths:
    """Scores by the number of the episode; remembers who came together."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def score(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        self.batches.append([each.member for each in trajectories])
        if any(each.member == 3 for each in trajectories):
            raise ValueError("episode 3 cannot be scored")
        return [Reward(float(each.member)) for each in trajectories]


def episode(member: int) -> Any:
    return SimpleNamespace(trajectory=Trajectory(Task("t", "p"), "g", member), environment=None)


def test_episodes_that_end_together_are_scored_together() -> None:
    async def ask(reward: LearnedReward, members: Sequence[int]) -> list[Any]:
        return await asyncio.gather(*(score(episode(n), reward) for n in members), return_exceptions=True)

    scorer = Lengths()
    reward = LearnedReward(scorer)
    assert [each.outcome for each in asyncio.run(ask(reward, (0, 1, 2)))] == [0.0, 1.0, 2.0]
    assert scorer.batches == [[0, 1, 2]]
    # another rollout has another event loop; one that cannot be scored costs nobody else's reward
    found = asyncio.run(ask(reward, (2, 3, 4)))
    assert [found[0].outcome, str(found[1]), found[2].outcome] == [2.0, "episode 3 cannot be scored", 4.0]
    assert scorer.batches[1:] == [[2, 3, 4], [2], [3], [4]]


def test_who_comes_while_others_are_scored_is_next() -> None:
    async def late() -> list[Any]:
        reward = LearnedReward(scorer, patience=0.0)
        first = asyncio.create_task(reward(episode(0)))
        while not scorer.batches:
            await asyncio.sleep(0)
        given_up = asyncio.create_task(reward(episode(9)))
        await asyncio.sleep(0)
        given_up.cancel()
        return [await first, *await asyncio.gather(reward(episode(1)), reward(episode(2)))]

    scorer = Lengths()
    assert [each.outcome for each in asyncio.run(late())] == [0.0, 1.0, 2.0]
    assert sorted(member for batch in scorer.batches for member in batch) == [0, 1, 2]


def test_a_wrong_number_of_rewards_is_noticed() -> None:
    class Short:
        def score(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
            return []

    with pytest.raises(ValueError, match="0 rewards for 1 episodes"):
        asyncio.run(score(episode(0), LearnedReward(Short())))


def test_a_run_is_scored_by_a_reward_model(tmp_path: Path) -> None:
    saved(tmp_path / "rm")
    config = small(
        tmp_path,
        training={"max_steps": 2},
        reward={"type": "learned", "model": str(tmp_path / "rm")},
        environment={"environment_id": "search"},
        data={"count": 6},
    )
    assert Training(config, name="run", watcher=Quiet()).train().state == "finished"
    episodes = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    again = RewardScorer.load(tmp_path / "rm").score(episodes)
    assert len({reward.outcome for reward in again}) > 6
    for trajectory, reward in zip(episodes, again, strict=True):
        assert trajectory.reward is not None
        assert trajectory.reward.outcome == pytest.approx(reward.outcome, abs=1e-4)


def test_a_run_trains_a_reward_model_and_another_uses_it(tmp_path: Path) -> None:
    data, held = tmp_path / "episodes.jsonl", tmp_path / "heldout.jsonl"
    groups = numbered(good_and_bad("train", 8))
    for path in (data, held):
        save_trajectories(path, (each for group in groups for each in group))
    config = small(
        tmp_path,
        training={"algorithm": "reward_model", "max_steps": 3, "eval_every": 3},
        data={"dataset": str(data), "heldout": str(held)},
    )
    report = Training(config, name="rm", watcher=Quiet()).train()
    assert report.rows[-1]["eval/loss"] < report.rows[0]["eval/loss"] == pytest.approx(0.693147, rel=1e-5)
    assert {"accuracy", "margin", "eval/accuracy"} <= report.rows[-1].keys()
    scored = small(
        tmp_path, reward={"type": "learned", "model": "rm"}, environment={"environment_id": "search"}
    )
    assert assemble_rewards.reward_checkpoint(scored.reward.model, str(tmp_path)) == report.checkpoint
    reward = assemble_rewards.make_reward(scored)
    assert isinstance(reward, LearnedReward) and isinstance(reward.scorer, RewardScorer)
    assert reward.scorer.kind == "outcome"


@pytest.mark.parametrize(
    ("section", "wrong"),
    [({"type": "learned"}, "reward.model: is missing; a reward of the type learned is a run"),
     ({"type": "learned", "model": "nowhere"}, "reward.model: must be a run.*registry are not there yet.*nowhere"),
     ({"type": "learned", "model": "."}, "holds no reward model"),
     ({"model": "nowhere"}, "reward.model: is for reward.type=learned")],
)  # fmt: skip
def test_a_wrong_reward_model_is_told_before_anything_is_loaded(
    tmp_path: Path, section: dict[str, Any], wrong: str
) -> None:
    config = small(tmp_path, reward=section, environment={"environment_id": "search"})
    with pytest.raises(ValueError, match=wrong):
        Training(config, name="run", watcher=Quiet())
    assert not (tmp_path / "run").exists()
