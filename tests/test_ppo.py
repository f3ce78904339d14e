"""PPO's credit and loss against plain float64 computations from the formulas, and who learns what from them."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_kit import tiny
from tests.learner_kit import far, gradients, words
from tests.run_kit import Quiet, assert_same_run, go_on, small, train
from tests.warm_kit import lift
from TrainingFactory.algorithms.gae import moments
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.trained import Trained
from TrainingFactory.data.packing import Batch, make_batch
from TrainingFactory.learning.heads import ScalarHead
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models.loading import load_model
from TrainingFactory.services.assemble_learner import make_critic
from TrainingFactory.services.updating import learn, split
from TrainingFactory.types import Completion, Message, Reward, Sample, Status, Task, Trajectory, Turn


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
        learner.annotate(make_batch(part, **packing), ppo.needs) for part in split(rows, parts, seed=1)
    ]
    ppo.prepare(batches, step=0)
    return batches


def rows_of(ppo: PPO, groups: Sequence[Sequence[Trajectory]]) -> list[Sample]:
    return [row for group in groups for row in ppo.samples(group)]


# -- credit


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


@pytest.mark.parametrize(
    "options",
    [
        {"whiten": False, "gamma": 0.97, "lam": 0.9},
        {"whiten": True},
        {"whiten": True, "gamma": 0.99, "lam": 1.0, "kl": 0.3, "kl_in": "reward"},
        {"whiten": False, "lam": 0.0, "kl": 0.3},
    ],
)
def test_credit_is_the_formula(options: dict[str, Any]) -> None:
    """Over shared prefixes, tool spans, episodes of several rows, several packs and mini-batches."""
    ppo, learner, groups = PPO(**options), make(reference=True), played(5)
    episodes = [trajectory for group in groups for trajectory in group]
    learner.model.eval()
    facts = [plain(t, learner.model, learner.reference, learner.head) for t in episodes]  # pyright: ignore[reportArgumentType]
    wanted = []
    for fact in facts:
        drift = fact["old"] - fact["reference"]
        rewards = fact["rewards"] - (ppo.kl * drift if ppo.kl_in == "reward" else 0.0)
        wanted.append(summed_gae(rewards, fact["values"], ppo.gamma, ppo.lam))
    returns = [advantage + fact["values"] for advantage, fact in zip(wanted, facts, strict=True)]
    if ppo.whiten:
        every = np.concatenate(wanted)
        wanted = [(advantage - every.mean()) / every.std() for advantage in wanted]

    rows = rows_of(ppo, groups)
    assert len(rows) > len(episodes)  # some forgot
    numbers = list(dict.fromkeys(row.episode for row in rows))
    place = {number: index for index, number in enumerate(numbers)}
    parts = split(rows, 2, seed=1)
    seen, packs = 0, 0
    for part, batch in zip(parts, prepared(learner, ppo, rows, 2, token_budget=300), strict=True):
        for pack in batch.packs:
            packs += 1
            for episode in range(len(pack.labels)):
                mine = np.flatnonzero(pack.episode == episode)
                mine = mine[np.argsort(pack.row[mine], kind="stable")]
                index = place[part[pack.row[mine[0]]].episode]
                assert pack.values is not None and pack.returns is not None
                np.testing.assert_allclose(pack.values[mine], facts[index]["values"], atol=1e-5)
                np.testing.assert_allclose(pack.advantages[mine], wanted[index], rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(pack.returns[mine], returns[index], rtol=1e-5, atol=1e-5)
                seen += 1
        spread = np.concatenate(returns).var()
        assert batch.baseline == pytest.approx(spread, rel=1e-4) and not batch.values_only
    assert seen == len(episodes) and packs > 3


def test_tool_tokens_are_stepped_over() -> None:
    """However long a tool's reply is, the discount between two turns is that of one token."""
    for reply in (1, 40):
        first = Turn([1, 2], Completion([3], [-1.0], "stop"), Message("assistant"))
        second = Turn([1, 2, 3, *[7] * reply], Completion([4], [-1.0], "stop"), Message("assistant"))
        episode = Trajectory(Task("t", "p"), "g", turns=[first, second], reward=Reward(1.0, [0.5, 0.25]))
        ppo = PPO(gamma=0.5, lam=1.0, whiten=False)
        (batch,) = prepared(
            Learner(tiny(), OptimizerOptions(), head=ScalarHead(32)), ppo, ppo.samples([episode])
        )
        assert batch.packs[0].rewards.tolist() == [0.5, 1.25]
        assert batch.packs[0].advantages.tolist() == [0.5 + 0.5 * 1.25, 1.25]


