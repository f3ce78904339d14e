"""The native engine as an `Engine`: over a model of its own, in another process than the learner's."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from TrainingFactory import __version__
from TrainingFactory.models import load_model
from TrainingFactory.models.loading import LOADING, pick_device, pick_dtype
from TrainingFactory.models.saved import WEIGHTS, check_weights, saved_shapes
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.native import NativeSession
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Completion, EngineSpec, SamplingParams, Weights


class NativeHost:
    """Samples from a model that is made from a spec. Sessions are kept by their number, so that a turn feeds only what
    is new; those that were not used for longest go when there are many."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._empty = spec, spec.pushed
        self._sessions: dict[int, NativeSession] = {}
        self._read: Any = None  # the model with the weights that are being loaded

    async def start(self) -> dict[str, Any]:
        spec = self._spec
        try:
            self._model = await in_thread(self._make)
        except LOADING as error:
            raise ValueError(f"the model {spec.model!r} cannot be loaded: {error}") from error
        self._engine = NativeEngine(self._model, slots=spec.slots, max_length=spec.max_length, source=self)
        versions = {"TrainingFactory": __version__, "torch": torch.__version__}
        return {"pid": os.getpid(), "node": platform.node(), "versions": versions}

    def _make(self) -> Any:
        spec = self._spec
        trust: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
        if not spec.pushed:
            return load_model(spec.model, dtype=spec.dtype, device=spec.device, **trust).model
        place, auto = pick_device(spec.device), transformers.AutoModelForCausalLM
        config = transformers.AutoConfig.from_pretrained(spec.model, **trust)
        self._shapes = saved_shapes(spec.model, spec.trust_remote_code)
        with torch.device(place):
            return auto.from_config(config, dtype=pick_dtype(spec.dtype, place), **trust).eval()

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion:
        if self._empty:
            raise ValueError("the engine has no weights yet: they are pushed before it samples")
        if session < 0:
            return await self._engine.sample(prompt_ids, params)
        held = self._sessions.pop(session, None) or self._engine.session()
        try:
            return await held.sample(prompt_ids, params)
        finally:
            self._sessions[session] = held
            while len(self._sessions) > 2 * self._spec.slots:
                self._sessions.pop(next(iter(self._sessions))).close()

    async def load(self, weights: Weights) -> None:
        if weights.kind != "full":
            raise ValueError("the native engine in another process takes full weights, not an adapter")
        self._read = await in_thread(self._reading, Path(weights.where) / WEIGHTS)
        await self._engine.update(Weights(weights.version))  # between turns, by `parameters`
        self._read, self._empty = None, False

    def _reading(self, file: Path) -> Any:
        check_weights(file, self._shapes)
        # Names in files may differ from those of modules: transformers knows.
        given = {"config": self._model.config, "state_dict": load_file(file)}
        return type(self._model).from_pretrained(None, **given)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return what the engine copies into its own when its weights change."""
        return self._read.parameters()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await in_thread(self._score, list(token_ids))

    @torch.no_grad()
    def _score(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], device=self._model.device)
        every = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return every.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    async def close(self) -> None:
        await self._engine.close()
