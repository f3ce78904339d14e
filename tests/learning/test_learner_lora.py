"""Adapters: the base stays as it is, and is the reference. Sampler and learner agree after updates."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.algorithm import ALGORITHMS, batch_for, groups_of, learner_for
from tests.kits.engine import tiny
from tests.kits.learner import (
    batch_gradients,
    far,
    gradients,
    make_learner,
    ragged_rows,
    row_gradients,
    row_logprobs,
    sample,
    samples_of,
    weighted,
    weighted_part,
    weights_of,
    words,
)
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.assembly.learner import make_algorithm, make_critic, make_trainable
from TrainingFactory.assembly.learner import make_learner as make_learner_of
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import adapters, load_model
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.training.preflight import check_config
from TrainingFactory.types import Sample, SamplingParams, Weights


def rows_of(count: int = 5) -> list[Sample]:
    rng = random.Random(0)
    head = words(rng, 60)
    return [sample(rng, head + words(rng, 10 + n), 55) for n in range(count)]


def test_a_base_in_bfloat16_is_bit_identical_after_updates() -> None:
    base: Any = tiny().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    before = weights_of(base)
    model = add_lora(base, r=4, alpha=8)
    learner = Learner(model, OptimizerOptions(learning_rate=1e-2))
    assert learner.sharing and all("lora_" in name for name in learner._weights.names)
    assert {master.dtype for master in learner._weights.masters} == {torch.float32}
    batch = make_batch(rows_of())
    reference = [learner._compute_reference_logprobs(pack).tolist() for pack in batch.packs]
    for _ in range(3):
        learner.update(batch, weighted)
    after = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.any() for name, value in after.items() if "lora_B" in name)
    # adapters off is the model before training, and adapters on again is not
    assert [learner._compute_reference_logprobs(pack).tolist() for pack in batch.packs] == reference
    with torch.no_grad():
        now = [learner.compute_logprobs(pack)[0].tolist() for pack in batch.packs]
    assert now != reference
    assert all(param.requires_grad == ("lora_" in name) for name, param in model.named_parameters())


@pytest.mark.parametrize(
    ("base", "adapter"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),  # no layer casts what goes in
        (torch.float16, torch.float32),  # in which small gradients are lost
    ],
)
def test_an_adapter_has_the_same_precision_fresh_and_loaded(
    base: torch.dtype, adapter: torch.dtype, tmp_path: Path
) -> None:
    def precisions(model: Any) -> set[torch.dtype]:
        return {param.dtype for name, param in model.named_parameters() if "lora_" in name}

    fresh = add_lora(tiny().to(base), r=4)  # pyright: ignore[reportArgumentType]
    fresh.save_pretrained(tmp_path / "adapter")
    loaded = adapters.attach_adapter(tiny().to(base), str(tmp_path / "adapter"))  # pyright: ignore[reportArgumentType]
    assert precisions(fresh) == precisions(loaded) == {adapter}


def test_adapter_gradients_equal_plain_rows() -> None:
    model = add_lora(tiny(), r=4, alpha=8, target_modules=["q_proj", "up_proj"])
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zero at the start, and then lora_A has no gradient
            torch.nn.init.normal_(param, std=0.2, generator=torch.Generator().manual_seed(0))
    rows = ragged_rows(0)[:10]
    model.eval()
    wanted = row_gradients(model, rows, weighted_part)
    found = batch_gradients(make_learner(model), rows)
    assert len(found) == 8 and far(found, wanted) < 1e-5
    checkpointed = batch_gradients(make_learner(model, gradient_checkpointing=True), rows)
    assert far(checkpointed, wanted) < 1e-5


def test_a_fresh_adapter_changes_nothing_and_comes_from_its_seed() -> None:
    rows = rows_of(1)
    plain = row_logprobs(tiny().eval(), rows[0])
    one, same, other = (add_lora(tiny(), seed=seed).eval() for seed in (1, 1, 2))
    assert torch.equal(row_logprobs(one, rows[0]), plain)
    first, second, third = (
        next(p for n, p in m.named_parameters() if "lora_A" in n) for m in (one, same, other)
    )
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_targets_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match=r"Target modules \{'nope'\} not found"):
        add_lora(tiny(), target_modules=["nope"])


def test_a_reference_that_is_not_there_is_asked_for() -> None:
    with pytest.raises(AssertionError, match="frozen copy"):
        make_learner().annotate(make_batch(rows_of(1)), frozenset({"reference"}))


# One for each of what an algorithm may need; other losses take the same way.
NEEDS = (
    "sft",
    "grpo-kl-k3",
    "grpo-importance",
    "ppo-head",
    "ppo-separate",
    "ppo-warmup",
    "dpo",
    "kto",
    "reward-model",
)


@pytest.mark.parametrize("name", NEEDS)
def test_every_algorithm_trains_an_adapter(name: str) -> None:
    """The base does not move, and with adapters off it is the reference."""
    algorithm, base = ALGORITHMS[name], tiny()
    before, frozen = weights_of(base), copy.deepcopy(base).eval()
    model = add_lora(base, r=4)
    options = {"critic": make_critic(model)} if "separate" in name or "warmup" in name else {}
    for critic in options.values():  # what is frozen takes no memory twice, what is trained is apart
        theirs = dict(critic.named_parameters())
        assert all((theirs[n] is weight) != weight.requires_grad for n, weight in model.named_parameters())
    learner = learner_for(algorithm, model, **options)
    rows = samples_of(algorithm, groups_of())
    learner.update(make_batch(rows), weighted)  # away from the reference
    batch = batch_for(learner, algorithm, rows)
    if "reference" in algorithm.needs:
        [pack] = batch.packs
        assert pack.reference is not None
        first = row_logprobs(frozen, rows[pack.row[0]]).detach()
        torch.testing.assert_close(
            torch.from_numpy(pack.reference[pack.row == pack.row[0]]), first, rtol=1e-5, atol=1e-5
        )
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    learner.update(batch, algorithm.loss, algorithm.needs)
    after = {n.replace(".base_layer", ""): value for n, value in base.state_dict().items()}
    assert all(torch.equal(before[key], after[key]) for key in before)
    moved = any(not torch.equal(p, adapters[n]) for n, p in model.named_parameters() if n in adapters)
    assert moved == (name != "ppo-warmup")  # there the critic's adapter learns


@pytest.mark.parametrize("start", ["fresh", "loaded", "whole"])
def test_the_reference_is_the_model_that_training_starts_with(tmp_path: Path, start: str) -> None:
    """Under an adapter that was trained before, that is not its base."""
    model: dict[str, Any] = {"name": "builtin:tiny", "device": "cpu"}
    if start == "loaded":
        earlier: Any = add_lora(load_model("builtin:tiny", device="cpu").model, r=2)
        for name, param in earlier.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.1, generator=torch.Generator().manual_seed(0))
        earlier.save_pretrained(tmp_path)
        model["adapter"] = str(tmp_path)
    lora = {"enabled": start == "fresh"}
    config = TrainingConfig(model=model, lora=lora, training={"algorithm": "dpo", "learning_rate": 1e-2})
    loaded = build_sampler.load(config)
    make_trainable(config, loaded)
    learner = make_learner_of(config, loaded, make_algorithm(config), 5)
    assert (learner.reference is None) == (start == "fresh")
    batch = make_batch(rows_of())
    with torch.no_grad():
        before = [learner.compute_logprobs(pack)[0].numpy() for pack in batch.packs]
    learner.update(batch, weighted)
    [pack] = learner.annotate(batch, frozenset({"reference"})).packs
    assert pack.reference is not None and abs(pack.reference - before[0]).max() < 1e-5
    with torch.no_grad():
        assert abs(learner.compute_logprobs(pack)[0].numpy() - before[0]).max() > 1e-3
    if start == "loaded":  # the base is there once
        ours, theirs = (dict(m.named_parameters()) for m in (learner.model, learner.reference))
        assert all((ours[name] is theirs[name]) == ("lora_" not in name) for name in ours)


@pytest.mark.parametrize("options", [{"dora": True}, {"rslora": True}])
def test_dora_and_rslora(options: dict[str, bool]) -> None:
    config = TrainingConfig(
        lora={"enabled": True, "r": 4, "alpha": 8, "target_modules": ["q_proj"], **options}
    )
    loaded = load_model("builtin:tiny", device="cpu")
    make_trainable(config, loaded)
    layer: Any = loaded.model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == (4.0 if "rslora" in options else 2.0)  # 8 / sqrt(4), 8 / 4
    trained = {n.rpartition("q_proj.")[2] for n, p in loaded.model.named_parameters() if p.requires_grad}
    magnitude = {"lora_magnitude_vector.default.weight"} if "dora" in options else set()
    assert trained == {"lora_A.default.weight", "lora_B.default.weight"} | magnitude
    learner = make_learner(loaded.model)
    assert learner.sharing
    rows = rows_of()
    loaded.model.eval()
    wanted = row_gradients(loaded.model, rows, weighted_part)
    assert far(batch_gradients(learner, rows), wanted) < 1e-4


# -- few bits

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@needs_bitsandbytes
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_an_adapter_over_weights_in_few_bits(warm: Path, bits: str) -> None:
    """Sampler and learner see the same model, gradients are those of the same weights in float32 (4bit; 8bit rounds
    what goes in too), the base stays as it is."""
    loaded = load_model(str(warm), device="cpu", quantization=bits)
    layer = loaded.model.model.layers[0].mlp.up_proj
    assert layer.weight.dtype in (torch.uint8, torch.int8)
    stored = layer.weight.detach().clone()
    model: Any = add_lora(loaded.model, r=4, target_modules=["q_proj", "up_proj"])
    engine = NativeEngine(model, slots=4, max_length=128)
    learner = Learner(model, OptimizerOptions(learning_rate=1e-3))
    # 8bit treats columns with outliers apart, and which those are depends on all rows of a batch: the learner may find
    # that a tree gives something else than rows.
    assert learner.sharing or bits == "8bit"
    rng = random.Random(0)
    prompts = [words(rng, 40) for _ in range(3)]
    algorithm, figures = GRPO(kl=0.1), dict[str, float]()
    for step in range(2):
        asyncio.run(engine.update(Weights(step)))
        rows = asyncio.run(sampled_rows(engine, prompts, step, 1.0))
        batch = learner.annotate(make_batch(rows, sharing=learner.sharing), algorithm.needs)
        figures = learner.update(batch, algorithm.loss, algorithm.needs)
        assert figures["logprob_diff"] < (1e-5 if bits == "4bit" else 2e-2)
        assert figures["grad_norm"] > 0
    assert torch.equal(layer.weight, stored) and figures["kl"] > 0
    if bits == "4bit":
        rows = rows_of(3)
        found = batch_gradients(learner, rows)
        assert far(found, row_gradients(whole_again(model), rows, weighted_part)) < 1e-4


def whole_again(model: Any) -> Any:
    """The model with its 4-bit layers as plain ones of the same weights."""
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    for module in model.modules():
        for name, layer in list(module.named_children()):
            if type(layer).__module__.startswith("bitsandbytes"):
                plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
                plain.weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
                setattr(module, name, plain.requires_grad_(False))
    return model.eval()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"model": {"name": "some/model", "quantization": "4bit"}}, "cannot be trained.*lora.enabled=true"),
        (
            {"model": {"name": "some/model", "quantization": "8bit"}, "lora": {"enabled": True}},
            "pip install bitsandbytes",
        ),
        ({"model": {"quantization": "4bit"}, "lora": {"enabled": True}}, "builtin:tiny cannot be quantized"),
        ({"training": {"optimizer": "adamw_8bit"}}, "adamw_8bit needs bitsandbytes"),
    ],
)
def test_few_bits_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], text: str
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ValueError, match=text):
        check_config(TrainingConfig(environment="search", **sections), is_recorded=False)


def test_8bit_optimiser_states_need_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    config = TrainingConfig(
        environment="search", training={"optimizer": "adamw_8bit"}, model={"device": "cpu"}
    )
    with pytest.raises(ValueError, match=r"adamw_8bit .*CUDA devices; use adamw"):
        check_config(config, is_recorded=False)


# -- the sampler's log-probs are the learner's


@pytest.mark.parametrize(("adapter", "temperature"), [(False, 0.6), (True, 1.0)])
def test_sampler_and_learner_agree_after_updates(adapter: bool, temperature: float) -> None:
    """Three steps, the same prompts each time: keys and values of old weights would show as a gap."""
    model: Any = add_lora(tiny(), r=4) if adapter else tiny()
    engine = NativeEngine(model, slots=8, max_length=128)
    learner = Learner(model, OptimizerOptions(learning_rate=1e-2), temperature=temperature)
    rng = random.Random(0)
    head = words(rng, 60)
    prompts = [head + words(rng, 5) for _ in range(4)]
    algorithm, gaps = GRPO(), []
    for step in range(3):
        asyncio.run(engine.update(Weights(step)))
        assert engine.policy_version == step
        rows = asyncio.run(sampled_rows(engine, prompts, step, temperature))
        figures = learner.update(make_batch(rows), algorithm.loss)
        gaps.append(figures["logprob_diff"])
    assert max(gaps) < 1e-5
    # without an update, the engine still samples but its keys are old: the figure shows it
    stale = asyncio.run(sampled_rows(engine, prompts, 9, temperature))
    assert learner.update(make_batch(stale), algorithm.loss)["logprob_diff"] > 1e-3


async def sampled_rows(sampler: Any, prompts: list[list[int]], step: int, temperature: float) -> list[Sample]:
    rows = []
    for number, prompt in enumerate(prompts):
        how = SamplingParams(max_tokens=10, seed=100 * step + number, temperature=temperature)
        done = await sampler.sample(prompt, how)
        known, new = len(prompt), len(done.token_ids)
        zeros = [0.0] * known
        rows.append(
            Sample(
                prompt + done.token_ids, [False] * known + [True] * new, zeros + done.logprobs,
                zeros + [(-1.0) ** number] * new, zeros + [0.0] * new, [step] * (known + new),
            )
        )  # fmt: skip
    return rows


def test_updates_leave_the_model_as_the_sampler_needs_it() -> None:
    """Attention function and gradients are put back, also after an error in the loss."""
    model = tiny()
    learner = make_learner(model)
    before = model.config._attn_implementation

    calls: list[int] = []

    def broken(trained: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("no")
        return weighted(trained)

    wanted = gradients(learner, make_batch(rows_of()))
    with pytest.raises(RuntimeError, match="no"):
        learner.update(make_batch(rows_of(), 100), broken)
    assert far(gradients(learner, make_batch(rows_of())), wanted) == 0  # nothing of the broken step is left
    assert model.config._attn_implementation == before
    assert all(param.grad is None for param in model.parameters())
