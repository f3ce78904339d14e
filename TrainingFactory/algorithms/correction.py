"""Importance weights for what the learner did not sample itself: an engine that computes differently, older weights.

    v = min(p_old / p_sampled, cap)          p_old: by the learner, before the step; p_sampled: by who sampled it

Ratio and clip are taken against p_old, the loss of a token is multiplied by v, which has no gradient: how far an update
may go and who sampled are two things (the decoupled form). With `mask` = (low, high), what lies outside counts 0
instead (IcePop). Losses are divided by all trained tokens, those that count 0 among them.

Older weights need more (`anchored`): updates since a token was sampled may have moved it as far as the clip allows one
update to, and it says "further" until groups come that were sampled after them. Such a token counts 0: where A > 0 and
p_old / p_sampled > 1 + clip_high, or A < 0 and it is < 1 - clip_low. Without that, runs on a plateau overshoot and fall
to nothing: 7 of 40 at two versions behind and 3 of 10 at four, none of 30 with it (docs/CLUSTER.md).

By `token`, v is that of the token alone: steady, and blind to how likely the sampler was to get that far. By `sequence`
every token has the product over its episode: with it the mean over episodes is right, as far as no cap is met, at the
price of weights that spread with the length. The geometric mean would not spread, and would not be right either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from TrainingFactory.algorithms.policy_loss import ratio_of
from TrainingFactory.algorithms.trained_tokens import Trained


@dataclass(slots=True, frozen=True)
class Correction:
    cap: float = 2.0
    by: Literal["token", "sequence"] = "token"
    mask: tuple[float, float] | None = None
    anchored: bool = False  # for older weights


def corrected(
    trained: Trained,
    correction: Correction | None,
    clip: tuple[float, float] | None = None,
    whole: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | float, dict[str, float]]:
    """Return the log-probs that the model's are compared with, the weight of each token, and metrics that add up.
    `clip` is how far below and above 1 a ratio counts, where the loss has such bounds; `whole`: that of the episode."""
    if correction is None:
        return trained.sampled, 1.0, {}
    assert trained.old is not None
    gap = trained.old - trained.sampled
    moved = torch.zeros_like(gap, dtype=torch.bool)
    if correction.anchored and clip is not None:
        mean = (trained.per_episode(gap) / trained.lengths)[trained.episode] if whole else gap
        drift, above = ratio_of(mean), trained.advantages > 0
        moved = torch.where(above, drift > 1 + clip[1], drift < 1 - clip[0]) & (trained.advantages != 0)
    if correction.by == "sequence":
        gap = trained.per_episode(gap)[trained.episode]
    ratio = ratio_of(gap)
    low, high = correction.mask or (0.0, float("inf"))
    kept = (low <= ratio) & (ratio <= high)
    weight = ratio.clamp(max=correction.cap) * (kept & ~moved)
    sums = {"weight": weight, "masked": ~kept, "capped": (ratio > correction.cap) & kept, "moved": moved}
    metrics = {f"importance_{name}": float(each.sum()) / trained.step_tokens for name, each in sums.items()}
    return trained.old, weight, metrics
