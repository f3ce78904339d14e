"""Extension of vLLM's worker processes: loading of weights from a file, and log-probs of the full softmax."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open


class WorkerExtension:
    """Mixin for vLLM's worker class. The prefix of its methods avoids conflicts with vLLM's own names."""

    def tfactory_load(self: Any, path: str) -> None:
        """Load all weights from a safetensors file, layer by layer, because layers repack their weights."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

        model = self.model_runner.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), _without_adapter_wrappers(model):
            reload.initialize_layerwise_reload(model)
            model.load_weights(_read_tensors(path))
            reload.finalize_layerwise_reload(model, self.model_config)
            _repack_tied_head(model)

    def tfactory_full_logprobs(self: Any) -> None:
        """Make the sampler return log-probs of the full softmax; vLLM's own are those after top_p, top_k and min_p."""
        sampler = self.model_runner.sampler
        assert hasattr(sampler, "topk_topp_sampler"), "VLLM_USE_V2_MODEL_RUNNER must be 0"
        sampler.sample = _with_full_logprobs(sampler.sample)


@contextmanager
def _without_adapter_wrappers(model: Any) -> Iterator[None]:
    """Remove vLLM's adapter wrappers temporarily, because the weights have the names of the layers inside them."""
    from vllm.lora.layers import BaseLayerWithLoRA  # pyright: ignore[reportMissingImports]

    children = [
        (child, parent, name) for parent in model.modules() for name, child in parent.named_children()
    ]
    wrappers = [entry for entry in children if isinstance(entry[0], BaseLayerWithLoRA)]
    for wrapper, parent, name in wrappers:
        setattr(parent, name, wrapper.base_layer)
    try:
        yield
    finally:
        for wrapper, parent, name in wrappers:
            setattr(parent, name, wrapper)


def _read_tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            yield name, file.get_tensor(name)


def _repack_tied_head(model: Any) -> None:
    """Repack an output head that shares the embedding's weights. On a CPU, every layer computes with a packed copy of
    its weights. A reload does not update the copy of a tied head, because the file has no separate weights for it."""
    from vllm.model_executor.layers import vocab_parallel_embedding  # pyright: ignore[reportMissingImports]

    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if is_tied and next(model.parameters()).device.type == "cpu":
        for module in model.modules():
            if isinstance(module, vocab_parallel_embedding.ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _with_full_logprobs(sample_tokens: Any) -> Any:
    def sample_with_logprobs(logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        is_filtered = metadata.top_p is not None or metadata.top_k is not None
        is_filtered = is_filtered or any(
            getattr(processor, "min_p_count", 0) for processor in metadata.logitsprocs.argmax_invariant
        )
        if not is_filtered or metadata.max_num_logprobs is None or metadata.temperature is None:
            return sample_tokens(logits, metadata, *args, **kwargs)
        temperature = torch.where(metadata.temperature < 1e-5, 1.0, metadata.temperature)[:, None]
        logprobs = (logits / temperature).log_softmax(-1, dtype=torch.float32)
        return sample_tokens(logits, metadata, *args, **kwargs)[0], logprobs

    return sample_with_logprobs
