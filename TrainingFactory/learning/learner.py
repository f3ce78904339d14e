"""What changes weights: a `Policy` over one transformers or PEFT model in this process."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.algorithms.trained import Loss, Trained
from TrainingFactory.data.packing import Batch, Pack
from TrainingFactory.learning.logprobs import token_logprobs
from TrainingFactory.learning.optim import MixedPrecision, OptimizerOptions, make_optimizers
from TrainingFactory.learning.tree import ATTENTION, plan_tree
from TrainingFactory.protocols import Sampler


class Learner:
    """`temperature` is the sampler's: training sees the distribution that was sampled from. `sampler` is what
    `publish` gives out; it is told of new weights by its `advance`. `reference` is a frozen model, or None: then
    an adapter's base is its own reference."""

    def __init__(
        self,
        model: Any,
        options: OptimizerOptions,
        *,
        sampler: Any = None,
        reference: Any = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.causal = _causal(model)
        self.options = options
        self.reference = reference
        self.temperature = temperature
        self.version = 0
        self.steps = 0
        self._sampler = sampler
        self._published = 0
        if gradient_checkpointing:
            self.causal.gradient_checkpointing_enable({"use_reentrant": False})
        self._weights = MixedPrecision(model.named_parameters())
        named = zip(self._weights.names, self._weights.masters, strict=True)
        self.optimizers = make_optimizers(named, options)
        if not self.optimizers:
            raise ValueError("the model has no weights to train")
        self.sharing = shares_prefixes(self.causal)

    def publish(self) -> Sampler:
        if self._sampler is None:
            raise ValueError("this learner has no sampler to publish its weights to")
        if self._published != self.version:
            self._sampler.advance(self.version)
            self._published = self.version
        return self._sampler

    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        if "reference" in needs:
            for pack in batch.packs:
                pack.reference = self._reference_logprobs(pack)
        return batch

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One step of the optimiser. A batch without rows leaves everything as it is."""
        sums: dict[str, float] = defaultdict(float)
        if batch.packs:
            self.model.train()
            for pack in batch.packs:
                trained = self._trained(pack, batch)
                value, figures = loss(trained)
                value.backward()
                sums["loss"] += float(value.detach())
                sums["entropy"] += float(trained.entropy.sum())
                for name, figure in figures.items():
                    sums[name] += figure
            sums["grad_norm"] = self._step()
            sums["entropy"] /= batch.tokens
            self.version += 1
        sums["learning_rate"] = self.options.learning_rate * self.options.factor(self.steps)
        sums["trained_tokens"], sums["rows"] = batch.tokens, batch.rows
        sums["row_tokens"] = sum(pack.row_tokens for pack in batch.packs)
        sums["computed_tokens"] = sum(len(pack.token_ids) for pack in batch.packs)
        self.steps += 1
        return dict(sums)

    def evaluate(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """The loss without a step."""
        sums: dict[str, float] = defaultdict(float)
        self.model.eval()
        with torch.no_grad():
            for pack in batch.packs:
                value, figures = loss(self._trained(pack, batch))
                sums["loss"] += float(value)
                for name, figure in figures.items():
                    sums[name] += figure
        return dict(sums)

    def logprobs(self, pack: Pack, model: PreTrainedModel | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the trained tokens of a pack."""
        causal = model or self.causal
        device = causal.device
        arrays = (pack.token_ids, pack.positions, pack.source, pack.target)
        ids, positions, source, target = (torch.from_numpy(array).to(device) for array in arrays)
        if self.sharing:
            with attention(causal, ATTENTION):
                hidden = causal.base_model(
                    input_ids=ids[None], position_ids=positions[None], use_cache=False,
                    tfactory_tree=plan_tree(pack, device),
                ).last_hidden_state[0]  # fmt: skip
        else:
            assert len(pack.nodes) == 1, "a model that cannot share prefixes is given one row a pack"
            hidden = causal.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        head: Any = causal.get_output_embeddings()
        vocabulary = causal.config.get_text_config().vocab_size
        return token_logprobs(hidden, head, source, target, vocabulary, self.temperature)

    def _trained(self, pack: Pack, batch: Batch) -> Trained:
        logprobs, entropy = self.logprobs(pack)
        arrays = (pack.logprobs, pack.advantages, pack.rewards, pack.row, pack.reference)
        sampled, advantages, rewards, row, reference = (
            None if array is None else torch.from_numpy(array).to(logprobs.device) for array in arrays
        )
        assert sampled is not None and advantages is not None and rewards is not None and row is not None
        return Trained(
            logprobs, entropy, sampled, advantages, rewards, row, reference, batch.tokens, batch.rows
        )

    @torch.no_grad()
    def _reference_logprobs(self, pack: Pack) -> np.ndarray:
        self.model.eval()
        if self.reference is not None:
            return self.logprobs(pack, _causal(self.reference))[0].cpu().numpy()
        with self.model.disable_adapter():
            return self.logprobs(pack)[0].cpu().numpy()

    def _step(self) -> float:
        self._weights.gather_grads()
        masters = self._weights.masters
        norm = torch.nn.utils.clip_grad_norm_(masters, self.options.max_grad_norm)
        factor = self.options.factor(self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._weights.write_back()
        return float(norm)


def _causal(model: Any) -> PreTrainedModel:
    """The transformers model inside PEFT's wrapper, with its adapter layers in place."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


@contextlib.contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention function for a while."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether prefix trees give what single rows give: only full attention does, and it is tried."""
    layers = getattr(model.config.get_text_config(), "layer_types", None) or []
    return set(layers) <= {"full_attention"}
