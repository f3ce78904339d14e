"""Plan a run on GPUs that are not there: figures and their sources, costs that follow from them, the best split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.config import TrainingConfig
from TrainingFactory.options import did_you_mean, nearest
from TrainingFactory.services.build.learner import make_algorithm
from TrainingFactory.services.doctor.memory import OPTIMIZER
from TrainingFactory.services.plan.shapes import DATA, find_shape, learner_bytes, sampler_bytes
from TrainingFactory.services.plan.simulate import Costs, Simulation
from TrainingFactory.services.plan.workload import Played, distribution, drawn, recorded
from TrainingFactory.services.runs.folder import RunFolder

EPISODES = 3000  # of a simulation, in 4 to 12 steps
# parts of a step, and the costs that each stands for
PARTS = {"sampling": ("decode", "prefill", "turn"), "tools": (), "reward": (), "update": ("update",)}
PARTS |= {"push": ("write", "load"), "driver": ("driver", "record")}
PARTS |= {"evaluations": ("evaluation",), "checkpoints": ("checkpoint",)}
CALLED = Costs._fields[:3]  # the functions among them
REMEDIES = ("training.gradient_checkpointing=true", "training.token_budget=4096", "lora.enabled=true")


class Figure(NamedTuple):
    value: Any
    unit: str
    source: str


def find_figures(engine: str, gpu: str, file: Path | None, rates: Sequence[str]) -> dict[str, Figure]:
    """Return all figures; those in a file of the user's, and those given as NAME=VALUE, take the place of ours."""
    if gpu not in DATA["gpus"]:
        raise ValueError(f"--gpu {gpu} is not known; there are {', '.join(DATA['gpus'])}")
    rows = DATA["workload"] | DATA["gpus"][gpu] | DATA["engines"][engine] | DATA["figures"]
    found = {name: Figure(*row) for name, row in rows.items()}
    read = {} if file is None else yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(read, dict):
        raise ValueError(f"--rates {file} must have a mapping from names to values")
    given = [("--rate", *each.partition("=")[::2]) for each in rates]
    for source, name, value in [*((f"--rates {file}", *each) for each in read.items()), *given]:
        if name not in found:
            raise ValueError(f"{source}: no figure {name!r}{did_you_mean(nearest(str(name), found))}")
        try:
            number = value if name in DATA["workload"] else float(value)
            if not distribution(value)(np.random.default_rng(0)) and found[name].value:
                raise ValueError("must be more than 0")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {name}: {error}") from None
        found[name] = Figure(number, found[name].unit, f"given by {source}")
    return found


def freed(costs: Costs, *names: str) -> Costs:
    """Return the costs with some that take no time."""
    return costs._replace(**{name: (lambda *_: 0.0) if name in CALLED else 0.0 for name in names})


def in_gb(parts: dict[str, float]) -> dict[str, float]:
    return {name: count / 1e9 for name, count in parts.items()}


