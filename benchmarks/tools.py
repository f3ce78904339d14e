"""What tools cost a run besides their own time: `python -m benchmarks.tools`.

`ratio_to_ideal`: 64 episodes with three calls each of a tool that takes 0.2 s, and a last turn without one. If nothing
waited for anything else, the wall time would be 0.6 s plus what decoding takes alone (the same episodes with instant
tools, measured in the same run). The figure is the measured time over that sum, for a tool that blocks (`time.sleep`)
and for an async one, the worse of the two; `mcp_ratio_to_ideal` is the same for a tool behind one stdio connection to
an MCP server.

What runs: the built-in model and the native engine really decode 24 tokens in every turn. An untrained model writes
no calls and hardly ends a turn, so the environment calls the tool whatever the model said, and every turn is ended
after 24 tokens (the chat format is told that any token may end one). Beside it, TRL's GRPOTrainer makes the same calls
of the same functions in its own tool loop (tools_trl.py).

`sdk_share`: calls per second of our executors over those of the MCP SDK alone, each with 64 calls at the same time over
one stdio connection to a server that answers at once; both in turns in one run.

`cache_hit_ms`: a call of a pure tool whose result is in the cache, through the executor.

All figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mcp import Client, StdioServerParameters

from benchmarks.tools_trl import measure_trl
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.protocols import Sampler, SamplingSession
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.tools import AsyncToolExecutor, MCPTools, tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Completion, Message, SamplingParams, Step, Task, ToolCall

EPISODES, CALLS, TOKENS, SECONDS, ROUNDS = 64, 3, 24, 0.2, 7
AT_ONCE, EACH, SHARE_ROUNDS = 64, 10, 24
HITS = 2000
SERVER = {"command": sys.executable, "args": [str(Path(__file__).with_name("tools_server.py"))]}
LIMITS = {"ratio_to_ideal": 1.3, "mcp_ratio_to_ideal": 1.5, "sdk_share": 0.85, "cache_hit_ms": 0.2}


def instant(index: int) -> str:
    """Answer at once.

    Args:
        index: which call it is
    """
    return f"answer {index}"


def blocking(index: int) -> str:
    """Answer after a while.

    Args:
        index: which call it is
    """
    time.sleep(SECONDS)
    return f"answer {index}"


async def waiting(index: int) -> str:
    """Answer after a while.

    Args:
        index: which call it is
    """
    await asyncio.sleep(SECONDS)
    return f"answer {index}"


FUNCTIONS: dict[str, Callable[..., Any]] = {"instant": instant, "blocking": blocking, "waiting": waiting}


class Forced(ToolEnvironment):
    """Calls the tool three times, whatever the model said, and ends after the turn that follows."""

    kind = "instant"
    handed: Sequence[Any] = ()

    def __init__(self, task: Task) -> None:
        super().__init__(task, self.handed)
        self.calls = 0

    async def step(self, message: Message) -> Step:
        if self.calls == CALLS:
            return Step(done=True)
        call = ToolCall(self.kind, {"index": self.calls}, "call")
        self.calls += 1
        return await super().step(Message("assistant", tool_calls=[call]))


class FixedLength:
    """A sampler, or a session of one, whose turns all have TOKENS tokens."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.policy_version: int = 0
        self.max_length: int = 1024

    def session(self) -> SamplingSession:
        return FixedLength(self.inner.session())

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        free = dataclasses.replace(params, stop_ids=(), max_tokens=TOKENS)
        return dataclasses.replace(await self.inner.sample(prompt_ids, free), finish="stop")

    def close(self) -> None:
        self.inner.close()


async def measure_overlap(loaded: Any) -> dict[str, list[tuple[float, float]]]:
    """For every kind of slow tool, pairs of seconds: with instant tools, then with slow ones. Taken one right after
    the other, because what else the machine does changes by the minute."""
    chat = chat_format(loaded.tokenizer, stop_ids=range(len(loaded.tokenizer)))
    sampler: Sampler = FixedLength(NativeEngine(loaded.model, slots=EPISODES, max_length=1024))
    tasks = [Task(f"task-{number}", f"Question number {number}?", "x") for number in range(EPISODES)]
    runtime = ToolRuntime()

    async def seconds(kind: str, handed: Any) -> float:
        environment = type("Forced", (Forced,), {"kind": kind, "handed": [handed]})
        rollouts = RolloutEngine(environment, chat, SamplingParams(), runtime=runtime)
        started = time.perf_counter()
        groups = await rollouts.rollout_batch(tasks, sampler)
        elapsed = time.perf_counter() - started
        results = [result for [episode] in groups for turn in episode.turns for result in turn.tool_results]
        assert len(results) == EPISODES * CALLS and all(result.content[:6] == "answer" for result in results)
        return elapsed

    entry = SERVER | {"tfactory": {"tools": ["served"]}}
    async with MCPTools.from_dict({"mcpServers": {"bench": entry}}) as servers:
        slow = {"blocking": tool(blocking), "waiting": tool(waiting), "served": servers}
        await seconds("instant", tool(instant))  # warm up
        pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in slow}
        for _ in range(ROUNDS):
            for kind, handed in slow.items():
                pairs[kind].append((await seconds("instant", tool(instant)), await seconds(kind, handed)))
    return pairs


