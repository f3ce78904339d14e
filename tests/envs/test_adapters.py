"""Environments of the real TextArena, OpenEnv and TRL, and lost processes of all adapters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.kits.guessing import (
    GAME,
    factory_of,
    learn,
    needs,
    needs_openenv,
    openenv_server,
    success_by_chance,
    warm_start,
)
from tests.kits.lessons import evaluations
from tests.kits.rollout import FakeChat
from TrainingFactory.rollout.scripted import play
from TrainingFactory.types import Message, Step, Task, ToolCall, ToolFailure, Trajectory

pytestmark = pytest.mark.servers
SERVERS = Path(__file__).resolve().parents[1] / "servers"
SUMS = f"verifiers:{SERVERS / 'verifiers_tasks' / 'sums.py'}"
SUMS_V0 = f"verifiers_v0:{SERVERS / 'verifiers_tasks' / 'sums_v0.py'}"
SHOP = f"trl:{SERVERS / 'shop.py'}:Shop"


def stepped(
    factory: Any, *messages: Message, task: Task | None = None
) -> tuple[Any, list[Message], list[Step]]:
    """Play messages in one episode; return the environment, the prompt and the steps."""

    async def main() -> tuple[Any, list[Message], list[Step]]:
        environment = factory(task or Task("t", "", None, {"seed": 7}))
        prompt = await environment.reset()
        steps = [await environment.step(message) for message in messages]
        await factory.pool.close()
        return environment, prompt, steps

    return asyncio.run(main())


def played(factory: Any, task: Task, *messages: Message) -> Trajectory:
    async def main() -> Trajectory:
        episode = await play(factory(task), FakeChat(), messages, max_turns=len(messages))
        await factory.pool.close()
        return episode

    return asyncio.run(main())


def text(content: str) -> Message:
    return Message("assistant", content)


def call(tool: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=[ToolCall(tool, arguments, "c0")])


# -- TextArena


@needs("textarena")
def test_a_game_of_textarena() -> None:
    """All episodes draw from one module `random`; each must draw as if it were alone."""

    async def main() -> None:
        factory = factory_of(GAME, args={"max_number": 9})
        tasks = [Task(f"t{number // 2}", "", None, {"seed": number // 2}) for number in range(8)]
        episodes = [factory(task) for task in tasks]
        prompts = await asyncio.gather(*(episode.reset() for episode in episodes))
        assert "between 1 and 9" in prompts[0][0].content
        numbers = []
        for episode in episodes:
            for guess in range(1, 10):
                step = await episode.step(text(str(guess)))
                if step.done:
                    numbers.append(guess)
                    assert step.signals["stop/won"] == 1 and "correct number" in step.replies[0].content
                    break
                assert step.replies[0].content == "The target number is higher."
        assert numbers[::2] == numbers[1::2] and len(set(numbers)) > 1
        await factory.pool.close()

    asyncio.run(main())


@needs("textarena")
@pytest.mark.slow
def test_an_opponent_takes_listed_actions_or_those_of_the_config() -> None:
    moves = [text(str(number)) for number in (4, 0, 1, 2, 3, 5, 6, 7, 8)]
    environment = factory_of("textarena:TicTacToe-v0")
    _, prompt, steps = stepped(environment, moves[0])
    assert "Available Moves" in prompt[0].content and "[Player 1]" in steps[0].replies[0].content
    rocks = factory_of("textarena:IteratedRockPaperScissors-v0", args={"opponent": ["[scissors]"]})
    _, _, steps = stepped(rocks, *[text("rock")] * 9)
    assert steps[-1].done and steps[-1].signals["stop/won"] == 1


@needs("textarena")
@pytest.mark.slow
def test_invalid_moves_end_a_game() -> None:
    trajectory = played(factory_of(GAME), Task("t", "", None, {"seed": 1}), text("left"), text("right"))
    assert trajectory.turns[-1].signals["stop/invalid move"] == 1
    assert trajectory.reward is not None and trajectory.reward.outcome == 0


@needs("textarena")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("GuessTheNumer-v0", "unknown game"),
        ("Wordle-v0", "nltk.downloader"),
        ("GuessTheNumber-v0", "no_such"),
    ],
)
def test_unusable_games_are_explained(name: str, part: str) -> None:
    args = {"args": {"no_such": 1}} if part == "no_such" else {}
    with pytest.raises(ValueError, match=part):
        factory_of(f"textarena:{name}", **args).tasks("train", 0, 1)


# -- OpenEnv


@needs_openenv
@pytest.mark.slow
def test_sessions_of_an_openenv_server() -> None:
    async def main(address: str) -> None:
        factory = factory_of(address)
        episodes = [factory(Task(f"t{number}", "", None, {"seed": number % 4})) for number in range(64)]
        prompts = await asyncio.gather(*(episode.reset() for episode in episodes))
        assert {prompt[0].content for prompt in prompts} == {"Guess a number from 1 to 15."}
        steps = await asyncio.gather(*(episode.step(text("0")) for episode in episodes))
        assert {step.replies[0].content for step in steps} == {"Higher."}
        assert steps[0].signals == {"guesses": 1.0}
        await factory.pool.close()

    with openenv_server() as address:
        asyncio.run(main(address))
        script = [text(str(number)) for number in range(1, 16)]
        factory = factory_of(address)
        trajectory = asyncio.run(_until_done(factory, script))
        assert trajectory.reward is not None and trajectory.reward.outcome == 1
        assert trajectory.reward.parts["guesses"] == len(trajectory.turns)


async def _until_done(factory: Any, script: list[Message]) -> Trajectory:
    episode = await play(factory(Task("t", "", None, {"seed": 3})), FakeChat(), script)
    await factory.pool.close()
    return episode


@needs_openenv
@pytest.mark.slow
def test_mcp_tools_of_an_openenv_server() -> None:
    with openenv_server("tools") as address:
        environment, prompt, steps = stepped(
            factory_of(address), call("price", name="milk"), call("price", name="tea")
        )
    assert [tool.spec.name for tool in environment.tools] == ["price"]
    assert prompt[0].content == "Call the tools."
    assert steps[0].tool_results[0].error == "exception" and steps[1].done
    assert 1 <= int(steps[1].replies[0].content) <= 9


@needs_openenv
@pytest.mark.slow
def test_a_server_with_one_session_is_rejected() -> None:
    with openenv_server("one") as address:
        with pytest.raises(ValueError, match="SUPPORTS_CONCURRENT_SESSIONS"):
            factory_of(address).tasks("train", 0, 1)
        _, _, steps = stepped(factory_of(address, args={"sessions": 1}), text("0"))
        assert steps[0].replies[0].content == "Higher."


@needs_openenv
@pytest.mark.slow
def test_a_lost_connection_loses_its_episode_alone() -> None:
    """The server dies and comes back at the same port. The process of the environment stays."""

    async def main(servers: contextlib.ExitStack, address: str) -> None:
        factory = factory_of(address)
        task = Task("t", "", None, {"seed": 1})
        first = factory(task)
        await first.reset()
        pid = factory.pool.processes[0].pid
        servers.close()
        with pytest.raises(ToolFailure, match="closed the connection"):
            await first.step(text("0"))
        await first.close()
        with pytest.raises(ToolFailure, match="refused"):
            await factory(task).reset()
        with openenv_server(port=int(address.rpartition(":")[2])):
            episode = await play(factory(task), FakeChat(), [text(str(n)) for n in range(1, 16)])
        assert episode.reward is not None and episode.reward.outcome == 1
        assert factory.pool.processes[0].pid == pid
        metrics = factory.pool.metrics()
        assert (metrics["environment/crashes"], metrics["environment/lost_episodes"]) == (0, 1)
        await factory.pool.close()

    with contextlib.ExitStack() as servers:
        asyncio.run(main(servers, servers.enter_context(openenv_server())))


@needs("openenv")
def test_a_missing_openenv_server_is_named() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no OpenEnv server answers at {address}"):
            factory_of(f"openenv:{address}").tasks("train", 0, 1)


# -- TRL


@needs("trl")
def test_an_environment_factory_of_trl() -> None:
    schema = {"type": "integer", "description": "Number of cups."}
    task = Task("t", "Hello. ", None, {"seed": 4})
    messages = [call("buy", count=10), call("look"), call("buy", count=2), text("bye")]
    factory = factory_of(SHOP, args={"price": 5})

    async def main() -> None:
        environment = factory(task)
        assert (await environment.reset())[0].content == "Hello. Buy 2 cups of tea."
        specs = {tool.spec.name: tool.spec.parameters["properties"] for tool in environment.tools}
        assert specs == {"buy": {"count": schema}, "look": {}}
        steps = [await environment.step(message) for message in messages]
        assert [step.replies[0].content for step in steps[:3]] == [
            json.dumps({"error": "there are nine cups"}),
            "open",
            "10 crowns",
        ]
        assert steps[0].tool_results[0].error == "exception" and steps[3].done
        await environment.close()
        await factory.pool.close()

    asyncio.run(main())


@needs("trl")
@pytest.mark.slow
def test_rewards_of_trl_are_those_of_get_reward() -> None:
    task = Task("t", "", None, {"seed": 0})
    bought = played(factory_of(SHOP), task, call("buy", count=1), text("bye"))
    assert bought.reward is not None and bought.reward.outcome == 1
    with pytest.raises(ValueError, match="defines no Shp"):
        factory_of(SHOP.replace(":Shop", ":Shp")).tasks("train", 0, 1)


@needs("trl")
@pytest.mark.slow
def test_an_environment_of_trl_without_a_reward_is_not_scored() -> None:
    bought = played(factory_of(SHOP.replace(":Shop", ":Unpaid")), Task("t", "", None, {}), text("bye"))
    assert bought.reward is None and bought.error and "no reward" in bought.error


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"trl:no_such\.py:Shop: there is no file no_such\.py"):
        factory_of("trl:no_such.py:Shop")


# -- all adapters


@pytest.mark.slow
@pytest.mark.parametrize("name", [GAME, SHOP, SUMS, SUMS_V0], ids=lambda name: name.partition(":")[0])
def test_a_killed_process_loses_only_its_episodes(name: str) -> None:
    needed = needs(name.partition(":")[0])
    if needed.args[0]:
        pytest.skip(needed.kwargs["reason"])

    async def main() -> None:
        factory = factory_of(name, episodes_per_process=2)
        task = (await asyncio.to_thread(lambda: list(factory.tasks("train", 0, 1))))[0]
        episodes = [factory(task) for _ in range(4)]
        await asyncio.gather(*(episode.reset() for episode in episodes))
        os.kill(factory.pool.processes[0].pid, signal.SIGKILL)
        for episode in episodes[:2]:
            with pytest.raises(ToolFailure, match="SIGKILL"):
                await episode.step(text("?"))
            await episode.close()
        await asyncio.gather(*(episode.step(text("?")) for episode in episodes[2:]))
        again = factory(task)
        await again.reset()
        metrics = factory.pool.metrics()
        assert (metrics["environment/crashes"], metrics["environment/lost_episodes"]) == (1, 2)
        await factory.pool.close()

    asyncio.run(main())


@needs("textarena")
@pytest.mark.slow
def test_grpo_learns_to_guess_in_textarena(tmp_path: Path) -> None:
    by_chance = success_by_chance(GAME)
    success = evaluations(learn(tmp_path, warm_start(tmp_path, GAME), GAME, 90))
    assert success[-1] >= by_chance + 0.3 and success[-1] >= success[0] + 0.1, (by_chance, success)


@needs_openenv
@pytest.mark.slow
def test_grpo_learns_to_guess_on_an_openenv_server(tmp_path: Path) -> None:
    with openenv_server() as address:
        by_chance = success_by_chance(address)
        success = evaluations(learn(tmp_path, warm_start(tmp_path, address), address, 90))
    assert success[-1] >= by_chance + 0.3 and success[-1] >= success[0] + 0.1, (by_chance, success)
