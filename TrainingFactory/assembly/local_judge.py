"""A judge of the run's own (`reward.judge`): engines for the model that it names, started and ended with the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from TrainingFactory.assembly.fleet import Say, places
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.common.endpoint import ModelError
from TrainingFactory.common.options import STRICT, Count, NotNegative, OptionError, Text, Wrong, make_from
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.names import resolve
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.rewards.judge.endpoints import DEFAULT_MAX_TOKENS, Reply, SampledJudge
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import EngineSpec, Message, SamplersLost, SamplingParams

AT_ENDPOINTS = ("base_url", "model", "api", "api_key_env", "timeout")
MOST_TOKENS = 8192  # of a prompt and its verdict, where the config does not say
AT_ONCE = 8  # requests of each engine


@dataclass(config=STRICT, kw_only=True, frozen=True)
class JudgeOptions:
    """The keys of `reward.judge`."""

    model: Text
    replicas: Count = 1
    gpus: NotNegative | None = None  # of each replica
    engine: Literal["native", "vllm"] | None = None  # None: that of the run
    max_length: Count | None = None
    device: Text = "auto"
    thinking: bool | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)


Sampled = dataclass(
    SamplingParams, config=STRICT, frozen=True
)  # what may stand in the options of its requests


def with_own_judge(options: dict[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """Return a judge's options with a model of the run's own in place of `judge`; nothing is started yet."""
    options = dict(options)
    text = "is for a judge at an endpoint, and reward.judge starts one; leave one out"
    if wrong := [Wrong(name, text) for name in AT_ENDPOINTS if name in options]:
        raise OptionError(*wrong)
    try:
        chosen: JudgeOptions = make_from(JudgeOptions, options.pop("judge"), "reward.judge")
        if chosen.replicas > 1 and config.compute.backend != "ray":
            text = "needs compute.backend=ray: without Ray a judge has one process"
            raise OptionError(Wrong("replicas", text, chosen.replicas))
        name = _model(chosen.model, config)
    except OptionError as error:
        raise error.within("judge") from None
    # Greedily several samples would be one and the same.
    usual = {"temperature": float(options.get("samples", 1) != 1), "max_tokens": DEFAULT_MAX_TOKENS}
    try:
        params = make_from(Sampled, usual | (options.pop("options", None) or {}), "a judge of the run's own")
    except OptionError as error:
        raise error.within("options") from None
    options.setdefault("concurrency", AT_ONCE * chosen.replicas)
    return options | {"model": OwnJudge(chosen, name, params, config)}


def _model(written: str, config: TrainingConfig) -> str:
    try:
        found = find_model(written, config.logging.output_dir, config.registry.path)
    except ValueError as error:
        raise OptionError(Wrong("model", str(error))) from error
    if found.adapter is not None:
        text = f"is an adapter, and a judge is a whole model: tfactory export {written} --out FOLDER --merge"
        raise OptionError(Wrong("model", text))
    return resolve(found.name) if found.folder is None else str(found.folder.expanduser().resolve())


class OwnJudge:
    """Asks engines of its own. They start with `open` or the first question, also after `close`."""

    def __init__(
        self, asked: JudgeOptions, name: str, params: SamplingParams, config: TrainingConfig
    ) -> None:
        self.asked, self._name, self._params, self._config = asked, name, params, config
        self._kind: Literal["native", "vllm"] = asked.engine or config.sampling.engine
        self.identity = digest(name, self._kind, repr(params), repr(asked.thinking))
        self._fleet: Fleet | None = None
        self._judge: SampledJudge | None = None
        self._turn = asyncio.Lock()

    async def open(self, say: Say = lambda _: None) -> SampledJudge:
        """Start the engines, and return when they answer; `say` hears of each."""
        async with self._turn:
            if self._judge is None:
                say(f"starting the judge {self.asked.model}: {self._kind}, engines: {self.asked.replicas}")
                try:
                    self._judge = await self._started(say)
                except BaseException:
                    await self.close()
                    raise
            return self._judge

    async def _started(self, say: Say) -> SampledJudge:
        from TrainingFactory.models import chat_format
        from TrainingFactory.models.loading import load_tokenizer

        asked, gpus = self.asked, int(self.asked.gpus or 0)
        tokenizer = await in_thread(load_tokenizer, self._name)
        chat = await in_thread(chat_format, tokenizer, thinking=asked.thinking)
        longest = asked.max_length or min(MOST_TOKENS, tokenizer.model_max_length)
        options = asked.engine_options
        if self._kind == "vllm" and gpus > 1:
            options = {"tensor_parallel_size": gpus} | options
        spec = EngineSpec(
            self._kind, self._name, longest, AT_ONCE, device=asked.device, pushed=False, options=options
        )
        made = places(self._config.compute, spec, asked.replicas, asked.gpus, say, "judge")
        patience = self._config.compute.start_timeout
        self._fleet = Fleet(made, asked.replicas, longest, say, patience=patience)
        await self._fleet.sample(chat.render([Message("user", "?")]), SamplingParams(max_tokens=1))
        return SampledJudge(self._fleet, chat, self._params, self._name)

    async def ask(self, messages: Sequence[Message], number: int) -> Reply:
        judge = await self.open()
        try:
            return await judge.ask(messages, number)
        except SamplersLost as error:
            if self._judge is judge:  # the next attempt starts anew
                await self.close()
            raise ModelError(f"the judge {self.asked.model} is down: {error}", temporary=True) from error

    async def close(self) -> None:
        fleet, self._fleet, self._judge = self._fleet, None, None
        if fleet is not None:
            await fleet.close()
