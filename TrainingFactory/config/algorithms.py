"""List the options of each algorithm, named like its arguments; the common ones are in `training`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from TrainingFactory.common.options import Count, NotNegative, Positive, Share, ZeroOrMore
from TrainingFactory.config.section import Section

AboveOne = Annotated[float, Field(gt=1)]


class SFTSection(Section):
    turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are learned."""


class GRPOSection(Section):
    advantage: Literal["group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "group"
    """What a reward is compared with: the mean of its group, the mean of the others in it (rloo), mean and deviation of
    the whole batch (reinforce_plus_plus), or the group's mean and then those (reinforce_plus_plus_baseline)."""
    credit: Literal["trajectory", "turn"] = "turn"
    """Who is credited with step rewards: each turn with those from it on, or the whole episode with all of them. The
    same where there are none."""
    scale_rewards: bool = False
    """Divide advantages by the deviation of the group's rewards, as GRPO first did; off is Dr. GRPO."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens of the step, over episodes of their token means, or a sum over a constant."""
    constant_length: Count = 1024
    """normalization=constant: each episode's sum is divided by this."""
    loss_kind: Literal["clip", "cispo"] = "clip"
    """clip: no gain beyond the bounds of the ratio; cispo: the ratio is a weight of the log-prob, at most
    1 + clip_high."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio of each token, or that of the whole episode for all of its tokens (GSPO; with
    normalization=sequence)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """A probability ratio counts down to 1 - clip_low."""
    clip_high: Positive = 0.28
    """And up to 1 + clip_high; above clip_low, so that unlikely tokens may grow faster."""
    clip_dual: AboveOne | None = 3.0
    """loss_kind=clip: a negative advantage counts at most so many times; null: any number."""
    kl: NotNegative = 0.0
    """Weight of the distance from the model that training started with."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that distance is estimated."""
    entropy: NotNegative = 0.0
    """Weight of a bonus for undecided tokens."""
    train_truncated: bool = True
    """Learn from episodes that a length limit cut."""
    overlong_length: Count | None = None
    """Sampled tokens of an episode at which the whole overlong_penalty is due; null: none ever is."""
    overlong_buffer: Count = 128
    """Tokens before overlong_length over which the penalty grows from 0."""
    overlong_penalty: NotNegative = 1.0
    """What an episode loses at overlong_length and beyond."""
    refill: ZeroOrMore = 0
    """Rounds in which tasks that teach nothing, because their episodes all earned the same, are made up for by further
    tasks; 0: none."""
    refill_by: Literal["reward", "outcome"] = "reward"
    """What must differ for a task to teach: the whole reward, or the outcome, whatever steps and lengths are worth."""


class PPOSection(Section):
    critic: Literal["head", "separate"] = "head"
    """What expects the reward: a head on the model itself, or a copy of the model."""
    gamma: Share = 1.0
    """Discount from token to token."""
    lam: Share = 1.0
    """How far advantages look beyond the critic: 0 one token, 1 to the end."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """A probability ratio counts from 1 - clip to 1 + clip."""
    clip_dual: AboveOne | None = 3.0
    """A negative advantage counts at most so many times; null: any number."""
    value_clip: Positive | None = 0.2
    """How far a value may move in one step with effect on its loss; null: any distance."""
    value_weight: Positive = 0.1
    """Weight of the critic's loss."""
    critic_learning_rate: Positive | None = None
    """Peak learning rate of the critic, or of the head alone where that is the critic; null: ten times
    training.learning_rate."""
    critic_warmup: ZeroOrMore = 0
    """Steps in which only the critic learns."""
    whiten: bool = True
    """Advantages of a step get mean 0 and deviation 1."""
    kl: NotNegative = 0.0
    """Weight of the distance from the model that training started with."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether that distance is part of the loss or of each token's reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the distance is estimated in the loss; the reward takes k1."""
    entropy: NotNegative = 0.0
    """Weight of a bonus for undecided tokens."""
    train_truncated: bool = True
    """Learn from episodes that a length limit cut."""


class DPOSection(Section):
    loss_kind: Literal["sigmoid", "ipo", "hinge", "robust", "orpo", "simpo"] = "sigmoid"
    """How a pair is judged; orpo and simpo need no reference model."""
    beta: Positive = 0.1
    """How much a distance from the reference weighs (orpo: weight of the odds; simpo: scale of the rewards)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are taken to be labelled the wrong way round (sigmoid: cDPO; robust)."""
    margin: NotNegative = 0.5
    """simpo: by how much the better answer should lead."""
    reference: Literal["live", "precomputed"] = "live"
    """Compute the reference's log-probs in each step, or once before training, after which it takes no memory."""


class KTOSection(Section):
    beta: Positive = 0.1
    """How much a distance from the reference weighs."""
    desirable_weight: Positive = 1.0
    """Of the good examples."""
    undesirable_weight: Positive = 1.0
    """Of the bad ones."""
    threshold: float = 0.5
    """Examples with a reward above it are good."""


class RFTSection(Section):
    threshold: float = 1.0
    """Least reward of an episode that is learned from."""
    best_of: Count | None = None
    """At most so many episodes of a task, those with the highest rewards; null: all over the threshold."""
    dedupe: bool = True
    """Episodes of a task that made the same calls and gave the same answer are learned once."""
    balance: bool = True
    """Every task that has something to learn weighs the same, however many of its episodes were kept."""
    train_truncated: bool = False
    """Keep episodes that a length limit cut as well."""


class RewardModelSection(Section):
    kind: Literal["outcome", "process"] = "outcome"
    """One score for the whole dialogue, from pairs; or one for every turn, from labelled turns."""
    margin: bool = False
    """outcome: the better side must lead by as much as the data say."""
    center: NotNegative = 0.0
    """outcome: weight of a pull that keeps the scores of a pair around 0."""
    threshold: float = 0.0
    """process: turns with a recorded step reward over it are good; rows with labels have 1 and -1."""
