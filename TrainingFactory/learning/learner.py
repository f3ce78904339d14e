"""Change the weights of one transformers or PEFT model in this process: log-probs, gradients, optimiser."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.algorithms.trained_tokens import Loss, Trained
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

ANNOTATIONS = ("reference", "old", "values")  # fields of a pack that models fill in
SAMPLED = 1024  # numbers of each frozen weight that tell one base model from another
# What is counted over the step: its name among the metrics, and in a batch.
COUNTS = {"trained_tokens": "tokens", "rows": "rows", "trained_episodes": "episodes", "pairs": "pairs"}


class Learner:
    """`temperature` is the sampler's: training sees the distribution that was sampled from. `reference` is a frozen
    model; without one an adapter's base is it. `head` gives a number for each token, on the model or on a `critic` of
    its own. `sharing` says whether common prefixes are computed once, `below` how often, for `make_batch`. With several
    `processes` their weights are divided among them, in the models that are given."""

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
        processes: Processes | None = None,
    ) -> None:
        self.model, self.causal, self.options = model, causal_model(model), options
        self.reference, self.head, self.critic = reference, head, critic
        self.temperature = temperature
        # A GPU finds the gradients of keys that all tokens see one after the other: trees of some size are quicker.
        self.below = 4096 if self.causal.device.type == "cuda" else 0
        self.steps = 0
        for each in self._trained_models() if gradient_checkpointing else ():
            causal_model(each).gradient_checkpointing_enable({"use_reentrant": False})
        if reference is not None:
            reference.requires_grad_(False)
        models = [each for each in (model, reference, critic) if each is not None]
        self.dtype, self.frozen = self.causal.dtype, frozen_digest(model)  # before weights are divided
        self.processes = processes or Processes()
        for each in models:
            scored = each is (critic or model)
            self.processes.shard(each, head if scored else None)
            self.processes.run(each, partial(check_head, causal_model(each)))
        run = self.processes.run
        self.sharing = all(run(each, partial(_can_share, causal_model(each))) for each in models)
        self._weights = MixedPrecision(self._named_parameters())
        named = list(zip(self._weights.names, self._weights.masters, strict=True))
        self._critic_weights = [weight for name, weight in named if name.startswith(CRITIC)]
        self._policy_weights = [weight for name, weight in named if not name.startswith(CRITIC)]
        self.optimizers = make_optimizers(named, options, self.processes)
        if not self.optimizers:
            raise ValueError("the model has no weights to train")

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

    @torch.no_grad()
    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Add what the batch must carry beside its rows, by the models as they are now."""
        self._set_training(False)
        known = all(pack.reference is not None for pack in batch.packs)  # computed beforehand
        wanted = [name for name in ANNOTATIONS if name in needs and not (name == "reference" and known)]
        self._annotate(batch.packs, wanted)
        self._annotate(batch.mismatched, ["reference", "old"])
        return batch

    def _annotate(self, packs: Sequence[Pack], wanted: Sequence[str]) -> None:
        for pack in self.processes.deal(packs) if wanted else ():
            if "reference" in wanted:
                pack.reference = self._reference_logprobs(pack)
            if "old" in wanted or "values" in wanted:
                places = pack.source if "values" in wanted else None
                logprobs, _, values = self._outputs(pack, "old" in wanted, places)
                pack.old = logprobs.cpu().numpy() if "old" in wanted else pack.old
                pack.values = pack.values if values is None else values.cpu().numpy()
        self.processes.exchange(packs, wanted)

    def update(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Make one step over the rows; none without rows or with a gradient that is not finite."""
        found: dict[str, float] = {name: getattr(batch, count) for name, count in COUNTS.items()}
        found["row_tokens"] = sum(pack.row_tokens for pack in batch.packs)
        found["computed_tokens"] = sum(len(pack.token_ids) for pack in batch.packs)
        if batch.rows:
            self._set_training(True)
            self._weights.clear_grads()  # of a step that ended in an error
            sums: dict[str, float] = defaultdict(float)
            for pack in self.processes.deal(batch.packs):
                # Around forward and backward: with gradient checkpointing the layers run again in the latter.
                with contextlib.ExitStack() as stack:
                    for model in self._trained_models():
                        stack.enter_context(tree_mode(causal_model(model), self.sharing))
                    value, metrics = self._loss(pack, batch, loss, needs)
                    value.backward()
                self._weights.gather_grads()
                for name, metric in metrics.items():
                    sums[name] += metric
            found |= self.processes.total(sums)
            # Weights that have no gradient are left alone by the optimiser, by its decay and momentum too.
            found["grad_norm"] = norm = self._step()
            found["skipped"] = float(not math.isfinite(norm))
        found["learning_rate"] = self.options.learning_rate * self.options.factor(self.steps)
        self.steps += 1
        return found

    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Loss, needs: frozenset[str] = frozenset()) -> dict[str, float]:
        """Return the loss and what goes with it, without a step."""
        sums: dict[str, float] = defaultdict(float)
        self._set_training(False)
        for pack in self.processes.deal(batch.packs):
            for name, metric in self._loss(pack, batch, loss, needs)[1].items():
                sums[name] += metric
        return self.processes.total(sums)

    def _loss(
        self, pack: Pack, batch: Batch, loss: Loss, needs: frozenset[str]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the pack's part of the step's loss and metrics; 0 and none for a pack without rows."""
        trained = self._trained(pack, batch, needs)
        if not len(pack.rows):
            outputs = (trained.logprobs, trained.values, trained.scores)
            return torch.stack([each.sum() for each in outputs if each is not None]).sum() * 0.0, {}
        value, metrics = loss(trained)
        metrics["loss"] = float(value.detach())
        if torch.is_grad_enabled() and "scores" not in needs:  # a scorer has no distribution
            metrics["entropy"] = float(trained.entropy.detach().sum()) / batch.tokens
        return value, metrics

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

    def _outputs(
        self, pack: Pack, logprobs: bool, places: np.ndarray | None, values_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropies of the trained tokens, if asked, and what the head says at these places of the
        tree."""
        nothing = torch.zeros(0, device=self.causal.device)

        def scalars(states: torch.Tensor) -> torch.Tensor:
            assert self.head is not None and places is not None, (
                "the objective needs values or scores: no head"
            )
            return self.head(states.index_select(0, *self._on_device(places)))

        def policy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not values_only):
                states = self.states(pack)
                found, entropy = self.logprobs(pack, states=states) if logprobs else (nothing, nothing)
            return found, entropy, None if places is None or self.critic is not None else scalars(states)

        if self.critic is None:
            return self.processes.run(self.model, policy)
        found, entropy, _ = self.processes.run(self.model, policy) if logprobs else (nothing, nothing, None)
        if places is None:
            return found, entropy, None
        critic = causal_model(self.critic)
        return found, entropy, self.processes.run(self.critic, lambda: scalars(self.states(pack, critic)))

    def _trained(self, pack: Pack, batch: Batch, needs: frozenset[str]) -> Trained:
        scored, valued = "scores" in needs, "values" in needs
        places = pack.place if scored else pack.source if valued else None
        logprobs, entropy, scalars = self._outputs(pack, not scored, places, batch.values_only)
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
            values=scalars if valued else None, scores=scalars if scored else None,
        )  # fmt: skip

    def _on_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.causal.device) for array in arrays]

    def _reference_logprobs(self, pack: Pack) -> np.ndarray:
        model = self.model if self.reference is None else self.reference
        assert self.reference is not None or model is not self.causal, (
            "no reference model: neither a frozen copy nor an adapter"
        )
        model.eval()
        with model.disable_adapter() if self.reference is None else contextlib.nullcontext():
            return (
                self.processes.run(model, lambda: self.logprobs(pack, causal_model(model))[0]).cpu().numpy()
            )

    def _step(self) -> float:
        # A separate critic has a limit of its own: its errors, which are large at first, must not slow the policy.
        parts = [self._policy_weights, self._critic_weights] if self.critic else [self._weights.masters]
        limit = self.options.max_grad_norm
        norms = (self.processes.whole(torch.nn.utils.clip_grad_norm_(part, limit)) for part in parts)
        norm = math.hypot(*(float(each) for each in norms))
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


def frozen_digest(model: torch.nn.Module) -> str:
    """Return a digest of the weights that are not trained: an adapter fits only the base it was trained on."""
    digest = hashlib.blake2b(digest_size=8)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            digest.update(name.encode())
            digest.update(param.detach().flatten()[:SAMPLED].float().cpu().numpy().tobytes())
    return digest.hexdigest()
