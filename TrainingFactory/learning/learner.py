"""The learner: log-probs, gradients and optimizer steps of one transformers or PEFT model in this process."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.algorithms.trained_tokens import Loss, TrainedTokens
from TrainingFactory.data.packing import Batch, Pack
from TrainingFactory.learning.forward import (
    causal_model,
    check_head,
    output_head,
    row_states,
    sharing_problem,
    tree_mode,
    tree_states,
)
from TrainingFactory.learning.heads import ScalarHead
from TrainingFactory.learning.logprobs import token_logprobs
from TrainingFactory.learning.optim import CRITIC_PREFIXES, MixedPrecision, OptimizerOptions, make_optimizers
from TrainingFactory.learning.processes import Processes
from TrainingFactory.learning.routers import Routing, find_routers, load_metrics, token_counts

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

log = logging.getLogger(__name__)

ANNOTATIONS = ("reference", "old", "values")  # fields of a pack that are filled by a forward pass
DIGEST_ELEMENTS = 1024  # leading elements of each frozen weight that enter the digest of the base model
# Metric name -> field of a batch, for counts over the whole step.
COUNTS = {"trained_tokens": "tokens", "rows": "rows", "trained_episodes": "episodes", "pairs": "pairs"}


class Learner:
    """Trains `model`, and optionally a scalar `head` on it or on a separate `critic` model.

    `temperature` is the sampler's, so that training sees the distribution that was sampled from. `reference` is a
    frozen model; None: the base under the adapter. With several `processes`, the given models are sharded in place.
    `activation_offload` keeps the inputs of checkpointed layers in CPU memory. `router_aux_loss` is the coefficient of
    the auxiliary loss of a mixture of experts; None: the model's own. `vision` is the `Vision` of a model that sees
    images. Callers pass `sharing` (compute common prefixes once) and `split_above` (split larger trees; 0: never) to
    `make_batch`."""

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
        activation_offload: bool = False,
        processes: Processes | None = None,
        router_aux_loss: float | None = 0.0,
        vision: Vision | None = None,
    ) -> None:
        self.model, self.causal, self.options = model, causal_model(model), options
        self.routers = find_routers(self.causal, router_aux_loss)
        self.reference, self.head, self.critic = reference, head, critic
        self.temperature, self.activation_offload, self.vision = temperature, activation_offload, vision
        # A GPU serialises the gradients of keys that all tokens attend to, so smaller trees are faster.
        self.split_above = 4096 if self.causal.device.type == "cuda" else 0
        self.steps = 0
        for module in self._trained_models() if gradient_checkpointing else ():
            causal_model(module).gradient_checkpointing_enable({"use_reentrant": False})
        if reference is not None:
            reference.requires_grad_(False)
        models = [module for module in (model, reference, critic) if module is not None]
        self.dtype, self.frozen = self.causal.dtype, frozen_digest(model)  # before the weights are sharded
        self.processes = processes or Processes()
        for module in models:
            has_scores = module is (critic or model)
            self.processes.shard(module, head if has_scores else None)
            self.processes.run(module, partial(check_head, causal_model(module)))
        run = self.processes.run
        self.sharing = all(
            run(module, partial(_can_share_prefixes, causal_model(module), vision)) for module in models
        )
        self._weights = MixedPrecision(self._named_parameters())
        named_masters = list(zip(self._weights.names, self._weights.masters, strict=True))
        self._critic_weights = [weight for name, weight in named_masters if name.startswith(CRITIC_PREFIXES)]
        self._policy_weights = [
            weight for name, weight in named_masters if not name.startswith(CRITIC_PREFIXES)
        ]
        self.optimizers = make_optimizers(named_masters, options, self.processes)
        if not self.optimizers:
            raise ValueError("The model has no trainable weights")

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.model.named_parameters()
        for prefix, module in (("head", self.head), ("critic", self.critic)):
            if module is not None:
                yield from ((f"{prefix}.{name}", param) for name, param in module.named_parameters())

    def _trained_models(self) -> list[Any]:
        return [self.model] if self.critic is None else [self.model, self.critic]

    def _set_training(self, training: bool) -> None:
        """Set train or eval mode, which switches dropout and gradient checkpointing."""
        for model in self._trained_models():
            model.train(training)

    @torch.no_grad()
    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fill in the reference log-probs, old log-probs and critic values that `needs` contains. Old log-probs and
        values are computed with the current weights."""
        self._set_training(False)
        precomputed = {"reference"} if all(pack.reference is not None for pack in batch.packs) else set()
        self._annotate_packs(batch.packs, [name for name in ANNOTATIONS if name in needs - precomputed])
        self._annotate_packs(batch.mismatched, ["reference", "old"])
        return batch

    def _annotate_packs(self, packs: Sequence[Pack], fields: Sequence[str]) -> None:
        for pack in self.processes.deal(packs) if fields else ():
            if "reference" in fields:
                pack.reference = self._compute_reference_logprobs(pack)
            if "old" in fields or "values" in fields:
                indices = pack.source if "values" in fields else None
                logprobs, _, values = self._compute_outputs(pack, "old" in fields, indices)
                pack.old = logprobs.cpu().numpy() if "old" in fields else pack.old
                pack.values = pack.values if values is None else values.cpu().numpy()
        self.processes.exchange(packs, fields)

    def update(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Make one optimizer step, unless there are no rows or the gradient is not finite. Return its metrics."""
        metrics: dict[str, float] = {name: getattr(batch, field) for name, field in COUNTS.items()}
        metrics["row_tokens"] = sum(pack.row_tokens for pack in batch.packs)
        metrics["computed_tokens"] = sum(len(pack.token_ids) for pack in batch.packs)
        if batch.split_episodes:
            metrics["split_episodes"] = batch.split_episodes
        if batch.rows:
            self._set_training(True)
            self._weights.clear_grads()  # left over from a step that raised
            sums: dict[str, float] = defaultdict(float)
            balance, loads = self._balance_counts(batch), np.zeros(0)
            for pack in self.processes.deal(batch.packs):
                # Around forward and backward: with gradient checkpointing the backward runs the layers again.
                with contextlib.ExitStack() as stack:
                    for model in self._trained_models():
                        stack.enter_context(tree_mode(causal_model(model), self.sharing))
                    routing = stack.enter_context(self.routers.recording()) if self.routers else None
                    loss_value, pack_metrics = self._pack_loss(pack, batch, loss, needs)
                    if routing is not None:
                        aux_loss, pack_loads = self._share_of_aux_loss(
                            pack, batch, routing, balance, pack_metrics
                        )
                        loss_value, loads = loss_value + aux_loss, pack_loads + (loads if loads.size else 0.0)
                    loss_value.backward()
                self._weights.gather_grads()
                for name, value in pack_metrics.items():
                    sums[name] += value
            metrics |= self.processes.sum_metrics(sums)
            if self.routers:
                metrics |= load_metrics(self.processes.sum_array(loads))
            # The optimizer skips weights without a gradient; weight decay and momentum do not apply to them either.
            metrics["grad_norm"] = norm = self._step_optimizers()
            metrics["skipped"] = float(not math.isfinite(norm))
        metrics["learning_rate"] = self.options.learning_rate * self.options.factor(self.steps)
        self.steps += 1
        return metrics

    @torch.no_grad()
    def _balance_counts(self, batch: Batch) -> np.ndarray | None:
        """Return the `balance_counts` of the whole update, counted in an additional forward pass without dropout over
        each pack. Return None if the model has no auxiliary loss, or if the update has a single forward pass, which
        counts itself."""
        if self.routers is None or not self.routers.coefficient or batch.values_only:
            return None
        if len(batch.packs) == 1 and self.processes.count == 1:
            return None
        counts = 0.0
        self._set_training(False)
        for pack in self.processes.deal(batch.packs):
            with self.routers.recording() as routing:
                self.processes.run(self.model, partial(self.states, pack))
            counts = counts + self.routers.balance_counts(routing, token_counts(pack, self.sharing))
        self._set_training(True)
        return self.processes.sum_array(np.asarray(counts))

    def _share_of_aux_loss(
        self,
        pack: Pack,
        batch: Batch,
        routing: Routing,
        balance: np.ndarray | None,
        metrics: dict[str, float],
    ) -> tuple[torch.Tensor | float, np.ndarray]:
        """Return the pack's share of the auxiliary loss, and the load of each expert. Add the share to the metrics."""
        assert self.routers is not None
        weights = token_counts(pack, self.sharing)
        loads = self.routers.loads(routing, weights)
        if not self.routers.coefficient or batch.values_only:
            return 0.0, loads
        balance = self.routers.balance_counts(routing, weights) if balance is None else balance
        unscaled_loss = self.routers.aux_loss(routing, weights, balance)
        metrics["router_aux_loss"] = float(unscaled_loss.detach())
        return self.routers.coefficient * unscaled_loss, loads

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Return the loss and its metrics without updating the weights."""
        sums: dict[str, float] = defaultdict(float)
        self._set_training(False)
        for pack in self.processes.deal(batch.packs):
            for name, value in self._pack_loss(pack, batch, loss, needs)[1].items():
                sums[name] += value
        return self.processes.sum_metrics(sums)

    def _pack_loss(
        self, pack: Pack, batch: Batch, loss: Loss, needs: frozenset[str]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the pack's share of the step's loss and metrics; a pack without rows yields 0 and no metrics."""
        tokens = self._compute_trained_tokens(pack, batch, needs)
        if not len(pack.rows):
            outputs = (tokens.logprobs, tokens.values, tokens.scores)
            return torch.stack([output.sum() for output in outputs if output is not None]).sum() * 0.0, {}
        value, metrics = loss(tokens)
        metrics["loss"] = float(value.detach())
        if torch.is_grad_enabled() and "scores" not in needs:  # a reward model has no token distribution
            metrics["entropy"] = float(tokens.total(tokens.entropy.detach())) / tokens.step_tokens
        return value, metrics

    def states(self, pack: Pack, model: PreTrainedModel | None = None) -> torch.Tensor:
        """Return the hidden states [N, D] of the pack's tokens."""
        causal = model or self.causal
        with tree_mode(causal, self.sharing), self._offload_saved_tensors():
            return (tree_states if self.sharing else row_states)(causal, pack, self.vision)

    def _offload_saved_tensors(self) -> contextlib.AbstractContextManager[object]:
        """Copy the tensors that autograd saves inside the block to CPU memory. With gradient checkpointing, these are
        the inputs of the layers."""
        if not (self.activation_offload and torch.is_grad_enabled()):
            return contextlib.nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.causal.device.type == "cuda")

    def logprobs(
        self, pack: Pack, model: PreTrainedModel | None = None, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies of the trained tokens. The head runs once per distinct (position, target)."""
        causal = model or self.causal
        hidden = self.states(pack, causal) if states is None else states
        vocabulary = causal.config.get_text_config().vocab_size
        assert (pack.target < vocabulary).all(), "token id outside the model's vocabulary"
        unique, inverse = np.unique(pack.source * vocabulary + pack.target, return_inverse=True)
        source, target, index = self._on_device(unique // vocabulary, unique % vocabulary, inverse)
        outputs = token_logprobs(hidden, output_head(causal), source, target, vocabulary, self.temperature)
        return outputs[0].index_select(0, index), outputs[1].index_select(0, index)

    def _compute_outputs(
        self, pack: Pack, logprobs: bool, indices: np.ndarray | None, values_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropies of the trained tokens, if requested, and the scalar head's outputs at these
        `indices` of the tree."""
        empty = torch.zeros(0, device=self.causal.device)

        def apply_head(states: torch.Tensor) -> torch.Tensor:
            assert self.head is not None and indices is not None, "values and scores need a scalar head"
            return self.head(states.index_select(0, *self._on_device(indices)))

        def run_policy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not values_only):
                states = self.states(pack)
                token_logprobs, entropy = self.logprobs(pack, states=states) if logprobs else (empty, empty)
            return (
                token_logprobs,
                entropy,
                None if indices is None or self.critic is not None else apply_head(states),
            )

        if self.critic is None:
            return self.processes.run(self.model, run_policy)
        token_logprobs, entropy, _ = (
            self.processes.run(self.model, run_policy) if logprobs else (empty, empty, None)
        )
        if indices is None:
            return token_logprobs, entropy, None
        critic = causal_model(self.critic)
        return (
            token_logprobs,
            entropy,
            self.processes.run(self.critic, lambda: apply_head(self.states(pack, critic))),
        )

    def _compute_trained_tokens(self, pack: Pack, batch: Batch, needs: frozenset[str]) -> TrainedTokens:
        needs_scores, needs_values = "scores" in needs, "values" in needs
        indices = pack.place if needs_scores else pack.source if needs_values else None
        logprobs, entropy, scalars = self._compute_outputs(pack, not needs_scores, indices, batch.values_only)
        sampled_logprobs, advantages, rewards = self._on_device(pack.logprobs, pack.advantages, pack.rewards)
        episode, labels, pairs = self._on_device(pack.episode, pack.labels, pack.pairs)
        optional_arrays = (pack.reference, pack.old, pack.values, pack.returns, pack.weights, pack.lengths)
        reference, old, old_values, returns, weights, lengths = (
            None if array is None else self._on_device(array)[0] for array in optional_arrays
        )
        return TrainedTokens(
            logprobs, entropy, sampled_logprobs, advantages, rewards, episode, labels, pairs,
            batch.token_weight, batch.episodes, batch.pairs, weights=weights, episode_lengths=lengths,
            reference=reference, old=old, old_values=old_values, returns=returns, baseline=batch.baseline,
            values=scalars if needs_values else None, scores=scalars if needs_scores else None,
        )  # fmt: skip

    def _on_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.causal.device) for array in arrays]

    def _compute_reference_logprobs(self, pack: Pack) -> np.ndarray:
        model = self.model if self.reference is None else self.reference
        assert self.reference is not None or model is not self.causal, (
            "no reference model: neither a frozen copy nor an adapter"
        )
        model.eval()
        with model.disable_adapter() if self.reference is None else contextlib.nullcontext():
            logprobs = self.processes.run(model, lambda: self.logprobs(pack, causal_model(model))[0])
            return logprobs.cpu().numpy()

    def _step_optimizers(self) -> float:
        # A separate critic is clipped separately: its large initial errors must not slow the policy down.
        groups = [self._policy_weights, self._critic_weights] if self.critic else [self._weights.masters]
        limit = self.options.max_grad_norm
        norms = (self.processes.gather(torch.nn.utils.clip_grad_norm_(group, limit)) for group in groups)
        norm = math.hypot(*(float(group_norm) for group_norm in norms))
        if not math.isfinite(norm):
            log.warning("step %d: gradient norm is %s; skipping the update", self.steps, norm)
        lr_factor = self.options.factor(self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_factor
            if math.isfinite(norm):
                optimizer.step()
        self._weights.clear_grads()
        self._weights.write_back()
        return norm


def _can_share_prefixes(model: PreTrainedModel, vision: Vision | None) -> bool:
    reason = sharing_problem(model)
    if reason is None and vision is not None and vision.sees_whole_images:
        reason = "the tokens of an image attend to each other in both directions"
    if reason is not None:
        log.warning(
            "A %r model cannot share prefixes between rows: %s. Computing rows one by one: same results, slower "
            "updates. `tfactory models --compat` lists the models that can.", model.config.model_type, reason,
        )  # fmt: skip
    return reason is None


def frozen_digest(model: torch.nn.Module) -> str:
    """Return a digest of the frozen weights, because an adapter fits only the base model it was trained on."""
    digest = hashlib.blake2b(digest_size=8)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            digest.update(name.encode())
            digest.update(param.detach().flatten()[:DIGEST_ELEMENTS].float().cpu().numpy().tobytes())
    return digest.hexdigest()
