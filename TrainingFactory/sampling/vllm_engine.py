"""vLLM as an `Engine`: token ids in, token ids and log-probs out, weights pushed into it while it runs.

What vLLM would not survive, or do wrong in silence, never reaches it: ids outside of the vocabulary, a seeded prompt in
chunks, requests with and without an adapter side by side, weights that are not the model's. `ValueError` means that one
call was wrong; anything else, that the engine is of no use any more."""

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

# Of the processes that vLLM runs in, where the user has not said otherwise.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose log-probs cannot be kept those of the full softmax
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines of one machine would otherwise sit on the same cores
}
STRIDE = 0x9E3779B97F4A7C15  # a turn that is asked in pieces draws other numbers in each: vLLM starts from the seed
GPU_SHARE = 0.5  # of a GPU's memory: the learner may live on the same one
CPU_CACHE = 2 * 2**30  # bytes for keys and values on a CPU
ADAPTER = "adapter_model.safetensors"
OWN_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


def lora_options(rank: int) -> dict[str, Any]:
    """Return the engine's arguments for adapters of a rank, of two versions side by side."""
    room = next((each for each in OWN_RANKS if each >= rank), None)
    if room is None:
        raise ValueError(f"lora.r is {rank}, and vLLM takes at most {OWN_RANKS[-1]}: lower it")
    # Turns that are older still find theirs in memory: its folder may be gone.
    return {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": room}


class VllmEngine:
    """One engine of vLLM, whose core runs in a process below this one."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._lora = spec, bool(spec.options.get("enable_lora"))
        self._llm: Any = None
        self._version, self._numbers = 0, itertools.count(1)
        self._useless = ""  # why nothing may be sampled
        self._shapes: Any = None  # of the model's weights, once any are pushed
        self._adapter: Any = None  # the request for the current one
        self._adapter_shapes: Any = None
        self._base = "" if spec.pushed else spec.model  # the weights under adapters
        self._loading = asyncio.Lock()

    async def start(self) -> dict[str, Any]:
        os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
        if (device := self._spec.device).startswith("cuda:"):
            number, seen = int(device.removeprefix("cuda:")), os.environ.get("CUDA_VISIBLE_DEVICES", "")
            os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[number] if seen else str(number)
        try:
            from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"sampling.engine is vllm, which needs: pip install 'training-factory[vllm]' ({error})"
            ) from error
        self._llm = AsyncLLM.from_engine_args(engine_arguments(self._spec))
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        self._spans = hasattr(self._llm, "update_weight_version")  # not in earlier releases
        await self._llm.collective_rpc("tfactory_full_logprobs")
        await self._say_version(0)
        await self._turn([0], SamplingParams(max_tokens=1))  # the first request compiles much
        if self._spec.pushed:
            self._useless = "has no weights yet: they are pushed before it samples"
        versions = {name: metadata.version(name) for name in ("torch", "transformers")}
        versions |= {"TrainingFactory": __version__, "python": platform.python_version()}
        versions["vllm"] = import_module("vllm").__version__  # its package has several names
        about = {"pid": os.getpid(), "node": platform.node(), "vocabulary": self._vocabulary}
        return {**about, "versions": versions}

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion:
        self._check(prompt_ids)
        if self._lora or not self._spans:  # a turn of one version: the one that it begins with
            async with self._loading:
                pass
        if self._useless:
            raise RuntimeError(f"the engine {self._useless}")
        return await self._turn(prompt_ids, params)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams as Params  # pyright: ignore[reportMissingImports]

        self._check(token_ids)
        params = Params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        answer = await self._ask(token_ids, params)
        pairs = zip(token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        return [float(logprobs[token].logprob) for token, logprobs in pairs]

    async def load(self, weights: Weights) -> None:
        async with self._loading:
            if weights.kind == "adapter":
                await self._load_adapter(weights)
            else:
                await self._load_full(weights)

    async def close(self) -> None:
        if self._llm is not None:
            self._useless, llm, self._llm = "is closed", self._llm, None
            await asyncio.to_thread(llm.shutdown)

    # -- requests

    def _check(self, token_ids: Sequence[int]) -> None:
        size, most = len(token_ids), self._spec.max_length - 1
        if not size:
            raise ValueError("an empty prompt cannot be sampled from; it needs at least one token")
        if size > most:
            raise ValueError(f"the prompt has {size} tokens, and max_length {most + 1} has room for {most}")
        if wrong := [token for token in token_ids if not 0 <= token < self._vocabulary]:
            raise ValueError(f"token id {wrong[0]} is not in the model's vocabulary of {self._vocabulary}")

    async def _turn(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        from vllm import SamplingParams as Params  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        most = min(params.max_tokens, self._spec.max_length - len(prompt_ids))
        wanted = Params(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p,
            seed=(params.seed + STRIDE * len(prompt_ids)) % 2**63, max_tokens=most,
            stop_token_ids=list(params.stop_ids), ignore_eos=True,  # what ends a turn is said by the caller alone
            logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        version, adapter = self._version, self._adapter is not None
        output = (await self._ask(prompt_ids, wanted)).outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request by itself: {output.finish_reason}")
        tokens = list(output.token_ids)
        pairs = zip(tokens, output.logprobs, strict=True)
        logprobs = [float(found[token].logprob) for token, found in pairs]
        # Turns with an adapter end with the version that they began with.
        spans = output.weight_versions if self._spans and not adapter else ()
        each = [int(span.version) for span in spans for _ in range(span.start, span.end)] or [version]
        several = each if len(set(each)) > 1 else None
        return Completion(tokens, logprobs, output.finish_reason, each[0], several)

    async def _ask(self, token_ids: Sequence[int], params: Any) -> Any:
        """Ask vLLM with the current adapter. Cancelling it aborts the request."""
        from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": str(self._version)}
        name, adapter, last = f"r{next(self._numbers)}", self._adapter, None
        try:
            async for answer in self._llm.generate(prompt, params, request_id=name, lora_request=adapter):
                last = answer
        except EngineDeadError as error:
            raise RuntimeError(f"vLLM's engine core has died: {error}") from error
        except Exception as error:
            if type(error).__name__ == "VLLMValidationError":  # of 0.32; no ValueError any more
                raise ValueError(str(error)) from error
            raise
        assert last is not None
        return last

    # -- weights

    async def _load_full(self, weights: Weights) -> None:
        """Load the weights under requests that wait meanwhile and go on with the new ones, their keys and values
        computed anew; vLLM tells which token is of which version. Those with an adapter end before."""
        from TrainingFactory.models.saved import WEIGHTS, check_weights, saved_shapes

        spec, file = self._spec, Path(weights.where) / WEIGHTS
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(saved_shapes, spec.model, spec.trust_remote_code)
        await asyncio.to_thread(check_weights, file, self._shapes)
        mode = "keep" if self._spans and self._adapter is None else "wait"
        await self._llm.pause_generation(mode=mode, clear_cache=True)
        try:
            await self._llm.collective_rpc("tfactory_load", args=(str(file),))
        except Exception as error:  # it may hold parts of both, and the next load would fail too
            self._useless = f"could not load {file}: {error}"
            raise RuntimeError(f"vLLM {self._useless}") from error
        self._adapter, self._base, self._useless = None, weights.where, ""
        await self._say_version(weights.version)
        await self._llm.resume_generation()

    async def _say_version(self, version: int) -> None:
        if self._spans:
            await self._llm.update_weight_version(str(version))
        self._version = version

    async def _load_adapter(self, weights: Weights) -> None:
        """Add the adapter under a new number: what is stored of the prompts of others stays apart by itself."""
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        from TrainingFactory.models.saved import check_weights

        if not self._lora:
            raise ValueError("the engine was started without room for adapters: options need enable_lora")
        if weights.base != self._base:
            await self._load_full(Weights(weights.version, weights.base))
        file, shapes = Path(weights.where) / ADAPTER, self._adapter_shapes  # the first says what one holds
        self._adapter_shapes = await asyncio.to_thread(check_weights, file, shapes)
        request = LoRARequest(f"v{weights.version}", next(self._numbers), weights.where)
        first = self._adapter is None
        if first:  # requests without an adapter are wrong beside those with one: they end before
            await self._llm.pause_generation(mode="wait", clear_cache=True)
        try:
            await self._llm.add_lora(request)
        except Exception as error:
            self._useless = f"could not load the adapter {weights.where}: {error}"
            raise RuntimeError(f"vLLM {self._useless}") from error
        self._adapter = request
        await self._say_version(weights.version)
        if first:
            await self._llm.resume_generation()


def engine_arguments(spec: EngineSpec) -> Any:
    """Return vLLM's own arguments. What the spec's options say comes last."""
    from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    on_cpu = current_platform.is_cpu()
    if on_cpu != (spec.device == "cpu") and spec.device != "auto":
        kind = "CPUs, or sees no GPU" if on_cpu else "GPUs"
        raise ValueError(f"model.device is {spec.device!r}, but this vLLM is built for {kind}")
    dtype = spec.dtype if spec.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    given: dict[str, Any] = {
        "model": spec.model, "trust_remote_code": spec.trust_remote_code, "dtype": dtype,
        "max_model_len": spec.max_length, "max_num_seqs": spec.slots, "enable_prefix_caching": True,
        "enable_chunked_prefill": False,  # a seeded request in chunks kills the engine
        "max_num_batched_tokens": max(spec.max_length, 4096 if on_cpu else 16_384),
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "generation_config": "vllm",  # not the model's own, which may cut the distribution
        "skip_tokenizer_init": True, "disable_log_stats": True,
        "worker_extension_cls": "TrainingFactory.sampling.vllm_worker.WorkerExtension",
    }  # fmt: skip
    given |= {"load_format": "dummy"} if spec.pushed else {}
    on_a_cpu = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": CPU_CACHE}
    given |= on_a_cpu if on_cpu else {"gpu_memory_utilization": GPU_SHARE}
    return AsyncEngineArgs(**given | spec.options)
