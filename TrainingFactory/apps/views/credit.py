"""The episodes of a group with the credit of every token. It needs torch and a tokenizer, so it runs in a worker
process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from TrainingFactory.apps.reports.credit_view import TokenPiece
from TrainingFactory.apps.reports.run_credit import compute_run_credit, resolve_step
from TrainingFactory.apps.views.episodes import make_episode_view
from TrainingFactory.apps.views.index import EpisodeIndex
from TrainingFactory.apps.views.shapes import CreditView, GroupView, Json
from TrainingFactory.data.trajectories import trajectory_from_dict
from TrainingFactory.runs.folder import RunFolder


def make_group_view(
    run: RunFolder, step: int | None, task: str, index: EpisodeIndex | None = None, with_learner_logprobs: bool = False,
    group: str | None = None,
) -> GroupView:  # fmt: skip
    """Return a task's episodes in a step with the credit that the run's algorithm gave them; raise ValueError if there
    are none. `step` None: the last step with this task. `group` None: all groups. `with_learner_logprobs` adds the
    learner's log-probs. Pass an existing `index` of the run to avoid indexing it again."""
    step = resolve_step(run, step, task)
    lines = (index or EpisodeIndex(run)).get_lines("step = ?", step)
    episodes = [trajectory_from_dict(json.loads(line), run.images) for line, _ in lines]
    credit = compute_run_credit(run, step, task, episodes)[1]
    episode_credits = [episode for group in credit.groups for episode in group.episodes]
    entries = {(entry.trajectory.group, entry.trajectory.member): entry for entry in episode_credits}
    group_view = GroupView(step=step, task=task, members=[], notes=credit.notes)
    members = [(*line, episode) for line, episode in zip(lines, episodes, strict=True)]
    members = [
        member for member in members if member[-1].task.id == task and group in (None, member[-1].group)
    ]
    logprobs: list[list[list[float]]] = [[[] for _ in episode.turns] for *_, episode in members]
    if with_learner_logprobs:
        # Imported here because it is slow: it imports the model code.
        from TrainingFactory.apps.views.learned import compute_learner_logprobs

        try:
            logprobs = compute_learner_logprobs(run, [episode for *_, episode in members])
        except (ValueError, OSError) as error:
            group_view.notes.append(f"the learner's log-probs are not available: {error}")
    for (line, line_number, episode), turn_logprobs in zip(members, logprobs, strict=True):
        view, entry = make_episode_view(line, line_number, run.name), entries[episode.group, episode.member]
        pieces = [turn.pieces for turn in entry.turns]
        view.credit = CreditView(
            measure=credit.measure, largest=credit.max_value, note=credit.notes[0], left_out=entry.untrained_reason,
            turns=[{"pieces": list(_list_pieces(*pair))} for pair in zip(pieces, turn_logprobs, strict=True)]
        )  # fmt: skip
        group_view.members.append(view)
    return group_view


def _list_pieces(pieces: Sequence[TokenPiece], logprobs: Sequence[float]) -> Iterator[Json]:
    end_token = 0
    for piece in pieces:
        row = {"text": piece.text, "ids": piece.token_ids, "logprobs": piece.logprobs, "values": piece.values}
        start_token, end_token = end_token, end_token + len(piece.token_ids)
        yield row | {"trained": bool(piece.values), "learned": logprobs[start_token:end_token]}
