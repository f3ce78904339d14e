"""Publishing of the policy's weights to engines in other processes: one folder per version, if possible in /dev/shm.

An adapter that vLLM supports is published as it is, over a base that is written once. If anything else is trained too
(embeddings, whole modules, DoRA), full weights are published, merged from the base into new tensors, never in place."""

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
from TrainingFactory.models.saved import WEIGHTS_FILE, to_checkpoint_names
from TrainingFactory.types import Sample, Weights

KEPT_VERSIONS = 2  # versions: the one that all engines have, and the one that they are loading
CANARY_TOKENS = 24  # tokens whose log-probs verify that an engine has the published weights
SHARED_MEMORY = Path("/dev/shm")


class Publisher:
    """Writes versions of a learner's weights. `model_folder` is the `EngineSpec.model`: the model's config, and for
    adapters the base weights. `adapter_rank` is the rank of the published LoRA adapter; None: full weights. Without
    `publish_adapters`, full weights are always published."""

    def __init__(self, learner: Learner, publish_adapters: bool = True) -> None:
        self._learner, self._causal_lm = learner, learner.causal_lm
        if getattr(self._causal_lm, "is_quantized", False):  # third-party object
            raise ValueError(
                "model.quantization is not supported for engines in other processes, which load unquantized weights. "
                "Remove it, or use sampling.engine=native without Ray"
            )
        model_bytes = sum(param.numel() * param.element_size() for param in self._causal_lm.parameters())
        fits_in_memory = (
            SHARED_MEMORY.is_dir()
            and shutil.disk_usage(SHARED_MEMORY).free > (KEPT_VERSIONS + 1) * model_bytes
        )
        self._is_writer, temp_folder, self._cleanup = learner.processes.rank == 0, "", None
        if self._is_writer:
            temp_folder = tempfile.mkdtemp(
                prefix="tfactory-weights-", dir=SHARED_MEMORY if fits_in_memory else None
            )
            # Removes the folder when this process has ended, even by a kill: shared memory would leak until a reboot.
            command = ["sh", "-c", 'cat >/dev/null; rm -rf "$1"', "sh", temp_folder]
            self._cleanup = subprocess.Popen(command, stdin=subprocess.PIPE, env={}, start_new_session=True)
        self._root_folder = Path(learner.processes.broadcast_text(temp_folder))
        with torch.device("meta"):
            self._meta_model = type(self._causal_lm)(copy.deepcopy(self._causal_lm.config))
        config = self._meta_model.config
        config.architectures, config.dtype = [type(self._causal_lm).__name__], learner.dtype
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.model_folder = str(self._root_folder / "model")
        self.adapter_rank = _get_adapter_rank(learner.model) if publish_adapters else None
        if self.adapter_rank is not None:
            self._write_weights(self._root_folder / "model", merged=False)
        elif self._is_writer:
            config.save_pretrained(self.model_folder)
        rng, vocab_size = random.Random(0), config.get_text_config().vocab_size
        self._canary_ids = tuple(rng.randrange(vocab_size) for _ in range(CANARY_TOKENS))
        self._folder_numbers, self._published_folders = itertools.count(), list[Path]()

    def publish(self, version: int) -> Weights:
        """Write the current weights on rank 0. Return their folder and version, and their log-probs of the canary, a
        fixed token sequence with which the fleet verifies its engines."""
        version_folder = self._root_folder / f"{next(self._folder_numbers):06d}-version-{version}"
        if self.adapter_rank is None:
            self._write_weights(version_folder, merged=True)
        else:
            model = self._learner.model
            weights = self._learner.processes.gather_state(model, self._learner.dtype)
            options = {"state_dict": weights, "save_embedding_layers": False}
            self._write_folder(version_folder, lambda folder: model.save_pretrained(folder, **options))
        self._published_folders.append(version_folder)
        while len(self._published_folders) > KEPT_VERSIONS:
            old_folder = self._published_folders.pop(0)
            if self._is_writer:
                shutil.rmtree(old_folder)
        kind, base = ("full", "") if self.adapter_rank is None else ("adapter", self.model_folder)
        return Weights(version, str(version_folder), kind, base, (self._canary_ids, self._score_canary()))

    def close(self) -> None:
        """Remove all published folders. Further calls do nothing."""
        if self._cleanup is not None:
            assert self._cleanup.stdin is not None
            self._cleanup.stdin.close()
            self._cleanup.wait()

    def _write_weights(self, folder: Path, merged: bool) -> None:
        weights: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, weight in _gather_weights(
                self._learner, self._meta_model, merged
            ):  # gathered one by one
                if self._is_writer:
                    weights[name] = weight.cpu()

        def write_files(folder: Path) -> None:
            self._meta_model.config.save_pretrained(folder)
            renamed = to_checkpoint_names(self._meta_model, weights)
            save_file({name: weight.contiguous() for name, weight in renamed.items()}, folder / WEIGHTS_FILE)

        self._write_folder(folder, write_files)

    def _write_folder(self, folder: Path, write_files: Callable[[Path], object]) -> None:
        """Write to a temporary folder and rename it, on rank 0. On failure raise OSError on all ranks."""
        partial_folder, error_text = self._root_folder / ".part", ""
        try:
            if self._is_writer:
                write_files(partial_folder)
                partial_folder.rename(folder)
        except (OSError, SafetensorError) as error:
            error_text = str(error)
        if error_text := self._learner.processes.broadcast_text(error_text):
            raise OSError(f"Could not write the weights to {self._root_folder}: {error_text}")

    def _score_canary(self) -> tuple[float, ...]:
        """Return the learner's log-probs of the canary at temperature 1, and restore the learner's settings."""
        learner, zeros = self._learner, [0.0] * CANARY_TOKENS
        was_training, temperature = learner.model.training, learner.temperature
        loss_mask = [False] + [True] * (CANARY_TOKENS - 1)
        row = Sample(list(self._canary_ids), loss_mask, zeros, zeros, zeros, [0] * CANARY_TOKENS)
        learner.temperature = 1.0
        try:
            return tuple(score_rows(learner, [row], StepOptions())[0][1:])
        finally:
            learner.temperature = temperature
            learner._set_training(was_training)


