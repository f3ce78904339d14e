"""Learning with groups that are sampled ahead comes to the same as learning without."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import fmean

import pytest
import torch

from benchmarks.staleness import one
from tests.kits.run import train
from tests.kits.warm import WARM, Homes
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.models import load_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Message, Step


@pytest.mark.slow
def test_every_bound_reaches_the_same_success() -> None:
    """On a plateau, where a run that overshoots loses everything."""
    found = {bound: [one(bound, seed, 30, 3e-4, free=False) for seed in range(3)] for bound in (0, 1, 2, 4)}
    for bound, shares in found.items():
        print(f"bound {bound}: {fmean(shares):.3f} {[round(share, 2) for share in shares]}")
    means = [fmean(shares) for shares in found.values()]
    assert min(means) > 0.7 and max(means) - min(means) < 0.06  # before it is 0.3


class Late(Homes):
    """Replies come when others have been learned from."""

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(random.random() * 0.3)
        return await super().step(message)


@pytest.mark.slow
def test_every_turn_has_the_log_probs_of_the_weights_that_it_names(tmp_path: Path) -> None:
    """New weights land between the turns of an episode; what was computed for it before is forgotten."""
    config = TrainingConfig(
        model={"name": str(WARM)},
        training={"max_steps": 6, "batch_size": 3, "group_size": 4, "learning_rate": 1e-3},
        sampling={"max_tokens": 24},
        environment={"max_turns": 3},
        optimization={"async_rollout": True, "max_staleness": 3, "async_order": "arrival"},
        logging={"output_dir": str(tmp_path), "checkpoint_every": 1, "keep_checkpoints": 9},
    )
    run = RunFolder(train(config, "a", environment=Late).run)
    folders = {0: WARM} | {int(path.name.removeprefix("step-")): path for path in run.checkpoints()}
    models = {version: load_model(str(folder)).model.eval() for version, folder in folders.items()}
    several = 0
    for episode in load_trajectories(run.path / "trajectories.jsonl"):
        several += len({turn.completion.policy_version for turn in episode.turns}) > 1
        for turn in episode.turns:
            sampled, start = turn.completion, len(turn.prompt_ids)
            ids = torch.tensor([turn.prompt_ids + sampled.token_ids])
            with torch.no_grad():
                logits = models[sampled.policy_version](input_ids=ids).logits[0, start - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
            assert torch.allclose(expected, torch.tensor(sampled.logprobs), atol=1e-4)
    assert several > 5
