"""Comparison of the expert choices of sampling and of training, for the same tokens under the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from TrainingFactory.common.event_loop import OneThread
from TrainingFactory.data.packing import Pack, make_batch
from TrainingFactory.learning.forward import get_causal_lm
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.policy import LocalPolicy
from TrainingFactory.learning.routers import Routing, find_routers, measure_changed_routes
from TrainingFactory.protocols import Sampler
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Sample, SamplingParams

MAX_CHECKED_TOKENS = 256  # of a row, whose routes are compared


class RouterCheck:
    """Check that measures `router_mismatch` before every `interval`-th update: the share of pairs of a token and a
    layer of the step's first row whose experts differ between the engine's forward pass and the learner's."""

    def __init__(self, engine: NativeEngine, policy: LocalPolicy, interval: int) -> None:
        if policy.learner.routers is None:
            raise ValueError(
                f"training.router_check_every is {interval}, but the model has no experts. Remove the option"
            )
        self._engine, self._policy, self._interval = engine, policy, interval

    async def measure(self, rows: Sequence[Sample], step: int) -> dict[str, float]:
        if step % self._interval or not rows:
            return {}
        mismatch = await measure_router_mismatch(
            self._engine, self._policy.learner, rows[0], self._policy.thread
        )
        return {} if mismatch is None else {"router_mismatch": mismatch}


def make_router_check(sampler: Sampler, policy: LocalPolicy, interval: int) -> RouterCheck:
    assert isinstance(sampler, NativeEngine)  # by `check_config`
    return RouterCheck(sampler, policy, interval)


async def measure_router_mismatch(
    engine: NativeEngine, learner: Learner, row: Sample, thread: OneThread | None = None
) -> float | None:
    """Return the share of (token, layer) pairs whose experts differ between the engine's forward pass over the
    beginning of a row and the learner's; None if the model has no experts. The learner runs on `thread` if given. Call
    this before an update, while the engine samples nothing else."""
    if learner.routers is None:
        return None
    # Another first token, so that nothing is in the engine's cache.
    tokens = [row.token_ids[-1], *row.token_ids][:MAX_CHECKED_TOKENS]
    engine_routers = find_routers(get_causal_lm(engine.model), 0.0)
    assert engine_routers is not None
    with engine_routers.record_routing() as routing:
        await engine.sample(tokens, SamplingParams(max_tokens=1))
    routing.experts = routing.experts[: len(engine_routers.layers)]  # without steps after the prompt
    zeros = [0.0] * len(tokens)
    probe = Sample(tokens, [False] + [True] * (len(tokens) - 1), zeros, zeros, zeros, [0] * len(tokens))
    (pack,) = make_batch([probe], sharing=learner.sharing).packs
    if thread is None:
        learner_routing = _record_learner_routing(learner, pack)
    else:
        learner_routing = await thread.call(_record_learner_routing, learner, pack)
    return measure_changed_routes(routing, learner_routing, len(tokens))


@torch.no_grad()
def _record_learner_routing(learner: Learner, pack: Pack) -> Routing:
    assert learner.routers is not None
    learner.model.eval()
    with learner.routers.record_routing() as routing:
        learner.compute_states(pack)
    return routing
