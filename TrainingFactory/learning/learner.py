"""Change the weights of one transformers or PEFT model in this process: log-probs, gradients, optimiser."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Iterator
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
from TrainingFactory.learning.heads import ScalarHead
from TrainingFactory.learning.logprobs import token_logprobs
from TrainingFactory.learning.optim import CRITIC, MixedPrecision, OptimizerOptions, make_optimizers
from TrainingFactory.learning.processes import Processes

log = logging.getLogger(__name__)

# What is counted over the step: its name among the metrics, and in a batch.
COUNTS = {"trained_tokens": "tokens", "rows": "rows", "trained_episodes": "episodes", "pairs": "pairs"}


class Learner:
    """`temperature` is the sampler's: training sees the distribution that was sampled from. `reference` is a frozen
    model; without one an adapter's base is it. `head` gives a number for each token, on the model or on a `critic` of
    its own. `sharing` says whether common prefixes are computed once, for `make_batch(..., sharing)`."""

    def __init__(
        self,
        model: Any,
        options: OptimizerOptions,
        *,
        reference: Any = None,
        head: ScalarHead | None = None,
        critic: Any = None,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model, self.causal, self.options = model, causal_model(model), options
        self.reference, self.head, self.critic = reference, head, critic
        self.temperature = temperature
        self.steps = 0
        for each in self._trained_models() if gradient_checkpointing else ():
            causal_model(each).gradient_checkpointing_enable({"use_reentrant": False})
        self._processes = Processes(self.causal.device)
        self._weights = MixedPrecision(self._named_parameters())
        named = list(zip(self._weights.names, self._weights.masters, strict=True))
        self._critic_weights = [weight for name, weight in named if name.startswith(CRITIC)]
        self._policy_weights = [weight for name, weight in named if not name.startswith(CRITIC)]
        self.optimizers = make_optimizers(named, options)
        if not self.optimizers:
            raise ValueError("the model has no weights to train")
        models = [causal_model(each) for each in (model, reference, critic) if each is not None]
        for each in models:
            check_head(each)
        self.sharing = all(_can_share(each) for each in models)

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.model.named_parameters()
        for prefix, part in (("head", self.head), ("critic", self.critic)):
            if part is not None:
                yield from ((f"{prefix}.{name}", param) for name, param in part.named_parameters())

    def _trained_models(self) -> list[Any]:
        return [self.model] if self.critic is None else [self.model, self.critic]

    def _set_training(self, training: bool) -> None:
        """Switch dropout, and with it gradient checkpointing, on or off."""
        for each in self._trained_models():
            each.train(training)

    def total(self, sums: dict[str, float]) -> dict[str, float]:
        """Add sums up over the processes that train together."""
        return self._processes.total(sums)

    @torch.no_grad()
    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Add what the batch must carry beside its rows, by the models as they are now."""
        self._set_training(False)
        for pack in batch.packs:
            if "reference" in needs and pack.reference is None:  # it may have been computed beforehand
                pack.reference = self._reference_logprobs(pack)
            both = {"old", "values"} <= needs and self.critic is None
            states = self.states(pack) if both else None
            if "old" in needs:
                pack.old = self.logprobs(pack, states=states)[0].cpu().numpy()
            if "values" in needs:
                pack.values = self._scalars(pack, pack.source, states).cpu().numpy()
        for pack in batch.mismatched:
            pack.reference, pack.old = self._reference_logprobs(pack), self.logprobs(pack)[0].cpu().numpy()
        return batch

    def update(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Make one step over the rows of all processes; none without rows or with a gradient that is not finite."""
        sums: dict[str, float] = defaultdict(float)
        sums["row_tokens"] = sum(pack.row_tokens for pack in batch.packs)
        sums["computed_tokens"] = sum(len(pack.token_ids) for pack in batch.packs)
        sums |= {name: getattr(batch, count) for name, count in COUNTS.items()}
        counts = self._processes.total(dict(sums))
        step = dataclasses.replace(batch, **{count: int(counts[name]) for name, count in COUNTS.items()})
        if step.rows:
            self._set_training(True)
            self._weights.clear_grads()  # of a step that ended in an error
            for pack in step.packs:
                # Around forward and backward: with gradient checkpointing the layers run again in the latter.
                with contextlib.ExitStack() as stack:
                    for model in self._trained_models():
                        stack.enter_context(tree_mode(causal_model(model), self.sharing))
                    trained = self._trained(pack, step, needs)
                    value, metrics = loss(trained)
                    value.backward()
                self._weights.gather_grads()
                metrics["loss"] = float(value.detach())
                if "scores" not in needs:  # a scorer has no distribution
                    metrics["entropy"] = float(trained.entropy.detach().sum()) / step.tokens
                for name, metric in metrics.items():
                    sums[name] += metric
            # Weights that have no gradient are left alone by the optimiser, by its decay and momentum too.
            self._processes.add_gradients(self._critic_weights if step.values_only else self._weights.masters)
            sums = defaultdict(float, self._processes.total(dict(sums)))
            sums["grad_norm"] = norm = self._step()
            sums["skipped"] = float(not math.isfinite(norm))
        sums["learning_rate"] = self.options.learning_rate * self.options.factor(self.steps)
        self.steps += 1
        return dict(sums)

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Return the loss and what goes with it, without a step."""
        sums: dict[str, float] = defaultdict(float)
        self._set_training(False)
        for pack in batch.packs:
            value, metrics = loss(self._trained(pack, batch, needs))
            for name, metric in (metrics | {"loss": float(value)}).items():
                sums[name] += metric
        return dict(sums)

    def states(self, pack: Pack, model: PreTrainedModel | None = None) -> torch.Tensor:
        """Return the hidden states of the tokens of a pack. [N, D]"""
        causal = model or self.causal
        with tree_mode(causal, self.sharing):
            return (tree_states if self.sharing else row_states)(causal, pack)

    def logprobs(
        self, pack: Pack, model: PreTrainedModel | None = None, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies of the trained tokens; the head runs once for rows that went the same way."""
        causal = model or self.causal
        hidden = self.states(pack, causal) if states is None else states
        vocabulary = causal.config.get_text_config().vocab_size
        assert (pack.target < vocabulary).all(), "a token that the model does not have"
        kept, again = np.unique(pack.source * vocabulary + pack.target, return_inverse=True)
        source, target, every = self._on_device(kept // vocabulary, kept % vocabulary, again)
        found = token_logprobs(hidden, head_of(causal), source, target, vocabulary, self.temperature)
        return found[0].index_select(0, every), found[1].index_select(0, every)

    def _scalars(self, pack: Pack, places: np.ndarray, states: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the head says at these places of the tree. `states` are the model's, where they are known."""
        assert self.head is not None, "the objective needs values or scores, and there is no head"
        if self.critic is not None:
            states = self.states(pack, causal_model(self.critic))
        elif states is None:
            states = self.states(pack)
        (chosen,) = self._on_device(places)
        return self.head(states.index_select(0, chosen))

    def _trained(self, pack: Pack, batch: Batch, needs: frozenset[str]) -> Trained:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not batch.values_only):
            states = self.states(pack)
            if "scores" in needs:
                logprobs = entropy = states.new_zeros(0, dtype=torch.float32)
            else:
                logprobs, entropy = self.logprobs(pack, states=states)
        sampled, advantages, rewards = self._on_device(pack.logprobs, pack.advantages, pack.rewards)
        episode, labels, pairs = self._on_device(pack.episode, pack.labels, pack.pairs)
        extra = (pack.reference, pack.old, pack.values, pack.returns)
        reference, old, old_values, returns = (
            None if array is None else self._on_device(array)[0] for array in extra
        )
        return Trained(
            logprobs, entropy, sampled, advantages, rewards, episode, labels, pairs,
            batch.tokens, batch.episodes, batch.pairs,
            reference=reference, old=old, old_values=old_values, returns=returns, baseline=batch.baseline,
            values=self._scalars(pack, pack.source, states) if "values" in needs else None,
            scores=self._scalars(pack, pack.place, states) if "scores" in needs else None,
        )  # fmt: skip

    def _on_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.causal.device) for array in arrays]

    def _reference_logprobs(self, pack: Pack) -> np.ndarray:
        if self.reference is not None:
            self.reference.eval()
            return self.logprobs(pack, causal_model(self.reference))[0].cpu().numpy()
        assert self.model is not self.causal, "no reference model: neither a frozen copy nor an adapter"
        with self.model.disable_adapter():
            return self.logprobs(pack)[0].cpu().numpy()

    def _step(self) -> float:
        # A separate critic has a limit of its own: its errors, which are large at first, must not slow the policy.
        parts = [self._policy_weights, self._critic_weights] if self.critic else [self._weights.masters]
        limit = self.options.max_grad_norm
        norm = math.hypot(*(float(torch.nn.utils.clip_grad_norm_(part, limit)) for part in parts))
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
    if (reason := why_not_shared(model)) is not None:
        log.warning(
            "A %r model cannot share prefixes between rows: %s. Rows are computed one by one; results are the "
            "same, updates take longer.", model.config.model_type, reason,
        )  # fmt: skip
    return reason is None
