"""How well episodes overlap with slow tools: `python -m benchmarks.tool_overlap`.

64 episodes with three calls each of a tool that takes 0.2 s, and a last turn without one. If nothing waited
for anything else, the wall time would be 0.6 s plus what decoding takes alone (the same episodes with instant
tools, measured in the same run); `ratio_to_ideal` is the measured time over that sum, once with a tool that
blocks (`time.sleep`) and once with an async one.

What runs: the built-in model and the native engine really decode 24 tokens in every turn. An untrained model
writes no calls and hardly ends a turn, so the environment calls the tool whatever the model said, and every
turn is ended after 24 tokens (the chat format is told that any token may end one).

Beside it, TRL's GRPOTrainer with `tools=` makes the same 64 x 3 calls of the same functions, in its own tool
loop: the same weights really generate 24 tokens for all 64 rows in every turn, which are then replaced by a
written call, because TRL runs only what it can parse.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.protocols import Sampler, SamplingSession
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.tools import tool
from TrainingFactory.types import Completion, Message, SamplingParams, Step, Task, ToolCall

EPISODES, CALLS, TOKENS, SECONDS, ROUNDS = 64, 3, 24, 0.2, 7
SLOW = ("blocking", "waiting")


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

    def __init__(self, task: Task) -> None:
        super().__init__(task, [tool(FUNCTIONS[self.kind])])
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


def measure_ours(loaded: Any) -> dict[str, list[tuple[float, float]]]:
    """For either kind of tool, pairs of seconds: with instant tools, then with slow ones. Taken one right after
    the other, because what else the machine does changes by the minute."""
    chat = chat_format(loaded.tokenizer, stop_ids=range(len(loaded.tokenizer)))
    sampler: Sampler = FixedLength(NativeEngine(loaded.model, slots=EPISODES, max_length=1024))
    tasks = [Task(f"task-{number}", f"Question number {number}?", "x") for number in range(EPISODES)]

    def seconds(kind: str) -> float:
        environment = type("Forced", (Forced,), {"kind": kind})
        rollouts = AsyncRolloutEngine(environment, chat, SamplingParams())
        started = time.perf_counter()
        groups = asyncio.run(rollouts.rollout_batch(tasks, sampler))
        elapsed = time.perf_counter() - started
        results = [result for [episode] in groups for turn in episode.turns for result in turn.tool_results]
        assert len(results) == EPISODES * CALLS and all(result.ok for result in results)
        return elapsed

    seconds("instant")  # warm up
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in SLOW}
    for _ in range(ROUNDS):
        for kind in SLOW:
            pairs[kind].append((seconds("instant"), seconds(kind)))
    return pairs


def measure_trl(loaded: Any) -> dict[str, float]:
    import trl
    from datasets import Dataset
    from transformers.utils import logging

    logging.set_verbosity_error()
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    loaded.tokenizer.chat_template = template.read_text(encoding="utf-8")
    prompts = [[{"role": "user", "content": f"Question number {number}?"}] for number in range(EPISODES)]
    seconds: dict[str, float] = {}
    for kind in ("instant", "instant", *SLOW):  # the first one warms up
        with tempfile.TemporaryDirectory() as folder:
            config = trl.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=EPISODES,
                num_generations=8,
                max_completion_length=1024,
                max_tool_calling_iterations=CALLS,
                use_cpu=True,
                bf16=False,
                report_to=[],
            )
            trainer = trl.GRPOTrainer(
                loaded.model,
                reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
                args=config,
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
                processing_class=loaded.tokenizer,
                tools=[FUNCTIONS[kind]],
            )
            seconds[kind] = _time_trl_loop(trainer, kind, prompts)
    return seconds


def _time_trl_loop(trainer: Any, kind: str, prompts: list[Any]) -> float:
    """TRL's `_generate`: prompts to tokens, generation, parsing, its tool loop. Only the words are replaced."""
    trainer.generation_config.max_new_tokens = TOKENS
    trainer.generation_config.eos_token_id = None  # no row ends early
    is_async = asyncio.iscoroutinefunction(FUNCTIONS[kind])
    tools = {kind: FUNCTIONS[kind]}
    trainer._sync_tool_dicts = [{} if is_async else tools] * EPISODES
    trainer._async_tool_dicts = [tools if is_async else {}] * EPISODES
    really_generate = trainer._generate_single_turn
    turn = -1

    def generate(*args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        nonlocal turn
        turn += 1
        generated, _ = really_generate(*args, **kwargs)
        assert max(len(ids) for ids in generated) == TOKENS
        call = json.dumps({"name": kind, "arguments": {"index": turn}})
        text = f"<tool_call>\n{call}\n</tool_call><|im_end|>" if turn < CALLS else "x<|im_end|>"
        ids = trainer.processing_class.encode(text)
        return [list(ids) for _ in generated], None

    trainer._generate_single_turn = generate
    started = time.perf_counter()
    completions = trainer._generate(prompts)[3]
    elapsed = time.perf_counter() - started
    replies = [m for completion in completions for m in completion if m["role"] == "tool"]
    assert len(replies) == EPISODES * CALLS and all(m["content"].startswith("answer") for m in replies)
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-trl", action="store_true", help="leave out TRL, which takes over a minute")
    arguments = parser.parse_args()
    print(__doc__)
    loaded = load_model("builtin:tiny", device="cpu")
    pairs = measure_ours(loaded)
    ideal = CALLS * SECONDS
    ratios = {kind: median(slow / (ideal + alone) for alone, slow in pairs[kind]) for kind in SLOW}
    for kind in SLOW:
        alone, slow = (median(column) for column in zip(*pairs[kind], strict=True))
        print(
            f"{kind:8} tools: {slow:6.2f} s, decoding alone {alone:.2f} s, ratio to ideal {ratios[kind]:.2f}"
        )
    result: dict[str, Any] = {"episodes": EPISODES, "calls_each": CALLS, "tool_seconds": SECONDS}
    result |= {
        "tokens_per_turn": TOKENS,
        "ratio_to_ideal": ratios,
        "limit": 1.3,
        "seconds_alone_and_slow": pairs,
    }
    if not arguments.no_trl:
        seconds = measure_trl(loaded)
        trl_ratios = {kind: seconds[kind] / (ideal + seconds["instant"]) for kind in SLOW}
        result |= {"trl_seconds": seconds, "trl_ratio_to_ideal": trl_ratios}
        for kind in SLOW:
            alone, ratio = seconds["instant"], trl_ratios[kind]
            print(
                f"{kind:8} tools: {seconds[kind]:6.2f} s, decoding alone {alone:.2f} s, ratio {ratio:.2f} (TRL)"
            )
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
