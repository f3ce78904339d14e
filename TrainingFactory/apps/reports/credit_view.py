"""Credit assignment token by token: episodes with the advantages that training gave to the sampled tokens.

credit = compute_credit(trajectories, GRPO(), tokenizer)
Path("credit.html").write_text(credit.page("my episodes"), encoding="utf-8")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from TrainingFactory.algorithms.advantages import OVERLONG_PENALTY
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.rft import RFT
from TrainingFactory.apps.reports.pages import render
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples, turn_spans
from TrainingFactory.protocols import Algorithm
from TrainingFactory.runs.episode_texts import format_reward
from TrainingFactory.training.filters import make_rows_by_role
from TrainingFactory.types import Sample, Trajectory, Turn

# advantage: factor of a token's gradient. weight: the same for demonstrations. reward: input of ppo's advantages.
Measure = Literal["advantage", "weight", "reward"]
DecodeTokens = Callable[[Sequence[int]], str]
SHADES = 8  # shades of a colour
MAX_CELL_GROUPS = 2  # groups in a notebook's cell
INCOMPLETE_CHARACTER = "\ufffd"  # decoded form of an incomplete character
LONGEST_CHARACTER = 4  # bytes in UTF-8, and therefore tokens at most
UNLIMITED_TOKENS = 1 << 60  # token budget that puts all rows into one pack
NO_SIGNAL = "no learning signal: all scored episodes of its group have the same reward"
NOTES: dict[Measure, str] = {
    "advantage": "advantages that the algorithm gave to the tokens of this step",
    "weight": "weights of the accepted episodes, with a mean of 1 over the tokens of the step; training normalises "
    "them per mini-batch",
    "reward": "rewards at the tokens that received them; ppo computes advantages from these (minus the KL if ppo.kl_in "
    "is reward) and from the critic's values, which are not recorded",
}


@dataclass(slots=True, frozen=True)
class TokenPiece:
    """The smallest run of sampled tokens that decodes to whole characters; nearly always one token."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    values: list[float]  # one per token; empty if the tokens are not trained

    @property
    def value(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    def describe_tokens(self, measure: Measure) -> str:
        """Return a line per token: its text, id, log-prob and value."""
        labels = [f"{measure} {value:+.4f}" for value in self.values] or ["not trained"] * len(self.token_ids)
        tokens = zip(self.token_ids, self.logprobs, labels, strict=True)
        return "\n".join(f"{self.text!r}, token {n}, log-prob {p:.4f}, {value}" for n, p, value in tokens)


@dataclass(slots=True, frozen=True)
class TurnCredit:
    turn: Turn
    step_reward: float | None  # None: the episode has no step rewards
    pieces: list[TokenPiece]

    @property
    def values(self) -> list[float]:
        return [value for piece in self.pieces for value in piece.values]

    def list_labels(self, measure: Measure) -> list[str]:
        """Return the labels of a turn, such as `step reward +0.50` and `advantage +0.83`."""
        values, label = self.values, "not trained"
        if values and measure == "reward":
            label = f"reward {sum(values):+.2f}"
        elif values:
            low, high = f"{min(values):+.2f}", f"{max(values):+.2f}"
            range_note = f" on average ({low} to {high})" if low != high else ""
            label = f"{measure} {sum(values) / len(values):+.2f}{range_note}"
        return [label] if self.step_reward is None else [f"step reward {self.step_reward:+.2f}", label]


@dataclass(slots=True, frozen=True)
class EpisodeCredit:
    trajectory: Trajectory
    turns: list[TurnCredit]
    untrained_reason: str | None  # why no token of it is trained

    @property
    def reward(self) -> float | None:
        """Return the total reward of the episode as the algorithm counts it; None if it was not scored."""
        if (reward := self.trajectory.reward) is None:
            return None
        return reward.outcome + sum(reward.steps) + reward.parts.get(OVERLONG_PENALTY, 0.0)


@dataclass(slots=True, frozen=True)
class GroupCredit:
    """Credit of a group of episodes, whose rewards the algorithm compares with each other."""

    name: str
    episodes: list[EpisodeCredit]

    @property
    def task(self) -> str:
        return self.episodes[0].trajectory.task.id

    @property
    def max_value(self) -> float:
        return max((abs(v) for e in self.episodes for turn in e.turns for v in turn.values), default=0.0)

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes if episode.reward is not None]

    @property
    def overview_cells(self) -> list[str]:
        """Return the cells of the group's row in the overview table, in the order of `Credit.columns`."""
        low, high = min(self.rewards, default=None), max(self.rewards, default=None)
        rewards = "none" if low is None else f"{low:g}" if low == high else f"{low:g} to {high:g}"
        num_trained = sum(episode.untrained_reason is None for episode in self.episodes)
        return [self.task, f"{len(self.episodes)}", f"{num_trained}", rewards, f"{self.max_value:.2f}"]