def test_which_episodes_are_learned_from() -> None:
    def episode(reward: Reward | None, status: Status = "done") -> Trajectory:
        turn = Turn([1, 2], Completion([3, 4], [-1.0, -1.0], "stop"), Message("assistant"))
        return Trajectory(Task("t", "p"), "g", turns=[turn], status=status, reward=reward)

    none = Trajectory(Task("t", "p"), "g", status="truncated", reward=Reward(0.0))
    group = [episode(Reward(1.0)), episode(None), episode(Reward(0.25, [0.5]), "truncated"), none]
    assert [row.rewards for row in PPO().samples(group)] == [[0, 0, 0, 1.0], [0, 0, 0, 0.75]]
    assert [row.rewards for row in PPO(train_truncated=False).samples(group)] == [[0, 0, 0, 1.0]]
    assert PPO().samples(group[:1])[0].loss_mask == [False, False, True, True]  # one episode is enough


def test_processes_agree_on_mean_and_deviation() -> None:
    rng = np.random.default_rng(0)
    numbers = [rng.normal(3, 2, 50), rng.normal(-1, 1, 7), np.zeros(0)]
    shares, meeting = [numbers[:2], numbers[2:]], threading.Barrier(2)
    told: list[dict[str, float]] = [{}, {}]
    found: list[Any] = [None, None]

    def process(rank: int) -> None:
        def total(figures: dict[str, float]) -> dict[str, float]:
            told[rank] = figures
            meeting.wait(10)
            sums = {name: told[0][name] + told[1][name] for name in figures}
            meeting.wait(10)
            return sums

        found[rank] = moments(shares[rank], total)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = np.concatenate(numbers)
    assert found[0] == found[1] == pytest.approx((every.mean(), every.std()))


def test_equal_advantages_are_not_blown_up() -> None:
    turn = Turn([1, 2], Completion([3], [-1.0], "stop"), Message("assistant"))
    same = Trajectory(Task("t", "p"), "g", turns=[turn], reward=Reward(0.1))
    learner = Learner(tiny(), OptimizerOptions(), head=ScalarHead(32))
    (batch,) = prepared(learner, PPO(), PPO().samples([same, same, same]))
    assert np.abs(batch.packs[0].advantages).max() < 1e-6
    _, figures = PPO().loss(learner._trained(batch.packs[0], batch, PPO().needs))
    assert "explained" not in figures
    PPO().prepare([make_batch([])], 0)  # nothing to learn from is no error


# -- the loss


def random_tokens(seed: int, size: int = 60) -> Trained:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(size, generator=generator)

    zeros = torch.zeros(size)
    sampled = -2 + 0.5 * normal()
    old_values = normal()
    return Trained(
        (sampled + 0.3 * normal()).requires_grad_(), normal().abs().requires_grad_(), sampled, normal(), zeros, zeros,
        zeros.long(), zeros[:1], torch.zeros(0, 2), 100, 7, 7, 0, reference=sampled + 0.2 * normal(),
        old_values=old_values, values=(old_values + 0.3 * normal()).requires_grad_(), returns=old_values + normal(),
        baseline=1.7,
    )  # fmt: skip


