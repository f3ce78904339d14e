"""Programs as they are written for TRL: its names are taken for what they mean here, or answered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from peft import LoraConfig, PrefixTuningConfig

from tests.kits.rules import episode
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.services import DPOTrainer, GRPOTrainer, KTOTrainer, SFTTrainer
from TrainingFactory.trainers.trl_keywords import combine_reward_funcs
from TrainingFactory.types import Reward

TASKS = [{"prompt": f"Say {word}.", "solution": word} for word in ("yes", "no", "oh", "ah")]


def given(**options: Any) -> dict[str, Any]:
    """The keys of the config that a GRPO trainer gets by the options."""
    sections = GRPOTrainer(train_dataset=TASKS, **options).config.model_dump(exclude_unset=True)
    keys = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {key: value for key, value in keys.items() if key != "training.algorithm"}


def right(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    return [float(word in text) for text, word in zip(completions, solution, strict=True)]


def short(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) < 20) for text in completions]


def test_a_program_for_trl_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands in TRL's own documentation, with its own config; the import of the trainer alone is another."""
    GRPOConfig = pytest.importorskip("trl", reason="trl is not installed").GRPOConfig
    monkeypatch.chdir(tmp_path)
    args = GRPOConfig(
        output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
        max_completion_length=8, beta=0.01, temperature=0.9, learning_rate=1e-5, max_steps=1, logging_steps=1,
        save_steps=5, report_to="none", use_cpu=True, bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model="builtin:tiny",
        reward_funcs=[right, short],
        args=args,
        train_dataset=datasets.Dataset.from_list(TASKS),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    )
    report = trainer.train()
    assert report.steps == 1 and {"reward/right", "reward/short"} <= report.metrics.keys()
    assert report.run.parent == Path("out") and (report.checkpoint / "adapter_config.json").is_file()
    saved = list(load_trajectories(report.run / "trajectories.jsonl"))
    assert len(saved) == 8 and len({each.task.id for each in saved}) == 2  # completions, and their tasks
    config = trainer.config
    assert (config.training.batch_size, config.training.group_size, config.grpo.kl) == (2, 4, 0.01)
    assert (config.sampling.temperature, config.sampling.max_tokens, config.lora.r) == (0.9, 8, 4)
    assert config.training.schedule == "linear" and config.grpo.scale_rewards  # as TRL has them
    assert any("counts completions: training.batch_size=2 tasks" in text for text in trainer.notices)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"num_generations": 4}, {"training.group_size": 4}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"model.thinking": False}),
        ({"args": {"chat_template_kwargs": {"enable_thinking": True}}}, {"model.thinking": True}),
        ({"per_device_train_batch_size": 16}, {"training.batch_size": 2}),
        ({"per_device_train_batch_size": 16, "group_size": 4}, {"training.batch_size": 4, "training.group_size": 4}),
        ({"per_device_train_batch_size": 16, "config": TrainingConfig(group_size=2)},
         {"training.batch_size": 8, "training.group_size": 2}),
        ({"gradient_accumulation_steps": 3, "num_generations": 2},
         {"training.batch_size": 12, "training.group_size": 2}),
        ({"args": {"per_device_train_batch_size": 4, "generation_batch_size": 16, "num_generations": 4,
                   "num_iterations": 2, "max_steps": 20}},
         {"training.batch_size": 4, "training.group_size": 4, "training.minibatches": 4, "training.update_epochs": 2,
          "training.max_steps": 3}),
        ({"args": {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_generations": 4, "max_steps": 8}},
         {"training.batch_size": 4, "training.group_size": 4, "training.minibatches": 4, "training.max_steps": 2}),
        ({"max_completion_length": 64, "beta": 0.1, "save_steps": 7},
         {"sampling.max_tokens": 64, "grpo.kl": 0.1, "logging.checkpoint_every": 7}),
        ({"args": SimpleNamespace(epsilon=0.1, loss_type="dr_grpo", max_completion_length=9, scale_rewards="group")},
         {"grpo.clip_low": 0.1, "grpo.clip_high": 0.1, "grpo.normalization": "constant", "grpo.constant_length": 9,
          "sampling.max_tokens": 9, "grpo.scale_rewards": True}),
        ({"args": {"epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "cispo", "importance_sampling_level": "sequence"}},
         {"grpo.clip_low": 0.1, "grpo.clip_high": 0.3, "grpo.normalization": "token", "grpo.loss_kind": "cispo",
          "grpo.ratio": "sequence"}),
        ({"args": {"num_train_epochs": 2.0, "lr_scheduler_type": "constant_with_warmup", "optim": "adamw_torch",
                   "seed": 3, "warmup_steps": 5, "mask_truncated_completions": True, "eval_steps": 10}},
         {"training.num_epochs": 2, "training.schedule": "constant", "training.optimizer": "adamw", "training.seed": 3,
          "training.warmup_steps": 5, "grpo.train_truncated": False, "training.eval_every": 10}),
        ({"args": {"report_to": ["tensorboard"], "max_tool_calling_iterations": 3, "run_name": None}},
         {"logging.trackers": ["tensorboard"], "environment.max_turns": 4}),
        ({"sampling": {"temperature": 0.5}, "max_completion_length": 8},
         {"sampling.temperature": 0.5, "sampling.max_tokens": 8}),
        ({"peft_config": LoraConfig(r=8, use_rslora=True)},
         {"lora.enabled": True, "lora.rslora": True, "lora.r": 8, "lora.alpha": 8, "lora.dropout": 0.0}),
    ],
)  # fmt: skip
def test_names_mean_our_options(options: dict[str, Any], keys: dict[str, Any]) -> None:
    assert given(**options) == keys


def test_a_value_that_is_the_default_of_its_class_counts() -> None:
    """Nobody can tell `GRPOConfig(per_device_train_batch_size=8)` from `GRPOConfig()`."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    machine = {"output_dir": "out", "use_cpu": True, "bf16": False}
    config = given(args=trl.GRPOConfig(per_device_train_batch_size=8, num_generations=4, **machine))
    assert (config["training.batch_size"], config["training.num_epochs"]) == (2, 3)
    assert config["grpo.clip_high"] == 0.2 and config["training.schedule"] == "linear"
    rows = [{"prompt": "a", "completion": "b"}]
    sft = SFTTrainer(train_dataset=rows, args=trl.SFTConfig(learning_rate=2e-5, **machine)).config.training
    assert (sft.batch_size, sft.learning_rate, sft.num_epochs) == (8, 2e-5, 3)


@dataclass
class Config:
    """Somebody's own, with defaults of its own."""

    learning_rate: float = 0.5
    num_generations: int = 6
    strange: int = 1


def test_what_differs_from_the_class_counts_and_what_is_meant_anyway() -> None:
    assert given(args=Config(num_generations=2)) == {"training.group_size": 2, "training.learning_rate": 0.5}
    with pytest.raises(ValueError, match="strange=2: leave it out"):
        given(args=Config(strange=2))


def test_what_makes_no_difference_is_said() -> None:
    trainer = GRPOTrainer(
        train_dataset=TASKS, processing_class=object(), max_prompt_length=512, logging_steps=1,
        args={"dataloader_num_workers": 4},
    )  # fmt: skip
    for text in (
        "processing_class: tokenizer",
        "model.max_length limits",
        "every step",
        "dataloader_num_workers: ",
    ):
        assert any(text in notice for notice in trainer.notices), text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"callbacks": [1]}, "callbacks=.*watcher="),
        ({"environment_factory": dict}, "environment="),
        ({"args": {"deepspeed": "z.json", "top_entropy_quantile": 0.2}},
         r"(?s)no counterpart here:.*DeepSpeed is not supported.*top_entropy_quantile=0.2: leave it out"),
        ({"args": {"lr_scheduler_type": "polynomial"}}, "only constant, linear, cosine, constant_with_warmup"),
        ({"args": {"loss_type": "sapo"}}, "loss_type=.sapo.: only grpo, dapo"),
        ({"args": {"scale_rewards": "batch"}}, "only group, True"),
        ({"args": {"num_train_epochs": 0.5}}, "training.num_epochs: must be a valid integer"),
        ({"args": {"warmup_ratio": 0.1}}, "write warmup_steps"),
        ({"per_device_train_batch_size": 4}, "4 completions.*multiple of 8 .*training.batch_size"),
        ({"num_generations": 4, "group_size": 4}, "training.group_size, which is also set"),
        ({"max_completion_length": 4, "max_tokens": 4}, "max_tokens is given twice"),
        ({"num_generations": 4, "args": {"num_generations": 8}}, "given twice, by itself and in args"),
        ({"tasks": TASKS}, "tasks is given twice, by itself and by its name in TRL"),
        ({"reward_funcs": "some/reward-model"}, "reward_funcs has 'some/reward-model'.*learned"),
        ({"reward_funcs": [right, short], "reward_weights": [1.0]}, "1 numbers and reward_funcs 2"),
        ({"reward_weights": [1.0]}, "goes with reward_funcs"),
        ({"peft_config": PrefixTuningConfig(num_virtual_tokens=4)}, "peft_config has .*no counterpart"),
        ({"peft_config": LoraConfig(modules_to_save=["lm_head"])}, "peft_config has modules_to_save"),
    ],
)  # fmt: skip
def test_the_others_are_answered(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        given(**options)


def test_trainers_on_data() -> None:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e", "rejected": "f"}]
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_length": 64,
        "packing": True,
    }
    sft = SFTTrainer(train_dataset=rows, eval_dataset=rows[:1], args=args | {"eval_steps": 5})
    assert (sft.config.training.batch_size, sft.config.model.max_length) == (8, 64)
    assert sft.objects.examples and sft.objects.heldout and len(sft.objects.heldout) == 1
    dpo = DPOTrainer(
        train_dataset=pairs, beta=0.3, args={"loss_type": ["ipo"], "precompute_ref_log_probs": True}
    )
    assert (dpo.config.dpo.beta, dpo.config.dpo.loss_kind, dpo.config.dpo.reference) == (
        0.3,
        "ipo",
        "precomputed",
    )
    kto = KTOTrainer(
        train_dataset=[row | {"label": n == 0} for n, row in enumerate(rows)], args={"beta": 0.2}
    )
    assert kto.config.kto.beta == 0.2
    with pytest.raises(ValueError, match=r"epsilon=0\.1: leave it out"):
        SFTTrainer(train_dataset=rows, args={"epsilon": 0.1})


