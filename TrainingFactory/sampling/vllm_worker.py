"""Runs in vLLM's worker processes, as their extension: loads weights from a file into the running model, and keeps
log-probs those of the full softmax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open


class WorkerExtension:
    """Is mixed into vLLM's worker class, whose own names must not be met: hence the prefix."""

    def tfactory_load(self: Any, path: str) -> None:
        """Load all weights from a safetensors file, layer by layer: layers keep them packed in other forms."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

        model = self.model_runner.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), _bare(model):
            reload.initialize_layerwise_reload(model)
            model.load_weights(_tensors(path))
            reload.finalize_layerwise_reload(model, self.model_config)
            _repack_tied_head(model)

    def tfactory_full_logprobs(self: Any) -> None:
        """Make log-probs those of the full softmax also where top_p, top_k or min_p cut it: vLLM's are of the rest."""
        sampler = self.model_runner.sampler
        assert hasattr(sampler, "topk_topp_sampler"), "VLLM_USE_V2_MODEL_RUNNER must be 0"
        sampler.sample = _full_logprobs(sampler.sample)


@contextmanager
def _bare(model: Any) -> Iterator[None]:
    """Take away the layers that vLLM puts around others for adapters: weights have the names of those inside."""
    from vllm.lora.layers import BaseLayerWithLoRA  # pyright: ignore[reportMissingImports]

    every = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    around = [each for each in every if isinstance(each[2], BaseLayerWithLoRA)]
    for parent, name, child in around:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in around:
            setattr(parent, name, child)


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  (no mapping: safetensors' own object)
            yield name, file.get_tensor(name)


def _repack_tied_head(model: Any) -> None:
    """Pack a head anew that shares the embedding's weights. On a CPU every layer computes from a packed copy; a tied
    head has no weights in the file, so a reload leaves its copy as it was."""
    from vllm.model_executor.layers import vocab_parallel_embedding  # pyright: ignore[reportMissingImports]

    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and next(model.parameters()).device.type == "cpu":
        for module in model.modules():
            if isinstance(module, vocab_parallel_embedding.ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _full_logprobs(sample: Any) -> Any:
    def wrapped(logits: torch.Tensor, about: Any, *more: Any, **named: Any) -> Any:
        cut = about.top_p is not None or about.top_k is not None
        cut = cut or any(getattr(each, "min_p_count", 0) for each in about.logitsprocs.argmax_invariant)
        if not cut or about.max_num_logprobs is None or about.temperature is None:
            return sample(logits, about, *more, **named)
        heat = torch.where(about.temperature < 1e-5, 1.0, about.temperature)[:, None]
        full = (logits / heat).log_softmax(-1, dtype=torch.float32)
        return sample(logits, about, *more, **named)[0], full

    return wrapped
