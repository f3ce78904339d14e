"""DPO and its relatives against TRL's own losses, and what must hold for pairs of whole dialogues."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.engine import tiny
from tests.kits.learner import far, gradients, make_learner, row_logprobs, samples_of, weights_of, words
from tests.kits.preference import (
    Alone,
    Group,
    bare_trainer,
    dialogue,
    lift_by_episodes,
    model_gradients,
    moved_learner,
    padded,
    pair_groups,
    write_episodes,
)
from tests.kits.run import Quiet, assert_same_run
from TrainingFactory.algorithms.dpo import DPO
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.step import StepOptions, score_rows, train_step
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Reward, Sample

BETA, MARGIN = 0.3, 0.4
CASES = [("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.2), ("hinge", 0.0), ("ipo", 0.0), ("orpo", 0.0),
         ("simpo", 0.0), ("simpo", 0.1)]  # fmt: skip


# -- pairs


def test_a_group_gives_its_best_against_its_worst() -> None:
    rng = random.Random(0)
    prompt = words(rng, 9)
    group = [dialogue(rng, prompt, 2, reward) for reward in (0.5, None, 0.1, 1.5, 1.5, 0.1)]
    group[0].reward = Reward(0.5, [0.5, -1.0])  # steps count: 0 in all
    rows = DPO().samples(group)
    first, second = rows
    assert [row.label for row in rows] == [1.5, 0.0] and first.pair == second.pair
    assert first.episode != second.episode
    last = group[3].turns[-1]
    assert first.token_ids == last.prompt_ids + last.completion.token_ids
    (pack,) = make_batch(rows).packs
    assert pack.labels[pack.pairs].tolist() == [[1.5, 0.0]]


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.1 + 0.2, 0.3), (1.0,), (1.0, None), (None, None), ()])
def test_groups_without_a_preference_give_no_rows(rewards: tuple[float | None, ...]) -> None:
    rng = random.Random(0)
    assert DPO().samples([dialogue(rng, [1, 2], 1, reward) for reward in rewards]) == []


# -- values


def sides(rows: list[Sample]) -> list[Sample]:
    """The better ones, then the worse ones, in the same order of pairs."""
    pairs = [sorted(pair, key=lambda row: -row.label) for pair in zip(rows[::2], rows[1::2], strict=True)]
    return [pair[0] for pair in pairs] + [pair[1] for pair in pairs]


def by_trl(
    model: Any, frozen: Any, rows: list[Sample], kind: str, smoothing: float
) -> tuple[torch.Tensor, Any]:
    """TRL's loss with a gradient, and its metrics where its DPO trainer has the loss."""
    if kind in ("sigmoid", "robust", "hinge", "ipo") and not (kind == "sigmoid" and smoothing):
        from trl.trainer.dpo_trainer import DPOTrainer

        trainer = bare_trainer(
            DPOTrainer, model, frozen, beta=BETA, label_smoothing=smoothing, loss_types=[kind], loss_weights=[1.0],
            ld_alpha=None, f_divergence_type="reverse_kl", use_weighting=False,
        )  # fmt: skip
        loss = trainer._compute_loss(trainer.model, padded(sides(rows)), False)
        return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}
    each = [row_logprobs(model, row) for row in sides(rows)]
    better, worse = torch.stack([values.mean() for values in each]).chunk(2)
    if kind == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

        odds: Any = ORPOTrainer.__new__(ORPOTrainer)
        odds.beta, odds.accelerator = BETA, Alone()
        return (-better - odds.odds_ratio_loss(better, worse)[0]).mean(), {}
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    if kind == "sigmoid":  # of the log-ratios: what TRL's DPO trainer leaves out, its CPO trainer has
        base = [row_logprobs(frozen, row) for row in sides(rows)]
        ratios = [(now - then).sum() for now, then in zip(each, base, strict=True)]
        better, worse = torch.stack(ratios).chunk(2)
    judge: Any = CPOTrainer.__new__(CPOTrainer)
    judge.beta, judge.alpha, judge.accelerator = BETA, 0.0, Alone()
    judge.loss_type, judge.simpo_gamma, judge.label_smoothing = kind, MARGIN, smoothing
    return judge.cpo_loss(better, worse)[0].mean(), {}


