"""The native engine as an `Engine` in another process than the learner's, with its own copy of the model."""

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
from TrainingFactory.models.dtypes import pick_device, pick_dtype
from TrainingFactory.models.loading_errors import LOADING_ERRORS
from TrainingFactory.models.saved import WEIGHTS_FILE, check_weights, read_checkpoint_shapes
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.native import NativeSession
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Completion, EngineSpec, SamplingParams, Weights


class NativeHost:
    """Engine that loads the model of a spec and samples from it. It keeps sampling sessions by number, so that a turn
    prefills only its new tokens. If there are more than twice as many sessions as slots, the least recently used ones
    are closed."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._needs_weights = spec, spec.pushed
        self._sessions: dict[int, NativeSession] = {}
        self._new_model: Any = None  # a model with the new weights, during `load`

    async def start(self) -> dict[str, Any]:
        spec = self._spec
        try:
            self._model = await in_thread(self._make_model)
        except LOADING_ERRORS as error:
            raise ValueError(f"Cannot load the model {spec.model!r}: {error}") from error
        cache_bytes = None if spec.cache_gib is None else int(spec.cache_gib * 2**30)
        self._engine = NativeEngine(
            self._model, slots=spec.slots, max_length=spec.max_length, source=self, cache_bytes=cache_bytes
        )
        versions = {"TrainingFactory": __version__, "torch": torch.__version__}
        return {"pid": os.getpid(), "node": platform.node(), "versions": versions}

    def _make_model(self) -> Any:
        spec = self._spec
        trust_options: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
        if not spec.pushed:
            return load_model(spec.model, dtype=spec.dtype, device=spec.device, **trust_options).model
        device = pick_device(spec.device)
        dtype = pick_dtype(spec.dtype, device)
        config = transformers.AutoConfig.from_pretrained(spec.model, **trust_options)
        self._checkpoint_shapes = read_checkpoint_shapes(spec.model, spec.trust_remote_code)
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **trust_options).eval()

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion:
        if self._needs_weights:
            raise ValueError("The engine has no weights yet: call `load` before `sample`")
        if session < 0:
            return await self._engine.sample(prompt_ids, params)
        native_session = self._sessions.pop(session, None) or self._engine.session()
        try:
            return await native_session.sample(prompt_ids, params)
        finally:
            self._sessions[session] = native_session
            while len(self._sessions) > 2 * self._spec.slots:
                self._sessions.pop(next(iter(self._sessions))).close()

    async def load(self, weights: Weights) -> None:
        if weights.kind != "full":
            raise ValueError("The native engine in another process loads full weights, not adapters")
        self._new_model = await in_thread(self._load_model, Path(weights.folder) / WEIGHTS_FILE)
        await self._engine.update(Weights(weights.version))  # between turns, copies from `parameters`
        self._new_model, self._needs_weights = None, False

    def _load_model(self, path: Path) -> Any:
        check_weights(path, self._checkpoint_shapes)
        # `from_pretrained` maps names in the file to names of modules, which may differ.
        model_class = type(self._model)
        return model_class.from_pretrained(None, config=self._model.config, state_dict=load_file(path))

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return the new weights, which the engine copies into its model."""
        return self._new_model.parameters()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await in_thread(self._score, list(token_ids))

    @torch.no_grad()
    def _score(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor([token_ids], device=self._model.device)
        logprobs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    async def close(self) -> None:
        await self._engine.close()