@pytest.mark.parametrize("value_clip", [0.2, None])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_loss_is_the_formula(value_clip: float | None, kl_in: Any) -> None:
    trained = random_tokens(2)
    ppo = PPO(clip=0.2, value_clip=value_clip, value_weight=0.7, kl=0.3, kl_in=kl_in, entropy=0.05)
    loss, figures = ppo.loss(trained)
    loss.backward()
    now, entropy, sampled, advantage, reference, old_values, values, returns = (
        part.detach().double().numpy()  # pyright: ignore[reportOptionalMemberAccess]
        for part in (trained.logprobs, trained.entropy, trained.sampled, trained.advantages, trained.reference,
                     trained.old_values, trained.values, trained.returns)
    )  # fmt: skip
    total = value_loss = kl = clipped = 0.0
    slopes, value_slopes = [], []
    for t in range(len(now)):
        ratio = np.exp(now[t] - sampled[t])
        bound = ratio > 1.2 if advantage[t] > 0 else ratio < 0.8
        total -= (np.clip(ratio, 0.8, 1.2) if bound else ratio) * advantage[t]
        clipped += bound
        gap = reference[t] - now[t]
        kl += np.exp(gap) - gap - 1
        slopes.append(
            (0 if bound else -ratio * advantage[t]) + (0.3 * (1 - np.exp(gap)) if kl_in == "loss" else 0)
        )
        move, error = values[t] - old_values[t], values[t] - returns[t]
        slope, worst = error, error**2
        if value_clip is not None and abs(move) > value_clip:
            near = old_values[t] + np.sign(move) * value_clip - returns[t]
            if near**2 > worst:
                slope, worst = 0.0, near**2
        value_loss += worst / 2
        value_slopes.append(0.7 * slope)
    explained = len(now) - ((returns - old_values) ** 2).sum() / 1.7
    total += 0.7 * value_loss - 0.05 * entropy.sum() + (0.3 * kl if kl_in == "loss" else 0)
    assert loss.item() == pytest.approx(total / 100, rel=1e-5)
    wanted = {"clipped": clipped, "value_loss": value_loss, "explained": explained, "kl": kl}
    wanted["sampler_gap"] = np.abs(now - sampled).sum()
    assert clipped and figures == pytest.approx({name: sum_ / 100 for name, sum_ in wanted.items()}, rel=1e-5)
    for tensor, slope in (
        (trained.logprobs, slopes),
        (trained.values, value_slopes),
        (trained.entropy, [-0.05] * 60),
    ):
        assert tensor is not None and tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), np.array(slope) / 100, rtol=1e-4, atol=1e-7)
    if value_clip is not None:
        assert 0 < sum(slope == 0 for slope in value_slopes) < 60


def test_options_are_checked() -> None:
    wrong: dict[str, Any] = {
        "clip": 1.0, "gamma": 1.1, "lam": -0.1, "value_clip": 0.0, "value_weight": 0.0, "kl": -0.1, "entropy": -1.0,
        "critic_warmup": -1,
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"ppo\.{name} is"):
            PPO(**{name: value})
    assert PPO().needs == {"values"} and PPO(kl=0.1, kl_in="reward").needs == {"values", "reference"}


def test_a_policy_that_would_never_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"critic_warmup is 6 of training.max_steps 6"):
        train(small(tmp_path, training={"algorithm": "ppo"}, ppo={"critic_warmup": 6}), "a")


# -- through the learner


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
            loss = (
                -gains + 0.25 * (values - returns[done:end]) ** 2 + ppo.kl * (distance.exp() - distance - 1)
            ).sum()
            (loss / len(every)).backward()
            done = end
    named = list(learner._named_parameters())
    found = {name: param.grad.clone() for name, param in named if param.grad is not None}
    for _, param in named:
        param.grad = None
    return found


