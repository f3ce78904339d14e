"""The fleet over places that are plain objects: who is asked, who is asked again, and what happens to the lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import islice
from typing import Any

import pytest

from TrainingFactory.cluster.fleet import MAX_RETRIES, Fleet, iterate_restart_delays
from TrainingFactory.cluster.places import EngineLost
from TrainingFactory.types import Completion, SamplersLost, SamplingParams, Weights

CANARY = ((1, 2, 3), (-1.0, -2.0))


class Fake:
    """Answers with its seed; `hold` keeps turns, `dead` loses them."""

    def __init__(self, number: int, life: int) -> None:
        self.number, self.name = number, f"sampler {number}, life {life}"
        self.asked: list[tuple[int, int]] = []  # session, seed
        self.loaded: list[int] = []
        self.scores = [-1.0, -2.0]
        self.dead = self.closed = self.stuck = False
        self.cancelled = 0
        self.hold: asyncio.Event | None = None

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if self.dead:
            raise EngineLost("killed")
        if self.stuck:
            await asyncio.Event().wait()
        if method == "load":
            self.loaded.append(args[0].version)
        if method == "score":
            return self.scores
        if method != "sample":
            return None
        _, params, session = args
        self.asked.append((session, params.seed))
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.dead:
            raise EngineLost("killed")
        return Completion([params.seed], [0.0], "stop", self.loaded[-1] if self.loaded else 0)

    async def close(self) -> None:
        self.closed = True


class Fakes:
    def __init__(self) -> None:
        self.made: list[Fake] = []
        self.refuse = ""  # why none can be made
        self.each = lambda place: None
        self.gate: asyncio.Event | None = None  # of those that are made anew
        self.closed = False

    async def launch_engine(self, number: int) -> Fake:
        if self.refuse:
            raise ValueError(self.refuse)
        life = sum(place.number == number for place in self.made)
        if life and self.gate is not None:
            await self.gate.wait()
        place = Fake(number, life)
        self.each(place)
        self.made.append(place)
        return place

    async def close(self) -> None:
        self.closed = True
        for place in self.made:
            place.closed = True


def params(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


def test_sessions_keep_to_their_place_and_are_spread() -> None:
    async def test() -> None:
        fakes = Fakes()
        fleet = Fleet(fakes, 2, 64)
        sessions = [fleet.session() for _ in range(4)]
        for turn in range(2):
            await asyncio.gather(
                *(each.sample([1], params(10 * turn + n)) for n, each in enumerate(sessions))
            )
        one, two = fakes.made
        assert sorted(one.asked) == [(0, 0), (0, 10), (2, 2), (2, 12)]
        assert sorted(two.asked) == [(1, 1), (1, 11), (3, 3), (3, 13)]
        sessions[1].close()
        sessions[3].close()
        await asyncio.gather(*(fleet.sample([1], params(n)) for n in (20, 21)))
        assert [seed for _, seed in two.asked[4:]] == [20, 21]  # it had the fewer
        with pytest.raises(ValueError, match="closed"):
            await sessions[1].sample([1], params(0))
        await fleet.close()
        assert one.closed and two.closed and fakes.closed

    run(test())


def test_a_lost_turn_is_asked_again_with_the_same_seed_and_the_place_is_made_anew_with_the_weights() -> None:
    async def test() -> None:
        fakes, said = Fakes(), list[str]()
        fleet = Fleet(fakes, 2, 64, said.append)
        await fleet.update(Weights(7, "there", canary=CANARY))
        one, two = fakes.made
        one.hold, fakes.gate = asyncio.Event(), asyncio.Event()
        turn = asyncio.create_task(fleet.session().sample([1], params(5)))
        while not one.asked:
            await asyncio.sleep(0)
        one.dead = True
        one.hold.set()
        found = await turn
        assert (found.token_ids, found.policy_version) == ([5], 7)
        assert one.asked == two.asked == [(0, 5)]
        counts = fleet.metrics()
        assert (counts["samplers/alive"], counts["samplers/asked_again"], counts["samplers/remade"]) == (
            1,
            1,
            0,
        )
        await fleet.update(Weights(8, "there", canary=CANARY))  # while the new one is on its way
        fakes.gate.set()
        while fleet.metrics()["samplers/alive"] < 2:
            await asyncio.sleep(0)
        assert one.closed and fakes.made[2].loaded == [8] and two.loaded == [7, 8]
        assert fleet.metrics()["samplers/remade"] == 1 and said[0].startswith("killed;")
        assert fleet.policy_version == 8
        await fleet.close()

    run(test())


def test_delays_double_from_a_second_to_five_minutes() -> None:
    assert [*islice(iterate_restart_delays(), 11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_a_lost_sampler_is_retried_until_its_machine_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def test() -> None:
        fakes, said = Fakes(), list[str]()
        fleet, sleep = Fleet(fakes, 2, 64, said.append), asyncio.sleep

        async def sleeping(delay: float) -> None:
            if delay:
                waited.append(delay)
                fakes.refuse = "" if len(waited) == 5 else fakes.refuse
            await sleep(0)

        await fleet.update(Weights(7, "there", canary=CANARY))
        monkeypatch.setattr(asyncio, "sleep", sleeping)
        one = fakes.made[0]
        fakes.refuse, one.dead = "the machine is off\nits log", True
        await fleet.session().sample([1], params(5))
        while fleet.metrics()["samplers/alive"] < 2:
            await sleep(0)
        assert waited == [1, 2, 4, 8, 16] and fakes.made[2].loaded == [7]
        counts = fleet.metrics()
        assert (counts["samplers/failed_restarts"], counts["samplers/remade"]) == (5, 1)
        assert said[1:] == [f"the machine is off; retrying in {seconds} s" for seconds in (1, 2, 4, 8, 16)]
        await fleet.close()

    run(test())


def test_the_clock_of_episodes_stops_while_no_sampler_is_alive() -> None:
    async def test() -> None:
        fakes = Fakes()
        fleet = Fleet(fakes, 2, 64)
        await fleet.start()
        one, two = fakes.made
        fakes.gate, one.dead = asyncio.Event(), True
        await fleet.session().sample([1], params(1))
        assert fleet.clock.get_pause_seconds() == 0  # one is alive
        two.dead = True
        turn = asyncio.create_task(fleet.session().sample([1], params(2)))
        while not fleet.clock.get_pause_seconds():
            await asyncio.sleep(0)
        stopped = fleet.clock.now()
        await asyncio.sleep(0.01)
        assert fleet.clock.now() == stopped
        fakes.gate.set()
        assert (await turn).token_ids == [2]
        assert fleet.clock.get_pause_seconds() == 0 and fleet.clock.now() >= stopped
        await fleet.close()

    run(test())


def test_none_left_and_none_to_be_made_tells_all_who_wait() -> None:
    async def test() -> None:
        fakes = Fakes()
        fleet = Fleet(fakes, 2, 64, start_timeout=0.05)
        await fleet.update(Weights(1, "there"))
        for place in fakes.made:
            place.dead = True
        fakes.refuse = "no GPU is free"
        turns = [fleet.session().sample([1], params(n)) for n in range(6)]
        found = await asyncio.gather(*turns, return_exceptions=True)
        assert all(isinstance(each, SamplersLost) and "no GPU is free" in str(each) for each in found)
        with pytest.raises(SamplersLost):
            await fleet.update(Weights(2, "there"))
        await fleet.close()

    run(test())


def test_a_turn_that_ends_every_engine_is_given_up() -> None:
    async def test() -> None:
        fakes = Fakes()
        fakes.each = lambda place: setattr(place, "dead", True)
        fleet = Fleet(fakes, 1, 64)
        with pytest.raises(SamplersLost, match=f"failed {1 + MAX_RETRIES} times"):
            await fleet.sample([1], params(1))
        await fleet.close()

    run(test())


def test_a_place_with_other_weights_than_the_learner_is_replaced_and_two_of_them_are_an_error() -> None:
    async def test() -> None:
        fakes = Fakes()
        fleet = Fleet(fakes, 2, 64)
        await fleet.update(Weights(1, "there", canary=CANARY))
        fakes.made[1].scores = [-1.0, -2.1]
        await fleet.update(Weights(2, "there", canary=CANARY))
        while fleet.metrics()["samplers/alive"] < 2:
            await asyncio.sleep(0)
        assert [place.number for place in fakes.made] == [0, 1, 1] and fakes.made[1].closed
        fakes.each = lambda place: setattr(place, "scores", [float("nan"), 0.0])
        fakes.made[0].scores = fakes.made[2].scores = [0.0, 0.0]
        fleet._start_timeout = 0.3
        with pytest.raises(SamplersLost, match=r"sampler \d, life \d does not have the learner's weights"):
            await fleet.update(Weights(3, "there", canary=CANARY))
        await fleet.close()

    run(test())


def test_cancelling_reaches_the_place_and_a_wrong_call_is_told() -> None:
    async def test() -> None:
        fakes = Fakes()
        fleet = Fleet(fakes, 1, 64)
        first = asyncio.create_task(fleet.sample([1], params(1)))
        while not fakes.made:
            await asyncio.sleep(0)
        [place] = fakes.made
        place.hold = asyncio.Event()
        while not place.asked:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert place.cancelled == 1 and fleet.metrics()["samplers/alive"] == 1
        await fleet.close()
        broken = Fakes()
        broken.refuse = "there is no such model"
        fleet = Fleet(broken, 2, 64)
        for _ in range(2):
            with pytest.raises(ValueError, match="no such model"):
                await fleet.sample([1], params(1))
        await fleet.close()

    run(test())


async def test_a_place_that_does_not_take_weights_is_lost() -> None:
    """A process that stands still answers nothing: the others must not wait for it for ever."""
    fakes, said = Fakes(), list[str]()

    def stuck(place: Fake) -> None:
        place.stuck = not fakes.made  # the first that is made

    fakes.each = stuck
    fleet = Fleet(fakes, 2, 64, said.append, start_timeout=0.05)
    await fleet.update(Weights(1, "x", canary=CANARY))
    assert fleet.policy_version == 1 and "within 0.05 s" in said[0]
    assert (await fleet.sample([1], SamplingParams(seed=5))).token_ids == [5]
    await fleet.close()


async def test_the_start_of_one_that_fails_ends_the_others() -> None:
    ended: list[int] = []

    class Slow(Fakes):
        async def launch_engine(self, number: int) -> Fake:
            if number:
                raise ValueError("no room")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(number)
            raise AssertionError

    with pytest.raises(ValueError, match="no room"):
        await Fleet(Slow(), 2, 64).start()
    assert ended == [0]


def test_a_fleet_that_closes_as_its_last_sampler_is_lost_lets_nobody_wait() -> None:
    async def test() -> None:
        fakes = Fakes()
        fleet = Fleet(fakes, 1, 64)
        await fleet.start()
        fleet._handle_lost_engine(0, fakes.made[0], EngineLost("gone"))
        await fleet.close()  # before the restart has begun
        with pytest.raises(SamplersLost, match="samplers are closed"):
            await fleet.session().sample([1], params(0))

    run(test())


def test_a_turn_under_way_at_the_end_makes_nothing_anew() -> None:
    async def test() -> None:
        fakes = Fakes()
        fleet = Fleet(fakes, 2, 64)
        await fleet.start()
        one, two = fakes.made
        one.hold, fakes.gate, two.dead = asyncio.Event(), asyncio.Event(), True
        turns = [asyncio.create_task(fleet.sample([1], params(n))) for n in range(2)]
        while len(one.asked) < 2:  # the second one has made anew, which the end waits for
            await asyncio.sleep(0)
        closing = asyncio.create_task(fleet.close())
        await asyncio.sleep(0)
        one.dead = True
        one.hold.set()
        for turn in turns:
            with pytest.raises(SamplersLost):
                await turn
        await closing
        assert fakes.made == [one, two] and fakes.closed and not fleet._restart_tasks

    run(test())
