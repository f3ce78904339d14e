"""Does it help to train the summary of a folded conversation? `python -m benchmarks.folding`

The user asks for a thing. To each "look" of the model the environment replies with one word: a name, a place and a
thing, in any order; an answer counts only after all three. The conversation then exceeds `environment.context.limit`,
and the model writes a summary of one word (`fold: summary`). The answer comes after the fold, so it can only come from
the summary.

The warm start is trained on scripted episodes that keep the right word with chance RIGHT, else another one, so the
model can write and use summaries but chooses badly. GRPO trains it twice from there, with the same tasks and seeds: all
turns (`trained`), or all turns but the summaries (`masked`).

`difference` is success with `trained` minus success with `masked`, averaged over the last WINDOW steps and paired by
seed. `lower` and `upper` are its 95 % interval by Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import count as endlessly
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples, turn_spans
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.builtin.splits import in_split
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.words import NAMES, PLACES, THINGS
from TrainingFactory.protocols import ChatFormat, Episode
from TrainingFactory.rollout import RolloutEngine, play
from TrainingFactory.rollout.folding import Folding
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Message, Sample, SamplingParams, Step, Task, Trajectory, Weights

CHOICES = 4  # words of a kind; more would take longer to learn
KINDS = {"name": NAMES[:CHOICES], "place": PLACES[:CHOICES], "thing": THINGS[:CHOICES]}
ASKED = "thing"  # the kind that the user asks for
LOOK = "look"
RIGHT = 1 / 3  # chance that a demonstration keeps the word that the user asks for
DEMONSTRATIONS = 2000
BATCH, WARM_RATE = 16, 0.006
TASKS, MEMBERS = 8, 8  # of a step
RATE, WARMUP = 5e-4, 4
MAX_TOKENS, MAX_TURNS, MAX_LENGTH = 8, len(KINDS) + 2, 192
WINDOW = 10
Arm = Literal["trained", "masked"]
ARMS: tuple[Arm, Arm] = ("trained", "masked")
T95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 15: 2.131}  # Student's t by degrees of freedom


class Words(ToolEnvironment):
    """The user asks for a thing; to each "look" the environment replies with the next word. It has no tools,
    because their list would be most of the tokens."""

    system_prompt = ""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.looks = 0

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        rng, num_tasks = random.Random(f"words {seed}"), 0
        for number in endlessly():
            if num_tasks == count:
                return
            words = {kind: rng.choice(choices) for kind, choices in KINDS.items()}
            order = rng.sample(list(words.values()), len(words))
            if in_split(" ".join(order), split):
                num_tasks += 1
                yield Task(f"words-{seed}-{number}", f"{ASKED}?", words[ASKED], {"words": order})

    @property
    def words(self) -> list[str]:
        return self.task.metadata["words"]

    async def step(self, message: Message) -> Step:
        if message.content != LOOK:
            return Step(done=True)
        self.looks += 1
        return Step([Message("user", self.words[self.looks - 1] if self.looks <= len(KINDS) else "Nothing")])

    def reward(self, episode: Episode) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float(self.looks >= len(KINDS) and episode.trajectory.answer.strip() == self.task.answer)

    def script(self, rng: random.Random) -> Iterator[Message]:
        """All words, a summary that keeps one of them, and that word as the answer."""
        for _ in KINDS:
            yield Message("assistant", LOOK)
        right = str(self.task.answer)
        kept = right if rng.random() < RIGHT else rng.choice([word for word in self.words if word != right])
        yield Message("assistant", kept)
        yield Message("assistant", kept)


def folding_of(chat: ChatFormat) -> Folding:
    """Return the folding of the task: the limit is just below the prompt after the last lookup."""
    folding = Folding("summary", limit=10_000, max_folds=1, summary_tokens=8, template="Summary?")
    task = next(Words.tasks("heldout", 0, 1))
    script = [*Words(task).script(random.Random(0))]
    del script[len(KINDS)]  # without a fold there is no summary
    episode = asyncio.run(play(Words(task), chat, script, folding=folding))
    return replace(folding, limit=len(episode.turns[-1].prompt_ids) - 4)


def demonstrations(chat: ChatFormat, folding: Folding) -> list[Sample]:
    """Return the rows of scripted episodes before the fold, and of one episode in four also after it: copying one
    word is easy."""

    async def play_all() -> list[Sample]:
        rng, rows = random.Random(0), list[Sample]()
        for task in Words.tasks("heldout", 0, DEMONSTRATIONS):
            environment = Words(task)
            episode = await play(environment, chat, environment.script(rng), folding=folding)
            assert [turn.fold for turn in episode.turns] == [None] * (len(KINDS) + 1) + ["summary"]
            rows += to_samples(episode)[: 1 if rng.random() < 0.75 else 2]
        return rows

    return asyncio.run(play_all())


def make_warm_start(folder: Path) -> dict[str, float]:
    """Train the built-in model on demonstrations and save it; return the first and the last loss."""
    loaded = load_model("builtin:tiny", device="cpu")
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    rows = demonstrations(chat, folding_of(chat))
    steps = len(rows) // BATCH
    learner = Learner(
        loaded.model,
        OptimizerOptions("muon", learning_rate=WARM_RATE, schedule="linear", total_steps=steps),
    )
    sft = SFT()
    metrics = [
        learner.update(make_batch(rows[step * BATCH : (step + 1) * BATCH]), sft.loss) for step in range(steps)
    ]
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return {"first": metrics[0]["loss"], "last": metrics[-1]["loss"]}


@dataclass(slots=True)
class Run:
    """One seed of one arm: share of right answers and of summaries with the right word, step by step."""

    arm: Arm
    seed: int
    success: list[float]
    kept: list[float]
    seconds: float

    @property
    def final(self) -> float:
        return float(np.mean(self.success[-WINDOW:]))


def train(folder: Path, arm: Arm, seed: int, steps: int) -> Run:
    started = time.perf_counter()
    loaded = load_model(str(folder), device="cpu")
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    engine = NativeEngine(loaded.model, slots=TASKS * MEMBERS, max_length=MAX_LENGTH, deterministic=True)
    learner = Learner(loaded.model, OptimizerOptions(learning_rate=RATE, warmup_steps=WARMUP))
    grpo = GRPO()
    params = SamplingParams(max_tokens=MAX_TOKENS)
    rollouts = RolloutEngine(Words, chat, params, max_turns=MAX_TURNS, seed=seed, folding=folding_of(chat))
    tasks = list(Words.tasks("train", seed, TASKS * steps))
    run = Run(arm, seed, [], [], 0.0)
    for step in range(steps):
        loaded.model.eval()
        chosen = tasks[step * TASKS : (step + 1) * TASKS]
        asyncio.run(engine.update(Weights(step)))
        groups = rollouts.rollout(chosen, engine, MEMBERS, step)
        note(run, [episode for group in groups for episode in group])
        rows = [row for group in groups for row in samples(grpo, group, arm)]
        if rows:
            learner.update(make_batch(rows), grpo.loss)
    run.seconds = round(time.perf_counter() - started, 1)
    return run


def samples(grpo: GRPO, group: Sequence[Trajectory], arm: Arm) -> list[Sample]:
    """Return the rows of a group. `masked` does not train the tokens of summaries."""
    rows = grpo.samples(group)
    if arm == "masked" and rows:
        parts = iter(rows)
        for episode in group:
            spans = turn_spans(episode)
            own = [next(parts) for _ in range(spans[-1].row + 1)]
            for turn, span in zip(episode.turns, spans, strict=True):
                if turn.summary:
                    own[span.row].loss_mask[span.begin : span.end] = [False] * (span.end - span.begin)
    return rows


def note(run: Run, episodes: Sequence[Trajectory]) -> None:
    run.success.append(
        round(float(np.mean([episode.reward.outcome for episode in episodes if episode.reward])), 4)
    )
    summaries = [(turn.message.content, e.task) for e in episodes for turn in e.turns if turn.summary]
    right = [str(task.answer) in text for text, task in summaries]
    run.kept.append(round(float(np.mean(right)) if right else 0.0, 4))


def all_runs(folder: Path, seeds: int, steps: int, workers: int) -> list[Run]:
    """Run every seed of both arms, each in a process with one thread."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        jobs = [pool.submit(train, folder, arm, seed, steps) for seed in range(seeds) for arm in ARMS]
        for job in as_completed(jobs):
            run = job.result()
            kept = np.mean(run.kept[-WINDOW:])
            print(
                f"seed {run.seed} {run.arm:8} {run.seconds:5.0f} s  success {run.final:.3f}  kept {kept:.3f}",
                flush=True,
            )
        return [job.result() for job in jobs]


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    arms = {arm: sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed) for arm in ARMS}
    final = {arm: np.array([run.final for run in found]) for arm, found in arms.items()}
    differences = final["trained"] - final["masked"]
    half = T95[len(differences) - 1] * float(differences.std(ddof=1)) / len(differences) ** 0.5
    mean = float(differences.mean())
    return {
        "difference": round(mean, 4),
        "lower": round(mean - half, 4),
        "upper": round(mean + half, 4),
        "helps": mean - half > 0,
        "window": WINDOW,
        "final": {arm: found.round(4).tolist() for arm, found in final.items()},
        "mean": {arm: round(float(found.mean()), 4) for arm, found in final.items()},
        "differences": differences.round(4).tolist(),
        "success": {
            arm: np.mean([run.success for run in found], 0).round(4).tolist() for arm, found in arms.items()
        },
        "kept": {
            arm: np.mean([run.kept for run in found], 0).round(4).tolist() for arm, found in arms.items()
        },
        "seconds": {arm: [run.seconds for run in found] for arm, found in arms.items()},
    }


