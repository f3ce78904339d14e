"""Seconds per GRPO step, ours and TRL's: `python -m benchmarks.grpo_step`.

The built-in model, warm-started on calculator episodes of mixed quality, then copied: both sides train their
own copy on the same tasks, 64 rollouts a step in groups of 8, temperature 1, at most 64 tokens a turn and 4
turns, AdamW, no KL term. TRL is its GRPOTrainer with `tools=`. The two take turns, step by step: ours runs
between two steps of TRL's own training loop. The first step of each warms up and is not counted.

`generation` is everything up to scored episodes, tools included; `update` is the rest of the step. We leave out
groups whose episodes all earned the same, which TRL computes with a gradient of zero; `rows` says how many are
left, and `update_all_rows` is the time of our update, on a spare copy of the model, over all 64. `ratio` is
TRL's median step over ours, `ratio_all_rows` the same if we computed all rows.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.sampling import EPISODES, GROUPS, MAX_TOKENS, MAX_TURNS, MEMBERS, calculator
from benchmarks.warm import warm_run
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.apps.demo.lessons import Lessons, make_sum_drill
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.envs import CalculatorEnvironment
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import SamplingParams, Task, Weights

RATE = 1e-4
Figures = dict[str, float]


def warmed(steps: int) -> tuple[Any, ChatFormat]:
    """The built-in model after drills and demonstrations, some of them with mistakes: it solves some tasks."""
    lessons = Lessons(
        make_sum_drill, num_short_rows=5 * steps, num_dialogues=11 * steps
    )  # 16 demonstrations a step
    tasks = list(CalculatorEnvironment.tasks("train", 0, 1000))
    with tempfile.TemporaryDirectory() as folder:
        warm = warm_run(CalculatorEnvironment, tasks, lessons, folder)
        loaded = load_model(str(warm), device="cpu")
    return loaded, chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)


def our_side(model: Any, chat: ChatFormat, tasks: list[Task]) -> Callable[[int], Figures]:
    spare = Learner(copy.deepcopy(model), OptimizerOptions(learning_rate=RATE))
    engine = NativeEngine(model, slots=EPISODES, max_length=1024)
    learner = Learner(model, OptimizerOptions(learning_rate=RATE))
    algorithm = GRPO()
    rollouts = RolloutEngine(
        CalculatorEnvironment, chat, SamplingParams(max_tokens=MAX_TOKENS), max_turns=MAX_TURNS
    )

    def step(number: int) -> Figures:
        chosen = tasks[number * GROUPS : (number + 1) * GROUPS]
        started = time.perf_counter()
        asyncio.run(engine.update(Weights(number)))
        groups = rollouts.rollout(chosen, engine, MEMBERS, step=number)
        sampled = time.perf_counter()
        rows = [row for group in groups for row in algorithm.samples(group)]
        learner.update(make_batch(rows), algorithm.loss)
        ended = time.perf_counter()
        every = [row for group in groups for episode in group for row in to_samples(episode)]
        spare.update(make_batch(every), algorithm.loss)
        whole = time.perf_counter() - ended
        rewards = [e.reward.outcome for group in groups for e in group if e.reward is not None]
        found = figures(sampled - started, ended - sampled, statistics.fmean(rewards))
        return found | {"update_all_rows": round(whole, 4), "rows": len(rows)}

    return step


def figures(generation: float, update: float, reward: float) -> Figures:
    return {
        "seconds": round(generation + update, 4), "generation": round(generation, 4),
        "update": round(update, 4), "reward": round(reward, 3),
    }  # fmt: skip


def trl_loop(
    loaded: Any, tasks: list[Task], folder: str, steps: int, between: Callable[[int], None]
) -> list[Figures]:
    """`steps` steps of TRL's own training; `between(n)` is called after step n, outside of its time."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.utils import logging

    trl: Any = importlib.import_module("trl")
    logging.set_verbosity_error()
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    loaded.tokenizer.chat_template = template.read_text(encoding="utf-8")  # TRL knows templates by their text
    system = {"role": "system", "content": CalculatorEnvironment.system_prompt}
    prompts = [
        {"prompt": [system, {"role": "user", "content": task.prompt}], "answer": task.answer}
        for task in tasks
    ]
    done: list[Figures] = []
    clock = {"generation": 0.0, "started": 0.0, "reward": 0.0}

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        scores = [float(c[-1]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]
        clock["reward"] = statistics.fmean(scores)
        return scores

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock["started"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            whole = time.perf_counter() - clock["started"]
            done.append(figures(clock["generation"], whole - clock["generation"], clock["reward"]))
            between(len(done) - 1)

    trainer: Any = trl.GRPOTrainer(
        loaded.model, reward_funcs=reward, tools=[calculator], callbacks=[Clock()],
        args=trl.GRPOConfig(
            output_dir=folder, per_device_train_batch_size=EPISODES, num_generations=MEMBERS, temperature=1.0,
            max_completion_length=1024, max_tool_calling_iterations=MAX_TURNS - 1, use_cpu=True, bf16=False,
            report_to=[], max_steps=steps, learning_rate=RATE, lr_scheduler_type="constant", beta=0.0,
            epsilon_high=0.28, save_strategy="no", logging_strategy="no", disable_tqdm=True,
            shuffle_dataset=False, gradient_checkpointing=False, weight_decay=0.0,
        ),
        train_dataset=Dataset.from_list(prompts), processing_class=loaded.tokenizer,
    )  # fmt: skip
    trainer.generation_config.max_new_tokens = MAX_TOKENS  # a turn's limit; TRL's own is the whole episode's
    spec = CalculatorEnvironment.calculator.spec  # so that its prompts are, token for token, ours
    schema = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    trainer.tools = [{"type": "function", "function": schema}]
    generate = trainer._generate_and_score_completions

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = generate(*args, **kwargs)
        clock["generation"] = time.perf_counter() - started
        return result

    trainer._generate_and_score_completions = timed_generate
    trainer.train()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=7, help="steps that count, of each side")
    parser.add_argument("--warm", type=int, default=300, help="steps of the warm start")
    args = parser.parse_args()
    loaded, chat = warmed(args.warm)
    tasks = list(CalculatorEnvironment.tasks("train", 1, GROUPS * (args.steps + 1)))
    other = load_model("builtin:tiny", device="cpu")
    other.model.load_state_dict(copy.deepcopy(loaded.model.state_dict()))
    ours, our_step = [], our_side(loaded.model, chat, tasks)
    with tempfile.TemporaryDirectory() as folder:
        theirs = trl_loop(other, tasks, folder, args.steps + 1, lambda number: ours.append(our_step(number)))
    raw = {"ours": ours[1:], "trl": theirs[1:]}
    middle = {
        name: {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        for name, steps in raw.items()
    }
    for name, row in middle.items():
        print(
            f"{name:5} {row['seconds']:.2f} s/step: generation {row['generation']:.2f}, update {row['update']:.2f}"
        )
    ratios = {key: middle["trl"][key] / middle["ours"][key] for key in ("seconds", "generation", "update")}
    whole = middle["ours"]["generation"] + middle["ours"]["update_all_rows"]
    result = {"rollouts": EPISODES, "threads": torch.get_num_threads(), "steps": raw, "median": middle}
    result |= {"ratios": ratios, "ratio_all_rows": middle["trl"]["seconds"] / whole}
    result |= {"ratio": ratios["seconds"], "goal": 5}
    print(f"ratio {result['ratio']:.2f}, {result['ratio_all_rows']:.2f} if we computed all rows")
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
