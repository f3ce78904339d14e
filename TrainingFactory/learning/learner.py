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
    check_head,
    get_causal_lm,
    get_output_head,
    get_sharing_problem,
    run_rows,
    run_tree,
    use_trees,
)
from TrainingFactory.learning.heads import ScalarHead
from TrainingFactory.learning.logprobs import compute_token_logprobs
from TrainingFactory.learning.optim import CRITIC_PREFIXES, MixedPrecision, OptimizerOptions, make_optimizers
from TrainingFactory.learning.processes import Processes
from TrainingFactory.learning.routers import Routing, count_token_rows, find_routers, summarize_loads

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

log = logging.getLogger(__name__)

ANNOTATED_FIELDS = ("reference", "old", "values")  # fields of a pack that are filled by a forward pass
NUM_DIGEST_ELEMENTS = 1024  # leading elements of each frozen weight that enter the digest of the base model


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
        self.model, self.causal_lm, self.options = model, get_causal_lm(model), options
        self.routers = find_routers(self.causal_lm, router_aux_loss)
        self.reference, self.head, self.critic = reference, head, critic
        self.temperature, self.activation_offload, self.vision = temperature, activation_offload, vision
        # A GPU serialises the gradients of keys that all tokens attend to, so smaller trees are faster.
        self.split_above = 4096 if self.causal_lm.device.type == "cuda" else 0
        self.steps = 0
        for module in self._get_trained_models() if gradient_checkpointing else ():
            get_causal_lm(module).gradient_checkpointing_enable({"use_reentrant": False})
        if reference is not None:
            reference.requires_grad_(False)
        models = [module for module in (model, reference, critic) if module is not None]
        self.dtype, self.frozen_digest = self.causal_lm.dtype, hash_frozen_weights(model)  # before sharding
        self.processes = processes or Processes()
        for module in models:
            has_head = module is (critic or model)
            self.processes.shard(module, head if has_head else None)
            self.processes.run(module, partial(check_head, get_causal_lm(module)))
        run_on_model = self.processes.run
        self.sharing = all(
            run_on_model(module, partial(_can_share_prefixes, get_causal_lm(module), vision))
            for module in models
        )
        self._weights = MixedPrecision(self._iterate_parameters())
        named_masters = list(zip(self._weights.names, self._weights.masters, strict=True))
        self._critic_weights = [weight for name, weight in named_masters if name.startswith(CRITIC_PREFIXES)]
        self._policy_weights = [
            weight for name, weight in named_masters if not name.startswith(CRITIC_PREFIXES)
        ]
        self.optimizers = make_optimizers(named_masters, options, self.processes)
        if not self.optimizers:
            raise ValueError("The model has no trainable weights")

    def _iterate_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.model.named_parameters()
        for prefix, module in (("head", self.head), ("critic", self.critic)):
            if module is not None:
                yield from ((f"{prefix}.{name}", param) for name, param in module.named_parameters())

    def _get_trained_models(self) -> list[Any]:
        return [self.model] if self.critic is None else [self.model, self.critic]

    def _set_training(self, is_training: bool) -> None:
        """Set train or eval mode, which switches dropout and gradient checkpointing."""
        for model in self._get_trained_models():
            model.train(is_training)

    @torch.no_grad()
    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fill in the reference log-probs, old log-probs and critic values that `needs` contains. Old log-probs and
        values are computed with the current weights."""
        self._set_training(False)
        precomputed = {"reference"} if all(pack.reference is not None for pack in batch.packs) else set()
        missing_fields = [field for field in ANNOTATED_FIELDS if field in needs - precomputed]
        self._annotate_packs(batch.packs, missing_fields)
        self._annotate_packs(batch.mismatched, ["reference", "old"])
        return batch

    def _annotate_packs(self, packs: Sequence[Pack], fields: Sequence[str]) -> None:
        for pack in self.processes.take_local_packs(packs) if fields else ():
            if "reference" in fields:
                pack.reference = self._compute_reference_logprobs(pack)
            if "old" in fields or "values" in fields:
                indices = pack.source if "values" in fields else None
                logprobs, _, values = self._compute_outputs(pack, "old" in fields, indices)
                pack.old = logprobs.cpu().numpy() if "old" in fields else pack.old
                pack.values = pack.values if values is None else values.cpu().numpy()
        self.processes.exchange_fields(packs, fields)

    def update(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Make one optimizer step, unless there are no rows or the gradient is not finite. Return its metrics."""
        metrics: dict[str, float] = {"trained_tokens": batch.num_tokens, "rows": batch.num_rows}
        metrics |= {"trained_episodes": batch.num_episodes, "pairs": batch.num_pairs}
        metrics["row_tokens"] = sum(pack.row_tokens for pack in batch.packs)
        metrics["computed_tokens"] = sum(len(pack.token_ids) for pack in batch.packs)
        if batch.num_split_episodes:
            metrics["split_episodes"] = batch.num_split_episodes
        if batch.num_rows:
            self._set_training(True)
            self._weights.clear_grads()  # left over from a step that raised
            metric_sums: dict[str, float] = defaultdict(float)
            expert_counts, loads = self._count_update_balance(batch), np.zeros(0)
            for pack in self.processes.take_local_packs(batch.packs):
                # Around forward and backward: with gradient checkpointing the backward runs the layers again.
                with contextlib.ExitStack() as stack:
                    for model in self._get_trained_models():
                        stack.enter_context(use_trees(get_causal_lm(model), self.sharing))
                    routing = stack.enter_context(self.routers.record_routing()) if self.routers else None
                    loss_value, pack_metrics = self._compute_pack_loss(pack, batch, loss, needs)
                    if routing is not None:
                        aux_loss, pack_loads = self._compute_aux_loss_share(
                            pack, batch, routing, expert_counts, pack_metrics
                        )
                        loss_value, loads = loss_value + aux_loss, pack_loads + (loads if loads.size else 0.0)
                    loss_value.backward()
                self._weights.gather_grads()
                for name, value in pack_metrics.items():
                    metric_sums[name] += value
            metrics |= self.processes.sum_metrics(metric_sums)
            if self.routers:
                metrics |= summarize_loads(self.processes.sum_array(loads))
            # The optimizer skips weights without a gradient; weight decay and momentum do not apply to them either.
            metrics["grad_norm"] = grad_norm = self._step_optimizers()
            metrics["skipped"] = float(not math.isfinite(grad_norm))
        metrics["learning_rate"] = self.options.learning_rate * self.options.get_lr_factor(self.steps)
        self.steps += 1
        return metrics

    @torch.no_grad()
    def _count_update_balance(self, batch: Batch) -> np.ndarray | None:
        """Return the `count_balance` of the whole update, counted in an additional forward pass without dropout over
        each pack. Return None if the model has no auxiliary loss, or if the update has a single forward pass, which
        counts itself."""
        if self.routers is None or not self.routers.coefficient or batch.values_only:
            return None
        if len(batch.packs) == 1 and self.processes.world_size == 1:
            return None
        counts = 0.0
        self._set_training(False)
        for pack in self.processes.take_local_packs(batch.packs):
            with self.routers.record_routing() as routing:
                self.processes.run(self.model, partial(self.compute_states, pack))
            counts = counts + self.routers.count_balance(routing, count_token_rows(pack, self.sharing))
        self._set_training(True)
        return self.processes.sum_array(np.asarray(counts))

    def _compute_aux_loss_share(
        self, pack: Pack, batch: Batch, routing: Routing, counts: np.ndarray | None, metrics: dict[str, float]
    ) -> tuple[torch.Tensor | float, np.ndarray]:
        """Return the pack's share of the auxiliary loss, and the load of each expert. Add the share to the metrics."""
        assert self.routers is not None
        weights = count_token_rows(pack, self.sharing)
        loads = self.routers.count_loads(routing, weights)
        if not self.routers.coefficient or batch.values_only:
            return 0.0, loads
        counts = self.routers.count_balance(routing, weights) if counts is None else counts
        unscaled_loss = self.routers.compute_aux_loss(routing, weights, counts)
        metrics["router_aux_loss"] = float(unscaled_loss.detach())
        return self.routers.coefficient * unscaled_loss, loads

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Return the loss and its metrics without updating the weights."""
        metric_sums: dict[str, float] = defaultdict(float)
        self._set_training(False)
        for pack in self.processes.take_local_packs(batch.packs):
            for name, value in self._compute_pack_loss(pack, batch, loss, needs)[1].items():
                metric_sums[name] += value
        return self.processes.sum_metrics(metric_sums)

    def _compute_pack_loss(
        self, pack: Pack, batch: Batch, loss: Loss, needs: frozenset[str]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the pack's share of the step's loss and metrics; a pack without rows yields 0 and no metrics."""
        tokens = self._compute_trained_tokens(pack, batch, needs)
        if not len(pack.rows):
            outputs = (tokens.logprobs, tokens.values, tokens.scores)
            return torch.stack([output.sum() for output in outputs if output is not None]).sum() * 0.0, {}
        loss_value, metrics = loss(tokens)
        metrics["loss"] = float(loss_value.detach())
        if torch.is_grad_enabled() and "scores" not in needs:  # a reward model has no token distribution
            metrics["entropy"] = float(tokens.sum_weighted(tokens.entropy.detach())) / tokens.step_tokens
        return loss_value, metrics

    def compute_states(self, pack: Pack, model: PreTrainedModel | None = None) -> torch.Tensor:
        """Return the hidden states [N, D] of the pack's tokens."""
        causal_lm = model or self.causal_lm
        with use_trees(causal_lm, self.sharing), self._offload_saved_tensors():
            return (run_tree if self.sharing else run_rows)(causal_lm, pack, self.vision)

    def _offload_saved_tensors(self) -> contextlib.AbstractContextManager[object]:
        """Copy the tensors that autograd saves inside the block to CPU memory. With gradient checkpointing, these are
        the inputs of the layers."""
        if not (self.activation_offload and torch.is_grad_enabled()):
            return contextlib.nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.causal_lm.device.type == "cuda")

    def compute_logprobs(
        self, pack: Pack, model: PreTrainedModel | None = None, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies of the trained tokens. The head runs once per distinct (position, target)."""
        causal_lm = model or self.causal_lm
        hidden = self.compute_states(pack, causal_lm) if states is None else states
        vocab_size = causal_lm.config.get_text_config().vocab_size
        assert (pack.target < vocab_size).all(), "token id outside the model's vocabulary"
        pair_keys, pair_indices = np.unique(pack.source * vocab_size + pack.target, return_inverse=True)
        source, target, index = self._to_device(pair_keys // vocab_size, pair_keys % vocab_size, pair_indices)
        outputs = compute_token_logprobs(
            hidden, get_output_head(causal_lm), source, target, vocab_size, self.temperature
        )
        return outputs[0].index_select(0, index), outputs[1].index_select(0, index)

    def _compute_outputs(
        self, pack: Pack, needs_logprobs: bool, indices: np.ndarray | None, values_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropies of the trained tokens, if requested, and the scalar head's outputs at these
        `indices` of the tree."""
        empty = torch.zeros(0, device=self.causal_lm.device)

        def apply_head(states: torch.Tensor) -> torch.Tensor:
            assert self.head is not None and indices is not None, "values and scores need a scalar head"
            return self.head(states.index_select(0, *self._to_device(indices)))

        def run_policy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not values_only):
                states = self.compute_states(pack)
                token_logprobs, entropy = (
                    self.compute_logprobs(pack, states=states) if needs_logprobs else (empty, empty)
                )
            scalars = None if indices is None or self.critic is not None else apply_head(states)
            return token_logprobs, entropy, scalars

        if self.critic is None:
            return self.processes.run(self.model, run_policy)
        token_logprobs, entropy, _ = (
            self.processes.run(self.model, run_policy) if needs_logprobs else (empty, empty, None)
        )
        if indices is None:
            return token_logprobs, entropy, None
        critic = get_causal_lm(self.critic)
        return (
            token_logprobs,
            entropy,
            self.processes.run(self.critic, lambda: apply_head(self.compute_states(pack, critic))),
        )

    def _compute_trained_tokens(self, pack: Pack, batch: Batch, needs: frozenset[str]) -> TrainedTokens:
        needs_scores, needs_values = "scores" in needs, "values" in needs
        indices = pack.place if needs_scores else pack.source if needs_values else None
        logprobs, entropy, scalars = self._compute_outputs(pack, not needs_scores, indices, batch.values_only)
        sampled_logprobs, advantages, rewards = self._to_device(pack.logprobs, pack.advantages, pack.rewards)
        episode_ids, labels, pairs = self._to_device(pack.episode, pack.labels, pack.pairs)
        optional_arrays = (pack.reference, pack.old, pack.values, pack.returns, pack.weights, pack.lengths)
        reference_logprobs, old_logprobs, old_values, returns, weights, lengths = (
            None if array is None else self._to_device(array)[0] for array in optional_arrays
        )
        return TrainedTokens(
            logprobs, entropy, sampled_logprobs, advantages, rewards, episode_ids, labels, pairs,
            batch.token_weight, batch.num_episodes, batch.num_pairs, weights=weights, episode_lengths=lengths,
            reference_logprobs=reference_logprobs, old_logprobs=old_logprobs,
            old_values=old_values, returns=returns, baseline=batch.baseline,
            values=scalars if needs_values else None, scores=scalars if needs_scores else None,
        )  # fmt: skip

    def _to_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.causal_lm.device) for array in arrays]

    def _compute_reference_logprobs(self, pack: Pack) -> np.ndarray:
        model = self.model if self.reference is None else self.reference
        assert self.reference is not None or model is not self.causal_lm, (
            "no reference model: neither a frozen copy nor an adapter"
        )
        model.eval()
        with model.disable_adapter() if self.reference is None else contextlib.nullcontext():
            logprobs = self.processes.run(model, lambda: self.compute_logprobs(pack, get_causal_lm(model))[0])
            return logprobs.cpu().numpy()

    def _step_optimizers(self) -> float:
        # A separate critic is clipped separately: its large initial errors must not slow the policy down.
        params = [self._policy_weights, self._critic_weights] if self.critic else [self._weights.masters]
        max_norm = self.options.max_grad_norm
        norms = (self.processes.gather(torch.nn.utils.clip_grad_norm_(group, max_norm)) for group in params)
        total_norm = math.hypot(*(float(group_norm) for group_norm in norms))
        if not math.isfinite(total_norm):
            log.warning("step %d: gradient norm is %s; skipping the update", self.steps, total_norm)
        lr_factor = self.options.get_lr_factor(self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_factor
            if math.isfinite(total_norm):
                optimizer.step()
        self._weights.clear_grads()
        self._weights.write_back()
        return total_norm


def _can_share_prefixes(model: PreTrainedModel, vision: Vision | None) -> bool:
    problem = get_sharing_problem(model)
    if problem is None and vision is not None and vision.sees_whole_images:
        problem = "the tokens of an image attend to each other in both directions"
    if problem is not None:
        log.warning(
            "A %r model cannot share prefixes between rows: %s. Computing rows one by one: same results, slower "
            "updates. `tfactory models --compat` lists the models that can.", model.config.model_type, problem,
        )  # fmt: skip
    return problem is None


def hash_frozen_weights(model: torch.nn.Module) -> str:
    """Return a digest of the frozen weights, because an adapter fits only the base model it was trained on."""
    digest = hashlib.blake2b(digest_size=8)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            digest.update(name.encode())
            digest.update(param.detach().flatten()[:NUM_DIGEST_ELEMENTS].float().cpu().numpy().tobytes())
    return digest.hexdigest()
