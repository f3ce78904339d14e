"""One model over one pack: hidden states through the prefix tree, or row by row for a model that cannot share
prefixes; and the model's head. What a config does not tell is found by trying."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.data.packing import Pack, pack
from TrainingFactory.learning.tree.attention import ATTENTION, plan_tree, tree_attention
from TrainingFactory.learning.tree.flex import whole_blocks
from TrainingFactory.learning.tree.layers import fused
from TrainingFactory.types import Sample

Head = Callable[[torch.Tensor], torch.Tensor]  # [C, D] -> [C, V]


def causal_model(model: Any) -> PreTrainedModel:
    """The transformers model inside PEFT's wrapper, with its adapter layers in place."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


@contextlib.contextmanager
def tree_mode(model: PreTrainedModel, on: bool = True) -> Iterator[None]:
    """The model with the tree's attention. Backward passes belong inside: they may run the layers again."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = ATTENTION if on else before
    quick = on and model.device.type == "cuda"
    try:
        with fused(model, tree_attention) if quick else contextlib.nullcontext():
            yield
    finally:
        config._attn_implementation = before


def tree_states(model: PreTrainedModel, pack: Pack) -> torch.Tensor:
    """[N, D], each token of the tree once. Inside `tree_mode`."""
    size = len(pack.token_ids)
    pack = whole_blocks(pack) if model.device.type == "cuda" else pack
    ids, positions = (torch.from_numpy(array).to(model.device) for array in (pack.token_ids, pack.positions))
    return model.base_model(
        input_ids=ids[None], position_ids=positions[None], use_cache=False,
        tfactory_tree=plan_tree(pack, model.device),
    ).last_hidden_state[0, :size]  # fmt: skip


def row_states(model: PreTrainedModel, pack: Pack) -> torch.Tensor:
    """[N, D] by the model's own attention. Rows are padded at their end, where no token sees the padding."""
    assert all(node.parent < 0 for node in pack.nodes), "make_batch(..., sharing=learner.sharing)"
    starts, lengths = np.array([(node.start, node.length) for node in pack.nodes]).T
    columns = np.arange(lengths.max())
    real = columns < lengths[:, None]  # [n, T]
    places = np.where(real, starts[:, None] + columns, 0)
    ids = torch.from_numpy(pack.token_ids[places]).to(model.device)
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    return states.index_select(0, torch.from_numpy(np.flatnonzero(real)).to(model.device))


def head_of(model: PreTrainedModel) -> Head:
    """The output layer with what some families do to the logits after it."""
    linear: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    # Cohere multiplies, Granite divides, Gemma caps. These are foreign attributes, present or not.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def head(states: torch.Tensor) -> torch.Tensor:
        logits = linear(states)
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return linear if scale == 1.0 and cap is None else head


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Refuse a model whose own logits are not what `head_of` makes of its hidden states."""
    # A few tokens tell: what is done to logits is done to each.
    ids = torch.from_numpy(_probe(model, sharing=False).token_ids[:32]).to(model.device)[None]
    model.eval()  # an update sets it to train again
    own = model(input_ids=ids, use_cache=False).logits[0].float()
    made = head_of(model)(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]).float()
    if made.shape != own.shape or not _apart(made, own) <= (1e-2 if model.dtype != torch.float32 else 1e-4):
        raise ValueError(
            f"a {model.config.model_type!r} model cannot be trained: its forward does something to the logits "
            "after the output layer that the learner does not know"
        )


@torch.no_grad()
def why_not_shared(model: PreTrainedModel) -> str | None:
    """Say why prefix trees would not give what single rows give, or None if they do: by the config, and tried."""
    config: Any = model.config.get_text_config()  # foreign, and may have no layer types
    if odd := sorted({*map(str, getattr(config, "layer_types", None) or ())} - {"full_attention"}):
        return f"it has {' and '.join(odd)} layers"
    model.eval()
    alone, probe = _probe(model, sharing=False), _probe(model, sharing=True)
    try:
        # With gradients what a GPU compiles here is what training needs; shards want a backward pass after those.
        train = model.device.type == "cuda" and not hasattr(next(model.parameters()), "device_mesh")
        with tree_mode(model), torch.set_grad_enabled(train):
            shared = tree_states(model, probe).detach()
    except Exception as error:  # foreign code, which may not know our keyword or ask for what we lack
        row_states(model, alone)  # a forward that broke off leaves the weights of its layer gathered
        return f"its layers do not run over a tree ({(str(error) or type(error).__name__).splitlines()[0]})"
    # The probe trains all tokens but the first, so `source` lists where the tokens of the rows stand.
    rows, trees = row_states(model, alone)[_places(alone)], shared[_places(probe)]
    rounding = max(5e-2, 1.5e-2 * config.num_hidden_layers**0.5)  # of 16 bits; adds up like a random walk
    if not (apart := _apart(trees, rows)) <= (rounding if model.dtype != torch.float32 else 1e-3):
        return f"over a tree its layers give something else than over rows, {apart:.1%} away in the mean"
    return None


def _places(pack: Pack) -> torch.Tensor:
    """Where the tokens of the rows stand, rows in the order of the samples."""
    return torch.from_numpy(pack.source[np.argsort(pack.row, kind="stable")])


def _apart(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.float() - right.float()).abs().mean() / right.float().abs().mean())


def _probe(model: PreTrainedModel, sharing: bool) -> Pack:
    """Three rows, a tree of three levels."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = [(13 + 7919 * place) % vocabulary for place in range(200)]
    samples = []
    for rest in (ids[40:90] + ids[100:107], ids[40:90] + ids[110:122], ids[130:150]):
        row = ids[:30] + rest
        zeros = [0.0] * len(row)
        samples.append(Sample(row, [False] + [True] * (len(row) - 1), zeros, zeros, zeros, [0] * len(row)))
    (only,) = pack(samples, 10_000, sharing)
    return only
