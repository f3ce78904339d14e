"""Trained reward models: how they come from disk, score episodes, and reward runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kits.preference import Group
from tests.kits.reward_model import chat, good_and_bad, one_bad_turn, row_scores
from tests.kits.run import Quiet, small
from tests.kits.tokenizers import QWEN3, from_wheel
from TrainingFactory.algorithms.reward_model import RewardModel
from TrainingFactory.assembly import learner as assemble_learner
from TrainingFactory.assembly import rewards as assemble_rewards
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.rewriting import rerender
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories
from TrainingFactory.learning.checkpoints import save_checkpoint
from TrainingFactory.learning.heads import make_head
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.reward_models import RewardModelInfo, RewardScorer
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rollout.scoring import score
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Reward, Task, Trajectory

PROCESS = RewardModel("process")


def saved(folder: Path, lora: bool = False) -> Learner:
    """A checkpoint with random numbers in its head, as a run of training.algorithm=reward_model leaves it."""
    loaded = load_model("builtin:tiny", seed=0)
    model = add_lora(loaded.model, seed=1) if lora else loaded.model
    head = make_head(loaded.model, {"kind": "process", "base": "builtin:tiny"})
    with torch.no_grad():
        for number, param in enumerate((*model.parameters(), *head.parameters())):
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            param += 0.1 * noise if param.requires_grad else 0.0
    learner = Learner(model, OptimizerOptions(), head=head)
    save_checkpoint(folder, learner, loaded.tokenizer, {})
    learner.model.eval()
    return learner


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Learner]:
    """A process reward model on disk, and the learner that it comes from."""
    folder = tmp_path_factory.mktemp("made") / "rm"
    return folder, saved(folder)


def episodes_of(count: int) -> list[Trajectory]:
    return [each for [each] in one_bad_turn("train", count)]


def test_a_base_in_a_folder_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may be started with a path relative to where it was; its reward model is loaded from elsewhere."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    section = {"name": "base", "quantization": "4bit"}
    config = TrainingConfig(model=section, training={"algorithm": "reward_model"}, lora={"enabled": True})
    about = assemble_learner.describe_reward_model(config, frozenset({"scores"}))
    assert about is not None and about["base"] == str(tmp_path / "base")
    assert RewardModelInfo(**about).quantization == "4bit"
    config = TrainingConfig(model="tiny", training={"algorithm": "reward_model"})
    assert (assemble_learner.describe_reward_model(config, frozenset({"scores"})) or {})["base"] == "tiny"


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
def test_what_was_saved_scores_as_what_was_trained(
    made: tuple[Path, Learner], tmp_path: Path, lora: bool
) -> None:
    folder, learner = (tmp_path / "rm", saved(tmp_path / "rm", lora)) if lora else made
    episodes = episodes_of(5)
    episodes[2] = cut(episodes[2])
    found = RewardScorer.load(folder).compute_scores(episodes)
    for trajectory, scores in zip(episodes, found, strict=True):
        [row] = PROCESS.samples([trajectory])
        with torch.no_grad():
            assert scores == pytest.approx(row_scores(learner, row).tolist(), abs=1e-5)
    assert [len(scores) for scores in found] == [len(each.turns) for each in episodes]
    if lora:  # the base is loaded as it was trained
        about = json.loads((folder / "reward_model.json").read_text())
        (folder / "reward_model.json").write_text(json.dumps(about | {"quantization": "4bit"}))
        with pytest.raises(ValueError, match="quantization is 4bit, but builtin:tiny"):
            RewardScorer.load(folder)


def test_scores_of_an_episode_in_different_batches(made: tuple[Path, Learner]) -> None:
    episodes, (folder, _) = episodes_of(4), made
    alone = RewardScorer.load(folder, scores_together=False)
    together = RewardScorer.load(folder, token_budget=100_000)
    rewards = alone.score(episodes)
    assert rewards == [alone.score([episode])[0] for episode in reversed(episodes)][::-1]
    twice = together.score([*episodes, *episodes])
    assert twice[:4] == twice[4:]
    # Rounding errors depend on the batch, and one may move a score to the next of its four decimals.
    for reward, batched in zip(rewards, twice, strict=False):
        assert batched.outcome == pytest.approx(reward.outcome, abs=1e-4)
        assert batched.steps == pytest.approx(reward.steps, abs=1e-4)


def test_scores_become_rewards(made: tuple[Path, Learner]) -> None:
    episodes, (_, learner) = episodes_of(3), made
    assert learner.head is not None
    outcome = RewardScorer(learner.model, learner.head, chat(), "outcome", token_budget=10)
    process = RewardScorer(learner.model, learner.head, chat(), "process")
    for trajectory, plain, judged, [last], every in zip(
        episodes, outcome.score(episodes), process.score(episodes), outcome.compute_scores(episodes),
        process.compute_scores(episodes), strict=True,
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
    [own] = episodes_of(1)
    foreign = rerender(chat_format(from_wheel("qwen3", QWEN3)), own)
    assert foreign.turns[0].prompt_ids != own.turns[0].prompt_ids
    back = rerender(chat(), foreign)
    assert [turn.prompt_ids for turn in back.turns] == [turn.prompt_ids for turn in own.turns]
    assert [turn.completion.token_ids for turn in back.turns] == [
        turn.completion.token_ids for turn in own.turns
    ]
    ended = rerender(chat(), cut(foreign)).turns[-1].completion
    assert ended.token_ids == own.turns[-1].completion.token_ids[:-1] and ended.finish == "length"


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [("scalar_head.safetensors", None, "has no scalar_head"), ("reward_model.json", None, "has no reward_model.json"),
     ("reward_model.json", "{", "Cannot read"), ("reward_model.json", '{"kind": "best"}', "'outcome' or 'process'")],
)  # fmt: skip
def test_a_folder_without_a_reward_model(tmp_path: Path, name: str, text: str | None, wrong: str) -> None:
    (tmp_path / "scalar_head.safetensors").touch()
    (tmp_path / "reward_model.json").write_text('{"kind": "outcome"}')
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=wrong):
        RewardScorer.load(tmp_path)


def test_what_cannot_be_scored_is_an_error(made: tuple[Path, Learner]) -> None:
    [own], (folder, learner) = episodes_of(1), made
    scorer = RewardScorer.load(folder)
    limit = learner.causal_lm.config.max_position_embeddings
    last = own.turns[-1]
    last.completion = replace(last.completion, token_ids=[5] * limit, logprobs=[0.0] * limit, finish="length")
    last.message = chat().parse(last.completion.token_ids)
    with pytest.raises(ValueError, match=rf"has \d+ tokens.* {limit}"):
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


async def test_who_comes_while_others_are_scored_is_next() -> None:
    scorer = Lengths()
    reward = LearnedReward(scorer, patience=0.0)
    first = asyncio.create_task(reward(episode(0)))
    while not scorer.batches:
        await asyncio.sleep(0)
    given_up = asyncio.create_task(reward(episode(9)))
    await asyncio.sleep(0)
    given_up.cancel()
    rewards = [await first, *await asyncio.gather(reward(episode(1)), reward(episode(2)))]
    assert [each.outcome for each in rewards] == [0.0, 1.0, 2.0]
    assert sorted(member for batch in scorer.batches for member in batch) == [0, 1, 2]


def test_a_wrong_number_of_rewards_is_noticed() -> None:
    class Short:
        def score(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
            return []

    with pytest.raises(ValueError, match="0 rewards for 1 episodes"):
        asyncio.run(score(episode(0), LearnedReward(Short())))


def test_a_run_is_scored_by_a_reward_model(made: tuple[Path, Learner], tmp_path: Path) -> None:
    config = small(
        tmp_path,
        training={"max_steps": 1},
        reward={"type": "learned", "model": str(made[0])},
        environment={"environment_id": "search"},
        data={"count": 6},
    )
    assert Training(config, name="run", watcher=Quiet()).train().state == "finished"
    episodes = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    again = RewardScorer.load(made[0]).score(episodes)
    assert len({reward.outcome for reward in again}) > 6
    for trajectory, reward in zip(episodes, again, strict=True):
        assert trajectory.reward is not None
        assert trajectory.reward.outcome == pytest.approx(reward.outcome, abs=1e-4)


def numbered(groups: list[Group]) -> list[Group]:
    """As rollouts name them: those about the same task are one group."""
    return [
        [replace(each, group=f"g{number}", member=member) for member, each in enumerate(group)]
        for number, group in enumerate(groups)
    ]


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
    assert assemble_rewards.find_reward_model(scored.reward.model, scored).folder == report.checkpoint
    reward = assemble_rewards.make_reward(scored)
    assert isinstance(reward, LearnedReward) and isinstance(reward.scorer, RewardScorer)
    assert reward.scorer.kind == "outcome"


@pytest.mark.parametrize(
    ("section", "wrong"),
    [({"type": "learned"}, "reward.model: is missing; reward.type=learned needs a reward model"),
     ({"type": "learned", "model": "nowhere"}, "reward.model: must be a reward model.*no such run or model: 'nowhere'"),
     ({"type": "learned", "model": "."}, "no config.json"),
     ({"model": "nowhere"}, "reward.model: is for reward.type=learned")],
)  # fmt: skip
def test_a_wrong_reward_model_is_told_before_anything_is_loaded(
    tmp_path: Path, section: dict[str, Any], wrong: str
) -> None:
    config = small(tmp_path, reward=section, environment={"environment_id": "search"})
    with pytest.raises(ValueError, match=wrong):
        Training(config, name="run", watcher=Quiet())
    assert not (tmp_path / "run").exists()
