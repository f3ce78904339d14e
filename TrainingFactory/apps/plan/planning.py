"""The planner behind `tfactory plan`: input figures with their sources, the step time and cost that follow, and the
best split of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.apps.plan.memory import with_changes
from TrainingFactory.apps.plan.shapes import FIGURES, estimate_learner_bytes, get_sampler_bytes, plan_shape
from TrainingFactory.apps.plan.step_time import Costs, StepModel
from TrainingFactory.apps.plan.workload import (
    draw_workload,
    estimate_fork_factor,
    parse_distribution,
    workload_from_run,
)
from TrainingFactory.assembly.learner import make_algorithm
from TrainingFactory.assembly.memory import OPTIMIZER_BYTES
from TrainingFactory.assembly.states import get_row_bytes
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.tower_shape import ImageUse
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.sampling.sizing import SNAPSHOTS_PER_SLOT

MAX_SPLITS = 64  # maximum number of learner counts to try
GIB = 2**30
# part of a step -> the costs in it
STEP_PARTS = {
    "sampling": ("launch", "read", "compute", "row", "prompts", "renewal", "turn"),
    "tools": (),
    "reward": (),
    "update": ("update",),
    "push": ("write", "load"),
    "driver": ("driver", "record"),
    "evaluations": ("evaluation",),
    "checkpoints": ("checkpoint",),
}
WAIT_FIELDS = {"tools": "tool_seconds", "reward": "reward_seconds"}  # part -> field of Workload
# Costs that do not occur in an evaluation.
LEARNER_COSTS = ("update", "write", "load", "record", "checkpoint")
REMEDIES: dict[str, Any] = {
    "training.gradient_checkpointing": True, "training.token_budget": 4096, "lora.enabled": True
}  # fmt: skip


class PlanFigure(NamedTuple):
    value: Any
    unit: str
    source: str


def find_figures(engine: str, gpu: str, file: Path | None, rates: Sequence[str]) -> dict[str, PlanFigure]:
    """Return all input figures of a plan by name. The user's file overrides the defaults, and NAME=VALUE in `rates`
    overrides both."""
    if gpu not in FIGURES["gpus"]:
        raise ValueError(f"--gpu {gpu} is unknown; choose one of {', '.join(FIGURES['gpus'])}")
    rows = FIGURES["workload"] | FIGURES["gpus"][gpu] | FIGURES["engines"][engine] | FIGURES["figures"]
    figures = {name: PlanFigure(*row) for name, row in rows.items()}
    file_values = {} if file is None else yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(file_values, dict):
        raise ValueError(f"--rates {file} must be a mapping from names to values")
    settings = [(f"--rates {file}", name, value) for name, value in file_values.items()]
    settings += [("--rate", *rate.partition("=")[::2]) for rate in rates]
    for source, name, value in settings:
        if name not in figures:
            raise ValueError(f"{source}: unknown figure {name!r}{did_you_mean(nearest(str(name), figures))}")
        try:
            figure = value if name in FIGURES["workload"] else float(value)
            if not parse_distribution(value).mean and name in FIGURES["positive"]:
                raise ValueError("must be greater than 0")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {name}: {error}") from None
        figures[name] = PlanFigure(figure, figures[name].unit, f"set by {source}")
    return figures


def bytes_to_gib(bytes_by_part: dict[str, float]) -> dict[str, float]:
    return {name: num_bytes / GIB for name, num_bytes in bytes_by_part.items()}


class RunPlanner:
    """Planner for a config on `gpus` GPUs. A single GPU holds sampler and learner; otherwise each GPU holds one of
    them."""

    def __init__(
        self, config: TrainingConfig, gpus: int, gpu: str = "h200", model_size: str | None = None,
        run: str | None = None, file: Path | None = None, rates: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if not KINDS[config.training.algorithm].samples:
            raise ValueError(
                f"training.algorithm={config.training.algorithm} does not sample; use grpo, ppo or rft"
            )
        self.config, self.gpus, self.shape = config, gpus, plan_shape(config, model_size)
        if self.shape.tower is not None and gpus > 1:
            raise ValueError(
                f"--gpus {gpus}: runs with images use one GPU; set --gpus 1 or model.vision=false"
            )
        configured_engine, engine = config.sampling.engine, "vllm" if gpus > 1 else config.sampling.engine
        self.figures = find_figures(engine, gpu, file, rates)
        source_note = "sampling.engine"
        if engine != configured_engine:
            source_note = f"assumed with several GPUs; sampling.engine is {configured_engine}"
        self.figures["engine"] = PlanFigure(engine, "that samples", source_note)
        for name in ("sampler_overlap", "learner_overlap") if gpus > 1 else ():
            self.figures[name] = PlanFigure(1.0, self.figures[name].unit, "they share no GPU")
        if self.shape.tower is not None and self.figures["image_tokens"].source == "assumed":
            limit = "model.image_tokens, the maximum"
            self.figures["image_tokens"] = PlanFigure(config.model.image_tokens, "tokens per image", limit)
        distributions = {name: parse_distribution(self.figures[name].value) for name in FIGURES["workload"]}
        if run is None:
            turn_limits = config.environment.max_turns, config.sampling.max_tokens
            self.workload = draw_workload(distributions, *turn_limits)
        else:
            is_assumed = self.figures["tool_seconds"].source == "assumed"
            tool_seconds = None if is_assumed else distributions["tool_seconds"]
            self.workload = workload_from_run(RunFolder.find(run, config.logging.output_dir), tool_seconds)
            for name in FIGURES["workload"].keys() - ({"tool_seconds"} if tool_seconds else set()):
                self.figures[name] = PlanFigure("recorded", self.figures[name].unit, f"from run {run}")
        # Episodes of a group as sampled and learned: a turn that forked episodes share counts once.
        self.group_size: float = config.training.group_size
        if (branching := config.training.branching) is not None:
            fork_ratio = estimate_fork_factor(branching, self.workload.turns, config.training.group_size)
            self.group_size *= fork_ratio
            factor_source = f"estimated from training.branching with at={branching.at}"
            self.figures["fork_factor"] = PlanFigure(
                fork_ratio, "turns of a group over those without forks", factor_source
            )
        # With separate samplers the learner recomputes the log-probs with its own weights.
        algorithm = make_algorithm(config)
        self.needs, self.refill = algorithm.needs | frozenset(["old"] if gpus > 1 else []), algorithm.refill
        num_steps, episodes = self._count_steps(), config.training.batch_size * config.training.group_size
        self.images = ImageUse(
            self.workload.image_tokens, self.workload.image_share, self.workload.images * num_steps * episodes
        )
        self.gpu_bytes = GIB * (self["gpu_memory_gib"] - self["reserve_gib"])
        # GPUs per sampler: from the config, else the smallest power of 2 that leaves a fifth of the memory free
        log_tp_size = math.ceil(math.log2(max(1.0, 2 * self.shape.params / 0.8 / self.gpu_bytes)))
        self.tp_size = int(config.sampling.engine_options.get("tensor_parallel_size", 2**log_tp_size))

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def find_min_learners(self, config: TrainingConfig) -> int:
        """Return the smallest number of GPUs on which the learner fits; 1025 if it does not fit on 1024."""
        learner_bytes_by_count = (
            sum(estimate_learner_bytes(self.shape, config, self.needs, n, self.images).values())
            for n in range(1, 1025)
        )
        return next((n for n, size in enumerate(learner_bytes_by_count, 1) if size <= self.gpu_bytes), 1025)

    def count_samplers(self, num_learners: int) -> int:
        return max(1, (self.gpus - num_learners) // self.tp_size)

    def estimate_costs(self, num_learners: int, group_size: float) -> Costs:
        """Return the seconds of each part of a step, without evaluations."""
        shape, tp_size = self.shape, self.tp_size
        flops = 1e12 * self["gpu_tflops"]
        bandwidth = 1e9 * self["gpu_bandwidth_gbs"] * self["bandwidth_share"]
        link_rate = 1e9 * self["node_gbs" if num_learners <= self["gpus_per_node"] else "network_gbs"]
        trained_weights = shape.count_held(self.config).num_trained
        token_bytes = get_sampler_bytes(shape, tp_size, 1, 1.0)
        read_seconds, token_seconds = token_bytes["weights"] / bandwidth, token_bytes["cache"] / bandwidth
        state_seconds = 2 * get_row_bytes(shape, 2) / tp_size / bandwidth  # read and written, at any context
        prefill_flops = flops * tp_size * self["prefill_mfu"]
        prompt_tokens, num_tokens = self.workload.prompt_tokens, self.workload.num_tokens
        reply_tokens, context = float(np.mean(self.workload.reply_tokens)), self.workload.context_tokens
        # Each sampler that has episodes of a group computes the group's prompt once.
        prompt_share = prompt_tokens * min(group_size, self.count_samplers(num_learners)) / group_size
        image_tokens = self.workload.prompt_image_tokens * prompt_share / prompt_tokens
        prompt_flops = shape.count_flops(prompt_share, prompt_tokens / 2)
        prompt_flops += shape.count_flops(reply_tokens, context)
        encoding_flops = shape.count_tower_flops(image_tokens + self.workload.reply_image_tokens)
        pushed_gb = 2e-9 * trained_weights * (self.gpus > 1 or self.config.sampling.engine != "native")
        has_several_nodes = self.gpus > self["gpus_per_node"]
        seconds_per_gb = (num_learners > 1) * 1e9 / link_rate + has_several_nodes / self["network_gbs"]
        saved_gb = (
            1e-9
            * trained_weights
            * (6 + OPTIMIZER_BYTES[self.config.training.optimizer])
            * (1 + ("critic" in self.needs))
        )
        return Costs(
            launch=1e-6
            * shape.num_hidden_layers
            * (self["layer_us"] + 2 * self["allreduce_us"] * (tp_size > 1)),
            read=read_seconds,
            compute=2 * shape.active_params / flops / tp_size / self["decode_mfu"],
            row=1e-6 * self["row_us"] * shape.vocab_size / 151_936 + context * token_seconds + state_seconds,
            prompts=(prompt_flops + encoding_flops) / prefill_flops,
            renewal=shape.count_flops(num_tokens / 2, num_tokens / 4) / prefill_flops,
            turn=1e-3 * self["turn_ms"],
            driver=1e-3 * self["driver_ms"],
            update=self.estimate_update(
                num_learners, flops, 4 * (shape.params + trained_weights) * (1 - 1 / num_learners) / link_rate
            ),
            write=pushed_gb / self["push_write_gbs"] + pushed_gb * seconds_per_gb,
            load=pushed_gb / self["push_load_gbs"],
            record=self["record_s"],
            checkpoint=saved_gb / self["disk_gbs"] / self.config.logging.checkpoint_every,
            sampler_overlap=self["sampler_overlap"],
            learner_overlap=self["learner_overlap"],
        )

    def estimate_update(self, num_learners: int, flops: float, gather_seconds: float) -> float:
        """Return the seconds of an update: its compute time, or the time of FSDP's communication if that is longer.
        `gather_seconds` is the communication time per pack: 16 bits of every weight twice, 32 bits of every
        gradient."""
        training, shape, workload = self.config.training, self.shape, self.workload
        trained_share = 1 - (1 - workload.taught_share) ** (self.refill + 1)
        num_groups, group_size = training.batch_size * trained_share, self.group_size
        # The prompt of a group counts once.
        tokens = num_groups * (workload.num_tokens * group_size - workload.prompt_tokens * (group_size - 1))
        sampled_tokens = float(np.mean(workload.sampled_tokens))
        head_flops = 2 * shape.hidden_size * shape.vocab_size * num_groups * group_size * sampled_tokens
        forward_flops = shape.count_flops(tokens, workload.num_tokens / 2) + head_flops
        if self.config.model.train_tower:  # else the sampler's outputs of the tower are used
            image_tokens = workload.prompt_image_tokens + group_size * workload.reply_image_tokens
            forward_flops += shape.count_tower_flops(num_groups * image_tokens)
        train_passes = training.update_epochs * (3 + training.gradient_checkpointing)  # backward = 2 forwards
        num_passes = train_passes + (train_passes + 1) * ("critic" in self.needs)
        num_passes += len(self.needs & {"old", "reference"})
        num_packs = max(training.minibatches, math.ceil(tokens / training.token_budget / num_learners))
        compute_seconds = num_passes * forward_flops / flops / self["update_mfu"] / num_learners
        return max(compute_seconds, training.update_epochs * num_packs * gather_seconds)

    def make_model(
        self, num_learners: int, slots: int, max_staleness: int, skipped_part: str = ""
    ) -> StepModel:
        """Return the step-time model of a plan, in which the part `skipped_part` of a step takes no time."""
        training, samplers = self.config.training, self.count_samplers(num_learners)
        zeroed_costs = dict.fromkeys(STEP_PARTS.get(skipped_part, ()), 0.0)
        costs = self.estimate_costs(num_learners, self.group_size)._replace(**zeroed_costs)
        workload = self.workload
        if skipped_part in WAIT_FIELDS:
            workload = workload._replace(**{WAIT_FIELDS[skipped_part]: np.zeros_like(workload.turns)})
        if training.eval_every and skipped_part != "evaluations":
            zeroed_costs = dict.fromkeys(LEARNER_COSTS, 0.0) | zeroed_costs
            eval_costs = self.estimate_costs(num_learners, 1)._replace(**zeroed_costs)
            evaluation = StepModel(workload, eval_costs, self.config.data.heldout_count, 1, slots, samplers)
            costs = costs._replace(evaluation=evaluation.estimate_seconds() / training.eval_every)
        batch_shape = training.batch_size, self.group_size
        return StepModel(workload, costs, *batch_shape, slots, samplers, max_staleness, self.refill)

    def time_step(self, num_learners: int, slots: int, max_staleness: int, skipped_part: str = "") -> float:
        return self.make_model(num_learners, slots, max_staleness, skipped_part).estimate_seconds()

    def plan(self, learners: int | None = None) -> dict[str, Any]:
        """Return step time, bottleneck, split, memory and cost; try all splits unless `learners` is given."""
        config = self.config
        staleness, length = config.optimization.effective_max_staleness, self.workload.num_tokens
        min_gpus = self.find_min_learners(config)
        spare_bytes = self.gpu_bytes * self.tp_size - 2 * self.shape.params
        if self.gpus == 1:
            sampler_weights = 2 * self.shape.params * (config.sampling.engine != "native")
            spare_bytes = (
                self.gpu_bytes
                - sampler_weights
                - sum(estimate_learner_bytes(self.shape, config, self.needs, 1, self.images).values())
            )
        slot_bytes = get_sampler_bytes(self.shape, 1, 1, length)["cache"] + (
            1 + SNAPSHOTS_PER_SLOT
        ) * get_row_bytes(self.shape, 2)
        slots = min(config.sampling.slots, int(spare_bytes / slot_bytes))
        max_gpus = max(1, self.gpus - self.tp_size)
        if slots < 1 or not min_gpus <= (learners or min_gpus) <= max_gpus:
            raise ValueError(self._explain_too_few_gpus(min_gpus, learners))
        splits = {round(min_gpus + (max_gpus - min_gpus) * n / (MAX_SPLITS - 1)) for n in range(MAX_SPLITS)}
        timings = {n: self.time_step(n, slots, staleness) for n in sorted({learners} if learners else splits)}
        split = min(timings, key=timings.__getitem__)
        seconds_by_staleness = {n: self.time_step(split, slots, n) for n in sorted({0, staleness or 1})}
        seconds_without = {part: self.time_step(split, slots, staleness, part) for part in STEP_PARTS}
        num_steps = self._count_steps()
        seconds, bottleneck = timings[split], min(seconds_without, key=seconds_without.__getitem__)
        num_episodes = self.make_model(split, slots, staleness).num_episodes
        step_tokens = num_episodes * float(np.mean(self.workload.sampled_tokens))
        advice = dict[str, str]()
        if not staleness and seconds_by_staleness[1] < 0.9 * seconds:
            advice["optimization.async_rollout=true"] = f"{seconds_by_staleness[1]:.3g} s a step"
        if bottleneck == "push" and not config.lora.enabled:
            advice["lora.enabled=true"] = "pushes an adapter instead of all weights"
        return {
            "step_seconds": seconds, "bottleneck": bottleneck, "learners": split,
            "samplers": self.count_samplers(split), "gpus_per_sampler": self.tp_size, "episodes_per_sampler": slots,
            "gpu_memory_gib": self["gpu_memory_gib"], "room_gib": self.gpu_bytes / GIB,
            "learner_gib": bytes_to_gib(estimate_learner_bytes(self.shape, config, self.needs, split, self.images)),
            "sampler_gib": bytes_to_gib(get_sampler_bytes(self.shape, self.tp_size, slots, length)),
            "gpu_hours": self.gpus * (self["start_s"] + num_steps * seconds) / 3600,
            "advice": advice, "tokens_per_second": step_tokens / seconds, "step_seconds_without": seconds_without,
            "step_seconds_by_bound": seconds_by_staleness, "step_seconds_by_learners": timings,
            "model": self.shape.name, "parameters": self.shape.params, "active_parameters": self.shape.active_params,
            "gpus": self.gpus,
            "figures": {name: figure._asdict() for name, figure in self.figures.items()},
        }  # fmt: skip

    def _count_steps(self) -> int:
        """Return the number of steps, and record its source in the figures."""
        training, num_tasks = self.config.training, self.config.data.count
        steps = training.num_epochs * math.ceil((num_tasks or 1000) / training.batch_size)
        source = "data.count" if num_tasks else "assumed: 1,000 tasks"
        if training.max_steps:
            steps, source = training.max_steps, "training.max_steps"
        self.figures["steps"] = PlanFigure(steps, "steps", source)
        return steps

    def _explain_too_few_gpus(self, min_gpus: int, learners: int | None) -> str:
        """Return the error text for too few GPUs: how many are needed, and the options that reduce their number."""
        problem = f"--gpus {self.gpus}" + (f" --learners {learners}" if learners else "") + " does not suit "
        need_text = f"needs {min_gpus} or more" if min_gpus < 1025 else "does not fit on 1024"
        problem += f"{self.shape.name}: the learner {need_text} GPUs of {self['gpu_memory_gib']:g} GiB"
        problem += f", a sampler needs {self.tp_size}"
        problem += ", and one must hold both" if self.gpus == 1 else ""
        for key, value in REMEDIES.items():
            fewer_gpus = self.find_min_learners(with_changes(self.config, {key: value}))
            if fewer_gpus < min_gpus:
                problem += f"; with {key}={str(value).lower()} the learner needs {fewer_gpus}"
        return problem
