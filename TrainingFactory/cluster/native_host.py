"""The native engine as an `Engine`: over a model of its own, in another process than the learner's."""

from __future__ import annotations

import asyncio
import os
import platform
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
    is new; those of episodes that have ended go when there are many."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._sessions: OrderedDict[int, NativeSession] = OrderedDict()
        self._loading = asyncio.Lock()
        self._running = 0
        self._idle = asyncio.Event()
        self._empty = spec.pushed
        self._shapes: dict[str, tuple[int, ...]] = {}

    async def start(self) -> dict[str, Any]:
        try:
            self._model = await in_thread(self._make)
        except LOADING as error:
            raise ValueError(f"the model {self._spec.model!r} cannot be loaded: {error}") from error
        self._engine = NativeEngine(self._model, slots=self._spec.slots, max_length=self._spec.max_length)
        versions = {"TrainingFactory": __version__, "torch": torch.__version__}
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        return {
            "pid": os.getpid(), "node": platform.node(), "versions": versions, "vocabulary": vocabulary,
        }  # fmt: skip

    def _make(self) -> Any:
        spec = self._spec
        if not spec.pushed:
            return load_model(
                spec.model, dtype=spec.dtype, device=spec.device, trust_remote_code=spec.trust_remote_code
            ).model
        kind, place = self._kinds()
        with torch.device(place):
            model = transformers.AutoModelForCausalLM.from_config(
                self._config(), dtype=kind, trust_remote_code=spec.trust_remote_code
            )
        return model.eval()

    def _kinds(self) -> tuple[torch.dtype, torch.device]:
        place = pick_device(self._spec.device)
        return pick_dtype(self._spec.dtype, place), place

    def _config(self) -> Any:
        trust = self._spec.trust_remote_code
        return transformers.AutoConfig.from_pretrained(self._spec.model, trust_remote_code=trust)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion:
        if self._empty:
            raise ValueError("the engine has no weights yet: they are pushed before it samples")
        async with self._turn():
            if session < 0:
                return await self._engine.sample(prompt_ids, params)
            held = self._sessions.pop(session, None) or self._engine.session()
            try:
                return await held.sample(prompt_ids, params)
            finally:
                self._sessions[session] = held  # the last one is the one used last
                while len(self._sessions) > 2 * self._spec.slots:
                    self._sessions.popitem(last=False)[1].close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait while weights are loaded, and make those who load them wait."""
        async with self._loading:
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def load(self, weights: Weights) -> None:
        if weights.kind != "full":
            raise ValueError("the native engine in another process takes full weights, not an adapter")
        async with self._loading:
            self._idle.clear()
            if self._running:
                await self._idle.wait()
            await in_thread(self._copy, Path(weights.where))
            await self._engine.update(Weights(weights.version))
            self._empty = False

    def _copy(self, folder: Path) -> None:
        """Read a folder's weights into the model. Its names may differ from those of modules: transformers knows."""
        self._shapes = self._shapes or saved_shapes(self._spec.model, self._spec.trust_remote_code)
        check_weights(folder / WEIGHTS, self._shapes)
        weights = load_file(folder / WEIGHTS)
        read = type(self._model).from_pretrained(None, config=self._model.config, state_dict=weights)
        self._model.load_state_dict(read.state_dict())

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await in_thread(self._score, list(token_ids))

    @torch.no_grad()
    def _score(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], device=self._model.device)
        every = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return every.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    async def close(self) -> None:
        await self._engine.close()
