"""Forward pass of one model over one pack: hidden states over the prefix tree, or row by row for models that cannot
share prefixes, and the output head. Probes detect properties of a model's forward that its config does not state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.data.packing import Pack, pack
from TrainingFactory.learning.tree.attention import ATTENTION_NAME, TreePlan, tree_attention
from TrainingFactory.learning.tree.flex import pad_to_blocks
from TrainingFactory.learning.tree.layers import use_fused_layers
from TrainingFactory.learning.tree.recurrent import set_segments, use_segmented_layers
from TrainingFactory.models.recurrent import find_unsupported_types
from TrainingFactory.types import Sample

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

Head = Callable[[torch.Tensor], torch.Tensor]  # [C, D] -> [C, V]
SHAREABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Attributes of configs and layers that count positions; the last is where Llama 4 begins to scale queries.
WINDOW_ATTRIBUTES = ("sliding_window", "attention_chunk_size", "floor_scale")
PROBE_WINDOW_TOKENS = 24  # shorter than the probe's rows


def get_causal_lm(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a PEFT wrapper, adapter layers included."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def get_decoder(model: PreTrainedModel) -> Any:
    """Return the model without its output layer. Llama 4's `base_model` is the whole model, so its attribute `model` is
    used instead."""
    return model.base_model if model.base_model is not model else model.model


@contextlib.contextmanager
def use_trees(model: PreTrainedModel, is_enabled: bool = True) -> Iterator[None]:
    """Switch the model to tree attention inside the block, which must include backward passes, because they may run the
    layers again. Else keep the model's own attention, or select one that supports its soft-capped scores."""
    config = model.config.get_text_config()
    previous_attention = config._attn_implementation
    row_attention = "eager" if getattr(config, "attn_logit_softcapping", None) else previous_attention
    config._attn_implementation = ATTENTION_NAME if is_enabled else row_attention
    uses_fused_layers = is_enabled and model.device.type == "cuda"
    try:
        with (
            use_fused_layers(model, tree_attention) if uses_fused_layers else contextlib.nullcontext(),
            use_segmented_layers(model) if is_enabled else contextlib.nullcontext(),
        ):
            yield
    finally:
        config._attn_implementation = previous_attention


def run_tree(model: PreTrainedModel, pack: Pack, vision: Vision | None = None) -> torch.Tensor:
    """Return the hidden states [N, D], each token of the tree computed once. Call inside `use_trees`."""
    num_tokens = len(pack.token_ids)
    set_segments(model, pack.nodes)
    pack = pad_to_blocks(pack) if model.device.type == "cuda" else pack
    ids, positions, image_inputs = pack.token_ids, pack.positions, {}
    if vision is not None:
        positions = _compute_rotary_positions(pack, vision) if vision.has_rope else positions
        (ids,), image_inputs = vision.make_model_inputs(model, ids[None], bypass_cache=vision.is_trained)
    ids, positions = (torch.from_numpy(array).to(model.device) for array in (ids, positions))
    return get_decoder(model)(
        input_ids=ids[None], position_ids=positions.unsqueeze(-2), use_cache=False,
        tfactory_tree=TreePlan(pack, model.device), **image_inputs,
    ).last_hidden_state[0, :num_tokens]  # fmt: skip


def _compute_rotary_positions(pack: Pack, vision: Vision) -> np.ndarray:
    """Return the rotary positions [3, N] of a tree, in which images take fewer positions than tokens."""
    positions = np.empty((3, len(pack.token_ids)), np.int64)
    node_ends: list[int] = []  # position after each node
    for node in pack.nodes:
        token_range = slice(node.start, node.start + node.length)
        start_position = node_ends[node.parent] if node.parent >= 0 else 0
        positions[:, token_range], node_end = vision.compute_rope(pack.token_ids[token_range], start_position)
        node_ends.append(node_end)
    return positions


def run_rows(model: PreTrainedModel, pack: Pack, vision: Vision | None = None) -> torch.Tensor:
    """Return the hidden states [N, D], computed row by row with the model's own causal attention. Rows are padded on
    the right, where no token attends to the padding."""
    assert all(node.parent < 0 for node in pack.nodes), "pack with make_batch(..., sharing=learner.sharing)"
    starts, lengths = np.array([(node.start, node.length) for node in pack.nodes]).T
    columns = np.arange(lengths.max())
    is_token = columns < lengths[:, None]  # [n, T]
    indices = np.where(is_token, starts[:, None] + columns, 0)
    ids, kwargs = pack.token_ids[indices], {}
    if vision is not None:
        ids[~is_token] = 0  # not an image
        position_ids = np.stack([vision.compute_rope(row)[0] for row in ids], 1) if vision.has_rope else None
        ids, kwargs = vision.make_model_inputs(model, ids, bypass_cache=vision.is_trained)
        if position_ids is not None:
            kwargs["position_ids"] = torch.from_numpy(position_ids).to(model.device)  # [3, n, T]
    input_ids = torch.from_numpy(ids).to(model.device)
    outputs = get_decoder(model)(input_ids=input_ids, use_cache=False, **kwargs)
    states = outputs.last_hidden_state.flatten(0, 1)
    return states.index_select(0, torch.from_numpy(np.flatnonzero(is_token)).to(model.device))


