"""Config sections of the algorithms, with keys named like their arguments. Common options are in section `training`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from TrainingFactory.common.options import Count, NotNegative, Positive, Share, ZeroOrMore
from TrainingFactory.config.section import PathText, Section

AboveOne = Annotated[float, Field(gt=1)]


class BranchingSection(Section):
    at: Literal["tool_result", "turns", "entropy", "function"] = "tool_result"
    """Where an episode forks. tool_result: after every turn with tool results; turns: after the turns in `turns`;
    entropy: after turns of at least `entropy`; function: where your function returns true."""
    continuations: Annotated[int, Field(ge=2)] = 2
    """Continuations of one fork, the episode itself included."""
    max_forks: Count = 2
    """Maximum number of forks along one path: an episode becomes at most continuations^max_forks leaves."""
    every: Count = 1
    """Fork only after turns whose number, from 1, is a multiple of N."""
    turns: list[Count] = Field(default_factory=list)
    """at=turns: numbers of the turns after which every episode forks, from 1."""
    entropy: NotNegative = 1.0
    """at=entropy: minimum mean of -log p over the sampled tokens of the turn, in nats."""
    function: PathText | None = None
    """at=function: your function from the turns so far to true or false: forks.py:uncertain."""
    max_episodes: Count | None = None
    """Maximum number of leaves per task, divided equally among the group and at every fork. null: no limit."""
    max_tokens: Count | None = None
    """Sampled tokens per task after which no path forks, divided like max_episodes. No episode is cut. null: no
    limit."""
    replay: bool = True
    """Repeat the tool calls so far in a new environment if it has state and no `fork` method. false: such episodes do
    not fork."""
    timeout: Positive = 60.0
    """Maximum duration of forking one environment, or of repeating its calls, in seconds. A longer fork is dropped."""


class SFTSection(Section):
    turns: Literal["all", "last"] = "all"
    """Assistant turns to train on: all, or only the last."""


class GRPOSection(Section):
    advantage: Literal["group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "group"
    """Baseline of the advantage. group: group mean; rloo: mean of the other episodes in the group; reinforce_plus_plus:
    whitened over the batch; reinforce_plus_plus_baseline: group mean, then whitened over the batch."""
    credit: Literal["trajectory", "turn"] = "turn"
    """Credit assignment of step rewards. turn: each turn gets the rewards from it on; trajectory: every turn gets the
    episode's total. No effect without step rewards."""
    scale_rewards: bool = False
    """Divide advantages by the group's standard deviation, as in the GRPO paper. false: Dr. GRPO."""
    state_groups: NotNegative = 0.0
    """Weight of a second advantage, among the group's turns that begin in the same state (GiGPO), for environments with
    a property `state`. 0: off."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """Loss aggregation. token: mean over all tokens of the step; sequence: mean over episodes of their token means;
    constant: sum divided by constant_length."""
    constant_length: Count = 1024
    """normalization=constant: divisor of each episode's loss sum, in tokens."""
    loss_kind: Literal["clip", "cispo"] = "clip"
    """Policy loss. clip: PPO clipping of the ratio; cispo: the ratio, at most 1 + clip_high, is a weight without
    gradient on the log-prob."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio per token, or one per episode shared by all its tokens (GSPO; use normalization=sequence)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clipping bound: the probability ratio is clipped at 1 - clip_low."""
    clip_high: Positive = 0.28
    """Upper clipping bound: 1 + clip_high. Larger than clip_low, so that unlikely tokens can gain faster (DAPO)."""
    clip_dual: AboveOne | None = 3.0
    """loss_kind=clip: maximum ratio on tokens with negative advantage (dual clipping). null: unbounded."""
    kl: NotNegative = 0.0
    """KL penalty coefficient, relative to the initial model. 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""
    entropy: NotNegative = 0.0
    """Entropy bonus coefficient."""
    train_truncated: bool = True
    """Train on episodes truncated by a length limit."""
    overlong_length: Count | None = None
    """Episode length, in sampled tokens, at which the full overlong_penalty applies. null: no penalty."""
    overlong_buffer: Count = 128
    """Tokens before overlong_length over which the penalty rises linearly from 0."""
    overlong_penalty: NotNegative = 1.0
    """Reward subtracted from episodes of overlong_length tokens or more."""
    refill: ZeroOrMore = 0
    """Dynamic sampling (DAPO): maximum rounds of new tasks to replace groups with identical rewards. 0: off."""
    refill_by: Literal["reward", "outcome"] = "reward"
    """Value that must differ within a group: the total reward, or the outcome alone."""


class PPOSection(Section):
    critic: Literal["head", "separate"] = "head"
    """Value model: a head on the policy, or a separate copy of the model."""
    gamma: Share = 1.0
    """Discount factor per token."""
    lam: Share = 1.0
    """GAE lambda. 0: one-step TD error; 1: full return."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clipping range: the probability ratio is clipped to [1 - clip, 1 + clip]."""
    clip_dual: AboveOne | None = 3.0
    """Maximum ratio on tokens with negative advantage (dual clipping). null: unbounded."""
    value_clip: Positive | None = 0.2
    """Clipping range of the value update. null: off."""
    value_weight: Positive = 0.1
    """Coefficient of the value loss."""
    critic_learning_rate: Positive | None = None
    """Peak learning rate of the critic (critic=head: of the head alone). null: ten times training.learning_rate."""
    critic_warmup: ZeroOrMore = 0
    """Initial steps in which only the critic is trained."""
    whiten: bool = True
    """Normalize the advantages of a step to mean 0 and standard deviation 1."""
    kl: NotNegative = 0.0
    """KL penalty coefficient, relative to the initial model. 0: no reference model is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL penalty to the loss or to each token's reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator in the loss; kl_in=reward always uses k1."""
    entropy: NotNegative = 0.0
    """Entropy bonus coefficient."""
    train_truncated: bool = True
    """Train on episodes truncated by a length limit."""


