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
from collections.abc import Callable, Iterator
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
        self._first, made, self._guard = learner.processes.rank == 0, "", None
        if self._first:
            made = tempfile.mkdtemp(prefix="tfactory-weights-", dir=SHARED_MEMORY if roomy else None)
            # Removes it when this process is gone, however it ended: memory would be lost until the next start.
            guard = ["sh", "-c", 'cat >/dev/null; rm -rf "$1"', "sh", made]
            self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, env={}, start_new_session=True)
        self._home = Path(learner.processes.agree(made))
        with torch.device("meta"):
            self._bones = type(self._causal)(copy.deepcopy(self._causal.config))
        config = self._bones.config
        config.architectures, config.dtype = [type(self._causal).__name__], learner.dtype
        self.dtype, self.model_folder = str(config.dtype).removeprefix("torch."), str(self._home / "model")
        self.rank = _adapter_rank(learner.model) if adapters else None
        if self.rank is not None:
            self._write(self._home / "model", merged=False)
        elif self._first:
            config.save_pretrained(self.model_folder)
        rng, vocabulary = random.Random(0), config.get_text_config().vocab_size
        self._canary = tuple(rng.randrange(vocabulary) for _ in range(CANARY))
        self._numbers, self._kept = itertools.count(), list[Path]()

    def publish(self, version: int) -> Weights:
        """Write the weights as they are now, and return where, with the log-probs that they give. Of several processes
        the first writes."""
        where = self._home / f"{next(self._numbers):06d}-version-{version}"
        if self.rank is None:
            self._write(where, merged=True)
        else:
            model, given = self._learner.model, {"save_embedding_layers": False}
            weights = self._learner.processes.state_of(model, self._learner.dtype)
            self._into(where, lambda part: model.save_pretrained(part, state_dict=weights, **given))
        self._kept.append(where)
        while len(self._kept) > KEPT:
            old = self._kept.pop(0)
            if self._first:
                shutil.rmtree(old)
        kind, base = ("full", "") if self.rank is None else ("adapter", self.model_folder)
        return Weights(version, str(where), kind, base, (self._canary, self._score()))

    def close(self) -> None:
        """Remove everything; again does nothing."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()

    def _write(self, folder: Path, merged: bool) -> None:
        weights: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, weight in _weights(self._learner, self._bones, merged):  # one by one
                if self._first:
                    weights[name] = weight.cpu()

        def write(part: Path) -> None:
            self._bones.config.save_pretrained(part)
            saved = as_saved(self._bones, weights)
            save_file({name: weight.contiguous() for name, weight in saved.items()}, part / WEIGHTS)

        self._into(folder, write)

    def _into(self, folder: Path, write: Callable[[Path], object]) -> None:
        """Write a folder aside and rename it, in the first process; in all of them raise OSError where that fails."""
        failed, part = "", self._home / ".part"
        try:
            if self._first:
                write(part)
                part.rename(folder)
        except (OSError, SafetensorError) as error:
            failed = str(error)
        if failed := self._learner.processes.agree(failed):
            raise OSError(f"the weights could not be written to {self._home}: {failed}")

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


def _weights(learner: Learner, bones: Any, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under the names that they have without PEFT, with the adapter or without, in the model's
    number format. What PEFT puts around modules that are trained as a whole answers for them itself."""
    whole = learner.processes.whole
    for name in bones.state_dict():
        path, _, leaf = name.rpartition(".")
        module = learner.causal.get_submodule(path)
        if isinstance(module, BaseTunerLayer):
            if merged:
                params = {
                    id(each): torch.nn.Parameter(whole(each.detach()).clone()) for each in module.parameters()
                }
                module = copy.deepcopy(module, params)
                module.merge()
            module = module.get_base_layer()
        weight = whole(getattr(module, leaf).detach())
        yield name, weight.to(learner.dtype) if weight.is_floating_point() else weight
