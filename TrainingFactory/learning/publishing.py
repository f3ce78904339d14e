"""The policy's weights as folders that engines elsewhere load: one per version, in shared memory where it has room.

An adapter that vLLM can take goes as it is, over a base that is written once. Where anything else is trained beside it
(embeddings, whole modules, DoRA) the weights are merged, from the pristine base into new tensors, never in place."""

from __future__ import annotations

import copy
import itertools
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import save_file

from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.step import StepOptions, score_rows
from TrainingFactory.models.saved import WEIGHTS, as_saved
from TrainingFactory.types import Sample, Weights

KEPT = 2  # versions: the one that all engines have, and the one that they are loading
CANARY = 24  # tokens
SHARED_MEMORY = Path("/dev/shm")


class Publisher:
    """Writes versions of a learner's weights. `model_folder` is what an `EngineSpec` names: the model's config, and
    under adapters its base; `dtype` is its number format; `rank` is that of an adapter, None where full weights are
    published. Without `adapters` they always are."""

    def __init__(self, learner: Learner, adapters: bool = True) -> None:
        self._learner, self._causal = learner, learner.causal
        if getattr(self._causal, "is_quantized", False):  # foreign object
            text = (
                "engines in other processes need whole weights: leave it out, or take sampling.engine: native"
            )
            raise ValueError(f"model.quantization: {text} and no Ray")
        size = sum(param.numel() * param.element_size() for param in self._causal.parameters())
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > (KEPT + 1) * size
        self._home = Path(tempfile.mkdtemp(prefix="tfactory-weights-", dir=SHARED_MEMORY if roomy else None))
        # Removes the folder when this process is gone, however it ended: memory would be lost until the next start.
        guard = ["sh", "-c", 'cat >/dev/null; rm -rf "$1"', "sh", str(self._home)]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        with torch.device("meta"):
            self._bones = type(self._causal)(copy.deepcopy(self._causal.config))
        config = self._bones.config
        config.architectures, config.dtype = [type(self._causal).__name__], self._causal.dtype
        self.dtype, self.model_folder = str(config.dtype).removeprefix("torch."), str(self._home / "model")
        config.save_pretrained(self.model_folder)
        self.rank = _adapter_rank(learner.model) if adapters else None
        if self.rank is not None:
            self._write(self._home / "model", merged=False)
        rng, vocabulary = random.Random(0), config.get_text_config().vocab_size
        self._canary = tuple(rng.randrange(vocabulary) for _ in range(CANARY))
        self._numbers, self._kept = itertools.count(), list[Path]()

    def publish(self, version: int) -> Weights:
        """Write the weights as they are now, and return where, with the log-probs that they give."""
        part, where = self._home / ".part", self._home / f"{next(self._numbers):06d}-version-{version}"
        try:
            if self.rank is None:
                self._write(part, merged=True)
            else:
                self._learner.model.save_pretrained(part, save_embedding_layers=False)
            part.rename(where)
        except (OSError, SafetensorError) as error:
            raise OSError(f"the weights could not be written to {self._home}: {error}") from error
        self._kept.append(where)
        while len(self._kept) > KEPT:
            shutil.rmtree(self._kept.pop(0))
        kind, base = ("full", "") if self.rank is None else ("adapter", self.model_folder)
        return Weights(version, str(where), kind, base, (self._canary, self._score()))

    def close(self) -> None:
        """Remove everything; again does nothing."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _write(self, folder: Path, merged: bool) -> None:
        self._bones.config.save_pretrained(folder)
        with torch.no_grad():
            weights = as_saved(self._bones, dict(_weights(self._causal, self._bones, merged)))
            save_file({name: weight.cpu().contiguous() for name, weight in weights.items()}, folder / WEIGHTS)

    def _score(self) -> tuple[float, ...]:
        """Return the learner's log-probs of the canary at temperature 1; it stays as it is."""
        learner, zeros = self._learner, [0.0] * CANARY
        training, temperature = learner.model.training, learner.temperature
        mask = [False] + [True] * (CANARY - 1)
        row = Sample(list(self._canary), mask, zeros, zeros, zeros, [0] * CANARY)
        learner.temperature = 1.0
        try:
            return tuple(score_rows(learner, [row], StepOptions())[0][1:])
        finally:
            learner.temperature = temperature
            learner._set_training(training)


def _adapter_rank(model: Any) -> int | None:
    """Return the rank of an adapter that vLLM can take; None where there is none, or more than matrices of inner
    layers is trained."""
    if not isinstance(model, PeftModel):
        return None
    config: Any = model.active_peft_config
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    plain = all(re.search(r"\.lora_[AB]\.", name) and "lm_head" not in name for name in trained)
    odd = config.use_dora or config.bias != "none" or isinstance(config.init_lora_weights, str)
    odd = odd or bool(config.modules_to_save)  # also where they are frozen
    return max([config.r, *config.rank_pattern.values()]) if plain and not odd else None


def _weights(causal: Any, bones: Any, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under the names that they have without PEFT, with the adapter or without, in the model's
    number format. What PEFT puts around modules that are trained as a whole answers for them itself."""
    for name in bones.state_dict():
        path, _, leaf = name.rpartition(".")
        module = causal.get_submodule(path)
        if isinstance(module, BaseTunerLayer):
            if merged:
                module = copy.deepcopy(module)
                module.merge()
            module = module.get_base_layer()
        weight = getattr(module, leaf).detach()
        yield name, weight.to(causal.dtype) if weight.is_floating_point() else weight
