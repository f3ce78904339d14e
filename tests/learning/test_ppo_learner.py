"""PPO through the learner: gradients against plain turns, who is trained by what, whole runs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kits.engine import plain_logprobs, tiny
from tests.kits.learner import far, gradients, learn, samples_of
from tests.kits.ppo import make, plain, played, prepared, summed_gae
from tests.kits.run import EXACT, Quiet, assert_same_run, go_on, small, train
from tests.kits.warm import lift
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.learning.learner import Learner
from TrainingFactory.types import Trajectory


def plain_gradients(
    learner: Learner, ppo: PPO, groups: Sequence[Sequence[Trajectory]]
) -> dict[str, torch.Tensor]:
    """Episode by episode, turn by turn, by the models' own attention and logits."""
    model, critic, head = learner.model, learner.critic or learner.model, learner.head
    assert head is not None
    episodes = [trajectory for group in groups for trajectory in group]
    model.eval()
    critic.eval()
    facts = [plain(episode, critic, learner.reference, head) for episode in episodes]
    advantages = [summed_gae(fact["rewards"], fact["values"], ppo.gamma, ppo.lam) for fact in facts]
    every = np.concatenate(advantages)
    for episode, fact, advantage in zip(episodes, facts, advantages, strict=True):
        places, done = torch.tensor((advantage - every.mean()) / every.std()), 0
        returns = torch.tensor(advantage + fact["values"])
        for turn in episode.turns:
            ids, start = torch.tensor([turn.prompt_ids + turn.completion.token_ids]), len(turn.prompt_ids)
            end = done + ids.shape[1] - start
            logits = model(ids).logits[0, start - 1 : -1].double()
            now = torch.log_softmax(logits, -1).gather(1, ids[0, start:, None])[:, 0]
            ratio = (now - torch.tensor(fact["old"][done:end])).exp()
            gains = torch.minimum(ratio * places[done:end], ratio.clamp(0.8, 1.2) * places[done:end])
            states = critic(ids, output_hidden_states=True).hidden_states[-1][0, start - 1 : -1].double()
            values = states @ head.weight[0].double() + head.bias.double()
            distance = torch.tensor(fact["reference"][done:end]) - now
            k3 = (distance.exp() - distance - 1).clamp(max=10)  # as in verl; some tokens are beyond it
            loss = (-gains + 0.25 * (values - returns[done:end]) ** 2 + ppo.kl * k3).sum()
            (loss / len(every)).backward()
            done = end
    named = list(learner._iterate_parameters())
    found = {name: param.grad.clone() for name, param in named if param.grad is not None}
    for _, param in named:
        param.grad = None
    return found


def sampled_near(model: Any, groups: list[list[Trajectory]], gap: float) -> list[list[Trajectory]]:
    """The sampled log-probs become the model's own but for a gap, so that only some ratios are clipped."""
    for turn in (turn for group in groups for trajectory in group for turn in trajectory.turns):
        own = plain_logprobs(model, turn.prompt_ids, turn.completion.token_ids)
        turn.completion.logprobs = [value + gap * ((7 * n) % 3 - 1) for n, value in enumerate(own)]
    return groups


@pytest.mark.parametrize("critic", [False, True])
def test_gradients_through_the_learner_equal_plain_turns(critic: bool) -> None:
    """And however the rows are packed and ordered."""
    learner, groups = make(critic, reference=True), played(1, groups=2, members=3)
    sampled_near(learner.model, groups, 0.2)
    ppo = PPO(value_clip=None, value_weight=0.5, kl=0.1)
    wanted = plain_gradients(learner, ppo, groups)
    assert set(wanted) > {"head.weight", "model.norm.weight"}
    assert ("critic.model.norm.weight" in wanted) == critic
    rows = samples_of(ppo, groups)
    backwards = samples_of(ppo, [group[::-1] for group in groups[::-1]])
    for order, packing in (
        (rows, {}),
        (rows, {"token_budget": 150}),
        (rows, {"sharing": False, "token_budget": 200}),
        (backwards, {"token_budget": 1}),
    ):
        learner.sharing = "sharing" not in packing
        (batch,) = prepared(learner, ppo, order, **packing)
        assert far(gradients(learner, batch, ppo.loss, ppo.needs), wanted) < 1e-5


