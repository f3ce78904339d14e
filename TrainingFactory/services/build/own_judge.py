"""A judge of the run's own (`reward.judge`): engines for the model that it names, started and ended with the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Literal

from pydantic import validate_call
from pydantic.dataclasses import dataclass

from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.cluster.local import LocalPlaces
from TrainingFactory.cluster.places import Places
from TrainingFactory.cluster.ray_places import RayPlaces
from TrainingFactory.cluster.ray_session import RaySession, require_ray
from TrainingFactory.config import TrainingConfig
from TrainingFactory.endpoint import ModelError
from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.options import (
    STRICT,
    Count,
    NotNegative,
    OptionError,
    Share,
    Text,
    Wrong,
    ZeroOrMore,
    make_from,
)
from TrainingFactory.rewards.judge.endpoints import DEFAULT_MAX_TOKENS, Reply, SampledJudge
from TrainingFactory.services.build.model_names import find_model
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import EngineSpec, Message, SamplersLost, SamplingParams

AT_ENDPOINTS = ("base_url", "api", "api_key_env", "timeout")
MOST_TOKENS = 8192  # of a prompt and its verdict, where the config does not say
AT_ONCE = 8  # requests of each engine
TELL_SECONDS = 20.0  # between two words about a start that takes long
Say = Callable[[str], None]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class JudgeOptions:
    """The keys of `reward.judge`."""

    model: Text
    replicas: Count = 1
    gpus: NotNegative | None = None  # of each replica
    engine: Literal["native", "vllm"] | None = None  # None: that of the run
    max_length: Count | None = None
    device: Text = "auto"
    family: Text | None = None
    thinking: bool | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)


@validate_call(config=STRICT)
def _params(
    *,
    temperature: NotNegative = 0.0,
    max_tokens: Count = DEFAULT_MAX_TOKENS,
    top_p: Share = 1.0,
    top_k: ZeroOrMore = 0,
    min_p: Share = 0.0,
    seed: ZeroOrMore = 0,
) -> SamplingParams:
    return SamplingParams(temperature, max_tokens, (), top_p, top_k, min_p, seed)


def with_own_judge(options: dict[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """Return a judge's options with a model of the run's own in place of `judge`; nothing is started yet."""
    options = dict(options)
    asked, wrong = options.pop("judge"), []
    for name in AT_ENDPOINTS:
        if name in options:
            wrong.append(
                Wrong(name, "is for a judge at an endpoint, and reward.judge starts one; leave one out")
            )
    if "model" in options:
        wrong.append(Wrong("model", "is a name at an endpoint; with reward.judge it is judge.model"))
    if wrong:
        raise OptionError(*wrong)
    try:
        chosen: JudgeOptions = make_from(JudgeOptions, asked, "reward.judge")
        if chosen.replicas > 1 and config.compute.backend != "ray":
            text = "needs compute.backend=ray: without Ray a judge has one process"
            raise OptionError(Wrong("replicas", text, chosen.replicas))
        name = _model(chosen.model, config)
        if (chosen.engine or config.sampling.engine) == "vllm" and not _as_folder(name):
            text = f"vllm reads folders and hub ids, and {chosen.model} is neither; take native"
            raise OptionError(Wrong("engine", text))
    except OptionError as error:
        raise error.within("judge") from None
    several = (
        {"temperature": 1.0} if options.get("samples", 1) != 1 else {}
    )  # or all of them would be the same
    try:
        params = make_from(
            _params, several | (options.pop("options", None) or {}), "a judge of the run's own"
        )
    except OptionError as error:
        raise error.within("options") from None
    options.setdefault("concurrency", AT_ONCE * chosen.replicas)
    return options | {"model": OwnJudge(chosen, name, params, config)}


def _model(written: str, config: TrainingConfig) -> str:
    try:
        found = find_model(written, config.logging.output_dir, config.registry.path)
        if found.adapter is not None:
            raise ValueError(
                f"{written} is an adapter, and a judge is a whole model: tfactory export {written} --out FOLDER "
                "--merge makes one"
            )
    except ValueError as error:
        raise OptionError(Wrong("model", f"must name a model as model.name does; {error}")) from error
    return str(found.folder) if found.folder is not None else resolve(found.name)


def _as_folder(name: str) -> bool:
    return name != BUILTIN and not name.endswith(".gguf") and not name.startswith("package:")


class OwnJudge:
    """Asks engines of its own. They start with `open` or the first question, also after `close`."""

    def __init__(
        self, asked: JudgeOptions, name: str, params: SamplingParams, config: TrainingConfig
    ) -> None:
        self.asked, self._name, self._params, self._config = asked, name, params, config
        self.kind = asked.engine or config.sampling.engine
        self.identity = digest(name, self.kind, repr(params), repr(asked.thinking))
        self._fleet: Fleet | None = None
        self._judge: SampledJudge | None = None
        self._ray = RaySession(config.compute.address, config.compute.num_gpus)
        self._turn = asyncio.Lock()

    async def open(self, say: Say = lambda _: None) -> SampledJudge:
        """Start the engines, and return when they answer; tell so, and while it takes."""
        async with self._turn:
            if self._judge is not None:
                return self._judge
            began, many = time.monotonic(), self.asked.replicas
            say(f"starting the judge {self.asked.model}: {self.kind}, {many} engine{'s' * (many > 1)}")
            starting = asyncio.ensure_future(self._start(say))
            try:
                while not (await asyncio.wait({starting}, timeout=TELL_SECONDS))[0]:
                    say(f"waiting for the judge {self.asked.model}: {time.monotonic() - began:.0f} s")
            except asyncio.CancelledError:
                starting.cancel()
                await asyncio.wait({starting})  # until what it has started is ended
                raise
            self._judge = starting.result()
            say(f"the judge {self.asked.model} is ready after {time.monotonic() - began:.1f} s")
            return self._judge

    async def _start(self, say: Say) -> SampledJudge:
        from TrainingFactory.models import chat_format
        from TrainingFactory.models.loading import context_length, load_tokenizer

        asked = self.asked
        limit = await in_thread(context_length, self._name) or MOST_TOKENS
        if asked.max_length is not None and asked.max_length > limit:
            raise ValueError(
                f"reward.judge.max_length is {asked.max_length}, but {asked.model} was made for {limit}"
            )
        tokenizer = await in_thread(load_tokenizer, self._name)
        chat = await in_thread(chat_format, tokenizer, asked.family, thinking=asked.thinking)
        gpus = int(asked.gpus or 0)
        parallel = {"tensor_parallel_size": gpus} if self.kind == "vllm" and gpus > 1 else {}
        spec = EngineSpec(
            kind=self.kind,
            model=self._name,
            max_length=asked.max_length or min(limit, MOST_TOKENS),
            slots=AT_ONCE,
            device=asked.device,
            pushed=False,
            options=parallel | asked.engine_options,
        )
        try:
            places = await self._places(spec, say)
            self._fleet = Fleet(places, asked.replicas, spec.max_length, say)
            await self._fleet.sample(chat.render([Message("user", "?")]), SamplingParams(max_tokens=1))
        except BaseException:
            await self.close()
            raise
        return SampledJudge(self._fleet, chat, self._params, self._name)

    async def _places(self, spec: EngineSpec, say: Say) -> Places:
        asked, compute = self.asked, self._config.compute
        if compute.backend != "ray":
            return LocalPlaces(spec, start_timeout=compute.start_timeout, say=say, what="judge")
        await self._ray.open()
        gpus = asked.gpus
        if gpus is None:
            gpus = float(self.kind == "vllm" and require_ray().cluster_resources().get("GPU", 0) >= 1)
        shape = asked.replicas, gpus, compute.cpus_per_sampler, compute.start_timeout
        return RayPlaces(self._ray, spec, *shape, say=say, what="judge")

    async def ask(self, messages: Sequence[Message], number: int) -> Reply:
        judge = await self.open()
        try:
            return await judge.ask(messages, number)
        except SamplersLost as error:
            if self._judge is judge:  # the next attempt starts anew
                await self.close()
            raise ModelError(f"the judge {self.asked.model} is down: {error}", temporary=True) from error

    async def close(self) -> None:
        """End the engines."""
        fleet, self._fleet, self._judge = self._fleet, None, None
        if fleet is not None:
            await fleet.close()
        await self._ray.close()
