"""What changes weights: a `Policy` over one transformers or PEFT model in this process."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.algorithms.trained import Loss, Trained
from TrainingFactory.data.packing import Batch, Pack
from TrainingFactory.learning.forward import (
    causal_model,
    check_head,
    head_of,
    row_states,
    tree_mode,
    tree_states,
    why_not_shared,
)
from TrainingFactory.learning.logprobs import token_logprobs
from TrainingFactory.learning.optim import MixedPrecision, OptimizerOptions, make_optimizers
from TrainingFactory.learning.processes import Processes
from TrainingFactory.protocols import Sampler

log = logging.getLogger(__name__)


class Learner:
    """`temperature` is the sampler's: training sees the distribution that was sampled from. `sampler` is what
    `publish` gives out; it is told of new weights by its `advance`. `reference` is a frozen model, or None: then
    an adapter's base is its own reference. `sharing` says whether the model can compute common prefixes once;
    batches for one that cannot are made with `make_batch(..., sharing=False)`."""

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
        if not temperature > 0:
            raise ValueError(f"the learner's temperature is {temperature}; it must be over 0")
        self.model = model
        self.causal = causal_model(model)
        self.options = options
        self.reference = reference
        self.temperature = temperature
        self.version = 0
        self.steps = 0
        self._sampler = sampler
        self._published = 0
        if gradient_checkpointing:
            self.causal.gradient_checkpointing_enable({"use_reentrant": False})
        self._processes = Processes(self.causal.device)
        self._weights = MixedPrecision(model.named_parameters())
        named = zip(self._weights.names, self._weights.masters, strict=True)
        self.optimizers = make_optimizers(named, options)
        if not self.optimizers:
            raise ValueError("the model has no weights to train")
        models = [causal_model(each) for each in (model, reference) if each is not None]
        for each in models:
            check_head(each)
        self.sharing = all(_can_share(each) for each in models)

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
        """One step of the optimiser, over the rows of all processes. A step without rows leaves everything as it
        is, and so does one whose gradient is not finite (`skipped` is 1 then)."""
        sums: dict[str, float] = defaultdict(float)
        sums["trained_tokens"], sums["rows"] = batch.tokens, batch.rows
        sums["row_tokens"] = sum(pack.row_tokens for pack in batch.packs)
        sums["computed_tokens"] = sum(len(pack.token_ids) for pack in batch.packs)
        counts = self._processes.total(dict(sums))
        step = dataclasses.replace(batch, rows=int(counts["rows"]), tokens=int(counts["trained_tokens"]))
        if step.rows:
            self.model.train()
            self._weights.clear_grads()  # of a step that ended in an error
            with tree_mode(self.causal, self.sharing):
                for pack in step.packs:
                    trained = self._trained(pack, step)
                    value, figures = loss(trained)
                    value.backward()
                    self._weights.gather_grads()
                    sums["loss"] += float(value.detach())
                    sums["entropy"] += float(trained.entropy.sum()) / step.tokens
                    for name, figure in figures.items():
                        sums[name] += figure
            self._processes.add_gradients(self._weights.masters)
            sums = defaultdict(float, self._processes.total(dict(sums)))
            sums["grad_norm"] = norm = self._step()
            sums["skipped"] = float(not math.isfinite(norm))
            self.version += math.isfinite(norm)
        sums["learning_rate"] = self.options.learning_rate * self.options.factor(self.steps)
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
        with tree_mode(causal, self.sharing):
            hidden = (tree_states if self.sharing else row_states)(causal, pack)
        source, target = (torch.from_numpy(array).to(causal.device) for array in (pack.source, pack.target))
        vocabulary = causal.config.get_text_config().vocab_size
        return token_logprobs(hidden, head_of(causal), source, target, vocabulary, self.temperature)

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
            self.reference.eval()
            return self.logprobs(pack, causal_model(self.reference))[0].cpu().numpy()
        if self.model is self.causal:
            raise ValueError(
                "the objective compares with a reference model, and this learner has none: give it a frozen copy "
                "as `reference`, train an adapter, or set the weight of the KL term to 0"
            )
        with self.model.disable_adapter():
            return self.logprobs(pack)[0].cpu().numpy()

    def _step(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights.masters, self.options.max_grad_norm))
        if not math.isfinite(norm):
            log.warning("step %d: the gradient's norm is %s; the weights stay as they are", self.steps, norm)
        factor = self.options.factor(self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            if math.isfinite(norm):
                optimizer.step()
        self._weights.clear_grads()
        self._weights.write_back()
        return norm


def _can_share(model: PreTrainedModel) -> bool:
    reason = why_not_shared(model)
    if reason is not None:
        log.warning(
            "A %r model cannot share prefixes between rows: %s. Rows are computed one by one; results are the "
            "same, updates take longer.", model.config.model_type, reason,
        )  # fmt: skip
    return reason is None
