"""Supervised fine-tuning: the value of the loss, against TRL's too, and that it learns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.kits.data import loaded, tool_dialogues
from tests.kits.engine import tiny
from tests.kits.learner import sample, words
from tests.test_grpo import group_of
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.examples import load_examples
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.step import StepOptions, evaluate_rows
from TrainingFactory.training.tokenized_dataset import TokenizedDataset


def test_every_episode_is_a_row_whatever_it_earned() -> None:
    group = group_of(1.0, None, 0.0)
    rows, wanted = SFT().samples(group), [row for episode in group for row in to_samples(episode)]
    assert [(row.token_ids, row.loss_mask) for row in rows] == [
        (row.token_ids, row.loss_mask) for row in wanted
    ]
    last = SFT(turns="last").samples(group)
    for row, whole, episode in zip(last, rows, group, strict=True):
        size = len(episode.turns[-1].completion.token_ids)
        assert (
            sum(row.loss_mask) == size and row.loss_mask[-size:] == whole.loss_mask[-size:] == [True] * size
        )
    assert SFT().needs == {"lengths"}


@pytest.mark.parametrize("turns", ["all", "last"])
def test_the_loss_is_that_of_trl(tmp_path: Path, turns: str) -> None:
    """Tool dialogues of different length, through TRL's own trainer: its collator, its padding, its loss."""
    import datasets
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    model, tokenizer, chat = loaded()
    dialogues = TokenizedDataset(load_examples(tool_dialogues(5), "sft"), chat, 4096)
    algorithm = SFT(turns)  # pyright: ignore[reportArgumentType]
    groups = [dialogues.group(number) for number in range(5)]
    rows = [row for group in groups for row in algorithm.samples(group)]
    assert len({len(row.token_ids) for row in rows}) > 1
    assert [len(group[0].turns) for group in groups] == [2, 3, 2, 3, 2]
    table = [{"input_ids": row.token_ids, "assistant_masks": [int(m) for m in row.loss_mask]} for row in rows]
    options = SFTConfig(
        str(tmp_path), per_device_train_batch_size=5, report_to=[], use_cpu=True, bf16=False, max_length=None
    )
    trainer = SFTTrainer(
        model, options, train_dataset=datasets.Dataset.from_list(table), processing_class=tokenizer
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    assert int((inputs["labels"] != -100).sum()) == sum(sum(row.loss_mask) for row in rows)
    wanted = trainer.compute_loss(model.eval(), inputs).item()
    figures = evaluate_rows(Learner(model, OptimizerOptions()), algorithm, rows, 0, StepOptions(300))
    assert figures["loss"] == pytest.approx(wanted, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(torch.tensor(wanted).exp().item(), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns_by_heart(optimizer: str) -> None:
    rng = random.Random(0)
    head = words(rng, 50)
    batch = make_batch([sample(rng, head + words(rng, 12), 50) for _ in range(4)])
    options = OptimizerOptions(optimizer, learning_rate=1e-2, matrix_learning_rate=0.02)  # pyright: ignore[reportArgumentType]
    learner = Learner(tiny(), options)
    losses = [learner.update(batch, SFT().loss)["loss"] for _ in range(40)]
    assert losses[0] > 4 and losses[-1] < 0.2