def _get_adapter_rank(model: Any) -> int | None:
    """Return the rank of an adapter that vLLM supports (LoRA matrices of inner layers only), else None."""
    if not isinstance(model, PeftModel):
        return None
    config: Any = model.active_peft_config
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    is_lora_only = all(re.search(r"\.lora_[AB]\.", name) and "lm_head" not in name for name in names)
    is_unsupported = config.use_dora or config.bias != "none" or isinstance(config.init_lora_weights, str)
    is_unsupported = is_unsupported or bool(config.modules_to_save)  # even frozen ones
    is_unsupported = is_unsupported or bool(config.target_parameters)  # experts and routers
    return max([config.r, *config.rank_pattern.values()]) if is_lora_only and not is_unsupported else None


def _gather_weights(learner: Learner, meta_model: Any, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under the names that they have without PEFT, in the model's dtype; with `merged`, the adapter
    is merged into them. PEFT's wrapper around fully trained modules needs no special case, because it forwards
    attribute access to them."""
    gather = learner.processes.gather
    for name in meta_model.state_dict():
        module_path, _, weight_name = name.rpartition(".")
        module = learner.causal_lm.get_submodule(module_path)
        if isinstance(module, BaseTunerLayer):
            if merged:
                params = {
                    id(param): torch.nn.Parameter(gather(param.detach()).clone())
                    for param in module.parameters()
                }
                module = copy.deepcopy(module, params)
                layer: Any = module
                while layer is not module.get_base_layer():  # two weights of experts have nested adapters
                    layer.merge()
                    layer = layer.base_layer
            module = module.get_base_layer()
        weight = gather(getattr(module, weight_name).detach())
        yield name, weight.to(learner.dtype) if weight.is_floating_point() else weight
