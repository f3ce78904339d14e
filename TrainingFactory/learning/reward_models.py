"""A trained reward model, loaded to score episodes. It is a checkpoint like any other: a model, a head, and
reward_model.json, which says what the head's numbers mean.

    outcome   s at the last sampled token of the dialogue          Reward(outcome=s)
    process   p_t = sigmoid(s_t) at the last token of turn t: how likely the turn is good. With m_t the least of
              p_1 ... p_t, and m_0 = 1:                            Reward(outcome=2 m_T - 1, steps=[m_t - m_(t-1)])

An outcome over 0 says that every turn is rather good than bad. A step is 0, or what the dialogue lost at that turn.
None is positive, so that a model which learns from them gains nothing by making its dialogues longer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.rewriting import written_by
from TrainingFactory.data.samples import to_samples
from TrainingFactory.learning.forward import causal_model, row_states, tree_mode, tree_states, why_not_shared
from TrainingFactory.learning.heads import ABOUT, FILE, ScalarHead, load_head
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.types import Reward, Sample, Trajectory

Kind = Literal["outcome", "process"]
DIGITS = 4  # of a score; what follows is rounding


@dataclass(slots=True, frozen=True)
class About:
    """What is in reward_model.json: how to load the model beside it, and how to read its scores."""

    kind: Kind
    base: str | None = None  # the model that was trained, or the one under its adapter
    revision: str | None = None
    family: str | None = None
    thinking: bool | None = None
    quantization: str = "none"  # of the base under an adapter


def read_about(folder: Path) -> About:
    """Read reward_model.json of a folder; raise ValueError where it holds no reward model."""
    for name in (FILE, ABOUT):  # a critic has no second one
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no reward model: it has no {name}")
    try:
        return TypeAdapter(About).validate_json((folder / ABOUT).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / ABOUT} cannot be read: {error}") from error


class RewardScorer:
    """`chat` is how the reward model writes a conversation: episodes of a model that writes otherwise are rewritten.
    Threads may share it. Rounding depends on which episodes are scored together: `together=False` scores them one by
    one, so that an episode always gets the same score, bit for bit."""

    def __init__(
        self,
        model: Any,
        head: ScalarHead,
        chat: ChatFormat,
        kind: Kind,
        *,
        token_budget: int = 16_384,
        together: bool = True,
    ) -> None:
        self.kind: Kind = kind
        self._model, self._causal, self._head, self._chat = model.eval(), causal_model(model), head, chat
        self._token_budget, self._together = token_budget, together
        self._sharing = why_not_shared(self._causal) is None
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        base: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        token_budget: int = 16_384,
        together: bool = True,
        trust_remote_code: bool = False,
    ) -> RewardScorer:
        """Load a checkpoint of a reward model, and where it is an adapter the model under it as well: `base`, or what
        the checkpoint names."""
        folder = Path(folder).expanduser()
        about = read_about(folder)
        adapter = str(folder) if (folder / "adapter_config.json").is_file() else None
        loaded = load_model(
            base or str(about.base) if adapter else str(folder),
            dtype=dtype,
            device=device,
            adapter=adapter,
            revision=about.revision if adapter else None,
            trust_remote_code=trust_remote_code,
            quantization=about.quantization if adapter else "none",
        )
        chat = chat_format(loaded.tokenizer, about.family, thinking=about.thinking, stop_ids=loaded.stop_ids)
        head = load_head(folder, causal_model(loaded.model))
        return cls(loaded.model, head, chat, about.kind, token_budget=token_budget, together=together)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        """Score episodes; raise ValueError where one cannot be written in this template, or is too long."""
        if self._together:
            found = self.scores(trajectories)
        else:
            found = [scores for each in trajectories for scores in self.scores([each])]
        # Equal episodes must be equal, whatever they were computed beside.
        found = [[round(score, DIGITS) for score in scores] for scores in found]
        if self.kind == "outcome":
            return [Reward(score) for [score] in found]
        return [_process_reward(scores) for scores in found]

    @torch.no_grad()
    def scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return what the head says at the last token of each turn (process), or of the last one alone."""
        with self._lock:
            rows = [self._rows(trajectory) for trajectory in trajectories]
            samples = [row for each in rows for row in each]
            by_row: list[list[float]] = [[] for _ in samples]
            for pack in make_batch(samples, self._token_budget, self._sharing).packs:
                with tree_mode(self._causal, self._sharing):
                    states = (tree_states if self._sharing else row_states)(self._causal, pack)
                places = torch.from_numpy(pack.place).to(states.device)
                found = self._head(states.index_select(0, places)).tolist()
                for number, score in zip(pack.row.tolist(), found, strict=True):
                    by_row[number].append(score)
        rest = iter(by_row)
        return [[score for _ in each for score in next(rest)] for each in rows]

    def _rows(self, trajectory: Trajectory) -> list[Sample]:
        written = written_by(self._chat, trajectory)
        rows = to_samples(written, turns="all" if self.kind == "process" else "last", tokens="last")
        limit = getattr(self._causal.config.get_text_config(), "max_position_embeddings", None)  # foreign
        longest = max(len(row.token_ids) for row in rows)
        if limit is not None and longest > limit:
            raise ValueError(
                f"the episode of task {trajectory.task.id} has {longest} tokens; the reward model takes {limit}"
            )
        return rows


def _process_reward(scores: Sequence[float]) -> Reward:
    good = torch.tensor(scores, dtype=torch.float64).sigmoid().tolist()
    least = list(accumulate(good, min, initial=1.0))  # m_0 ... m_T
    return Reward(2 * least[-1] - 1, [now - before for before, now in pairwise(least)])