@dataclass(slots=True, frozen=True)
class Credit:
    """Groups of one training step, those with the largest absolute values first."""

    measure: Measure
    groups: list[GroupCredit] = field(repr=False)
    notes: list[str]
    max_value: float  # largest absolute value: the strongest colour

    @property
    def columns(self) -> list[str]:
        return ["task", "episodes", "trained", "rewards", f"largest {self.measure}"]

    def page(self, title: str) -> str:
        """Return a self-contained HTML page; `title` says which episodes it shows."""
        return render("credit.html.jinja", title=title, credit=self, levels=SHADES, reward_text=format_reward)

    def _repr_html_(self) -> str:
        """Return the first groups for a notebook."""
        return render(
            "credit_cell.html.jinja",
            credit=self,
            groups=self.groups[:MAX_CELL_GROUPS],
            left=max(0, len(self.groups) - MAX_CELL_GROUPS),
            levels=SHADES,
            reward_text=format_reward,
        )

    def get_shade(self, value: float | None) -> int:
        """Return the shade of a value from -LEVELS to LEVELS; 0 only if the value is 0 or None."""
        if not value or not self.max_value:
            return 0
        shade = max(1, min(SHADES, round(SHADES * abs(value) / self.max_value)))
        return shade if value > 0 else -shade


def compute_credit(trajectories: Sequence[Trajectory], algorithm: Algorithm, tokenizer: Any) -> Credit:
    """Return the credit that `algorithm` gives to each token of one step's episodes. Episodes with the same `group` are
    compared with each other."""
    measure: Measure = "reward" if "values" in algorithm.needs else "advantage"
    if algorithm.accepted([]) is not None:
        measure = "weight"
    groups: dict[str, list[Trajectory]] = {trajectory.group: [] for trajectory in trajectories}
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    samples = {name: make_rows_by_role(algorithm, group) for name, group in groups.items()}
    _write_advantages([row for episode_rows in samples.values() for row in episode_rows], algorithm)
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    credits = []
    for name, group in groups.items():
        reasons = [
            _explain_untrained(
                trajectory, [member for member in group if member.role == trajectory.role], algorithm
            )
            for trajectory in group
        ]
        episode_rows = _group_rows(group, samples[name], reasons)
        episodes = []
        for member_index, trajectory in enumerate(algorithm.adjusted(group)):
            turns = list(_make_turn_credits(trajectory, episode_rows.get(member_index), measure, decode))
            is_trained = any(turn.values for turn in turns)
            episodes.append(
                EpisodeCredit(trajectory, turns, None if is_trained else reasons[member_index] or NO_SIGNAL)
            )
        credits.append(GroupCredit(name, episodes))
    credits.sort(key=lambda group: -group.max_value)
    return Credit(measure, credits, [NOTES[measure]], credits[0].max_value if credits else 0.0)


