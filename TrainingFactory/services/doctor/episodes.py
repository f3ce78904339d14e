"""What the episodes and rows of a dry step tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from TrainingFactory.services.doctor.diagnosis import Diagnosis
from TrainingFactory.services.training.source import StepGroups, most_frequent
from TrainingFactory.types import Trajectory


def check_episodes(
    found: Diagnosis, episodes: Sequence[Trajectory], max_tokens: int, max_length: int
) -> None:
    """Look at how sampled episodes ended, where a turn may have `max_tokens` and an episode `max_length` tokens."""
    failed = [each for each in episodes if each.status in ("error", "tool_failure")]
    if failed:
        found.add("episodes_fail", f"{len(failed)} of {len(episodes)} episodes: {most_frequent(failed)}")
    ended = ", ".join(f"{count} {status}" for status, count in Counter(e.status for e in episodes).items())
    rewards = [each.reward.outcome + sum(each.reward.steps) for each in episodes if each.reward is not None]
    told = f"rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "none could be scored"
    found.fact("dry episodes", f"{len(episodes)}: {ended}; {told}")
    turns = [turn for episode in episodes for turn in episode.turns]
    if turns and not any(turn.completion.finish == "stop" for turn in turns):
        found.add(
            "no_stop",
            f"none of {len(turns)} turns ended with a stop token within sampling.max_tokens ({max_tokens})",
            severity="warning",
        )
    longest = max((len(turn.prompt_ids) for turn in turns), default=max_length)
    if longest + max_tokens > max_length:
        found.add(
            "prompt_too_long",
            f"a prompt has {longest} tokens, a turn may have {max_tokens} more, and model.max_length is {max_length}",
            severity="warning" if turns else "error",
        )


def check_mask(found: Diagnosis, batch: StepGroups) -> None:
    """Compare the trained tokens of the rows with what was sampled."""
    spoken = {
        tuple(token for turn in each.turns for token in turn.completion.token_ids)
        for each in batch.trajectories
    }
    for number, row in enumerate(batch.rows):
        trained = tuple(token for token, used in zip(row.token_ids, row.loss_mask, strict=True) if used)
        if not trained:
            found.add("mask", f"row {number} of the step has no token to learn from")
        elif batch.sampled and trained not in spoken:
            found.add(
                "mask", f"row {number} of the step trains tokens that were not sampled, or not all of them"
            )