@pytest.mark.parametrize(
    ("critic", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)]
)
def test_warm_up_leaves_the_policy_as_it_is(critic: bool, dtype: torch.dtype) -> None:
    """With decay and momentum waiting to move it."""
    ppo, model = PPO(critic_warmup=3), tiny().to(dtype)  # pyright: ignore[reportArgumentType]
    learner, groups = make(critic, model), played(3, groups=2, members=3)
    learn(learner, ppo, groups, 3, token_budget=400)  # the first that trains both
    assert learner.head is not None and learner.head.weight.dtype == torch.float32
    named = dict(zip(learner._weights.names, learner._weights.masters, strict=True))
    before = {name: weight.detach().clone() for name, weight in named.items()}
    served = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    figures = learn(learner, ppo, groups, 2, token_budget=400, epochs=2, minibatches=2)
    assert figures["grad_norm"] > 0 and figures["skipped"] == 0
    assert all(torch.equal(served[name], weight) for name, weight in model.named_parameters())
    moved = {name for name, weight in named.items() if not torch.equal(before[name], weight)}
    assert {"head.weight", "head.bias"} <= moved
    assert all(name.startswith(("head.", "critic.")) for name in moved)
    assert critic == any(name.startswith("critic.") for name in moved)
    learn(learner, ppo, groups, 3, token_budget=400)
    assert not torch.equal(served["model.norm.weight"], dict(model.named_parameters())["model.norm.weight"])


def test_a_second_pass_sees_other_ratios() -> None:
    learner, ppo, seen = make(), PPO(), list[float]()
    groups, update = sampled_near(learner.model, played(4), 0.0), learner.update

    def spy(*given: Any) -> dict[str, float]:
        metrics = update(*given)
        seen.append(metrics["logprob_diff"])
        return metrics

    learner.update = spy  # pyright: ignore[reportAttributeAccessIssue]
    learn(learner, ppo, groups, 0, token_budget=100_000, epochs=2, minibatches=2)
    assert len(seen) == 4 and seen[0] < 1e-5  # nothing has moved in the first mini-batch
    assert min(seen[1:]) > 1e-2


def test_gradient_checkpointing_with_a_critic() -> None:
    ppo, found = PPO(), []
    for on in (False, True):
        learner = make(critic=True, gradient_checkpointing=on)
        calls: list[int] = []
        for number, model in enumerate((learner.model, learner.critic)):
            layer = model.model.layers[0].self_attn
            layer.register_forward_pre_hook(lambda *_, number=number, calls=calls: calls.append(number))
        (batch,) = prepared(learner, ppo, samples_of(ppo, played(2)))
        calls.clear()
        found.append(gradients(learner, batch, ppo.loss, ppo.needs))
        assert sorted(calls) == ([0, 0, 1, 1] if on else [0, 1])  # computed again in the backward pass
    assert far(found[1], found[0]) < 1e-5


# -- whole runs

RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "head": {
        "training": {"minibatches": 3, "update_epochs": 2, "group_size": 2},
        "ppo": {"critic_warmup": 1, "kl": 0.1},
    },
    "separate": {
        "training": {"group_size": 2},
        "ppo": {"critic": "separate", "critic_warmup": 1},
        "lora": {"enabled": True, "r": 4, "dropout": 0.1},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_exactly(tmp_path: Path, name: str) -> None:
    sections = copy.deepcopy(RUNS[name])
    sections["training"] = sections.get("training", {}) | {"algorithm": "ppo", "max_steps": 3}
    sections["logging"] = {"output_dir": str(tmp_path), "checkpoint_every": 1}
    config = small(tmp_path, sampling=EXACT, **sections)
    report = train(config, "whole")
    assert report.rows[-1]["value_loss"] > 0 and report.checkpoint is not None
    # What vLLM would read as the model's weights, or as an adapter's.
    weights = "model.safetensors" if name == "head" else "adapter_model.safetensors"
    assert [path.name for path in report.checkpoint.glob("*.safetensors")] == [weights]
    with pytest.raises(RuntimeError, match="broken off"):
        train(config, "broken", Quiet(fail_at=2))
    assert go_on(tmp_path / "broken").state == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.slow  # GRPO learns it in training/test_grpo_runs.py; gradients and figures of PPO are checked above
def test_it_learns_a_tool_task(warm: Path, tmp_path: Path) -> None:
    """By the first steps of the recipe of configs/tiny_ppo.yaml; after all 16 success is 0.74."""
    before, after, report = lift(
        warm,
        tmp_path,
        training={
            "algorithm": "ppo", "max_steps": 4, "batch_size": 32, "group_size": 2, "minibatches": 4,
            "learning_rate": 4e-4, "warmup_steps": 2,
        },
        ppo={"critic_warmup": 1, "value_weight": 0.02},
    )  # fmt: skip
    assert after >= before + 0.2
    # the critic learns as well
    assert report.rows[-1]["explained_variance"] > report.rows[1]["explained_variance"]
