"""vLLM as an `Engine`: token ids in, token ids and log-probs out, weights pushed into it while it runs.

The engine rejects or avoids what would crash vLLM or silently give wrong results: ids outside the vocabulary, seeded
prompts in chunks, requests with and without an adapter at the same time, weights of another model. `ValueError` means
that one call was invalid; any other error means that the engine is unusable."""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from TrainingFactory import __version__
from TrainingFactory.types import Completion, EngineSpec, SamplingParams, Weights

# Environment variables of vLLM's processes, unless the user has set them.
ENVIRONMENT_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its log-probs cannot be changed to those of the full softmax
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all engines of a machine would use the same cores
}
SEED_STRIDE = 0x9E3779B97F4A7C15  # seed offset per prompt token: requests of one turn draw different numbers
GPU_MEMORY_SHARE = 0.5  # fraction of a GPU's memory, because the learner may use the same GPU
CPU_CACHE_BYTES = 2 * 2**30  # bytes for keys and values on a CPU
ADAPTER = "adapter_model.safetensors"
SUPPORTED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # LoRA ranks that vLLM supports


def make_lora_options(rank: int) -> dict[str, Any]:
    """Return vLLM's engine arguments for LoRA adapters of this rank. Two versions of the adapter may be loaded at the
    same time."""
    max_rank = next((supported_rank for supported_rank in SUPPORTED_RANKS if supported_rank >= rank), None)
    if max_rank is None:
        raise ValueError(f"lora.r is {rank}, but vLLM supports at most {SUPPORTED_RANKS[-1]}. Lower lora.r")
    # Eight in CPU memory, because running turns may use older versions whose folders are deleted.
    return {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": max_rank}


class VllmEngine:
    """A vLLM engine, whose core runs in a child process."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._lora = spec, bool(spec.options.get("enable_lora"))
        self._llm: Any = None
        self._policy_version = 0
        self._request_ids = itertools.count(1)
        self._unusable_reason = ""  # why the engine cannot sample; "": it can
        self._shapes: Any = None  # of the model's weights, read at the first push
        self._adapter: Any = None  # LoRA request of the current adapter
        self._adapter_shapes: Any = None
        self._base_folder = "" if spec.pushed else spec.model  # folder of the base weights of adapters
        self._load_lock = asyncio.Lock()

    async def start(self) -> dict[str, Any]:
        os.environ |= {name: value for name, value in ENVIRONMENT_DEFAULTS.items() if name not in os.environ}
        if (device := self._spec.device).startswith("cuda:"):
            gpu_index, visible = int(device.removeprefix("cuda:")), os.environ.get("CUDA_VISIBLE_DEVICES", "")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu_index] if visible else str(gpu_index)
        try:
            from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"sampling.engine is vllm, which needs: pip install 'training-factory[vllm]' ({error})"
            ) from error
        self._llm = AsyncLLM.from_engine_args(make_engine_arguments(self._spec))
        self._vocab_size = int(self._llm.model_config.get_vocab_size())
        self._reports_versions = hasattr(self._llm, "update_weight_version")  # not in earlier releases
        await self._llm.collective_rpc("tfactory_full_logprobs")
        await self._set_version(0)
        await self._sample_turn([0], SamplingParams(max_tokens=1))  # warm-up: the first request compiles
        if self._spec.pushed:
            self._unusable_reason = "has no weights yet: push weights before sampling"
        versions = {name: metadata.version(name) for name in ("torch", "transformers")}
        versions |= {"TrainingFactory": __version__, "python": platform.python_version()}
        versions["vllm"] = import_module("vllm").__version__  # its package has several names
        process_info = {"pid": os.getpid(), "node": platform.node(), "vocabulary": self._vocab_size}
        return {**process_info, "versions": versions}

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion:
        self._check_length(prompt_ids)
        if self._lora or not self._reports_versions:  # a turn has only one version: wait for a running load
            async with self._load_lock:
                pass
        if self._unusable_reason:
            raise RuntimeError(f"the engine {self._unusable_reason}")
        return await self._sample_turn(prompt_ids, params)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams as Params  # pyright: ignore[reportMissingImports]

        self._check_length(token_ids)
        params = Params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        output = await self._request_output(token_ids, params)
        token_logprobs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [float(logprobs[token].logprob) for token, logprobs in token_logprobs]

    async def load(self, weights: Weights) -> None:
        async with self._load_lock:
            if weights.kind == "adapter":
                await self._load_adapter(weights)
            else:
                await self._load_full(weights)

    async def close(self) -> None:
        if self._llm is not None:
            self._unusable_reason = "is closed"
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)

    # -- requests

    def _check_length(self, token_ids: Sequence[int]) -> None:
        num_tokens, max_tokens = len(token_ids), self._spec.max_length - 1
        if not num_tokens:
            raise ValueError("the prompt is empty; it needs at least one token")
        if num_tokens > max_tokens:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, but max_length={max_tokens + 1} allows at most {max_tokens}"
            )
        if invalid := [token for token in token_ids if not 0 <= token < self._vocab_size]:
            raise ValueError(f"token id {invalid[0]} is not in the model's vocabulary of {self._vocab_size}")

    async def _sample_turn(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        from vllm import SamplingParams as Params  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        max_tokens = min(params.max_tokens, self._spec.max_length - len(prompt_ids))
        vllm_params = Params(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p,
            seed=(params.seed + SEED_STRIDE * len(prompt_ids)) % 2**63, max_tokens=max_tokens,
            stop_token_ids=list(params.stop_ids), ignore_eos=True,  # only the caller's stop ids end a turn
            logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        version, has_adapter = self._policy_version, self._adapter is not None
        output = (await self._request_output(prompt_ids, vllm_params)).outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request by itself: {output.finish_reason}")
        tokens = list(output.token_ids)
        token_logprobs = zip(tokens, output.logprobs, strict=True)
        logprobs = [float(candidates[token].logprob) for token, candidates in token_logprobs]
        # Turns with an adapter keep the version that they started with.
        spans = output.weight_versions if self._reports_versions and not has_adapter else ()
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)] or [version]
        has_new_version = len(set(versions)) > 1
        return Completion(
            tokens, logprobs, output.finish_reason, versions[0], versions if has_new_version else None
        )

    async def _request_output(self, token_ids: Sequence[int], params: Any) -> Any:
        """Return vLLM's last output of a request with the current adapter. Cancelling aborts the request."""
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": str(self._policy_version)}
        name, adapter, final_output = f"r{next(self._request_ids)}", self._adapter, None
        try:
            async for output in self._llm.generate(prompt, params, request_id=name, lora_request=adapter):
                final_output = output
        except EngineDeadError as error:
            raise RuntimeError(f"vLLM's engine core has died: {error}") from error
        except Exception as error:
            if type(error).__name__ == "VLLMValidationError":  # since 0.32, which is not a ValueError
                raise ValueError(str(error)) from error
            raise
        assert final_output is not None
        return final_output

    # -- weights

    async def _load_full(self, weights: Weights) -> None:
        """Load full weights while requests are paused. Running requests resume with the new weights and recomputed keys
        and values, and vLLM reports the version of each token. Requests with an adapter finish before the load."""
        from TrainingFactory.models.saved import WEIGHTS_FILE, check_weights, read_checkpoint_shapes

        spec, weights_file = self._spec, Path(weights.folder) / WEIGHTS_FILE
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(read_checkpoint_shapes, spec.model, spec.trust_remote_code)
        await asyncio.to_thread(check_weights, weights_file, self._shapes)
        pause_mode = "keep" if self._reports_versions and self._adapter is None else "wait"
        await self._llm.pause_generation(mode=pause_mode, clear_cache=True)
        try:
            await self._llm.collective_rpc("tfactory_load", args=(str(weights_file),))
        except Exception as error:  # the model may be a mix of both weights, and the next load would fail too
            self._unusable_reason = f"could not load {weights_file}: {error}"
            raise RuntimeError(f"vLLM {self._unusable_reason}") from error
        self._adapter = None
        self._base_folder = weights.folder
        self._unusable_reason = ""
        await self._set_version(weights.version)
        await self._llm.resume_generation()

    async def _set_version(self, version: int) -> None:
        if self._reports_versions:
            await self._llm.update_weight_version(str(version))
        self._policy_version = version

    async def _load_adapter(self, weights: Weights) -> None:
        """Load an adapter under a new id, because vLLM then separates its prefix cache from other adapters'."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        from TrainingFactory.models.saved import check_weights

        if not self._lora:
            raise ValueError("the engine was started without adapters: set enable_lora in its options")
        if weights.base != self._base_folder:
            await self._load_full(Weights(weights.version, weights.base))
        weights_file = Path(weights.folder) / ADAPTER  # the first adapter defines the names and shapes of all
        self._adapter_shapes = await asyncio.to_thread(check_weights, weights_file, self._adapter_shapes)
        lora_request = LoRARequest(f"v{weights.version}", next(self._request_ids), weights.folder)
        is_first_adapter = self._adapter is None
        if is_first_adapter:  # let requests without an adapter finish: next to others they give wrong results
            await self._llm.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._llm.add_lora(lora_request)
        except Exception as error:
            self._unusable_reason = f"could not load the adapter {weights.folder}: {error}"
            raise RuntimeError(f"vLLM {self._unusable_reason}") from error
        self._adapter = lora_request
        await self._set_version(weights.version)
        if is_first_adapter:
            await self._llm.resume_generation()


def make_engine_arguments(spec: EngineSpec) -> Any:
    """Return vLLM's engine arguments. The spec's `options` override all other arguments."""
    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    on_cpu = current_platform.is_cpu()
    if on_cpu != (spec.device == "cpu") and spec.device != "auto":
        hardware = "CPUs, or sees no GPU" if on_cpu else "GPUs"
        raise ValueError(f"model.device is {spec.device!r}, but the installed vLLM is built for {hardware}")
    dtype = spec.dtype if spec.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    arguments: dict[str, Any] = {
        "model": spec.model, "trust_remote_code": spec.trust_remote_code, "dtype": dtype,
        "max_model_len": spec.max_length, "max_num_seqs": spec.slots, "enable_prefix_caching": True,
        "enable_chunked_prefill": False,  # a seeded request in chunks crashes the engine
        "max_num_batched_tokens": max(spec.max_length, 4096 if on_cpu else 16_384),
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "generation_config": "vllm",  # not the model's own, which may set top_p or top_k
        "skip_tokenizer_init": True, "disable_log_stats": True,
        "worker_extension_cls": "TrainingFactory.sampling.vllm_worker.WorkerExtension",
    }  # fmt: skip
    if spec.pushed:
        arguments["load_format"] = "dummy"
    if on_cpu:
        arguments |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    else:
        arguments["gpu_memory_utilization"] = GPU_MEMORY_SHARE
    return AsyncEngineArgs(**arguments | spec.options)
