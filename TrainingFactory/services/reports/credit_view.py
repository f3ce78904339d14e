"""Which token was paid how much: episodes with the advantages that training gave to what the model wrote. Here is what
there is to see; `credit_page.py` makes a page of it, and `tfactory runs episodes` shows it on a terminal.

    credit = coloured(trajectories, GRPO(), tokenizer)
    Path("credit.html").write_text(credit_page(credit, "my episodes"), encoding="utf-8")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from TrainingFactory.algorithms.credit import OVERLONG
from TrainingFactory.protocols import Algorithm
from TrainingFactory.services.demo.report import said
from TrainingFactory.services.serving.text import HALF
from TrainingFactory.types import Sample, Trajectory, Turn

# advantage: what the gradient is multiplied with. weight: the same for demonstrations. reward: what ppo begins with.
Measure = Literal["advantage", "weight", "reward"]
Decode = Callable[[Sequence[int]], str]
LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens at most
EVERYTHING = 1 << 60  # tokens: one pack
NOTES: dict[Measure, str] = {
    "advantage": "advantages as the algorithm gave them to the tokens of this step",
    "weight": "weights of the kept episodes, with a mean of 1 over the tokens of the step; training scales them so in "
    "each mini-batch",
    "reward": "rewards where they stand; the advantages of ppo come from these (less the KL if ppo.kl_in is reward) "
    "and from the critic's expectations, which are not kept",
}


@dataclass(slots=True, frozen=True)
class Piece:
    """Sampled tokens that are whole characters together: nearly always one token."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    values: list[float]  # one per token; none where the tokens are not trained

    @property
    def value(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None


@dataclass(slots=True, frozen=True)
class TurnCredit:
    turn: Turn
    step_reward: float | None  # None: the episode has no rewards for steps
    pieces: list[Piece]

    @property
    def values(self) -> list[float]:
        return [value for piece in self.pieces for value in piece.values]

    def figures(self, measure: Measure) -> list[str]:
        """Such as: step reward +0.50, advantage +0.83"""
        values, paid = self.values, []
        if self.step_reward is not None:
            paid.append(f"step reward {self.step_reward:+.2f}")
        if not values:
            return [*paid, "not trained"]
        if measure == "reward":
            return [*paid, f"reward {sum(values):+.2f}"]
        low, high, mean = min(values), max(values), sum(values) / len(values)
        if high - low <= 1e-6 * max(abs(low), abs(high)):
            return [*paid, f"{measure} {values[0]:+.2f}"]
        return [*paid, f"{measure} {mean:+.2f} on average, from {low:+.2f} to {high:+.2f}"]


@dataclass(slots=True, frozen=True)
class EpisodeCredit:
    trajectory: Trajectory
    turns: list[TurnCredit]
    left_out: str | None  # why nothing of it is trained

    @property
    def total(self) -> float | None:
        """What the episode was worth to the algorithm."""
        reward = self.trajectory.reward
        return (
            None if reward is None else reward.outcome + sum(reward.steps) + reward.parts.get(OVERLONG, 0.0)
        )


@dataclass(slots=True, frozen=True)
class GroupCredit:
    """The episodes that were compared with each other."""

    name: str
    episodes: list[EpisodeCredit]

    @property
    def task(self) -> str:
        return self.episodes[0].trajectory.task.id

    @property
    def largest(self) -> float:
        return max((abs(v) for e in self.episodes for turn in e.turns for v in turn.values), default=0.0)

    @property
    def totals(self) -> list[float]:
        return [episode.total for episode in self.episodes if episode.total is not None]

    @property
    def trained(self) -> int:
        return sum(episode.left_out is None for episode in self.episodes)

    def chosen(self, best: int | None, worst: int | None) -> GroupCredit:
        """With the best and the worst of the scored episodes only, in their order; all if neither is asked for, or if
        none is scored: then why is what there is to see."""
        if (best is None and worst is None) or not self.totals:
            return self
        scored = [episode for episode in self.episodes if episode.total is not None]
        ranked = sorted(scored, key=lambda episode: episode.total or 0.0, reverse=True)
        kept = {id(each) for each in ranked[: best or 0] + ranked[max(0, len(ranked) - (worst or 0)) :]}
        return replace(self, episodes=[episode for episode in self.episodes if id(episode) in kept])


@dataclass(slots=True, frozen=True)
class Credit:
    """Episodes of one training step, those with the largest values first."""

    measure: Measure
    groups: list[GroupCredit]
    notes: list[str]
    largest: float  # of the values, signs aside: the strongest colour


def coloured(trajectories: Sequence[Trajectory], algorithm: Algorithm, tokenizer: Any = None) -> Credit:
    """What `algorithm` makes of the episodes of one step, token by token. Those with the same `group` are compared with
    each other. Without a tokenizer, turns are shown as they were read, in one piece."""
    measure, notes = measure_of(algorithm), list[str]()
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    # A row says of each token which turn it came with, if turns are numbered through where they have a version.
    turns = [turn for group in groups.values() for trajectory in group for turn in trajectory.turns]
    numbers = {id(turn): number for number, turn in enumerate(turns)}
    rows: list[Sample] = []
    for name, group in groups.items():
        if _has_tokens(group):
            copies = [_numbered(trajectory, numbers) for trajectory in group]
            rows += algorithm.samples(copies)
            # What the algorithm has charged is among the rewards' parts now.
            groups[name] = [replace(t, reward=copy.reward) for t, copy in zip(group, copies, strict=True)]
        else:
            notes.append(f"group {name} has a turn without token ids, so that only rewards can be shown")
    values = _values(rows, algorithm, measure)
    if tokenizer is None:
        notes.append("without a tokenizer the turns are shown as they were read, in one piece")
    decode = None if tokenizer is None else _decoder(tokenizer)
    made = [
        GroupCredit(name, _episodes(group, algorithm, values, numbers, decode))
        for name, group in groups.items()
    ]
    made.sort(key=lambda group: -group.largest)
    return Credit(measure, made, [NOTES[measure], *notes], made[0].largest if made else 0.0)


def measure_of(algorithm: Algorithm) -> Measure:
    """ValueError for algorithms that pay no episode."""
    from TrainingFactory.algorithms.dpo import DPO
    from TrainingFactory.algorithms.kto import KTO
    from TrainingFactory.algorithms.reward_model import RewardModel
    from TrainingFactory.algorithms.rft import RFT
    from TrainingFactory.algorithms.sft import SFT

    if isinstance(algorithm, SFT | DPO | KTO | RewardModel):
        name = type(algorithm).__name__
        raise ValueError(
            f"{name} learns from examples, not from rewards: none of its tokens has an advantage"
        )
    if isinstance(algorithm, RFT):
        return "weight"
    return "reward" if "values" in algorithm.needs else "advantage"


def pieces_of(token_ids: Sequence[int], decode: Decode) -> Iterator[tuple[int, int, str]]:
    """(first token, the one after the last, text), of as few tokens as have whole characters. Tokens are decoded after
    the ones before them, because with some tokenizers a text loses its first blank."""
    before = start = 0  # of the piece before, and of the next one
    for end in range(1, len(token_ids) + 1):
        text, known = decode(token_ids[before:end]), decode(token_ids[before:start])
        if text.endswith(HALF) and end - start < LONGEST_CHARACTER and end < len(token_ids):
            continue
        yield start, end, text[len(known) :] if text.startswith(known) else decode(token_ids[start:end])
        before, start = start, end


def _decoder(tokenizer: Any) -> Decode:
    def decode(token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        return (
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if ids
            else ""
        )

    return decode


def _has_tokens(group: Sequence[Trajectory]) -> bool:
    return all(turn.completion.token_ids for trajectory in group for turn in trajectory.turns)


def _numbered(trajectory: Trajectory, numbers: dict[int, int]) -> Trajectory:
    turns = [
        replace(turn, completion=replace(turn.completion, policy_version=numbers[id(turn)]))
        for turn in trajectory.turns
    ]
    return replace(trajectory, turns=turns)


def _values(rows: Sequence[Sample], algorithm: Algorithm, measure: Measure) -> dict[int, list[float | None]]:
    """By the number of a turn one value per sampled token, None where it is not trained."""
    found: dict[int, list[float | None]] = {}
    for row, values in zip(rows, _prepared(rows, algorithm, measure), strict=True):
        for number, trained, value in zip(row.policy_version, row.loss_mask, values, strict=True):
            # The prompt comes with its turn, too. It is never trained, and cut off where the turn's length is known.
            found.setdefault(number, []).append(value if trained else None)
    return found


def _prepared(rows: Sequence[Sample], algorithm: Algorithm, measure: Measure) -> list[Sequence[float]]:
    """One value per token of each row. What an algorithm makes of all rows of a step together is in it, where it can be
    had without a model."""
    from TrainingFactory.algorithms.grpo import GRPO
    from TrainingFactory.algorithms.rft import RFT
    from TrainingFactory.data.packing import make_batch

    if measure == "reward":
        return [row.rewards for row in rows]
    if not isinstance(algorithm, GRPO | RFT):
        return [row.advantages for row in rows]
    batch = make_batch(rows, EVERYTHING, sharing=False)
    algorithm.prepare([batch], 0)
    values: list[list[float]] = [list(row.advantages) for row in rows]
    for pack in batch.packs:
        for number in pack.rows.tolist():
            trained = [place for place, used in enumerate(rows[number].loss_mask) if used]
            for place, value in zip(trained, pack.advantages[pack.row == number].tolist(), strict=True):
                values[number][place] = value
    return list(values)


def _episodes(
    group: Sequence[Trajectory],
    algorithm: Algorithm,
    values: dict[int, list[float | None]],
    numbers: dict[int, int],
    decode: Decode | None,
) -> list[EpisodeCredit]:
    made = []
    for trajectory in group:
        steps = trajectory.reward.steps if trajectory.reward is not None else []
        turns = []
        for place, turn in enumerate(trajectory.turns):
            size = len(turn.completion.token_ids)
            paid = values.get(numbers[id(turn)], [None] * size)[-size:] if size else []
            turns.append(TurnCredit(turn, steps[place] if steps else None, _pieces(turn, paid, decode)))
        trained = any(turn.values for turn in turns)
        why = None if trained else _left_out(trajectory, group, algorithm)
        made.append(EpisodeCredit(trajectory, turns, why))
    return made


def _pieces(turn: Turn, values: Sequence[float | None], decode: Decode | None) -> list[Piece]:
    sampled = turn.completion
    ids, logprobs = sampled.token_ids, sampled.logprobs
    parts = pieces_of(ids, decode) if decode is not None and ids else [(0, len(ids), _as_read(turn))]
    return [
        Piece(text, ids[start:end], logprobs[start:end], [v for v in values[start:end] if v is not None])
        for start, end, text in parts
    ]


def _as_read(turn: Turn) -> str:
    thought = [turn.message.reasoning] if turn.message.reasoning else []
    return "\n".join([*thought, *(what for _, what in said(turn.message))])


def _left_out(trajectory: Trajectory, group: Sequence[Trajectory], algorithm: Algorithm) -> str:
    """Why nothing of an episode is trained."""
    from TrainingFactory.algorithms.grpo import GRPO
    from TrainingFactory.algorithms.ppo import PPO
    from TrainingFactory.algorithms.rft import RFT

    if trajectory.reward is None:
        return f"not scored: {trajectory.error or 'no reason given'}"
    if not trajectory.turns:
        return "it has no turn"
    if not _has_tokens(group):
        return "its group has a turn without token ids"
    if isinstance(algorithm, RFT):
        return "not kept"
    cut = trajectory.status == "truncated"
    if cut and isinstance(algorithm, GRPO | PPO) and not algorithm.train_truncated:
        return "a length limit cut it, and train_truncated is false"
    return "its group teaches nothing: all of its scored episodes earned the same"