def test_several_rewards_and_one_that_does_not_apply() -> None:
    def maths(completions: list[str], kind: list[str]) -> list[float | None]:
        return [1.0 if each == "maths" else None for each in kind]

    async def code(completions: list[str], kind: list[str]) -> list[float | None]:
        return [2.0 if each == "code" else None for each in kind]

    episodes = [episode("x", kind=kind) for kind in ("maths", "code", "other")]
    first, second, third = asyncio.run(combine_reward_funcs([maths, code], [1.0, 0.5]).group(episodes))
    assert first == Reward(1.0, parts={"maths": 1.0}) and second == Reward(1.0, parts={"code": 2.0})
    assert isinstance(third, Unscored) and "none of the reward functions applies" in str(third)
    assert (
        combine_reward_funcs(maths) is maths
        and combine_reward_funcs([maths]) is maths
        and combine_reward_funcs("rule_based") == "rule_based"
    )
    two = combine_reward_funcs([lambda completions: [1.0], lambda completions: [2.0]])
    assert asyncio.run(two.group(episodes[:1]))[0].outcome == 3.0


def test_held_out_tasks_are_evaluated(tmp_path: Path) -> None:
    report = GRPOTrainer(
        model="builtin:tiny", train_dataset=TASKS[:2], eval_dataset=TASKS[2:], reward_funcs=right, eval_every=1,
        max_steps=1, batch_size=1, num_generations=2, max_completion_length=4, output_dir=tmp_path,
    ).train()  # fmt: skip
    assert any("eval/success" in row for row in report.rows)
