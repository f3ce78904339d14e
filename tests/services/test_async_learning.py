"""Learning with groups that are sampled ahead comes to the same as learning without."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.kits.run import train
from tests.kits.warm import WARM, Homes, lift
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.models import load_model
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.types import Message, Step


def success(warm: Path, folder: Path, bound: int, seed: int, order: str = "number", steps: int = 14) -> float:
    """Train from the warm start, and return the share of held-out tasks that are done afterwards."""
    folder.mkdir(parents=True)
    _, after, report = lift(
        warm,
        folder,
        training={"max_steps": steps, "seed": seed, "learning_rate": 4e-4, "schedule": "linear"},
        sampling={"max_tokens": 24, "deterministic": False, "slots": 64},
        optimization={"async_rollout": bound > 0, "max_staleness": bound, "async_order": order},
    )
    ages = [row["staleness/max"] for row in report.rows if "staleness/max" in row]
    assert (max(ages) == bound) if bound else not ages
    return after


@pytest.mark.slow
def test_every_bound_reaches_the_same_success(warm: Path, tmp_path: Path) -> None:
    found = {
        bound: [success(warm, tmp_path / f"{bound}-{seed}", bound, seed) for seed in range(5)]
        for bound in range(5)
    }
    for bound, shares in found.items():
        print(f"bound {bound}: {fmean(shares):.3f} {[round(share, 2) for share in shares]}")
    means = [fmean(shares) for shares in found.values()]
    assert min(means) > 0.6 and max(means) - min(means) < 0.08  # before it is 0.3


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
