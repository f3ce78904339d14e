"""A judge (`reward.judge`) or a simulated user (`environment.user`) that the run serves itself: its engines start and
end with the run."""

from __future__ import annotations

import asyncio
from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from TrainingFactory.assembly.fleet import Notify, make_launcher
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.common.endpoints.anthropic import DEFAULT_MAX_TOKENS
from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.common.endpoints.transport import ModelError
from TrainingFactory.common.options import (
    STRICT,
    Count,
    InvalidOption,
    NotNegative,
    OptionError,
    Text,
    make_from,
)
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.names import resolve_model_name
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.rewards.judge.endpoints import SampledJudge
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import EngineSpec, Message, SamplersLost, SamplingParams

ENDPOINT_OPTIONS = ("base_url", "model", "api", "api_key_env", "timeout")
DEFAULT_MAX_LENGTH = 8192  # default max_length: prompt and verdict
REQUESTS_PER_ENGINE = 8  # concurrent requests per engine


@dataclass(config=STRICT, kw_only=True, frozen=True)
class JudgeOptions:
    """The keys of `reward.judge`."""

    model: Text
    replicas: Count = 1
    gpus: NotNegative | None = None  # of each replica
    engine: Literal["native", "vllm"] | None = None  # None: the run's sampling.engine
    max_length: Count | None = None
    device: Text = "auto"
    thinking: bool | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)


# The sampling options that requests to the judge accept.
RequestOptions = dataclass(SamplingParams, config=STRICT, frozen=True)


def with_local_judge(options: dict[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """Return a judge's options with an unstarted `LocalJudge` as `model` in place of `judge`."""
    options = dict(options)
    message = "is for a judge at an endpoint, but reward.judge starts one; leave one of them out"
    if problems := [InvalidOption(name, message) for name in ENDPOINT_OPTIONS if name in options]:
        raise OptionError(*problems)
    try:
        judge: JudgeOptions = make_from(JudgeOptions, options.pop("judge"), "reward.judge")
        if judge.replicas > 1 and config.compute.backend != "ray":
            message = "needs compute.backend=ray: without Ray a judge has one process"
            raise OptionError(InvalidOption("replicas", message, judge.replicas))
        model_path = find_judge_model(judge.model, config)
    except OptionError as error:
        raise error.with_prefix("judge") from None
    # Several greedy samples would all be equal.
    default_options = {"temperature": float(options.get("samples", 1) != 1), "max_tokens": DEFAULT_MAX_TOKENS}
    try:
        judge_options = default_options | (options.pop("options", None) or {})
        params = make_from(RequestOptions, judge_options, "a judge of the run's own")
    except OptionError as error:
        raise error.with_prefix("options") from None
    options.setdefault("concurrency", REQUESTS_PER_ENGINE * judge.replicas)
    return options | {"model": LocalJudge(judge, model_path, params, config)}


def find_judge_model(model_name: str, config: TrainingConfig) -> str:
    try:
        model = find_model(model_name, config.logging.output_dir, config.registry.path)
    except ValueError as error:
        raise OptionError(InvalidOption("model", str(error))) from error
    if model.adapter is not None:
        message = f"is an adapter; name a whole model: tfactory export {model_name} --out FOLDER --merge"
        raise OptionError(InvalidOption("model", message))
    return (
        resolve_model_name(model.name) if model.folder is None else str(model.folder.expanduser().resolve())
    )


class LocalJudge:
    """Judge model, or simulated user, on engines of the run. `open` or the first request starts the engines, also after
    `close`."""

    def __init__(
        self,
        options: JudgeOptions,
        model_name: str,
        params: SamplingParams,
        config: TrainingConfig,
        role: str = "judge",
    ) -> None:
        self.options = options
        self.role = role
        self._model_name = model_name
        self._params = params
        self._config = config
        self._kind: Literal["native", "vllm"] = options.engine or config.sampling.engine
        self.identity = digest(model_name, self._kind, repr(params), repr(options.thinking))
        self._fleet: Fleet | None = None
        self._judge: SampledJudge | None = None
        self._start_lock = asyncio.Lock()

    async def open(self, notify: Notify = lambda _: None) -> SampledJudge:
        """Start the engines and wait until they answer; `notify` reports each start."""
        async with self._start_lock:
            if self._judge is None:
                options = self.options
                notify(f"starting the {self.role} {options.model}: {self._kind}, engines: {options.replicas}")
                try:
                    self._judge = await self._start_judge(notify)
                except BaseException:
                    await self.close()
                    raise
            return self._judge

    async def _start_judge(self, notify: Notify) -> SampledJudge:
        from TrainingFactory.models import chat_format
        from TrainingFactory.models.loading import load_tokenizer

        settings, num_gpus = self.options, int(self.options.gpus or 0)
        tokenizer = await in_thread(load_tokenizer, self._model_name)
        chat = await in_thread(chat_format, tokenizer, thinking=settings.thinking)
        max_length = settings.max_length or min(DEFAULT_MAX_LENGTH, tokenizer.model_max_length)
        engine_options = settings.engine_options
        if self._kind == "vllm" and num_gpus > 1:
            engine_options = {"tensor_parallel_size": num_gpus} | engine_options
        spec = EngineSpec(
            self._kind,
            self._model_name,
            max_length,
            REQUESTS_PER_ENGINE,
            device=settings.device,
            pushed=False,
            options=engine_options,
        )
        hosts = make_launcher(self._config.compute, spec, settings.replicas, settings.gpus, notify, self.role)
        start_timeout = self._config.compute.start_timeout
        self._fleet = Fleet(hosts, settings.replicas, max_length, notify, start_timeout=start_timeout)
        await self._fleet.sample(chat.render([Message("user", "?")]), SamplingParams(max_tokens=1))
        return SampledJudge(self._fleet, chat, self._params, self._model_name)

    async def ask(self, request: ModelRequest) -> ModelReply:
        judge = await self.open()
        try:
            return await judge.ask(request)
        except SamplersLost as error:
            if self._judge is judge:  # the next attempt starts new engines
                await self.close()
            raise ModelError(
                f"the {self.role} {self.options.model} is down: {error}", temporary=True
            ) from error

    async def close(self) -> None:
        fleet, self._fleet, self._judge = self._fleet, None, None
        if fleet is not None:
            await fleet.close()
