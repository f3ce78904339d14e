"""Sampled tokens per second over multi-turn episodes: `python -m benchmarks.sampling`.

64 calculator episodes (8 tasks, groups of 8) of the built-in model, warm-started for some seconds so that it
writes well-formed calls; temperature 1, at most 64 tokens a turn, at most 4 turns. Three contenders on the
same weights and tasks, in turn and several times over in one run:

  ours      the native engine under `RolloutEngine`, log-probs included
  generate  transformers `generate` under the same rollout engine, turn by turn: all waiting rows in one
            batch, left padded, nothing kept from turn to turn, no log-probs
  trl       the generation path of TRL's GRPOTrainer with `tools=`: its own prompts, parsing and tool loop,
            no log-probs

Tokens after a row's end do not count. `ratio` is ours over the better of the other two, by the median of the
rounds; `ratio_of_best` by the fastest round of each; `ratio_of_cpu_time` by the processor time of all threads
(what else runs on the machine disturbs it less).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.warm import expert_rows, warm_start
from TrainingFactory.common.arithmetic import calculate
from TrainingFactory.envs import CalculatorEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.protocols import Sampler
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, SamplingParams, Task, Trajectory, Weights

GROUPS, MEMBERS, MAX_TOKENS, MAX_TURNS = 8, 8, 64, 4
EPISODES = GROUPS * MEMBERS


class GenerateSampler:
    """A `Sampler` over `generate`: waits until every open session has asked, then runs all rows at once."""

    def __init__(self, model: Any, pad_id: int) -> None:
        self.model, self.pad_id = model, pad_id
        self.policy_version: int = 0
        self.max_length: int = 1024
        self.open = 0
        self.asked: list[tuple[list[int], SamplingParams, asyncio.Future[Completion]]] = []

    def session(self) -> GenerateSampler:
        self.open += 1
        return self

    def close(self) -> None:
        self.open -= 1
        self._run_if_all()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        future = asyncio.get_running_loop().create_future()
        self.asked.append((list(prompt_ids), params, future))
        self._run_if_all()
        return await future

    def _run_if_all(self) -> None:
        if not self.asked or len(self.asked) < self.open:
            return
        asked, self.asked = self.asked, []
        width = max(len(prompt) for prompt, _, _ in asked)
        ids = torch.tensor([[self.pad_id] * (width - len(prompt)) + prompt for prompt, _, _ in asked])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _, _ in asked])
        stops = asked[0][1].stop_ids
        with torch.inference_mode():
            rows = self.model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=MAX_TOKENS, eos_token_id=list(stops), pad_token_id=self.pad_id,
            )[:, width:].tolist()  # fmt: skip
        for row, (_, _, future) in zip(rows, asked, strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
            finish = "stop" if row[end - 1] in stops else "length"
            future.set_result(Completion(row[:end], [0.0] * end, finish))


def rollouts(chat: Any, sampler: Sampler, tasks: list[Task]) -> Callable[[int], int]:
    engine = RolloutEngine(
        CalculatorEnvironment, chat, SamplingParams(max_tokens=MAX_TOKENS), max_turns=MAX_TURNS
    )

    def play(number: int) -> int:
        groups = engine.rollout(tasks, sampler, MEMBERS, step=number)
        return sum(sampled_tokens(episode) for group in groups for episode in group)

    return play


def sampled_tokens(episode: Trajectory) -> int:
    return sum(len(turn.completion.token_ids) for turn in episode.turns)


def calculator(expression: str) -> str:
    """Calculate + - * / and ( ).

    Args:
        expression: what TRL insists on describing
    """
    return str(calculate(expression))


def trl_path(loaded: Any, tasks: list[Task], folder: str) -> Callable[[int], int]:
    from datasets import Dataset
    from transformers.utils import logging

    trl: Any = importlib.import_module("trl")
    logging.set_verbosity_error()
    # TRL recognises templates by their text; this is its own copy of the one that the model was warmed with.
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    loaded.tokenizer.chat_template = template.read_text(encoding="utf-8")
    system = {"role": "system", "content": CalculatorEnvironment.system_prompt}
    prompts = [[system, {"role": "user", "content": task.prompt}] for task in tasks for _ in range(MEMBERS)]
    trainer: Any = trl.GRPOTrainer(
        loaded.model,
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=trl.GRPOConfig(
            output_dir=folder, per_device_train_batch_size=EPISODES, num_generations=MEMBERS, temperature=1.0,
            max_completion_length=1024, max_tool_calling_iterations=MAX_TURNS - 1, use_cpu=True, bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=loaded.tokenizer,
        tools=[calculator],
    )  # fmt: skip
    trainer.generation_config.max_new_tokens = MAX_TOKENS  # a turn's limit; TRL's own is the whole episode's
    spec = CalculatorEnvironment.calculator.spec  # so that its prompts are, token for token, ours
    schema = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    trainer.tools = [{"type": "function", "function": schema}]
    trainer._sync_tool_dicts = [{"calculator": calculator}] * EPISODES
    trainer._async_tool_dicts = [{}] * EPISODES

    def play(_: int) -> int:
        tool_mask = trainer._generate(prompts)[2]
        return sum(sum(mask) for mask in tool_mask)

    return play


def measure(contenders: dict[str, Callable[[int], int]], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Interleaved, so that a noisy minute hits all of them; the first round warms up."""
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, play in contenders.items():
            started, cpu = time.perf_counter(), time.process_time()
            tokens = play(number)
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            if number:
                raw[name].append({"seconds": round(seconds, 4), "cpu": round(cpu, 4), "tokens": tokens})
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400, help="steps of the warm start")
    parser.add_argument("--threads", type=int, help="threads of torch; its own default if not given")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    loaded = load_model("builtin:tiny", device="cpu")
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    started = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same weights every time, and no slower where cores are shared
    loss = warm_start(loaded.model, expert_rows(CalculatorEnvironment, chat, 256), arguments.steps)
    torch.set_num_threads(threads)
    print(f"warm start: loss {loss:.2f} after {time.perf_counter() - started:.0f} s")
    tasks = list(CalculatorEnvironment.tasks("train", 1, GROUPS))
    engine = NativeEngine(loaded.model, slots=EPISODES, max_length=1024)

    def ours(number: int) -> int:
        asyncio.run(
            engine.update(Weights(number))
        )  # as after an update: nothing is kept from the round before
        return play(number)

    play = rollouts(chat, engine, tasks)
    generate = GenerateSampler(loaded.model, loaded.tokenizer.pad_token_id)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {"ours": ours, "generate": rollouts(chat, generate, tasks)}
        contenders["trl"] = trl_path(loaded, tasks, folder)
        raw = measure(contenders, arguments.rounds)
    result: dict[str, Any] = {"episodes": EPISODES, "max_tokens": MAX_TOKENS, "threads": threads, "goal": 3}
    median = statistics.median
    ways = {
        "ratio": (median, "seconds"),
        "ratio_of_best": (max, "seconds"),
        "ratio_of_cpu_time": (median, "cpu"),
    }
    for key, (choose, unit) in ways.items():
        speed = {name: choose([row["tokens"] / row[unit] for row in rows]) for name, rows in raw.items()}
        result[key] = speed["ours"] / max(speed["generate"], speed["trl"])
        print(f"{key} {result[key]:.2f}: {', '.join(f'{n} {s:.0f} tokens/s' for n, s in speed.items())}")
    print("RESULT " + json.dumps(result | {"rounds": raw}))


if __name__ == "__main__":
    main()