def get_output_head(model: PreTrainedModel) -> Head:
    """Return the output layer, including the logit scaling or soft-capping of some model families."""
    output_layer: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    # Cohere multiplies, Granite divides, Gemma caps. Third-party configs may lack these attributes.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    logit_cap = getattr(config, "final_logit_softcapping", None)

    def compute_logits(states: torch.Tensor) -> torch.Tensor:
        logits = output_layer(states)
        logits = logits if scale == 1.0 else logits * scale
        return logits if logit_cap is None else torch.tanh(logits / logit_cap) * logit_cap

    return output_layer if scale == 1.0 and logit_cap is None else compute_logits


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise ValueError if `get_output_head` does not reproduce the model's own logits from its hidden states."""
    # A few tokens suffice: whatever happens after the output layer happens to every token.
    ids = torch.from_numpy(_make_probe_pack(model, sharing=False).token_ids[:32]).to(model.device)[None]
    model.eval()  # `update` switches back to train mode
    expected = model(input_ids=ids, use_cache=False).logits[0].float()
    head_logits = get_output_head(model)(
        get_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
    ).float()
    max_error = 1e-2 if model.dtype != torch.float32 else 1e-4
    if head_logits.shape != expected.shape or not _compute_relative_error(head_logits, expected) <= max_error:
        raise ValueError(
            f"Cannot train a {model.config.model_type!r} model: its forward transforms the logits after the output "
            "layer in a way that the learner does not support. Supported models: `tfactory models --compat`"
        )


@torch.no_grad()
def get_sharing_problem(model: PreTrainedModel) -> str | None:
    """Return the reason why a forward over a prefix tree would differ from one over rows; None if both are equal.
    Checks the layer types, then runs a probe."""
    if unsupported_types := find_unsupported_types(model, SHAREABLE_LAYER_TYPES):
        return f"it has {' and '.join(unsupported_types)} layers"
    model.eval()
    with shorten_windows(model):
        return _find_probe_problem(model)


def _find_probe_problem(model: PreTrainedModel) -> str | None:
    """Compute the hidden states of a few rows over a prefix tree and row by row. Return the problem as text; None if
    both agree up to rounding."""
    row_pack, tree_pack = _make_probe_pack(model, sharing=False), _make_probe_pack(model, sharing=True)
    try:
        # With gradients, a GPU compiles here what training needs. Not with FSDP, which expects a backward afterwards.
        needs_grad = model.device.type == "cuda" and not hasattr(next(model.parameters()), "device_mesh")
        with use_trees(model), torch.set_grad_enabled(needs_grad):
            tree_hidden = run_tree(model, tree_pack).detach()
    except Exception as error:  # third-party code may reject our keyword, or need another argument
        run_rows(model, row_pack)  # an aborted forward leaves its layer unsharded; a complete one reshards it
        return f"its layers do not run over a tree ({(str(error) or type(error).__name__).splitlines()[0]})"
    # The probe trains all tokens but the first, so `source` lists the positions of the rows' tokens.
    with use_trees(model, is_enabled=False):
        row_hidden = run_rows(model, row_pack)[_get_row_positions(row_pack)]
    actual_hidden = tree_hidden[_get_row_positions(tree_pack)]
    num_layers = model.config.get_text_config().num_hidden_layers
    rounding_error = max(5e-2, 1.5e-2 * num_layers**0.5)  # 16-bit errors grow like a random walk
    max_error = rounding_error if model.dtype != torch.float32 else 1e-3
    if not (error := _compute_relative_error(actual_hidden, row_hidden)) <= max_error:
        return f"its hidden states over a tree differ from those over rows by {error:.1%} on average"
    return None


@contextlib.contextmanager
def shorten_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten windows and chunks inside the block, so that the probe's rows exceed them. Different lengths stay
    different, so that the probe detects a layer whose mask and attention use different windows."""
    window_owners: list[Any] = [model.config.get_text_config(), *model.modules()]
    windows = [
        (owner, name, length)
        for owner in window_owners
        for name in WINDOW_ATTRIBUTES
        if isinstance(length := vars(owner).get(name), int)
    ]
    distinct_lengths = sorted({length for _, _, length in windows})
    for owner, name, length in windows:
        setattr(owner, name, PROBE_WINDOW_TOKENS + distinct_lengths.index(length))
    try:
        yield
    finally:
        for owner, name, length in windows:
            setattr(owner, name, length)


def _get_row_positions(pack: Pack) -> torch.Tensor:
    """Return the index in the pack of each token of the rows, one row after another in the order of the samples."""
    return torch.from_numpy(pack.source[np.argsort(pack.row, kind="stable")])


def _compute_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).abs().mean() / expected.float().abs().mean())


def _make_probe_pack(model: PreTrainedModel, sharing: bool) -> Pack:
    """Return a pack of three rows that form a prefix tree of three levels."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = [(13 + 7919 * i) % vocab_size for i in range(200)]
    samples = []
    for suffix_ids in (ids[40:90] + ids[100:107], ids[40:90] + ids[110:122], ids[130:150]):
        row = ids[:30] + suffix_ids
        zeros = [0.0] * len(row)
        samples.append(Sample(row, [False] + [True] * (len(row) - 1), zeros, zeros, zeros, [0] * len(row)))
    (probe_pack,) = pack(samples, 10_000, sharing)
    return probe_pack
