"""Score sampled tokens by the learner, with the weights that sampled them. It loads the model, in a process of its
own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TrainingFactory.assembly.sampler import load
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples, turn_spans
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.resolve.model_names import as_started_from, with_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Trajectory


def learner_logprobs(run: RunFolder, episodes: Sequence[Trajectory]) -> list[list[list[float]]]:
    """Return the learner's log-probs of all sampled tokens, by episode and turn, as it had them before it trained on
    them; raise ValueError where the weights that sampled them are not kept."""
    config = _sampled_with(run, episodes)
    learner = Learner(load(config).model, OptimizerOptions(), temperature=config.sampling.temperature)
    rows = [to_samples(each) for each in episodes]
    every = [row for made in rows for row in made]
    batch = make_batch(every, config.training.token_budget, learner.sharing)
    learner.annotate(batch, frozenset({"old"}))
    found = [np.zeros(len(row.token_ids)) for row in every]
    for pack in batch.packs:
        assert pack.old is not None
        for number in pack.rows.tolist():
            found[number][np.array(every[number].loss_mask)] = pack.old[pack.row == number]
    numbers = iter(found)
    by_episode = [[next(numbers) for _ in made] for made in rows]
    return [
        [own[span.row][span.begin : span.end].tolist() for span in turn_spans(each)]
        for each, own in zip(episodes, by_episode, strict=True)
    ]


def _sampled_with(run: RunFolder, episodes: Sequence[Trajectory]) -> TrainingConfig:
    """Return the run's config with the model as it was when it sampled these."""
    turns = [turn.completion for each in episodes for turn in each.turns]
    versions = sorted({version for sampled in turns for version in sampled.token_versions})
    config = as_started_from(run)
    if versions in ([], [0]):
        return config
    if len(versions) > 1:
        raise ValueError(f"versions {', '.join(map(str, versions))} of the weights sampled this group")
    folder = run.checkpoint_folder(versions[0])
    if not folder.is_dir():
        kept = ", ".join(path.name.removeprefix("step-").lstrip("0") for path in run.checkpoints())
        raise ValueError(
            f"the weights after step {versions[0]} sampled this group, and are not kept; there are checkpoints of "
            f"steps: {kept or 'none'}; it is known for the steps right after them, and for step 1"
        )
    changes = {"name": str(folder), "adapter": None, "revision": None}
    return with_model(config.model_copy(update={"model": config.model.model_copy(update=changes)}))
