"""GRPO's losses against those of TRL's trainer, on random ragged batches with tool spans masked. TRL's own method is
called on an object that has what it reads, with log-probs given in place of a model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from TrainingFactory.algorithms.correction import Correction
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.trained_tokens import TrainedTokens


@dataclass
class Padded:
    """B episodes padded to T tokens. What is not in the mask is padding, or came from a tool. [B, T] each"""

    now: torch.Tensor
    entropy: torch.Tensor
    sampled: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor  # of sampled tokens
    inside: torch.Tensor  # of those that are not padding
    advantages: torch.Tensor  # [B], or one per token


def ragged(seed: int, per_turn: bool, episodes: int = 6, longest: int = 25) -> Padded:
    generator = torch.Generator().manual_seed(seed)
    shape = (episodes, longest)

    def near(middle: torch.Tensor, width: float) -> torch.Tensor:
        return middle + width * torch.randn(shape, generator=generator)

    lengths = torch.randint(2, longest + 1, (episodes, 1), generator=generator)
    inside = torch.arange(longest) < lengths
    tools = torch.rand(shape, generator=generator) < 0.3
    tools[:, 0] = False  # every episode has sampled something
    now = -2 * torch.rand(shape, generator=generator) - 1
    advantages = torch.randn(shape if per_turn else (episodes,), generator=generator)
    return Padded(
        now.requires_grad_(), torch.rand(shape, generator=generator).requires_grad_(), near(now.detach(), 0.3),
        near(now.detach(), 0.3), near(now.detach(), 0.5), inside & ~tools, inside, advantages,
    )  # fmt: skip


def trl_loss(data: Padded, kind: str, low: float, high: float, **options: Any) -> torch.Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    cap = options["correction"].cap if "correction" in options else None
    trainer = SimpleNamespace(
        loss_type=kind, epsilon_low=low, epsilon_high=high, beta=options.get("kl", 0.0),
        importance_sampling_level=options.get("ratio", "token"), max_completion_length=40,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=options.get("clip_dual", 3.0), steps_per_generation=1),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                    sync_gradients=True),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=cap is not None, vllm_importance_sampling_correction=cap is not None,
        _entropy_bonus_enabled="entropy" in options, entropy_coef=options.get("entropy", 0.0),
        use_adaptive_entropy=False, _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (data.now, data.entropy, None),
    )  # fmt: skip
    ids = torch.zeros(data.now.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": data.inside.float(), "tool_mask": data.mask.float(), "advantages": data.advantages,
        "old_per_token_logps": data.sampled if cap is None else data.old, "num_items_in_batch": data.mask.sum(),
        "ref_per_token_logps": data.reference,
        "importance_sampling_ratio": (data.old - data.sampled).exp().clamp(max=cap or 1.0),
    }  # fmt: skip
    return GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[arg-type]


def our_loss(data: Padded, algorithm: GRPO) -> torch.Tensor:
    """In two packs, whose parts are added up."""
    spread = data.advantages if data.advantages.dim() == 2 else data.advantages[:, None].expand_as(data.now)
    tokens, episodes = int(data.mask.sum()), len(data.mask)
    total = torch.zeros(())
    for pack in (slice(0, 2), slice(2, episodes)):
        mask = data.mask[pack]
        now, entropy, sampled, old, reference, advantages = (
            each[pack][mask]
            for each in (data.now, data.entropy, data.sampled, data.old, data.reference, spread)
        )
        episode = mask.nonzero()[:, 0]
        zeros = torch.zeros_like(now)
        trained = TrainedTokens(
            now, entropy, sampled, advantages, zeros, episode, torch.zeros(len(mask)),
            torch.zeros(0, 2), tokens, episodes, 0, reference, old,
        )  # fmt: skip
        total = total + algorithm.loss(trained)[0]
    return total


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"normalization": "sequence"}),
    "grpo with kl": ("grpo", {"normalization": "sequence", "kl": 0.3}),
    "dr_grpo": ("dr_grpo", {"normalization": "constant", "constant_length": 40}),
    "dapo": ("dapo", {"normalization": "token", "clip_high": 0.28}),
    "dapo without dual clip": ("dapo", {"clip_dual": None}),
    "dapo with a tight dual clip": ("dapo", {"clip_dual": 1.3}),
    "dapo with kl and entropy": ("dapo", {"kl": 0.1, "entropy": 0.2}),
    "gspo": (
        "grpo",
        {"normalization": "sequence", "ratio": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "gspo with kl": ("grpo", {"normalization": "sequence", "ratio": "sequence", "kl": 0.3}),
    "cispo": ("cispo", {"loss_kind": "cispo", "clip_high": 0.1}),
    "cispo of a foreign sampler": (
        "cispo",
        {"loss_kind": "cispo", "clip_high": 0.1, "correction": Correction(1.1)},
    ),
    "dapo of a foreign sampler": ("dapo", {"correction": Correction(1.2), "kl": 0.1}),
}


@pytest.mark.parametrize("per_turn", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_trls(name: str, per_turn: bool) -> None:
    kind, options = CASES[name]
    algorithm = GRPO(**options)
    # TRL's bound for cispo is on the ratio itself, ours on its distance from 1
    high = 1 + algorithm.clip_high if kind == "cispo" else algorithm.clip_high
    for seed in range(4):
        data = ragged(seed, per_turn)
        wanted = trl_loss(data, kind, algorithm.clip_low, high, **options)
        found = our_loss(data, algorithm)
        assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5, abs=1e-6)
        if per_turn and algorithm.ratio == "sequence":
            continue  # TRL gives every token the episode's mean advantage; ours is in `test_bounds.py`
        leaves = [data.now, data.entropy] if algorithm.entropy else [data.now]
        for theirs, ours in zip(
            torch.autograd.grad(wanted, leaves), torch.autograd.grad(found, leaves), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
            assert not ours[~data.mask].any()