class Planner:
    """Plans a config on GPUs. If there is only one, it holds sampler and learner, else every GPU has one of them."""

    def __init__(
        self, config: TrainingConfig, gpus: int, gpu: str = "h200", size: str | None = None, run: str | None = None,
        file: Path | None = None, rates: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if not KINDS[config.training.algorithm].samples:
            raise ValueError(
                f"training.algorithm={config.training.algorithm} samples nothing; take grpo, ppo or rft"
            )
        self.config, self.gpus, self.shape = config, gpus, find_shape(config.model.name, size)
        own, engine = config.sampling.engine, "vllm" if gpus > 1 else config.sampling.engine
        self.figures = find_figures(engine, gpu, file, rates)
        text = "sampling.engine" if engine == own else f"assumed with several GPUs; sampling.engine is {own}"
        self.figures["engine"] = Figure(engine, "that samples", text)
        for name in ("sampler_overlap", "learner_overlap") if gpus > 1 else ():
            self.figures[name] = Figure(1.0, self.figures[name].unit, "they share no GPU")
        draws = {name: distribution(self.figures[name].value) for name in DATA["workload"]}
        self.workload = drawn(draws, config.environment.max_turns, config.sampling.max_tokens)
        if run is not None:
            tool = None if self.figures["tool_seconds"].source == "assumed" else draws["tool_seconds"]
            self.workload = recorded(RunFolder.find(run, config.logging.output_dir), tool)
            for name in DATA["workload"].keys() - ({"tool_seconds"} if tool else set()):
                self.figures[name] = Figure("recorded", self.figures[name].unit, f"from run {run}")
        # Where others sample, the learner computes the log-probs of its own weights too.
        algorithm = make_algorithm(config)
        self.needs, self.refill = algorithm.needs | frozenset(["old"] if gpus > 1 else []), algorithm.refill
        self.room = 1e9 * (self["gpu_memory_gb"] - self["reserve_gb"])
        # GPUs of a sampler: what the config says, else the least power of 2 that leaves a fifth free
        least = math.ceil(math.log2(max(1.0, 2 * self.shape.params / 0.8 / self.room)))
        self.width = int(config.sampling.engine_options.get("tensor_parallel_size", 2**least))

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def least_learners(self, config: TrainingConfig) -> int:
        """Return on how many GPUs the learner fits; 1025: on no number that is tried."""
        used = (sum(learner_bytes(self.shape, config, self.needs, n).values()) for n in range(1, 1025))
        return next((n for n, each in enumerate(used, 1) if each <= self.room), 1025)

    def costs(self, learners: int) -> Costs:
        """Return what everything takes: decoding by memory traffic or operations, whichever is more; the rest by
        operations; FSDP's traffic beside the update, so that the slower of the two counts."""
        shape, training, width, lora = self.shape, self.config.training, self.width, self.config.lora
        flops, traffic = 1e12 * self["gpu_tflops"], 1e9 * self["gpu_bandwidth_gbs"] * self["bandwidth_share"]
        fixed = 1e-6 * shape.num_hidden_layers * (self["layer_us"] + 2 * self["allreduce_us"] * (width > 1))
        row, each = 1e-6 * self["row_us"] * shape.vocab_size / 151_936, 2 * shape.params / flops / width
        read, kept = (value / traffic for value in sampler_bytes(shape, width, 1, 1.0).values())
        link = 1e9 * self["node_gbs" if learners <= self["gpus_per_node"] else "network_gbs"]
        trained = shape.adapter(lora.r) if lora.enabled else shape.params
        # 16 bits gathered twice, 32 summed
        carried = 4 * (shape.params + trained) * (1 - 1 / learners) / link
        learned = training.update_epochs * (3 + training.gradient_checkpointing)  # backward is two forwards
        passes = learned + (learned + 1) * ("critic" in self.needs) + len(self.needs & {"old", "reference"})

        def update(groups: Sequence[Played]) -> float:
            work = sum(shape.forward(group.tree_tokens, group.length / 2) for group in groups)
            work += 2 * shape.hidden_size * shape.vocab_size * sum(group.sampled for group in groups)
            packs = math.ceil(sum(group.tree_tokens for group in groups) / training.token_budget / learners)
            packs = training.update_epochs * max(training.minibatches, packs)
            return max(passes * work / flops / self["update_mfu"] / learners, packs * carried)

        def decode(rows: int, context: float) -> float:
            return fixed + max(read, rows * each / self["decode_mfu"]) + rows * row + context * kept

        def prefill(new: int, known: int) -> float:
            return shape.forward(new, known + new / 2) / flops / width / self["prefill_mfu"]

        pushed = 2e-9 * trained * (self.gpus > 1 or self.config.sampling.engine != "native")
        over = (learners > 1) * 1e9 / link + (self.gpus > self["gpus_per_node"]) / self["network_gbs"]
        write, load = pushed / self["push_write_gbs"] + pushed * over, pushed / self["push_load_gbs"]
        turn, driver, record = 1e-3 * self["turn_ms"], 1e-3 * self["driver_ms"], self["record_s"]
        saved = 1e-9 * trained * (6 + OPTIMIZER[training.optimizer]) * (1 + ("critic" in self.needs))
        checkpoint = saved / self["disk_gbs"] / self.config.logging.checkpoint_every
        overlaps = self["sampler_overlap"], self["learner_overlap"]
        return Costs(decode, prefill, update, turn, driver, write, load, record, 0.0, checkpoint, *overlaps)

    def step(self, learners: int, slots: int, bound: int, without: str = "") -> tuple[float, float]:
        """Simulate steps, also with a part that takes no time; return seconds and tokens of one."""
        training, costs = self.config.training, freed(self.costs(learners), *PARTS.get(without, ()))

        def workload(rng: np.random.Generator, size: int) -> Played:
            episodes, rewards, taught = self.workload(rng, size)
            if without == "tools":
                episodes = [[turn._replace(tool=0.0) for turn in each] for each in episodes]
            return Played(episodes, [0.0] * size if without == "reward" else rewards, taught)

        size, members = training.batch_size, training.group_size
        samplers = max(1, (self.gpus - learners) // self.width)
        arrival = bound > 0 and self.config.optimization.async_order == "arrival"
        if training.eval_every and without != "evaluations":
            alone = freed(costs, "update", "write", "load", "record", "checkpoint")
            held = self.config.data.heldout_count, 1, slots, samplers
            seconds, _ = Simulation(workload, alone, *held, steps=2).run()
            costs = costs._replace(evaluation=seconds / training.eval_every)
        shape = size, members, slots, samplers, bound, self.gpus == 1, arrival, self.refill
        steps = min(12, max(4, EPISODES // size // members))
        return Simulation(workload, costs, *shape, steps, training.seed).run()

    def plan(self, learners: int | None = None) -> dict[str, Any]:
        """Return step time, bottleneck, split, memory and cost."""
        config, training, bound = self.config, self.config.training, self.config.optimization.bound
        groups = [self.workload(np.random.default_rng(n), training.group_size) for n in range(32)]
        length = sum(group.length for group in groups) / len(groups)
        least, spare = self.least_learners(config), self.room * self.width - 2 * self.shape.params
        if self.gpus == 1:
            own = 2 * self.shape.params * (config.sampling.engine != "native")
            spare = self.room - own - sum(learner_bytes(self.shape, config, self.needs, 1).values())
        slots = min(config.sampling.slots, int(spare / sampler_bytes(self.shape, 1, 1, length)["cache"]))
        most = max(1, self.gpus - self.width)
        if slots < 1 or not least <= (learners or least) <= most:
            raise ValueError(self._too_few(least, learners))
        tried = {*(most * n // 8 for n in range(1, 9)), *(2**n for n in range(10)), least}
        tried = {learners} if learners else {n for n in tried if least <= n <= most}
        splits = {n: self.step(n, slots, bound)[0] for n in sorted(tried)}
        best = min(splits, key=lambda n: splits[n])
        modes = {n: self.step(best, slots, n) for n in sorted({0, bound or 1})}
        without = {part: self.step(best, slots, bound, part)[0] for part in PARTS}
        steps = training.num_epochs * math.ceil((config.data.count or 1000) / training.batch_size)
        told = "data.count" if config.data.count else "assumed: 1,000 tasks"
        steps, told = (training.max_steps, "training.max_steps") if training.max_steps else (steps, told)
        self.figures["steps"] = Figure(steps, "steps", told)
        seconds, tokens = modes[bound]
        slowest, advice = min(without, key=lambda part: without[part]), dict[str, str]()
        if not bound and modes[1][0] < 0.9 * seconds:
            advice["optimization.async_rollout=true"] = f"{modes[1][0]:.3g} s a step"
        if slowest == "push" and not config.lora.enabled:
            advice["lora.enabled=true"] = "an adapter is pushed instead of all weights"
        return {
            "model": self.shape.name, "parameters": self.shape.params, "gpus": self.gpus, "learners": best,
            "samplers": max(1, (self.gpus - best) // self.width), "gpus_per_sampler": self.width,
            "episodes_per_sampler": slots, "step_seconds": seconds, "tokens_per_second": tokens / seconds,
            "bottleneck": slowest, "step_seconds_without": without,
            "step_seconds_by_bound": {n: each[0] for n, each in modes.items()}, "step_seconds_by_learners": splits,
            "room_gb": self.room / 1e9, "learner_gb": in_gb(learner_bytes(self.shape, config, self.needs, best)),
            "sampler_gb": in_gb(sampler_bytes(self.shape, self.width, slots, length)),
            "gpu_hours": self.gpus * (self["start_s"] + steps * seconds) / 3600,
            "advice": advice, "figures": {name: each._asdict() for name, each in self.figures.items()},
        }  # fmt: skip

    def _too_few(self, least: int, learners: int | None) -> str:
        """Say how many GPUs it takes, and what makes it fewer."""
        text = f"--gpus {self.gpus}" + (f" --learners {learners}" if learners else "") + " does not go with "
        takes = f"takes {least} or more" if least < 1025 else "fits on no number of"
        text += f"{self.shape.name}: the learner {takes} GPUs of {self['gpu_memory_gb']:g} GB"
        text += f", a sampler takes {self.width}" + (", and one must hold both" if self.gpus == 1 else "")
        for remedy in REMEDIES:
            key, _, value = remedy.partition("=")
            section, _, name = key.partition(".")
            changed = getattr(self.config, section).model_copy(update={name: yaml.safe_load(value)})
            if (fewer := self.least_learners(self.config.model_copy(update={section: changed}))) < least:
                text += f"; with {remedy} the learner takes {fewer}"
        return text
