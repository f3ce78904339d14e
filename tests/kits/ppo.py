"""What the tests of PPO share: random episodes, learners with a head, prepared batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.kits.engine import tiny
from tests.kits.learner import words
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.data.packing import Batch, make_batch
from TrainingFactory.learning.heads import ScalarHead
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.step import split_minibatches
from TrainingFactory.types import Completion, Message, Reward, Sample, Task, Trajectory, Turn


def play(rng: random.Random, prompt: list[int], forgets: bool = False) -> Trajectory:
    """Turns with tool replies of random length in between; one that forgets goes on from a shorter prompt."""
    turns: list[Turn] = []
    for number in range(rng.randrange(1, 5)):
        ids = words(rng, rng.randrange(1, 9))
        sampled = Completion(ids, [-4.5 - rng.random() for _ in ids], "stop")
        turns.append(Turn(list(prompt), sampled, Message("assistant")))
        prompt = prompt + ids + words(rng, rng.randrange(1, 12))
        if forgets and number == 0:
            prompt = prompt[:5] + prompt[12:]
    steps = [rng.gauss(0, 0.5) for _ in turns] if rng.random() < 0.7 else []
    return Trajectory(Task("t", "p"), "g", turns=turns, reward=Reward(rng.gauss(0, 1), steps))


def played(seed: int, groups: int = 3, members: int = 4) -> list[list[Trajectory]]:
    rng = random.Random(seed)
    prompts = [words(rng, 30) + words(rng, rng.randrange(1, 30)) for _ in range(groups)]
    return [[play(rng, prompt, forgets=n == 1) for n in range(members)] for prompt in prompts]


def make(critic: bool = False, model: Any = None, reference: bool = False, **options: Any) -> Learner:
    """A learner whose head is no longer the zeros that it starts with."""
    model = model or tiny()
    own = copy.deepcopy(model) if critic else None
    head = ScalarHead(32)
    with torch.no_grad():
        head.weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(3))
        head.bias.fill_(0.1)
    how = OptimizerOptions(learning_rate=1e-2, critic_learning_rate=2e-2, weight_decay=0.1)
    return Learner(
        model, how, head=head, critic=own, reference=tiny(seed=9) if reference else None, **options
    )


def prepared(
    learner: Learner, ppo: PPO, rows: Sequence[Sample], parts: int = 1, **packing: Any
) -> list[Batch]:
    batches = [
        learner.annotate(make_batch(part, **packing), ppo.needs)
        for part in split_minibatches(rows, parts, seed=1)
    ]
    ppo.prepare(batches, 0)
    return batches


@torch.no_grad()
def plain(trajectory: Trajectory, model: Any, reference: Any, head: ScalarHead) -> dict[str, np.ndarray]:
    """Token by token from the turns themselves: old and reference log-probs, values, rewards. float64"""
    found: dict[str, list[float]] = {"old": [], "reference": [], "values": [], "rewards": []}
    reward = trajectory.reward
    assert reward is not None
    for number, turn in enumerate(trajectory.turns):
        ids, start = turn.prompt_ids + turn.completion.token_ids, len(turn.prompt_ids)
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].double()
        values = states @ head.weight[0].double() + head.bias.double()
        other = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), -1)
        for place in range(start, len(ids)):
            found["old"].append(turn.completion.logprobs[place - start])
            found["values"].append(float(values[place - 1]))
            found["reference"].append(float(other[place - 1, ids[place]]))
            found["rewards"].append(0.0)
        found["rewards"][-1] += reward.steps[number] if reward.steps else 0.0
    found["rewards"][-1] += reward.outcome
    return {name: np.array(numbers) for name, numbers in found.items()}


def summed_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The sum that GAE is defined by, term by term."""
    size = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(size)]
    return np.array([sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, size)) for t in range(size)])
