"""Filters of sampled episodes, applied before credit (`training.filters`). A filter flags turns. Its action:

    drop    remove the episode from credit, as if it had not been scored
    mask    do not train the flagged turns; the episode stays in the baseline
    count   only count

Flags depend on the episode alone, so that a resumed or replayed run filters in the same way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.user_code import describe_failure, is_file_name, load_objects, split_name
from TrainingFactory.protocols import Algorithm
from TrainingFactory.types import Group, Sample, Trajectory, Turn

Flags = Sequence[bool]  # one per turn
Filter = Callable[[Trajectory], Any]  # returns Flags, or one bool for all turns

DROPPED = "dropped"  # episodes
DROPPED_PREFIX = "dropped by training.filters"  # begins the `error` of a dropped episode
MASKED = "masked_turns"


def void_turns(episode: Trajectory) -> Flags:
    """Flag turns with neither a call nor an answer."""
    return [not turn.message.tool_calls and not turn.message.content.strip() for turn in episode.turns]


def repeated_calls(episode: Trajectory) -> Flags:
    """Flag turns that repeat a call of the episode with the same arguments."""
    seen_calls: set[str] = set()
    flags = []
    for turn in episode.turns:
        calls = [
            json.dumps([call.name, call.arguments], sort_keys=True, default=str)
            for call in turn.message.tool_calls
            if call.error is None
        ]
        flags.append(len(set(calls)) < len(calls) or not seen_calls.isdisjoint(calls))
        seen_calls.update(calls)
    return flags


def truncated(episode: Trajectory) -> bool:
    """Flag all turns of an episode that was cut by a length limit."""
    return episode.status == "truncated"


def unreadable_calls(episode: Trajectory) -> Flags:
    """Flag turns with a call that could not be parsed."""
    return [any(call.error is not None for call in turn.message.tool_calls) for turn in episode.turns]


FILTERS: dict[str, Filter] = {
    function.__name__: function for function in (void_turns, repeated_calls, truncated, unreadable_calls)
}


@dataclass(slots=True, frozen=True)
class FilteredGroup:
    """A group after the filters."""

    episodes: list[Trajectory]  # with masked turns; all turns of a dropped episode
    credited_episodes: list[Trajectory]  # the same, without the rewards of dropped episodes
    counts: dict[str, int]


class EpisodeFilters:
    """The filters of a run: kind or FILE.py:function -> action (drop, mask or count)."""

    def __init__(self, actions: Mapping[str, str]) -> None:
        self._actions = dict(actions)
        self._filters = {name: _find_filter(name) for name in actions}

    def __bool__(self) -> bool:
        return bool(self._actions)

    def make_groups(
        self,
        groups: Sequence[list[Trajectory]],
        algorithm: Algorithm,
        slots: Sequence[tuple[int, int, int]],
    ) -> list[Group]:
        """Make one group per list of episodes, with its training rows. `slots` has the (number, attempt, position) of
        each group."""
        results = []
        for (number, attempt, position), group in zip(slots, groups, strict=True):
            if not self:
                results.append(Group(number, group, make_rows_by_role(algorithm, group), attempt, position))
                continue
            filtered = self.filter_group(group)
            rows = make_rows_by_role(algorithm, filtered.credited_episodes)
            rows = rows if any(any(row.loss_mask) for row in rows) else []
            results.append(Group(number, filtered.episodes, rows, attempt, position, filtered.counts))
        return results

    def filter_group(self, group: Sequence[Trajectory]) -> FilteredGroup:
        counts: Counter[str] = Counter(
            dict.fromkeys([*map(_shorten_filter_name, self._actions), DROPPED, MASKED], 0)
        )
        episodes, credited_episodes = [], []
        for trajectory in group:
            flags = {name: self._flag_turns(name, trajectory) for name in self._actions}
            counts.update(_shorten_filter_name(name) for name, turns in flags.items() if any(turns))
            dropping_filters = [n for n, turns in flags.items() if any(turns) and self._actions[n] == "drop"]
            masks = [turns for name, turns in flags.items() if self._actions[name] == "mask"]
            is_masked = [any(turn_flags) for turn_flags in zip(*masks, strict=True)]
            counts[MASKED] += sum(is_masked)
            if dropping_filters and trajectory.reward is not None:
                counts[DROPPED] += 1
                is_masked = [True] * len(trajectory.turns)
                trajectory = replace(trajectory, error=f"{DROPPED_PREFIX}: {', '.join(dropping_filters)}")
            if any(is_masked):
                trajectory = replace(trajectory, turns=_mask_turns(trajectory.turns, is_masked))
            episodes.append(trajectory)
            credited_episodes.append(without_dropped_reward(trajectory))
        return FilteredGroup(episodes, credited_episodes, dict(counts))

    def _flag_turns(self, name: str, trajectory: Trajectory) -> list[bool]:
        """Return, for each turn, whether the filter `name` flags it."""
        try:
            flags = self._filters[name](trajectory)
        except Exception as error:  # user code
            raise ValueError(describe_failure(error, f"training.filters: {name}")) from error
        if isinstance(flags, bool):
            return [flags] * len(trajectory.turns)
        if (
            not isinstance(flags, list | tuple)
            or len(flags) != len(trajectory.turns)
            or not all(isinstance(flag, bool) for flag in flags)
        ):
            raise ValueError(
                f"training.filters: {name} returned {flags!r:.60} for an episode of {len(trajectory.turns)} turns; "
                "return a bool, or a list with one bool for each turn"
            )
        return list(flags)


def make_rows_by_role(algorithm: Algorithm, group: Sequence[Trajectory]) -> list[Sample]:
    """Return the training rows of a group. In self-play, compute the rows of each role separately, because episodes are
    compared with those of the same role only."""
    roles = dict.fromkeys(trajectory.role for trajectory in group)
    role_groups = ([trajectory for trajectory in group if trajectory.role == role] for role in roles)
    return [row for role_group in role_groups for row in algorithm.samples(role_group)]


def without_dropped_reward(trajectory: Trajectory) -> Trajectory:
    """Return the episode for credit assignment: without its reward if a filter dropped the episode."""
    is_dropped = trajectory.error is not None and trajectory.error.startswith(DROPPED_PREFIX)
    return replace(trajectory, reward=None) if is_dropped else trajectory


def _find_filter(name: str) -> Filter:
    if name in FILTERS:
        return FILTERS[name]
    if not is_file_name(name):
        hint = did_you_mean(nearest(name, FILTERS))
        raise ValueError(
            f"training.filters.{name}: unknown filter{hint or '.'} Use {', '.join(FILTERS)} or FILE.py:FUNCTION"
        )
    _, function_name, objects = load_objects("training.filters: filter", name)
    if not function_name or not callable(objects[0]):
        raise ValueError(f"training.filters: {name} names no function. Write FILE.py:FUNCTION")
    return objects[0]


def _shorten_filter_name(name: str) -> str:
    """Return the name of a filter in metrics: for FILE.py:function, the name of the function alone."""
    return split_name(name)[1] or name


def _mask_turns(turns: Sequence[Turn], is_masked: Sequence[bool]) -> list[Turn]:
    """Mark turns as masked. A masked turn is copied, because forked episodes share their turns."""
    pairs = zip(turns, is_masked, strict=True)
    return [replace(turn, masked=True) if is_turn_masked else turn for turn, is_turn_masked in pairs]


def compute_filter_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return each filter's share of flagged episodes, and the shares of dropped episodes and of masked turns. Empty
    without filters."""
    counts: Counter[str] = Counter()
    for group in groups:
        counts.update(group.filtered)
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    totals = {MASKED: sum(len(trajectory.turns) for trajectory in episodes)}
    return {f"filters/{name}": n / (totals.get(name, len(episodes)) or 1) for name, n in counts.items()}


def find_dropped_problem(groups: Sequence[Group]) -> str | None:
    """Return the reason why the groups are unusable for training, if the filters dropped every scored episode; else
    None."""
    num_scored = sum(trajectory.reward is not None for group in groups for trajectory in group.trajectories)
    counts: Counter[str] = Counter()
    for group in groups:
        counts.update(group.filtered)
    if not num_scored or counts[DROPPED] < num_scored:
        return None
    flag_counts = {name: count for name, count in counts.items() if count and name not in (DROPPED, MASKED)}
    reasons = ", ".join(f"{name} flags {count}" for name, count in flag_counts.items())
    return (
        f"training.filters dropped all {num_scored} scored episodes ({reasons}). Inspect the episodes, and use the "
        "action mask or count for a filter that flags too many"
    )