def decode_pieces(token_ids: Sequence[int], decode: DecodeTokens) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, text) of the smallest runs of tokens that decode to whole characters. Each run is decoded
    together with the previous one, because some tokenizers drop a leading space."""
    previous_start = start = 0  # start of the previous piece, and of the current one
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[previous_start:end])
        prefix = decode(token_ids[previous_start:start]) if start else ""
        if text.endswith(INCOMPLETE_CHARACTER) and end - start < LONGEST_CHARACTER and end < len(token_ids):
            continue
        yield (start, end, text[len(prefix) :] if text.startswith(prefix) else decode(token_ids[start:end]))
        previous_start, start = start, end


def _write_advantages(rows: Sequence[Sample], algorithm: Algorithm) -> None:
    """Store in the rows the advantages that the algorithm computes over all of them, unless that needs a model."""
    if not isinstance(algorithm, GRPO | RFT):
        return
    batch = make_batch(rows, UNLIMITED_TOKENS, sharing=False)
    algorithm.prepare([batch], 0)
    for pack in batch.packs:
        for row_index in pack.rows.tolist():
            values = iter(pack.advantages[pack.row == row_index].tolist())
            rows[row_index].advantages = [
                next(values) if is_trained else 0.0 for is_trained in rows[row_index].loss_mask
            ]


def _group_rows(
    group: Sequence[Trajectory], rows: Sequence[Sample], reasons: Sequence[str | None]
) -> dict[int, list[Sample]]:
    """Return the rows of each episode, by its index in the group. Rows are matched in the order of the episodes,
    because different episodes may have the same tokens."""
    rows_by_episode, next_row = {}, 0
    for index, trajectory in enumerate(group):
        token_rows = [row.token_ids for row in to_samples(trajectory)] if reasons[index] is None else []
        candidates = list(rows[next_row : next_row + len(token_rows)])
        if token_rows and token_rows == [row.token_ids for row in candidates]:
            rows_by_episode[index] = candidates
            next_row += len(token_rows)
    return rows_by_episode


def _make_turn_credits(
    trajectory: Trajectory, rows: Sequence[Sample] | None, measure: Measure, decode: DecodeTokens
) -> Iterator[TurnCredit]:
    step_rewards = trajectory.reward.steps if trajectory.reward is not None else []
    for index, (turn, span) in enumerate(zip(trajectory.turns, turn_spans(trajectory), strict=True)):
        ids, logprobs = turn.completion.token_ids, turn.completion.logprobs
        values: list[float | None] = [None] * len(ids)
        if rows is not None:
            row, token_slice = rows[span.row], slice(span.begin, span.end)
            row_values = (row.rewards if measure == "reward" else row.advantages)[token_slice]
            values = [
                value if is_trained else None
                for value, is_trained in zip(row_values, row.loss_mask[token_slice], strict=True)
            ]
        pieces = [
            TokenPiece(
                text, ids[start:end], logprobs[start:end], [v for v in values[start:end] if v is not None]
            )
            for start, end, text in decode_pieces(ids, decode)
        ]
        yield TurnCredit(turn, step_rewards[index] if step_rewards else None, pieces)


def _explain_untrained(
    trajectory: Trajectory, group: Sequence[Trajectory], algorithm: Algorithm
) -> str | None:
    """Return the reason why training excludes an episode regardless of its group's rewards, or None."""
    if trajectory.reward is None:
        return f"not scored: {trajectory.error or 'no reason given'}"
    if not trajectory.turns:
        return "it has no turns"
    accepted_episodes = algorithm.accepted(group)
    if accepted_episodes is not None:
        return (
            None
            if any(candidate is trajectory for candidate in accepted_episodes)
            else "not accepted by the algorithm"
        )
    is_truncated = trajectory.status == "truncated"
    if is_truncated and isinstance(algorithm, GRPO | PPO) and not algorithm.train_truncated:
        return "truncated at a length limit, and train_truncated is false"
    return None
