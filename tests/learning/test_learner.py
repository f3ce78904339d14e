"""The learner's log-probs and gradients are those of plain rows, however rows are packed and shared."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.kits.engine import KINDS, tiny
from tests.kits.learner import (
    batch_gradients,
    far,
    gradients,
    make_learner,
    ragged_rows,
    row_gradients,
    row_logprobs,
    sample,
    weighted,
    weighted_part,
    weights_of,
    words,
)
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.packing import Pack, make_batch, pack
from TrainingFactory.learning import forward
from TrainingFactory.learning import logprobs as chunking
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.logprobs import compute_token_logprobs
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import recurrent
from TrainingFactory.types import Sample

CLOSE = 1e-5


def two_layers(kind: str, seed: int = 0) -> Any:
    """Milder than the engine's tests need: with peaked softmaxes rounding itself reaches 1e-5."""
    model = tiny(kind, seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(0.4)
    return model


def plain_gradients(model: Any, rows: list[Sample]) -> dict[str, torch.Tensor]:
    model.eval()  # some of the models have dropout, which equality leaves out
    return row_gradients(model, rows, weighted_part)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_plain_rows(kind: str) -> None:
    model, rows, temperature = two_layers(kind), ragged_rows(3), 0.7
    learner = make_learner(model, temperature=temperature)
    model.eval()
    for tree in pack(rows, 400):
        with torch.no_grad():
            found, entropies = learner.compute_logprobs(tree)
        for number in tree.rows:
            wanted = row_logprobs(model, rows[number], temperature).detach()
            torch.testing.assert_close(
                found[torch.from_numpy(tree.row == number)], wanted, rtol=1e-5, atol=1e-5
            )
        with torch.no_grad():
            row = rows[tree.rows[0]]
            logits = (
                model(torch.tensor([row.token_ids])).logits[0, row.loss_mask.index(True) - 1] / temperature
            )
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(entropies[tree.row == tree.rows[0]][0], entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_plain_rows(kind: str) -> None:
    model, rows = two_layers(kind, 1), ragged_rows(1)
    wanted = plain_gradients(model, rows)
    found = batch_gradients(make_learner(model), rows)
    assert far(found, wanted) < CLOSE
    # and they are no zeros: another row changes them
    assert far(batch_gradients(make_learner(model), rows[1:]), wanted) > 1e-3


def test_rows_that_went_the_same_way_share_the_head() -> None:
    once = ragged_rows(2)[:6]
    model, asked = two_layers("gqa_tied"), []
    learner = make_learner(model)
    output: Any = model.get_output_embeddings()
    hook = output.register_forward_hook(lambda module, states, logits: asked.append(len(states[0])))
    batch_gradients(learner, once)
    found = batch_gradients(learner, once + once[:4] * 2)
    hook.remove()
    assert asked[1] == asked[0] <= sum(sum(row.loss_mask) for row in once)
    assert far(found, plain_gradients(model, once + once[:4] * 2)) < CLOSE


def test_a_token_that_the_model_does_not_have_is_not_taken_for_another() -> None:
    learner = make_learner(two_layers("gqa_tied"))
    (packed,) = pack(ragged_rows(2)[:2], 100_000)
    packed.target[0] += learner.causal_lm.config.get_text_config().vocab_size
    with pytest.raises(AssertionError, match="outside the model's vocabulary"):
        learner.compute_logprobs(packed)


def test_figures_do_not_depend_on_packing() -> None:
    rows, model = ragged_rows(1), two_layers("gqa_tied")
    learner = make_learner(model)
    whole, small = (learner.evaluate(make_batch(rows, budget), SFT().loss) for budget in (100_000, 200))
    wanted = -sum(row_logprobs(model.eval(), row).sum().item() for row in rows)
    assert whole["loss"] == pytest.approx(wanted / sum(sum(row.loss_mask) for row in rows), rel=1e-5)
    assert small["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    before = weights_of(model)
    figures = learner.update(make_batch(rows), weighted)
    assert figures["rows"] == len(rows)
    assert figures["row_tokens"] == sum(len(row.token_ids) for row in rows)
    assert figures["trained_tokens"] == sum(sum(row.loss_mask) for row in rows)
    assert figures["computed_tokens"] < figures["row_tokens"]
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert learner.steps == 1


def test_an_empty_step_leaves_the_weights_alone() -> None:
    model = tiny()
    learner = make_learner(model)
    learner.update(make_batch(ragged_rows(0)), weighted)  # so that the optimiser has momentum to go on with
    before = weights_of(model)
    figures = learner.update(make_batch([]), weighted)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert learner.steps == 2
    assert figures["rows"] == figures["trained_tokens"] == figures["computed_tokens"] == 0


def test_a_gradient_that_is_not_finite_is_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    learner = make_learner(model)
    before = weights_of(model)
    figures = learner.update(make_batch(ragged_rows(0)), lambda t: (t.logprobs.sum() * float("nan"), {}))
    assert figures["skipped"] == 1
    assert "skipping the update" in caplog.text
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert learner.update(make_batch(ragged_rows(0)), weighted)["skipped"] == 0


# -- the head


def test_memory_of_the_head_does_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of tokens x vocabulary is made or kept: the largest output of the head is a chunk, and what
    the backward pass keeps for it all together is less than a chunk's logits and the hidden states."""
    tokens, vocabulary, width, chunk = 1024, 500, 8, 16
    monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", chunk * vocabulary)
    head = nn.Linear(width, vocabulary)
    made: list[int] = []
    head.register_forward_hook(lambda _, __, out: made.append(out.numel()))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != head.weight.data_ptr():
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    hidden = torch.randn(tokens, width, requires_grad=True)
    source, target = torch.arange(tokens), torch.randint(vocabulary, (tokens,))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found, _ = compute_token_logprobs(hidden, head, source, target, vocabulary)
        assert max(made) == chunk * vocabulary and sum(made) == tokens * vocabulary
        assert sum(kept.values()) < chunk * vocabulary + tokens * (width + 8)
    found.sum().backward()
    assert max(made) == chunk * vocabulary and sum(made) == 2 * tokens * vocabulary


def test_a_head_that_is_not_understood_is_refused() -> None:
    model: Any = tiny()
    plain = type(model).forward

    class Odd(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = plain(self, *args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    model.__class__ = Odd
    with pytest.raises(ValueError, match="transforms the logits"):
        make_learner(model)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_heads_that_scale_or_cap_their_logits(family: str) -> None:
    model = capped(family)
    learner = make_learner(model)
    assert learner.sharing
    rows = [sample(random.Random(n), words(random.Random(n), 20 + n), 5) for n in range(3)]
    model.eval()
    wanted = row_gradients(model, rows, weighted_part)
    assert far(batch_gradients(learner, rows, sharing=learner.sharing), wanted) < CLOSE


def capped(family: str) -> Any:
    import transformers as t

    common: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "head_dim": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "gemma2":  # every other layer has a sliding window, and scores are capped as well
        config = t.Gemma2Config(
            **common, final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=7
        )
        return t.Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    if family == "cohere":
        return t.CohereForCausalLM(t.CohereConfig(**common, logit_scale=0.3))
    del common["head_dim"]
    return t.GraniteForCausalLM(t.GraniteConfig(**common, logits_scaling=3.0))


# -- models that cannot share prefixes


def linear() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, mlp_only_layers=[0, 1],
            layer_types=["linear_attention", "full_attention"], initializer_range=0.1,
        )
    )  # fmt: skip


def test_models_that_cannot_share_go_by_rows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = linear(), ragged_rows(0)[:6]
    monkeypatch.setattr(recurrent, "RECURRENT_ATTRIBUTES", ())  # as if its linear attention took no state
    learner = make_learner(model)
    assert not learner.sharing and "linear_attention" in caplog.text and "one by one" in caplog.text
    model.eval()
    wanted = row_gradients(model, rows, weighted_part)
    # Two gates of the linear attention have gradients that all but cancel, so that rounding shows.
    assert far(batch_gradients(learner, rows, token_budget=700, sharing=False), wanted) < 2e-3
    with pytest.raises(AssertionError, match=r"sharing=learner\.sharing"):
        learner.update(make_batch(rows), weighted)


@pytest.mark.parametrize("layers", [2, 100])
def test_rounding_in_sixteen_bits_is_told_from_a_wrong_tree(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds up over the layers: over 5 % with 36 of an 8B on a GPU, or 100 here. Wrong positions are more."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.4,
    )  # fmt: skip
    model: Any = Qwen3ForCausalLM(config).to(torch.bfloat16)
    assert forward.get_sharing_problem(model) is None
    run_tree = forward.run_tree

    def flat(model: Any, pack: Pack) -> torch.Tensor:
        return run_tree(model, replace(pack, positions=np.arange(len(pack.token_ids))))

    monkeypatch.setattr(forward, "run_tree", flat)
    assert "over a tree differ" in (forward.get_sharing_problem(model) or "")


def test_sharing_is_tried_and_not_only_read_from_the_config(caplog: pytest.LogCaptureFixture) -> None:
    """A layer that looks at the token before it in the flat tree: no config tells."""
    model: Any = tiny()
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def shifted(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return plain(hidden_states=hidden_states + 0.3 * hidden_states.roll(1, dims=1), **kwargs)

    attention.forward = shifted
    learner = make_learner(model)
    assert not learner.sharing and "over a tree differ" in caplog.text


# -- number formats


def short_rows(count: int) -> list[Sample]:
    return [sample(random.Random(n), words(random.Random(n), 12), 3) for n in range(count)]


def test_bfloat16_weights_accumulate_small_updates() -> None:
    model: Any = tiny().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    learner = Learner(model, OptimizerOptions(learning_rate=1e-5))
    before, batch = weights_of(model), make_batch(short_rows(2))
    for _ in range(40):
        learner.update(batch, weighted)
    weights, name = learner._weights, "model.layers.0.mlp.up_proj.weight"
    exact = dict(zip(weights.names, weights.masters, strict=True))[name]
    # Forty steps of 1e-5 move a weight by 4e-4; one alone is far below half a unit of bfloat16 at 0.3.
    assert (exact - before[name].float()).abs().median() > 2e-4
    assert 0.05 < (model.get_parameter(name) != before[name]).float().mean() < 1
    for param, master in zip(weights.params, weights.masters, strict=True):
        assert param.dtype == torch.bfloat16 and torch.equal(param, master.to(torch.bfloat16))


def test_bfloat16_gradients_are_added_up_in_float32() -> None:
    """In bfloat16 small parts would be lost in the sum over packs."""
    model: Any = tiny().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    learner, rows = make_learner(model), short_rows(12)

    def plain_sum(trained: Any) -> Any:
        return (trained.advantages * trained.logprobs).sum(), {}

    parts = [gradients(learner, make_batch([row]), plain_sum) for row in rows]
    found = gradients(learner, make_batch(rows, token_budget=1), plain_sum)
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(
            value, torch.stack([part[name] for part in parts]).sum(0), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("elements", [2**24, 150])
@pytest.mark.parametrize("fused", ["", "as on a GPU", pytest.param("compiled", marks=pytest.mark.slow)])
def test_gradients_of_log_probs_and_entropies_are_those_of_the_formulas(
    monkeypatch: pytest.MonkeyPatch, temperature: float, elements: int, fused: str
) -> None:
    monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", elements)
    if fused:
        monkeypatch.setattr(chunking, "_is_plain", lambda *_: True)
    if fused != "compiled":
        monkeypatch.setattr(chunking, "compile_once", lambda function: function)
    torch.manual_seed(3)
    hidden, head = torch.randn(40, 8, requires_grad=True), torch.nn.Linear(8, 50, bias=False)
    weight, _ = head.weight, torch.nn.init.normal_(head.weight)
    source, target = torch.randint(0, 40, (30,)), torch.randint(0, 50, (30,))
    first, second = torch.randn(30), torch.randn(30)

    def slopes(logprobs: torch.Tensor, entropies: torch.Tensor, which: str) -> tuple[torch.Tensor, ...]:
        parts = {"log-probs": first * logprobs, "entropies": second * entropies}
        total = sum(part.sum() for name, part in parts.items() if which in (name, "both"))
        assert isinstance(total, torch.Tensor)
        return torch.autograd.grad(total, (hidden, weight))

    for which in ("log-probs", "entropies", "both"):
        every = torch.log_softmax(hidden[source] @ weight.T / temperature, -1)
        plain = (every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(-1))
        ours = compute_token_logprobs(hidden, head, source, target, 50, temperature)
        for found, wanted in zip(
            (*ours, *slopes(*ours, which)), (*plain, *slopes(*plain, which)), strict=True
        ):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), which
