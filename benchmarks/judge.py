"""What a model judge costs a run besides its own time: `python -m benchmarks.judge`.

The judge is an HTTP endpoint on the loopback, in a process of its own, that takes 0.3 s for a verdict and works on 8 at
a time. 256 episodes cannot be judged in less than 0.3 * 256 / 8 = 9.6 s.

`ratio_to_ideal`: the wall time of a rollout of 256 episodes with the judge as their reward, over those 9.6 s. The
built-in model and the native engine really decode 24 tokens for each episode, in 64 slots; episodes are judged while
others are still being sampled. `ratio_alone`: the same 256 trajectories, judged with nothing beside it.

`cache_ratio`: the time of that judging over the time that a new judge takes for the same trajectories when the cache
file has the replies (the median of five).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tools import TOKENS, FixedLength
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.rewards.judge.model_judge import model_judge
from TrainingFactory.rewards.workers.distributed import RewardWorkerPool
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import SamplingParams, Task, Trajectory

EPISODES, SECONDS, CAPACITY, SLOTS, WARM_ROUNDS = 256, 0.3, 8, 64, 5
IDEAL = SECONDS * EPISODES / CAPACITY
LIMITS = {"ratio_to_ideal": 1.2, "cache_ratio": 50}


@contextmanager
def endpoint() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.judge_server", str(SECONDS), str(CAPACITY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.stdin.close()  # it ends with it


def judge_at(url: str, cache: Path | None = None) -> Any:
    # Four more than the endpoint works on: the next ones are there when a place becomes free.
    return model_judge(
        base_url=url,
        model="judge",
        api_key_env=None,
        concurrency=CAPACITY + 4,
        cache=cache,
        judge_unfinished=True,
    )


def rolled_out(url: str) -> tuple[float, list[Trajectory]]:
    loaded = load_model("builtin:tiny", device="cpu")
    chat = chat_format(loaded.tokenizer, stop_ids=range(len(loaded.tokenizer)))
    sampler = FixedLength(NativeEngine(loaded.model, slots=SLOTS, max_length=1024))
    tasks = [Task(f"task-{number}", f"Question number {number}?", "x") for number in range(EPISODES)]
    engine = RolloutEngine(ToolEnvironment, chat, SamplingParams(), reward=judge_at(url))
    warm = RolloutEngine(ToolEnvironment, chat, SamplingParams(), reward=lambda episode: 0.0)
    started = time.perf_counter()
    warm.rollout(tasks, sampler)
    print(f"the rollout alone: {time.perf_counter() - started:.2f} s for {EPISODES} times {TOKENS} tokens")
    started = time.perf_counter()
    groups = engine.rollout(tasks, sampler)
    elapsed = time.perf_counter() - started
    trajectories = [episode for [episode] in groups]
    assert all(each.reward is not None and each.reward.outcome == 0.7 for each in trajectories)
    return elapsed, trajectories


def judged(url: str, trajectories: Sequence[Trajectory], cache: Path) -> float:
    """Return the seconds from the making of the judge to the last reward."""

    async def run() -> float:
        judge = judge_at(url, cache)
        pool = RewardWorkerPool(model=judge, per_worker=EPISODES)
        rewards = await pool.compute_rewards(trajectories)
        elapsed = time.perf_counter() - started
        assert all(reward is not None and reward.outcome == 0.7 for reward in rewards)
        await judge.close()
        return elapsed

    started = time.perf_counter()
    return asyncio.run(run())


def main() -> None:
    print(__doc__)
    with endpoint() as url, tempfile.TemporaryDirectory() as folder:
        overlapped, trajectories = rolled_out(url)
        print(f"rollout and judge: {overlapped:.2f} s, ideal {IDEAL:.2f} s, ratio {overlapped / IDEAL:.3f}")
        cache = Path(folder) / "judge.sqlite"
        cold = judged(url, trajectories, cache)
        print(f"judge alone: {cold:.2f} s, ratio {cold / IDEAL:.3f}")
        warm = [judged(url, trajectories, cache) for _ in range(WARM_ROUNDS)]
        print(f"from the cache: {1000 * median(warm):.0f} ms")
    result = {"ratio_to_ideal": overlapped / IDEAL, "ratio_alone": cold / IDEAL, "limits": LIMITS}
    result |= {"cache_ratio": cold / median(warm), "seconds": [overlapped, cold, *warm]}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