def show(result: dict[str, Any]) -> None:
    print("\nmean over seeds\nstep  success trained  masked    kept trained  masked")
    for step in range(0, len(result["success"]["trained"]), WINDOW):
        values = [
            np.mean(result[key][arm][step : step + WINDOW]) for key in ("success", "kept") for arm in ARMS
        ]
        print(f"{step + WINDOW:4}  {values[0]:15.3f} {values[1]:7.3f} {values[2]:15.3f} {values[3]:7.3f}")
    verdict = "training the summary helps" if result["helps"] else "NO gain of trained summaries is shown"
    print(
        f"difference {result['difference']}, 95 % interval {result['lower']} to {result['upper']}: {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8, choices=[n + 1 for n in T95])
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--model", type=Path, help="folder of the warm start; made there if it is missing")
    args = parser.parse_args()
    if args.steps < WINDOW:
        parser.error(f"--steps is {args.steps}; it must be {WINDOW} or more")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    torch.set_num_threads(1)  # matrices this small are not worth a second one
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = args.model or Path(name)
        if not (folder / "config.json").is_file():
            print(
                "warm start:", make_warm_start(folder), f"{time.perf_counter() - started:.0f} s", flush=True
            )
        runs = all_runs(folder, args.seeds, args.steps, args.workers)
    result = summary(runs)
    show(result)
    result |= {
        "seeds": args.seeds,
        "steps": args.steps,
        "all_seconds": round(time.perf_counter() - started, 1),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