@pytest.mark.parametrize("critic", [False, True])
def test_gradients_through_the_learner_equal_plain_turns(critic: bool) -> None:
    """And however the rows are packed and ordered."""
    learner, groups = make(critic, reference=True), played(1)
    model = learner.model
    for trajectory in (t for group in groups for t in group):
        for turn in trajectory.turns:  # sampled log-probs near the model's own, so that only some are clipped
            with torch.no_grad():
                every = torch.log_softmax(
                    model(torch.tensor([turn.prompt_ids + turn.completion.token_ids])).logits[0], -1
                )
            start = len(turn.prompt_ids)
            turn.completion.logprobs = [
                float(every[start + n - 1, token]) + 0.2 * ((7 * n) % 3 - 1)
                for n, token in enumerate(turn.completion.token_ids)
            ]
    ppo = PPO(value_clip=None, value_weight=0.5, kl=0.1)
    wanted = plain_gradients(learner, ppo, groups)
    assert set(wanted) > {"head.weight", "model.norm.weight"}
    assert ("critic.model.norm.weight" in wanted) == critic
    rows = rows_of(ppo, groups)
    backwards = rows_of(ppo, [group[::-1] for group in groups[::-1]])
    for order, packing in (
        (rows, {}),
        (rows, {"token_budget": 150}),
        (rows, {"sharing": False, "token_budget": 200}),
        (backwards, {"token_budget": 1}),
    ):
        learner.sharing = "sharing" not in packing
        (batch,) = prepared(learner, ppo, order, **packing)
        assert far(gradients(learner, batch, ppo.loss, ppo.needs), wanted) < 1e-5


def test_the_value_loss_trains_the_trunk_or_the_critic_alone() -> None:
    ppo = PPO()
    for critic in (False, True):
        learner = make(critic)
        (batch,) = prepared(learner, ppo, rows_of(ppo, played(2)))
        for pack in batch.packs:
            pack.advantages = np.zeros_like(pack.advantages)
        found = gradients(learner, batch, ppo.loss, ppo.needs)
        trunk = [
            name for name, value in found.items() if not name.startswith(("head", "critic")) and value.any()
        ]
        assert bool(trunk) != critic
        assert float(found["head.weight"].abs().max()) > 0
        assert critic == any(name.startswith("critic.") and value.any() for name, value in found.items())


@pytest.mark.parametrize(
    ("critic", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)]
)
def test_warm_up_leaves_the_policy_as_it_is(critic: bool, dtype: torch.dtype) -> None:
    """Also where several processes fill in gradients of zero, with decay and momentum waiting to move it."""
    ppo, model = PPO(critic_warmup=3), tiny().to(dtype)  # pyright: ignore[reportArgumentType]
    learner, groups = make(critic, model), played(3)
    learn(learner, ppo, groups, 3, token_budget=400)  # the first that trains both
    assert learner.version == 1 and learner.head is not None and learner.head.weight.dtype == torch.float32

    def filled(weights: Sequence[torch.nn.Parameter]) -> None:
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad

    learner._processes.add_gradients = filled  # pyright: ignore[reportAttributeAccessIssue]
    named = dict(zip(learner._weights.names, learner._weights.masters, strict=True))
    before = {name: weight.detach().clone() for name, weight in named.items()}
    served = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    figures = learn(learner, ppo, groups, 2, token_budget=400, epochs=2, minibatches=2)
    assert figures["grad_norm"] > 0 and figures["skipped"] == 0 and learner.version == 1
    assert all(torch.equal(served[name], weight) for name, weight in model.named_parameters())
    moved = {name for name, weight in named.items() if not torch.equal(before[name], weight)}
    assert {"head.weight", "head.bias"} <= moved
    assert all(name.startswith(("head.", "critic.")) for name in moved)
    assert critic == any(name.startswith("critic.") for name in moved)
    learn(learner, ppo, groups, 3, token_budget=400)
    assert learner.version == 2
    assert not torch.equal(served["model.norm.weight"], dict(model.named_parameters())["model.norm.weight"])


