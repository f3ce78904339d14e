"""Every algorithm with the options that change its maths, and random groups of scored tool dialogues for them all."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tests.kits.engine import plain_logprobs, tiny
from tests.kits.learner import Gradients, gradients, make_learner, moved, words
from TrainingFactory.algorithms.correction import Correction
from TrainingFactory.algorithms.dpo import DPO
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.kinds import make_algorithm
from TrainingFactory.algorithms.kto import KTO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.reward_model import RewardModel
from TrainingFactory.algorithms.rft import RFT
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import Batch, make_batch, pack
from TrainingFactory.learning.heads import ScalarHead, make_head
from TrainingFactory.learning.learner import Learner
from TrainingFactory.types import Completion, Message, Reward, Sample, Task, Trajectory, Turn

ALGORITHMS: dict[str, Any] = {
    "sft": SFT(),
    "grpo": GRPO(),
    "grpo-sequence": GRPO(normalization="sequence"),
    "grpo-constant": GRPO(normalization="constant", constant_length=50),
    "grpo-scaled": GRPO(scale_rewards=True, credit="trajectory"),
    "grpo-rloo": GRPO(advantage="rloo", clip_low=0.1, clip_high=0.1),
    "reinforce++": GRPO(advantage="reinforce_plus_plus"),
    "reinforce++-baseline": GRPO(advantage="reinforce_plus_plus_baseline"),
    "gspo": GRPO(ratio="sequence", normalization="sequence", clip_low=0.5, clip_high=0.5),
    "cispo": GRPO(loss_kind="cispo"),
    "grpo-kl-k3": GRPO(kl=0.1, kl_estimator="k3"),
    "grpo-entropy": GRPO(entropy=0.05),
    "grpo-importance": GRPO(correction=Correction(1.5, "sequence", (0.3, 3.0))),
    "ppo-importance": PPO(correction=Correction(mask=(0.8, 1.3)), kl=0.1, kl_in="reward"),
    "ppo-head": PPO(kl=0.1, entropy=0.01),
    "ppo-kl-in-reward": PPO(kl=0.1, kl_in="reward", value_clip=None, whiten=False),
    "ppo-separate": PPO(critic="separate"),
    "ppo-warmup": PPO(critic="separate", critic_warmup=1),
    "dpo": DPO(),
    "dpo-ipo": DPO(loss_kind="ipo"),
    "dpo-hinge": DPO(loss_kind="hinge"),
    "dpo-robust": DPO(loss_kind="robust", label_smoothing=0.2),
    "orpo": DPO(loss_kind="orpo"),
    "simpo": DPO(loss_kind="simpo"),
    "kto": KTO(beta=0.3, undesirable_weight=2.0),
    "rft": RFT(threshold=0.5),
    "reward-model": RewardModel(margin=True, center=0.1),
    "process-reward-model": RewardModel(kind="process"),
}
GAP = 0.4  # how far the sampler's log-probs are from the reference's at most: some ratios are clipped, some are not


@cache
def groups_of(seed: int = 1, count: int = 4, size: int = 3) -> list[list[Trajectory]]:
    """Ragged dialogues with replies of tools between the sampled turns, rewards for the outcome and for each turn; the
    prompts of all begin alike, those of a group are the same, one episode has forgotten its beginning half-way."""
    rng, model = random.Random(seed), tiny()
    head, groups = words(rng, 40), []
    for group in range(count):
        prompt = head + words(rng, rng.choice((2, 30)))
        members = [_dialogue(rng, model, prompt, f"{group}", member) for member in range(size)]
        # Whatever the algorithm and its threshold, something is better and something is worse.
        members[0].reward, members[1].reward = (
            _rewarded(rng, members[0], 1.0),
            _rewarded(rng, members[1], 0.0),
        )
        groups.append(members)
    forgetful = next(member for member in groups[0] if len(member.turns) > 1)
    for turn in forgetful.turns[1:]:
        turn.prompt_ids = turn.prompt_ids[15:]
    return groups


def _dialogue(rng: random.Random, model: Any, prompt: list[int], group: str, member: int) -> Trajectory:
    turns, prompt = [], list(prompt)
    for _ in range(2 if member == 0 else rng.randrange(1, 4)):
        ids = words(rng, rng.randrange(1, 12))
        logprobs = [value + rng.uniform(-GAP, GAP) for value in plain_logprobs(model, prompt, ids)]
        turns.append(Turn(list(prompt), Completion(ids, logprobs, "stop"), Message("assistant")))
        prompt += ids + words(rng, rng.choice((1, 5, 30)))
    # RFT goes by what an episode says; each says something else.
    turns[-1].message = Message("assistant", f"answer {group} {member}")
    trajectory = Trajectory(Task(group, "?"), group, member, turns=turns)
    trajectory.reward = _rewarded(rng, trajectory, rng.random())
    return trajectory


def _rewarded(rng: random.Random, trajectory: Trajectory, outcome: float) -> Reward:
    return Reward(outcome, [rng.choice((-0.1, 0.1)) for _ in trajectory.turns])


def learner_for(algorithm: Any, model: Any = None, **options: Any) -> Learner:
    """A learner whose model has moved away from its reference, with the head or the critic that the algorithm needs."""
    reference = tiny().eval()
    made = model if model is not None else moved(copy.deepcopy(reference), 3)
    needs = algorithm.needs
    if model is None and "reference" in needs:
        options["reference"] = reference
    if isinstance(algorithm, PPO) and algorithm.critic == "separate":
        options.setdefault("critic", moved(tiny(), 4))
    if needs & {"values", "scores"}:
        options["head"] = _head(made)
    return make_learner(made, **options)


def _head(model: Any) -> ScalarHead:
    head = make_head(model)
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return head


def batch_for(
    learner: Learner,
    algorithm: Any,
    rows: Sequence[Sample],
    budget: int = 16_384,
    sharing: bool = True,
    mismatched: Sequence[Sample] | None = None,
) -> Batch:
    """As one step of training makes it. Which answers meet which prompts goes by the order of the rows and by who has
    them; with `mismatched` they are given."""
    sharing, needs = sharing and learner.sharing, algorithm.needs
    made = make_batch(rows, budget, sharing, "mismatched" in needs and mismatched is None)
    if "mismatched" in needs and mismatched is not None:
        made.mismatched = pack(mismatched, budget, sharing)
    batch = learner.annotate(made, needs)
    algorithm.prepare([batch], 0)
    return batch


def step_gradients(learner: Learner, algorithm: Any, rows: Sequence[Sample], *layout: Any) -> Gradients:
    """`layout` is that of `batch_for`."""
    batch = batch_for(learner, algorithm, rows, *layout)
    return gradients(learner, batch, algorithm.loss, algorithm.needs)


def distance(found: Gradients, wanted: Gradients) -> float:
    """Euclidean, over all weights together, relative to the length of the gradient."""
    assert found.keys() == wanted.keys()
    square = sum(float((found[name] - value).double().square().sum()) for name, value in wanted.items())
    whole = sum(float(value.double().square().sum()) for value in wanted.values())
    return (square / whole) ** 0.5


def made(name: str, **options: Any) -> Any:
    """The algorithm as a config makes it: ranges are checked there, contradictions by the algorithm."""
    config = TrainingConfig(**{name: options})
    return make_algorithm(name, getattr(config, name).model_dump())