async def measure_share() -> list[tuple[float, float]]:
    """Pairs of calls per second: the SDK alone, then ours."""
    pairs = []
    ours_alone, sdk_alone = (
        MCPTools.from_dict({"mcpServers": {"bench": SERVER}}),
        StdioServerParameters(**SERVER),
    )
    async with ours_alone as servers, Client(sdk_alone) as client:

        async def raw(worker: int, index: int) -> str:
            return (await client.call_tool("echo", {"index": index})).content[0].text  # type: ignore[union-attr]

        executors = [AsyncToolExecutor([servers]) for _ in range(AT_ONCE)]
        runtime = ToolRuntime()
        for number, executor in enumerate(executors):
            executor.attach(runtime, number)

        async def ours(worker: int, index: int) -> str:
            [result] = await executors[worker].batch_execute([ToolCall("echo", {"index": index})])
            return result.content

        await _per_second(raw)  # warm up
        await _per_second(ours)
        for number in range(SHARE_ROUNDS):
            if number % 2:  # now the one first, now the other: neither profits from a machine that calms down
                second = await _per_second(ours)
                pairs.append((await _per_second(raw), second))
            else:
                pairs.append((await _per_second(raw), await _per_second(ours)))
    return pairs


async def _per_second(call: Callable[[int, int], Awaitable[str]]) -> float:
    async def work(worker: int) -> None:
        for index in range(EACH):
            assert await call(worker, index) == f"answer {index}"

    started = time.perf_counter()
    await asyncio.gather(*(work(worker) for worker in range(AT_ONCE)))
    return AT_ONCE * EACH / (time.perf_counter() - started)


async def measure_hits(folder: str) -> list[float]:
    """Milliseconds of single calls. A hundred different ones, as long as what a search returns."""

    @tool(pure=True)
    async def look(index: int) -> str:
        """A text of 2,000 characters."""
        return f"{index} " * 500

    cache = ToolCache(Path(folder) / "cache.sqlite")
    executor = AsyncToolExecutor([look])
    executor.attach(ToolRuntime(cache=cache), "episode")
    taken = []
    for number in range(HITS + 100):
        started = time.perf_counter()
        [result] = await executor.batch_execute([ToolCall("look", {"index": number % 100})])
        taken.append(1000 * (time.perf_counter() - started))
        assert result.ok and result.cached == (number >= 100)
    cache.close()
    return taken[100:]


def report_overlap(pairs: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    ideal = CALLS * SECONDS
    ratios = {kind: median(slow / (ideal + alone) for alone, slow in rows) for kind, rows in pairs.items()}
    for kind, rows in pairs.items():
        alone, slow = (median(column) for column in zip(*rows, strict=True))
        print(
            f"{kind:8} tools: {slow:6.2f} s, decoding alone {alone:.2f} s, ratio to ideal {ratios[kind]:.2f}"
        )
    return {
        "ratio_to_ideal": max(ratios["blocking"], ratios["waiting"]),
        "mcp_ratio_to_ideal": ratios["served"],
        "ratios": ratios,
        "seconds_alone_and_slow": pairs,
    }


def report_trl(seconds: dict[str, float]) -> dict[str, Any]:
    alone = seconds["instant"]
    ratios = {kind: spent / (CALLS * SECONDS + alone) for kind, spent in seconds.items() if kind != "instant"}
    for kind, ratio in ratios.items():
        print(
            f"{kind:8} tools: {seconds[kind]:6.2f} s, decoding alone {alone:.2f} s, ratio {ratio:.2f} (TRL)"
        )
    return {"trl_seconds": seconds, "trl_ratio_to_ideal": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-trl", action="store_true", help="leave out TRL, which takes over a minute")
    arguments = parser.parse_args()
    print(__doc__)
    result: dict[str, Any] = {"episodes": EPISODES, "calls_each": CALLS, "tool_seconds": SECONDS}
    result |= {"tokens_per_turn": TOKENS, "limits": LIMITS}
    pairs = asyncio.run(measure_share())
    result["sdk_share"] = median(ours / raw for raw, ours in pairs)
    result["calls_per_second_sdk_and_ours"] = [[round(raw), round(ours)] for raw, ours in pairs]
    raw, ours = (median(column) for column in zip(*pairs, strict=True))
    print(f"MCP over stdio, {AT_ONCE} calls at a time: SDK alone {raw:.0f}/s, ours {ours:.0f}/s,", end=" ")
    print(f"share {result['sdk_share']:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        result["cache_hit_ms"] = median(asyncio.run(measure_hits(folder)))
    print(f"cache hit: {result['cache_hit_ms']:.3f} ms")
    loaded = load_model("builtin:tiny", device="cpu")
    result |= report_overlap(asyncio.run(measure_overlap(loaded)))
    if not arguments.no_trl:
        result |= report_trl(measure_trl(loaded, FUNCTIONS, EPISODES, CALLS, TOKENS))
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