def test_a_second_pass_sees_other_ratios_and_the_same_credit() -> None:
    learner, ppo, seen = make(), PPO(), list[tuple[float, float]]()
    update = learner.update

    def spy(batch: Batch, loss: Any, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        def watched(trained: Trained) -> Any:
            moved = (
                (trained.logprobs.detach() - start[len(seen) % 2 :: 2][0][: len(trained.logprobs)])
                .abs()
                .max()
            )
            assert trained.values is not None and trained.old_values is not None
            seen.append((float(moved), float((trained.values - trained.old_values).detach().abs().max())))
            return loss(trained)

        return update(batch, watched, needs)

    rows = rows_of(ppo, groups := played(4))
    start = [learner.logprobs(make_batch(part).packs[0])[0].detach() for part in split(rows, 2, seed=7)]
    learner.update = spy  # pyright: ignore[reportAttributeAccessIssue]
    learn(learner, ppo, groups, 0, token_budget=100_000, epochs=2, minibatches=2, seed=7)
    assert len(seen) == 4 and max(seen[0]) < 1e-4  # nothing has moved in the first mini-batch
    assert all(min(pair) > 1e-2 for pair in seen[1:])


def test_gradient_checkpointing_with_a_critic() -> None:
    ppo, found = PPO(), []
    for on in (False, True):
        learner = make(critic=True, gradient_checkpointing=on)
        calls: list[int] = []
        for number, model in enumerate((learner.model, learner.critic)):
            layer = model.model.layers[0].self_attn
            layer.register_forward_pre_hook(lambda *_, number=number, calls=calls: calls.append(number))
        (batch,) = prepared(learner, ppo, rows_of(ppo, played(2)))
        calls.clear()
        found.append(gradients(learner, batch, ppo.loss, ppo.needs))
        assert sorted(calls) == ([0, 0, 1, 1] if on else [0, 1])  # computed again in the backward pass
    assert far(found[1], found[0]) < 1e-5


def test_an_adapter_with_a_critic() -> None:
    model = add_lora(load_model("builtin:tiny").model, r=4)
    critic = make_critic(model)
    base = {n: w.detach().clone() for n, w in model.named_parameters() if not w.requires_grad}
    ours, theirs = dict(model.named_parameters()), dict(critic.named_parameters())
    for name, weight in ours.items():  # what is frozen takes no memory twice, what is trained is apart
        assert (theirs[name] is weight) != weight.requires_grad, name
    learner = Learner(
        model, OptimizerOptions(learning_rate=1e-2), critic=critic,
        head=ScalarHead(model.config.get_text_config().hidden_size),
    )  # fmt: skip
    for step in range(2):  # adapters start as a product with zeros, half of which moves in the first step
        learn(learner, PPO(), played(6), step, token_budget=1000)
    assert all(torch.equal(base[name], weight) for name, weight in ours.items() if name in base)
    moved = [
        name
        for name, weight in ours.items()
        if weight.requires_grad and not torch.equal(weight, theirs[name])
    ]
    assert any("lora_A" in name for name in moved) and any("lora_B" in name for name in moved)


# -- whole runs

RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "head": {"training": {"minibatches": 3, "update_epochs": 2}, "ppo": {"critic_warmup": 1, "kl": 0.1}},
    "separate": {
        "ppo": {"critic": "separate", "critic_warmup": 1},
        "lora": {"enabled": True, "r": 4, "dropout": 0.1},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_exactly(tmp_path: Path, name: str) -> None:
    sections = copy.deepcopy(RUNS[name])
    sections["training"] = sections.get("training", {}) | {"algorithm": "ppo", "max_steps": 4}
    config = small(tmp_path, **sections)
    report = train(config, "whole")
    assert report.rows[-1]["value_loss"] > 0 and report.checkpoint is not None
    assert (report.checkpoint / "scalar_head.safetensors").exists() == (name == "head")
    with pytest.raises(RuntimeError, match="broken off"):
        train(config, "broken", Quiet(fail_at=3))
    assert go_on(tmp_path / "broken").state == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_it_learns_a_tool_task(warm: Path, tmp_path: Path) -> None:
    """By the recipe of configs/tiny_ppo.yaml."""
    before, after, report = lift(
        warm,
        tmp_path,
        training={
            "algorithm": "ppo", "max_steps": 16, "batch_size": 32, "group_size": 2, "minibatches": 4,
            "learning_rate": 4e-4, "warmup_steps": 2,
        },
        ppo={"critic_warmup": 1, "value_weight": 0.02},
    )  # fmt: skip
    assert after >= before + 0.3
    assert report.rows[-1]["explained"] > report.rows[1]["explained"]  # the critic learns as well
