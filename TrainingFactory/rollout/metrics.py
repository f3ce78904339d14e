"""Metrics of a batch of episodes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, pstdev
from typing import get_args

from TrainingFactory.data.samples import turn_spans
from TrainingFactory.rollout.folding import TASK_LOST
from TrainingFactory.types import Message, Status, Trajectory, Turn

USER_SIGNALS = "user/"  # prefix of the signals of simulated users
Z95 = 1.959964  # standard deviations of a two-sided 95 % interval of the normal distribution


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return counts over the batch and means per episode. A mean over no values is omitted, not zero. Turns that forked
    episodes share count once in sums; in means of rewards, the leaves of a tree together count as one episode."""
    turns = [turn for trajectory in trajectories for turn in trajectory.own_turns]
    results = [result for turn in turns for result in turn.tool_results]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    metrics: dict[str, float] = {"episodes": len(trajectories)}
    for status in get_args(Status):
        metrics[f"episodes/{status}"] = sum(trajectory.status == status for trajectory in trajectories)
    metrics["episodes/unscored"] = len(trajectories) - len(rewards)
    metrics["sampled_tokens"] = sum(turn.sampled_tokens for turn in turns)
    metrics["tool_calls"] = len(results)
    metrics["tools_offered"] = max((len(trajectory.tools) for trajectory in trajectories), default=0)
    callers = [episode for episode in trajectories if any(turn.message.tool_calls for turn in episode.turns)]
    metrics["episodes/called"] = len(callers)
    if results:
        metrics["tool_success"] = fmean(result.ok for result in results)
    if trajectories:
        token_counts = [sum(turn.sampled_tokens for turn in episode.turns) for episode in trajectories]
        num_turns = fmean(len(episode.turns) for episode in trajectories)
        metrics |= {"turns": num_turns, "length": fmean(token_counts), "length_max": max(token_counts)}
    if any(episode.is_folded for episode in trajectories):
        metrics |= _compute_fold_metrics(trajectories)
    metrics |= _compute_user_metrics(trajectories, turns)
    if num_images := sum(
        len(message.images) for episode in trajectories for message in list_messages(episode)
    ):
        metrics["images"] = num_images
    if num_hidden_images := sum(turn.signals.get("images/as_text", 0.0) for turn in turns):
        metrics["images/as_text"] = num_hidden_images
    if rewards:
        total_rewards = [reward.outcome + sum(reward.steps) for reward in rewards]
        metrics |= {"reward": fmean(total_rewards), "reward_std": pstdev(total_rewards)}
    if any(trajectory.parent is not None for trajectory in trajectories):
        metrics |= _compute_branching_metrics(trajectories, turns)
    for role in sorted({episode.role for episode in trajectories if episode.role is not None}):
        role_rewards = [episode.reward for episode in trajectories if episode.role == role]
        role_totals = [reward.outcome + sum(reward.steps) for reward in role_rewards if reward is not None]
        metrics[f"role/{role}/episodes"] = len(role_rewards)
        metrics[f"role/{role}/unscored"] = len(role_rewards) - len(role_totals)
        if role_totals:
            metrics[f"role/{role}/reward"] = fmean(role_totals)
    for name in sorted({name for reward in rewards for name in reward.parts}):
        metrics[f"reward/{name}"] = fmean(reward.parts[name] for reward in rewards if name in reward.parts)
    return metrics


def _compute_user_metrics(trajectories: Sequence[Trajectory], turns: Sequence[Turn]) -> dict[str, float]:
    """Return the metrics of simulated users, as means per episode; empty if there are no simulated users."""
    signal_totals: defaultdict[str, float] = defaultdict(float)
    for signal, value in chain.from_iterable(turn.signals.items() for turn in turns):
        if signal.startswith(USER_SIGNALS):
            signal_totals[signal] += value
    return {signal: signal_total / len(trajectories) for signal, signal_total in signal_totals.items()}


def list_messages(episode: Trajectory) -> list[Message]:
    """Return the messages that the model received: the prompt, and the replies to the episode's own turns."""
    return [*episode.prompt, *(reply for turn in episode.own_turns for reply in turn.replies)]