@pytest.mark.parametrize(("kind", "smoothing"), CASES)
def test_loss_and_gradient_are_trls(kind: Any, smoothing: float) -> None:
    learner, frozen = moved_learner()
    rows = samples_of(DPO(), pair_groups(1))
    assert len({len(row.token_ids) for row in rows}) > 5
    algorithm = DPO(kind, BETA, smoothing, MARGIN)
    batch = learner.annotate(make_batch(rows, 150), algorithm.needs)
    assert len(batch.packs) > 1 and batch.num_pairs == 5
    figures = learner.evaluate(batch, algorithm.loss)
    model = learner.model.eval()
    loss, metrics = by_trl(model, frozen, rows, kind, smoothing)
    wanted = model_gradients(model, loss)
    # robust is a difference of larger numbers, whose rounding it keeps
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert far(gradients(learner, batch, algorithm.loss), wanted) < 1e-5
    if metrics and kind != "ipo":  # there rewards are what is compared: means over tokens
        for ours, theirs in {
            "accuracy": "accuracies",
            "rewards/chosen": "chosen",
            "rewards/margin": "margins",
        }.items():
            assert figures[ours] == pytest.approx(metrics[f"rewards/{theirs}"], rel=1e-4, abs=1e-6)


# -- the reference


def trained(kind: Any, groups: list[Group]) -> tuple[Any, list[dict[str, float]]]:
    model: Any = add_lora(tiny(), r=4)
    algorithm, options = DPO(beta=0.5, reference=kind), StepOptions(token_budget=200)
    learner = make_learner(model)
    rows = [algorithm.samples(copy.deepcopy(group)) for group in groups]
    if kind == "precomputed":
        for group in rows:
            for row, known in zip(group, score_rows(learner, group, options), strict=True):
                row.reference = known
    figures = []
    for step, chosen in enumerate([rows[:3], rows[3:], rows[3:], rows]):
        every = [row for group in chosen for row in group]
        figures.append(train_step(learner, algorithm, every, step, options))
    return model, figures


def test_a_precomputed_reference_gives_the_same_training_of_an_adapter() -> None:
    """Without an adapter: the runs below."""
    groups = pair_groups(5)
    live, wanted = trained("live", groups)
    kept, found = trained("precomputed", groups)
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if step == 0:  # policy and reference are the same: which of two equal margins is larger is rounding
            theirs["accuracy"] = ours["accuracy"]
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)  # rows are packed in another company
    assert abs(found[-1]["rewards/margin"]) > 1e-3
    weights = weights_of(live)
    assert all(torch.allclose(value, weights[name], atol=1e-5) for name, value in kept.state_dict().items())


# -- runs


def config_of(folder: Path, reference: str, dataset: Path) -> TrainingConfig:
    heldout = folder / "heldout.jsonl"
    heldout.write_bytes(dataset.read_bytes())
    return TrainingConfig(
        training={"algorithm": "dpo", "max_steps": 3, "batch_size": 3, "learning_rate": 2e-3, "eval_every": 3},
        data={"dataset": str(dataset), "heldout": str(heldout), "heldout_count": 3},
        dpo={"reference": reference, "beta": 0.5},
        logging={"output_dir": str(folder), "checkpoint_every": 1},
    )  # fmt: skip


def run(config: TrainingConfig, name: str, fail_at: int | None = None) -> Any:
    return Training(config, name=name, watcher=Quiet(fail_at)).train()


def test_a_run_with_a_precomputed_reference_and_its_resume(tmp_path: Path) -> None:
    """What a resumed run compares with is the model before training, not that of the checkpoint."""
    dataset = write_episodes(tmp_path / "episodes.jsonl", "train", 7)
    live, kept = (run(config_of(tmp_path, how, dataset), how) for how in ("live", "precomputed"))
    for ours, theirs in zip(kept.rows, live.rows, strict=True):
        for name in ("loss", "rewards/chosen", "eval/loss", "eval/rewards/margin", "grad_norm"):
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-4, abs=1e-5), name
    assert kept.metrics["rewards/margin"] > 0.1
    with pytest.raises(RuntimeError, match="broken off"):
        run(config_of(tmp_path, "precomputed", dataset), "broken", fail_at=2)
    again = RunFolder(tmp_path / "broken")
    Training(again.config, run=again, watcher=Quiet()).train()
    assert_same_run(tmp_path / "broken", kept.run)


def test_it_learns_from_recorded_episodes(warm: Path, recorded: Path, tmp_path: Path) -> None:
    """From pairs of a lookup and a guess the model learns to look up, in tasks it has not seen."""
    gain, start, end = lift_by_episodes(warm, recorded, tmp_path, algorithm="dpo", max_steps=6, batch_size=16)
    assert start["eval/loss"] == pytest.approx(math.log(2)) and start["eval/accuracy"] == 0
    assert end["eval/accuracy"] > 0.9 and end["eval/rewards/margin"] > 0.2
    assert gain > 0.1
