"""A `Sampler` over several engines in other processes, which restarts lost engines and retries their requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from TrainingFactory.cluster.places import EngineHandle, EngineLauncher, EngineLost
from TrainingFactory.rollout.group_scoring import gather_or_cancel
from TrainingFactory.tools.timeouts import PausableClock
from TrainingFactory.types import Completion, SamplersLost, SamplingParams, Weights

MAX_RETRIES = 4  # retries of one request; a request that loses more samplers probably crashes them itself
MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 1.0, 300.0  # seconds between attempts to restart a sampler


def iterate_restart_delays() -> Iterator[float]:
    """Yield the delays, in seconds, between attempts to restart a sampler."""
    delay_seconds = MIN_DELAY_SECONDS
    while True:
        yield delay_seconds
        delay_seconds = min(2 * delay_seconds, MAX_DELAY_SECONDS)


class FleetSession:
    """Sampling session of one episode. `number` identifies it in every engine; all its requests go to engine
    `engine_number`."""

    def __init__(self, fleet: Fleet, session_number: int, engine_number: int) -> None:
        self._fleet, self.number, self.engine_number = fleet, session_number, engine_number
        self._closed = False

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if self._closed:
            raise ValueError("This sampling session is closed")
        return await self._fleet._sample_with_retries(self, list(prompt_ids), params)

    def fork(self) -> FleetSession:
        """Open a session on the same engine, whose prefix cache holds the turns of this session."""
        return self._fleet._open_session(self.engine_number)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._fleet._open_sessions[self.engine_number] -= 1


class Fleet:
    """A `Sampler` over `num_engines` engines, which start on first use. The requests of a lost engine are retried on
    another engine with the same seed. The lost engine restarts in the background with growing delays, and serves again
    once it has the current weights. If no engine is alive for `start_timeout` seconds, pending requests raise
    SamplersLost; meanwhile `clock` is paused. An engine also counts as lost if it needs more than `start_timeout`
    seconds to load weights, or if its log-probs of the canary differ from the learner's by more than `tolerance` on
    average."""

    def __init__(
        self, launcher: EngineLauncher, num_engines: int, max_length: int,
        notify: Callable[[str], None] = lambda _: None, tolerance: float = 1e-3, owned_object: object = None,
        start_timeout: float = 600.0
    ) -> None:  # fmt: skip
        self._owned_object = owned_object  # kept as long as the fleet, such as a temporary folder of weights
        self.max_length, self.policy_version = max_length, 0
        self._launcher, self._notify, self._tolerance = launcher, notify, tolerance
        self._num_engines, self._start_timeout, self.clock = num_engines, start_timeout, PausableClock()
        self._engines: dict[int, EngineHandle] = {}
        self._restart_tasks: dict[int, asyncio.Task[None]] = {}
        self._last_failure = ""  # why the last engine was lost or could not be restarted
        self._restart_event = asyncio.Event()  # set and replaced after each restart
        self._start_task: asyncio.Task[None] | None = None
        self._weights: Weights | None = None
        self._open_sessions: Counter[int] = Counter()  # sessions by engine
        self._session_numbers = itertools.count()
        metric_names = ("samplers/asked_again", "samplers/remade", "samplers/failed_restarts", "seconds/push")
        self._metrics = dict.fromkeys(metric_names, 0.0)

    # -- the Sampler port

    def session(self) -> FleetSession:
        # Fewest open sessions first, then lowest number, alive or not: a run without failures is deterministic.
        engine_number = min(range(self._num_engines), key=lambda i: (self._open_sessions[i], i))
        return self._open_session(engine_number)

    def _open_session(self, engine_number: int) -> FleetSession:
        self._open_sessions[engine_number] += 1
        return FleetSession(self, next(self._session_numbers), engine_number)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        session = self.session()
        try:
            return await session.sample(prompt_ids, params)
        finally:
            session.close()

    async def update(self, weights: Weights) -> None:
        """Load the weights on every engine and verify the canary; restart each engine for which this fails."""
        start_time = time.perf_counter()
        await self.start()
        self._weights = weights
        pushes = [self._push_weights(number, engine, weights) for number, engine in self._engines.items()]
        await asyncio.gather(*pushes)
        await self._wait_for_engine()
        self.policy_version = weights.version
        self._metrics["seconds/push"] = time.perf_counter() - start_time

    def metrics(self) -> dict[str, float]:
        """Return the number of live engines, totals of retries and restarts, and the duration of the last push."""
        return {"samplers/alive": float(len(self._engines)), **self._metrics}

    async def close(self) -> None:
        self._engines.clear()  # first, so that a running request that loses its engine does not restart it
        tasks = [task for task in (*self._restart_tasks.values(), self._start_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._restart_tasks.clear()  # a task that was cancelled before it began has not removed itself
        self._restart_event.set()
        await self._launcher.close()

    # -- requests

    async def _sample_with_retries(
        self, session: FleetSession, prompt_ids: list[int], params: SamplingParams
    ) -> Completion:
        await self.start()
        for _ in range(1 + MAX_RETRIES):
            await self._wait_for_engine()
            if session.engine_number not in self._engines:  # move to the engine with the fewest sessions
                self._open_sessions[session.engine_number] -= 1
                session.engine_number = min(self._engines, key=lambda i: (self._open_sessions[i], i))
                self._open_sessions[session.engine_number] += 1
            engine = self._engines[session.engine_number]
            try:
                return await engine.call("sample", prompt_ids, params, session.number)
            except EngineLost as error:
                self._handle_lost_engine(session.engine_number, engine, error)
                self._metrics["samplers/asked_again"] += 1
        raise SamplersLost(
            f"A request with a prompt of {len(prompt_ids)} tokens failed {1 + MAX_RETRIES} times because its sampler "
            f"was lost: {self._last_failure}"
        )

    async def _wait_for_engine(self) -> None:
        """Wait until an engine is alive; raise SamplersLost if none has been for `start_timeout` seconds."""
        while not self._engines:
            seconds_left = self._start_timeout - self.clock.get_pause_seconds()
            if seconds_left <= 0 or not self._restart_tasks:  # nothing is restarting: the fleet is closed
                reason = f"No sampler has been alive for {self._start_timeout:g} s (compute.start_timeout)"
                raise SamplersLost(
                    f"{reason if seconds_left <= 0 else 'The samplers are closed'}: {self._last_failure}"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    await self._restart_event.wait()

    # -- engines

    async def start(self) -> None:
        """Start all engines once. Call it before the clocks of episodes run."""
        if self._start_task is None:
            self._start_task = asyncio.create_task(self._start_engines())
        # Shielded: the first caller may be cancelled while others wait for the same start.
        await asyncio.shield(self._start_task)

    async def _start_engines(self) -> None:
        engines = await gather_or_cancel([self._launcher.launch_engine(i) for i in range(self._num_engines)])
        self._engines = dict(enumerate(engines))

    async def _push_weights(self, engine_number: int, engine: EngineHandle, weights: Weights) -> None:
        try:
            await self._load_weights(engine, weights)
        except (EngineLost, ValueError) as error:
            self._handle_lost_engine(engine_number, engine, error)

    async def _load_weights(self, engine: EngineHandle, weights: Weights) -> None:
        token_ids, expected_logprobs = weights.canary
        try:
            async with asyncio.timeout(self._start_timeout):
                await engine.call("load", weights)
                logprobs = await engine.call("score", list(token_ids)) if token_ids else []
        except TimeoutError:
            raise EngineLost(
                f"{engine.name} did not load the weights within {self._start_timeout:g} s"
            ) from None
        differences = [abs(a - b) for a, b in zip(expected_logprobs, logprobs, strict=True)]
        mean_difference = sum(differences) / max(1, len(differences))
        if not mean_difference <= self._tolerance:
            raise ValueError(
                f"{engine.name} does not have the learner's weights: after a weight update its log-probs of a test "
                f"sequence differ from the learner's by {mean_difference:.3g} on average (limit {self._tolerance:g})"
            )

    def _handle_lost_engine(self, engine_number: int, engine: EngineHandle, error: Exception) -> None:
        """Remove a lost engine and restart it in the background, unless another caller has already done so."""
        if self._engines.get(engine_number) is not engine:
            return
        del self._engines[engine_number]
        if not self._engines:
            self.clock.pause()
        self._last_failure = str(error)
        self._notify(f"{error}; restarting it and retrying its requests on another sampler")
        self._restart_tasks[engine_number] = asyncio.create_task(self._restart(engine_number, engine))

    async def _restart(self, engine_number: int, lost_engine: EngineHandle) -> None:
        try:
            with suppress(EngineLost, ValueError):
                await lost_engine.close()
            for delay_seconds in iterate_restart_delays():
                try:
                    self._engines[engine_number] = await self._load_current_weights(engine_number)
                except Exception as error:  # Ray, vLLM and the system raise many kinds
                    self._last_failure = str(error)
                    self._metrics["samplers/failed_restarts"] += 1
                    first_line, *_ = self._last_failure.splitlines() or [""]
                    self._notify(f"{first_line}; retrying in {delay_seconds:g} s")
                    await asyncio.sleep(delay_seconds)
                    continue
                self.clock.resume()
                self._metrics["samplers/remade"] += 1
                return
        finally:
            del self._restart_tasks[engine_number]
            restart_event, self._restart_event = self._restart_event, asyncio.Event()
            restart_event.set()

    async def _load_current_weights(self, engine_number: int) -> EngineHandle:
        """Start an engine and load the current weights, repeatedly if new ones are published meanwhile."""
        engine = await self._launcher.launch_engine(engine_number)
        loaded_weights = None
        try:
            while (weights := self._weights) is not None and weights is not loaded_weights:
                try:
                    await self._load_weights(engine, weights)
                    loaded_weights = weights
                except ValueError:
                    if self._weights is weights:  # else newer ones replaced them and their files are deleted
                        raise
        except BaseException:
            await engine.close()
            raise
        return engine