def _compute_fold_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean numbers of folds and of training rows per episode, and of tokens per summary. `every_turn` is the
    share of episodes that fold at every turn after the first fold, among those with several such turns."""
    fold_flags = [[turn.fold is not None for turn in e.turns if not turn.summary] for e in trajectories]
    row_counts = [turn_spans(episode)[-1].row + 1 for episode in trajectories if episode.turns]
    later_flags = [tail for flags in fold_flags if any(flags) and len(tail := flags[flags.index(True) :]) > 2]
    summaries = [turn for episode in trajectories for turn in episode.turns if turn.summary]
    folded_turns = [turn for episode in trajectories for turn in episode.turns if turn.fold is not None]
    metrics = {
        "fold/folds": fmean(map(sum, fold_flags)),
        "fold/rows": fmean(row_counts),
        "fold/every_turn": fmean(map(all, later_flags)) if later_flags else 0.0,
        "fold/task_lost": sum(bool(turn.signals.get(TASK_LOST)) for turn in folded_turns),
    }
    if summaries:
        summary_lengths = [len(turn.completion.token_ids) for turn in summaries]
        metrics |= {
            "fold/summary_tokens": fmean(summary_lengths),
            "fold/summaries_cut": fmean(turn.completion.finish == "length" for turn in summaries),
            "fold/summaries_empty": fmean(not turn.message.content.strip() for turn in summaries),
        }
    return metrics


def _compute_branching_metrics(trajectories: Sequence[Trajectory], turns: Sequence[Turn]) -> dict[str, float]:
    """Return the number of forks and forked episodes, the mean reward over trees, and the share of sampled tokens saved
    by forking, because a turn shared by several episodes is sampled once."""
    forked_episodes = [trajectory for trajectory in trajectories if trajectory.parent is not None]
    num_sampled_tokens = sum(len(turn.completion.token_ids) for turn in turns)
    num_unshared = sum(len(turn.completion.token_ids) for episode in trajectories for turn in episode.turns)
    metrics = {
        "branching/forks": len({(leaf.group, leaf.parent, leaf.fork_turn) for leaf in forked_episodes}),
        "branching/episodes": len(forked_episodes),
        "branching/shared": 1 - num_sampled_tokens / num_unshared,
    }
    rewards = [
        (weight, episode.reward.outcome + sum(episode.reward.steps))
        for weight, episode in zip(get_leaf_weights(trajectories), trajectories, strict=True)
        if episode.reward is not None
    ]
    if rewards:
        metrics["reward"] = sum(weight * reward for weight, reward in rewards) / sum(w for w, _ in rewards)
    return metrics


def get_leaf_weights(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the weight of each episode: the product of 1 / continuations over the forks on its path, so that the
    weights of all episodes of a tree sum to 1."""
    episodes = {(episode.group, episode.member): episode for episode in trajectories}
    continuations = Counter(
        (episode.group, episode.parent, episode.fork_turn)
        for episode in trajectories
        if episode.parent is not None
    )
    forks_by_parent: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
    for (group_name, parent, turn_index), num_continuations in continuations.items():
        forks_by_parent.setdefault((group_name, parent), []).append((turn_index, 1 + num_continuations))
    weights = []
    for leaf in trajectories:
        weight, end_turn = 1.0, len(leaf.turns)
        episode: Trajectory | None = leaf
        while episode is not None:
            for turn_index, num_continuations in forks_by_parent.get((episode.group, episode.member), ()):
                weight /= num_continuations if turn_index <= end_turn else 1
            end_turn, parent = episode.fork_turn, episode.parent
            episode = None if parent is None else episodes.get((episode.group, parent))
        weights.append(weight)
    return weights


def compute_evaluation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `rollout_metrics` and `success`: the share of scored outcomes above 0, with its 95 % interval."""
    metrics = rollout_metrics(trajectories)
    outcomes = [trajectory.reward.outcome for trajectory in trajectories if trajectory.reward is not None]
    if outcomes:
        num_solved = sum(outcome > 0 for outcome in outcomes)
        metrics["success"] = num_solved / len(outcomes)
        metrics["success_low"], metrics["success_high"] = wilson_interval(num_solved, len(outcomes))
    return metrics


def wilson_interval(num_successes: float, num_trials: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion, which unlike the normal approximation is accurate near 0 and
    1."""
    proportion, z_squared = num_successes / num_trials, Z95**2
    center = (proportion + z_squared / (2 * num_trials)) / (1 + z_squared / num_trials)
    half_width = (
        Z95
        * math.sqrt(proportion * (1 - proportion) / num_trials + z_squared / (4 * num_trials**2))
        / (1 + z_squared / num_trials)
    )
    return max(0.0, center - half_width), min(1.0, center + half_width)
