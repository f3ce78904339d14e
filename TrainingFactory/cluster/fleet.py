"""Several engines in other processes as one `Sampler`: a lost engine is restarted, and its requests are retried."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from TrainingFactory.cluster.places import Place, PlaceLost, Places
from TrainingFactory.rollout.group_scoring import all_of
from TrainingFactory.tools.timeouts import Clock
from TrainingFactory.types import Completion, SamplersLost, SamplingParams, Weights

AGAIN = 4  # times that one turn is asked again: then it is the turn itself that ends engines
FIRST_DELAY, LONGEST_DELAY = 1.0, 300.0  # seconds before a failed restart is repeated


def delays() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt to restart a sampler."""
    delay = FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, LONGEST_DELAY)


class FleetSession:
    """Holds one episode's side: its number, by which engines know it, and the place that it keeps to."""

    def __init__(self, fleet: Fleet, number: int, home: int) -> None:
        self._fleet, self.number, self.home = fleet, number, home
        self._closed = False

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if self._closed:
            raise ValueError("this sampling session is closed")
        return await self._fleet._ask(self, list(prompt_ids), params)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._fleet._open[self.home] -= 1


class Fleet:
    """A `Sampler` over `count` places, which start with the first use. A turn whose place is lost is asked again
    elsewhere with the same seed. A lost place is restarted in the background, after growing delays for as long as that
    fails, and loads the last weights before it gets work. When no place has been alive for `patience` seconds, those
    who wait get SamplersLost. `clock` is paused while no place is alive. `tolerance` bounds the mean distance between
    the learner's log-probs of the canary and those of a place; a place that has not loaded weights after `patience`
    seconds is lost."""

    def __init__(
        self, places: Places, count: int, max_length: int, say: Callable[[str], None] = lambda _: None,
        tolerance: float = 1e-3, holds: object = None, patience: float = 600.0,
    ) -> None:  # fmt: skip
        self._holds = holds  # what must be there as long as the fleet is, such as a folder of weights
        self.max_length, self.policy_version = max_length, 0
        self._places, self._count, self._say, self._tolerance = places, count, say, tolerance
        self._patience, self.clock = patience, Clock()
        self._alive: dict[int, Place] = {}
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._reason = ""  # why the last place was lost or could not be restarted
        self._changed = asyncio.Event()  # set and replaced when a restart has ended
        self._starting: asyncio.Task[None] | None = None
        self._weights: Weights | None = None
        self._open: Counter[int] = Counter()  # sessions by place
        self._numbers = itertools.count()
        counted = ("samplers/asked_again", "samplers/remade", "samplers/failed_restarts", "seconds/push")
        self._counts = dict.fromkeys(counted, 0.0)

    # -- the Sampler port

    def session(self) -> FleetSession:
        # By open sessions and then by number, whoever is alive: so a calm run depends on nothing but itself.
        home = min(range(self._count), key=lambda number: (self._open[number], number))
        self._open[home] += 1
        return FleetSession(self, next(self._numbers), home)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        session = self.session()
        try:
            return await session.sample(prompt_ids, params)
        finally:
            session.close()

    async def update(self, weights: Weights) -> None:
        """Load the weights on every place and compare the canary. A place where that fails is restarted."""
        began = time.perf_counter()
        await self.start()
        self._weights = weights
        pushed = [self._push(number, place, weights) for number, place in self._alive.items()]
        await asyncio.gather(*pushed)
        await self._some()
        self.policy_version = weights.version
        self._counts["seconds/push"] = time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Return how many places are alive, what has happened so far, and how long the last push took."""
        return {"samplers/alive": float(len(self._alive)), **self._counts}

    async def close(self) -> None:
        self._alive.clear()  # first: a turn under way loses its place, and must not restart it
        tasks = [task for task in (*self._restarting.values(), self._starting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._restarting.clear()  # a restart that was cancelled before it began has not removed itself
        self._changed.set()
        await self._places.close()

    # -- turns

    async def _ask(self, session: FleetSession, prompt_ids: list[int], params: SamplingParams) -> Completion:
        await self.start()
        for _ in range(1 + AGAIN):
            await self._some()
            if (
                session.home not in self._alive
            ):  # move to the one with the fewest, which prefills its prompt again
                self._open[session.home] -= 1
                session.home = min(self._alive, key=lambda number: (self._open[number], number))
                self._open[session.home] += 1
            place = self._alive[session.home]
            try:
                return await place.call("sample", prompt_ids, params, session.number)
            except PlaceLost as error:
                self._lose(session.home, place, error)
                self._counts["samplers/asked_again"] += 1
        raise SamplersLost(
            f"one turn of {len(prompt_ids)} tokens was asked {1 + AGAIN} times, and each time the sampler was lost: "
            f"{self._reason}"
        )

    async def _some(self) -> None:
        """Wait until a place is alive; raise SamplersLost when none has been for `patience` seconds."""
        while not self._alive:
            left = self._patience - self.clock.paused_for()
            if left <= 0 or not self._restarting:  # none is being restarted: the fleet is closed
                limit = f"no sampler has been alive for {self._patience:g} s (compute.start_timeout)"
                raise SamplersLost(f"{limit if left <= 0 else 'the samplers are closed'}: {self._reason}")
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    # -- places

    async def start(self) -> None:
        """Start all places, if nobody has; before the clocks of episodes run."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        # Shielded: whoever came first may be cancelled, and the others wait for the same.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._alive = dict(enumerate(await all_of([self._places.make(n) for n in range(self._count)])))

    async def _push(self, number: int, place: Place, weights: Weights) -> None:
        try:
            await self._load(place, weights)
        except (PlaceLost, ValueError) as error:
            self._lose(number, place, error)

    async def _load(self, place: Place, weights: Weights) -> None:
        token_ids, wanted = weights.canary
        try:
            async with asyncio.timeout(self._patience):
                await place.call("load", weights)
                found = await place.call("score", list(token_ids)) if token_ids else []
        except TimeoutError:
            raise PlaceLost(f"{place.name} has not loaded weights within {self._patience:g} s") from None
        gap = sum(abs(one - other) for one, other in zip(wanted, found, strict=True)) / max(1, len(wanted))
        if not gap <= self._tolerance:
            raise ValueError(
                f"{place.name} does not have the learner's weights: after a push its log-probs of a known text are "
                f"{gap:.3g} away from the learner's on average, and at most {self._tolerance:g} is rounding"
            )

    def _lose(self, number: int, place: Place, error: Exception) -> None:
        """Leave a place out and restart it in the background; of several that noticed, the first does."""
        if self._alive.get(number) is not place:
            return
        del self._alive[number]
        if not self._alive:
            self.clock.pause()
        self._reason = str(error)
        self._say(f"{error}; it is restarted, and its requests are retried on another sampler")
        self._restarting[number] = asyncio.create_task(self._restart(number, place))

    async def _restart(self, number: int, lost: Place) -> None:
        try:
            with suppress(PlaceLost, ValueError):
                await lost.close()
            for delay in delays():
                try:
                    self._alive[number] = await self._made(number)
                except Exception as error:  # Ray, vLLM and the machine have many
                    self._reason = str(error)
                    self._counts["samplers/failed_restarts"] += 1
                    first_line, *_ = self._reason.splitlines() or [""]
                    self._say(f"{first_line}; retrying in {delay:g} s")
                    await asyncio.sleep(delay)
                    continue
                self.clock.resume()
                self._counts["samplers/remade"] += 1
                return
        finally:
            del self._restarting[number]
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _made(self, number: int) -> Place:
        """Make a place that has the last weights, also where there are new ones meanwhile."""
        place = await self._places.make(number)
        loaded = None
        try:
            while (weights := self._weights) is not None and weights is not loaded:
                try:
                    await self._load(place, weights)
                    loaded = weights
                except ValueError:
                    if self._weights is weights:  # else they were replaced, and are there no more
                        raise
        except BaseException:
            await place.close()
            raise
        return place
