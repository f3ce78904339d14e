"""The learner's log-probs of sampled tokens under the weights that sampled them. It needs the model, so it runs in a
worker process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TrainingFactory.assembly.sampler import load
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples, turn_spans
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.resolve.model_names import with_original_model, with_resolved_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Trajectory


def compute_learner_logprobs(run: RunFolder, episodes: Sequence[Trajectory]) -> list[list[list[float]]]:
    """Return the learner's log-probs of all sampled tokens, by episode and turn, under the weights before it trained on
    these tokens. Raise ValueError if the weights that sampled them are no longer stored."""
    config = _find_sampling_config(run, episodes)
    loaded_model = load(config)
    temperature = config.sampling.temperature
    learner = Learner(
        loaded_model.model, OptimizerOptions(), temperature=temperature, vision=loaded_model.vision
    )
    samples_by_episode = [to_samples(episode) for episode in episodes]
    all_rows = [row for samples in samples_by_episode for row in samples]
    batch = make_batch(all_rows, config.training.token_budget, learner.sharing)
    learner.annotate(batch, frozenset({"old"}))
    logprobs = [np.zeros(len(row.token_ids)) for row in all_rows]
    for pack in batch.packs:
        assert pack.old is not None
        for row_index in pack.rows.tolist():
            logprobs[row_index][np.array(all_rows[row_index].loss_mask)] = pack.old[pack.row == row_index]
    row_logprobs = iter(logprobs)
    logprobs_by_episode = [[next(row_logprobs) for _ in samples] for samples in samples_by_episode]
    return [
        [logprobs_by_row[span.row][span.begin : span.end].tolist() for span in turn_spans(episode)]
        for episode, logprobs_by_row in zip(episodes, logprobs_by_episode, strict=True)
    ]


def _find_sampling_config(run: RunFolder, episodes: Sequence[Trajectory]) -> TrainingConfig:
    """Return the run's config with its model set to the weights that sampled these episodes."""
    completions = [turn.completion for episode in episodes for turn in episode.turns]
    versions = sorted({version for completion in completions for version in completion.token_versions})
    config = with_original_model(run)
    if versions in ([], [0]):
        return config
    if len(versions) > 1:
        raise ValueError(f"several weight versions sampled this group: {', '.join(map(str, versions))}")
    folder = run.checkpoint_folder(versions[0])
    if not folder.is_dir():
        step_list = ", ".join(path.name.removeprefix("step-").lstrip("0") for path in run.checkpoints())
        raise ValueError(
            f"the weights after step {versions[0]} sampled this group, and no checkpoint has them; checkpoints exist "
            f"for steps: {step_list or 'none'}; log-probs are available for step 1 and the step after each checkpoint"
        )
    model = config.model.model_copy(update={"name": str(folder), "adapter": None, "revision": None})
    return with_resolved_model(config.model_copy(update={"model": model}))
