"""The members of a group with the credit of every token. It takes torch and a tokenizer: for a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from TrainingFactory.apps.reports.credit_view import Piece
from TrainingFactory.apps.reports.run_credit import resolve_step, run_credit
from TrainingFactory.apps.views.episodes import episode_view
from TrainingFactory.apps.views.index import EpisodeIndex
from TrainingFactory.apps.views.shapes import CreditView, GroupView, Json
from TrainingFactory.data.trajectories import trajectory_from_dict
from TrainingFactory.runs.folder import RunFolder


def group_credit(
    run: RunFolder, step: int | None, task: str, index: EpisodeIndex | None = None, learner: bool = False,
    group: str | None = None,
) -> GroupView:  # fmt: skip
    """Return the episodes of a task in a step (None: the last that took it), of one of its groups or of all, with the
    credit that the run's algorithm gave, and the learner's log-probs if they are wanted; raise ValueError where there
    are none. An index that knows the run already saves reading it again."""
    step = resolve_step(run, step, task)
    lines = (index or EpisodeIndex(run)).lines("step = ?", step)
    episodes = [trajectory_from_dict(json.loads(line)) for line, _ in lines]
    credit = run_credit(run, step, task, episodes)[1]
    known = {(e.trajectory.group, e.trajectory.member): e for group in credit.groups for e in group.episodes}
    found = GroupView(step=step, task=task, members=[], notes=credit.notes)
    own = [(*line, played) for line, played in zip(lines, episodes, strict=True) if played.task.id == task]
    own = [each for each in own if group in (None, each[-1].group)]
    learned: list[list[list[float]]] = [[[] for _ in played.turns] for *_, played in own]
    if learner:
        from TrainingFactory.apps.views.learned import learner_logprobs  # the models' code: seconds

        try:
            learned = learner_logprobs(run, [played for *_, played in own])
        except (ValueError, OSError) as error:
            found.notes.append(f"the learner's log-probs are not known: {error}")
    for (line, number, played), turns in zip(own, learned, strict=True):
        told, view = known[played.group, played.member], episode_view(line, number)
        view.credit = CreditView(
            measure=credit.measure, largest=credit.largest, note=credit.notes[0], left_out=told.left_out,
            turns=[{"pieces": list(_pieces(turn.pieces, each))} for turn, each in zip(told.turns, turns, strict=True)],
        )  # fmt: skip
        found.members.append(view)
    return found


def _pieces(pieces: Sequence[Piece], learned: Sequence[float]) -> Iterator[Json]:
    at = 0
    for each in pieces:
        told = {"text": each.text, "ids": each.token_ids, "logprobs": each.logprobs, "values": each.values}
        start, at = at, at + len(each.token_ids)
        yield told | {"trained": bool(each.values), "learned": learned[start:at]}
