"""Trained reward models that score episodes. A reward model is a checkpoint: a model, a scalar head, and
reward_model.json, which defines how its scores become rewards.

    outcome   s at the last sampled token of the dialogue          Reward(outcome=s)
    process   p_t = sigmoid(s_t) at the last token of turn t: probability that the turn is good. With m_0 = 1 and
              m_t = min(p_1 ... p_t):                              Reward(outcome=2 m_T - 1, steps=[m_t - m_(t-1)])

An outcome above 0 means that every turn is more likely good than bad. A step reward is 0 or the loss at that turn,
never positive, so that a policy gains nothing by making its dialogues longer.
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
from TrainingFactory.data.rewriting import rerender
from TrainingFactory.data.samples import to_samples
from TrainingFactory.learning.forward import get_causal_lm, get_sharing_problem, run_rows, run_tree, use_trees
from TrainingFactory.learning.heads import HEAD_FILE, REWARD_MODEL_FILE, ScalarHead, load_head
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.vision import Vision
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.types import Reward, Sample, Trajectory

Kind = Literal["outcome", "process"]
SCORE_DECIMALS = 4  # decimals of a score; further ones depend on the batch


@dataclass(slots=True, frozen=True)
class RewardModelInfo:
    """Content of reward_model.json: how to load the model in the same folder, and how to interpret its scores."""

    kind: Kind
    base: str | None = None  # the model that was trained, or the base under its adapter
    revision: str | None = None
    family: str | None = None
    thinking: bool | None = None
    quantization: str = "none"  # of the base under an adapter


def read_reward_model_info(folder: Path) -> RewardModelInfo:
    """Read reward_model.json of a folder; raise ValueError if the folder holds no reward model."""
    for name in (HEAD_FILE, REWARD_MODEL_FILE):  # a critic has no reward_model.json
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no reward model: it has no {name}")
    try:
        return TypeAdapter(RewardModelInfo).validate_json((folder / REWARD_MODEL_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"Cannot read {folder / REWARD_MODEL_FILE}: {error}") from error


class RewardScorer:
    """Scores episodes with a reward model; thread-safe. `chat` is its chat format: episodes in another format are
    rewritten. Rounding depends on the batch; `scores_together=False` scores one by one, for bit-identical scores."""

    def __init__(
        self,
        model: Any,
        head: ScalarHead,
        chat: ChatFormat,
        kind: Kind,
        *,
        token_budget: int = 16_384,
        scores_together: bool = True,
        vision: Vision | None = None,
    ) -> None:
        self.kind: Kind = kind
        self._model, self._causal_lm, self._head, self._chat = model.eval(), get_causal_lm(model), head, chat
        self._token_budget, self._scores_together, self._vision = token_budget, scores_together, vision
        sees_whole_images = vision is not None and vision.sees_whole_images
        self._sharing = get_sharing_problem(self._causal_lm) is None and not sees_whole_images
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
        scores_together: bool = True,
        trust_remote_code: bool = False,
    ) -> RewardScorer:
        """Load a reward model's checkpoint. Under an adapter, load `base` (None: the base named in the checkpoint)."""
        folder = Path(folder).expanduser()
        model_info = read_reward_model_info(folder)
        adapter = str(folder) if (folder / "adapter_config.json").is_file() else None
        loaded_model = load_model(
            base or str(model_info.base) if adapter else str(folder),
            dtype=dtype,
            device=device,
            adapter=adapter,
            revision=model_info.revision if adapter else None,
            trust_remote_code=trust_remote_code,
            quantization=model_info.quantization if adapter else "none",
        )
        chat = chat_format(
            loaded_model.tokenizer,
            model_info.family,
            thinking=model_info.thinking,
            stop_ids=loaded_model.stop_ids,
            vision=loaded_model.vision,
        )
        head = load_head(folder, get_causal_lm(loaded_model.model))
        return cls(
            loaded_model.model,
            head,
            chat,
            model_info.kind,
            token_budget=token_budget,
            scores_together=scores_together,
            vision=loaded_model.vision,
        )

    def score(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        """Score episodes; raise ValueError if one does not fit the chat template or is too long."""
        if self._scores_together:
            scores = self.compute_scores(trajectories)
        else:
            scores = [self.compute_scores([trajectory])[0] for trajectory in trajectories]
        # Scores of one episode in different batches differ by at most one unit of the last decimal, and mostly by none.
        scores = [[round(score, SCORE_DECIMALS) for score in episode_scores] for episode_scores in scores]
        if self.kind == "outcome":
            return [Reward(score) for [score] in scores]
        return [_make_process_reward(episode_scores) for episode_scores in scores]

    @torch.no_grad()
    def compute_scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return the head's output at the last token of every turn (process) or of the last turn (outcome)."""
        with self._lock:
            rows_by_episode = [self._make_rows(trajectory) for trajectory in trajectories]
            samples = [row for rows in rows_by_episode for row in rows]
            row_scores: list[list[float]] = [[] for _ in samples]
            for pack in make_batch(samples, self._token_budget, self._sharing).packs:
                with use_trees(self._causal_lm, self._sharing):
                    states = (run_tree if self._sharing else run_rows)(self._causal_lm, pack, self._vision)
                positions = torch.from_numpy(pack.place).to(states.device)
                outputs = self._head(states.index_select(0, positions)).tolist()
                for row_index, score in zip(pack.row.tolist(), outputs, strict=True):
                    row_scores[row_index].append(score)
        remaining_scores = iter(row_scores)
        return [[score for _ in rows for score in next(remaining_scores)] for rows in rows_by_episode]

    def _make_rows(self, trajectory: Trajectory) -> list[Sample]:
        rendered_episode = rerender(self._chat, trajectory, unfold=True)  # the model judges the whole episode
        rows = to_samples(rendered_episode, turns="all" if self.kind == "process" else "last", tokens="last")
        max_tokens = getattr(self._causal_lm.config.get_text_config(), "max_position_embeddings", None)
        num_tokens = max(len(row.token_ids) for row in rows)
        if max_tokens is not None and num_tokens > max_tokens:
            raise ValueError(
                f"The episode of task {trajectory.task.id} has {num_tokens} tokens; the reward model's limit is "
                f"{max_tokens}"
            )
        return rows


def _make_process_reward(scores: Sequence[float]) -> Reward:
    probabilities = torch.tensor(scores, dtype=torch.float64).sigmoid().tolist()
    minima = list(accumulate(probabilities, min, initial=1.0))  # m_0 ... m_T
    return Reward(2 * minima[-1] - 1, [current - previous for previous, current in pairwise(minima)])