class DPOSection(Section):
    loss_kind: Literal["sigmoid", "ipo", "hinge", "robust", "orpo", "simpo"] = "sigmoid"
    """Preference loss. orpo and simpo need no reference model."""
    beta: Positive = 0.1
    """Higher keeps the policy closer to the reference (orpo: weight of the odds-ratio term; simpo: reward scale)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with flipped labels (sigmoid: cDPO; robust)."""
    margin: NotNegative = 0.5
    """simpo: target reward margin between chosen and rejected answer."""
    reference: Literal["live", "precomputed"] = "live"
    """Compute reference log-probs in every step (live), or once before training, to save memory (precomputed)."""


class KTOSection(Section):
    beta: Positive = 0.1
    """Higher keeps the policy closer to the reference model."""
    desirable_weight: Positive = 1.0
    """Loss weight of desirable examples."""
    undesirable_weight: Positive = 1.0
    """Loss weight of undesirable examples."""
    threshold: float = 0.5
    """Reward above which an example is desirable."""


class RFTSection(Section):
    threshold: float = 1.0
    """Minimum reward of an episode to train on."""
    best_of: Count | None = None
    """Maximum episodes per task, highest rewards first. null: all that reach the threshold."""
    dedupe: bool = True
    """Train only once on episodes of a task with the same tool calls and answer."""
    balance: bool = True
    """Give every task with accepted episodes the same total weight, regardless of their number."""
    train_truncated: bool = False
    """Also accept episodes truncated by a length limit."""


class RewardModelSection(Section):
    kind: Literal["outcome", "process"] = "outcome"
    """outcome: one score per conversation, trained on pairs. process: one score per turn, trained on labelled turns."""
    margin: bool = False
    """outcome: require the chosen side to lead by the reward difference in the data."""
    center: NotNegative = 0.0
    """outcome: coefficient of a penalty that centres the scores of a pair around 0."""
    threshold: float = 0.0
    """process: step reward above which a recorded turn counts as good; label rows hold 1 and -1."""
