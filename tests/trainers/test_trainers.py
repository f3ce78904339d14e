"""The trainers in the form that people know them by: each trains two steps, and says what it does not do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import TrainingFactory.services as services
from tests.kits.data import pairs, tool_dialogues, write
from tests.kits.run import Parity, Quiet
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import TrainingSection
from TrainingFactory.models import Qwen3Model
from TrainingFactory.services import (
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    PPOTrainer,
    RewardModelTrainer,
    RFTTrainer,
    SFTTrainer,
)
from TrainingFactory.training.dataset import read_heldout
from TrainingFactory.types import Trajectory

ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": tool_dialogues(4),
    "dpo": pairs(4),
    "kto": [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen", "tools": row["tools"]}
        for row in pairs(4)
        for side in ("chosen", "rejected")
    ],
}


def two_steps(folder: Path) -> dict[str, Any]:
    return {
        "num_epochs": 1, "max_steps": 2, "batch_size": 2, "learning_rate": 1e-3, "output_dir": str(folder),
        "watcher": Quiet(), "sampling": {"max_tokens": 6, "slots": 8},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "rows", "options", "how"),
    [
        (SFTTrainer, "sft", {"turns": "last"}, "objects"),
        (DPOTrainer, "dpo", {"beta": 0.2, "loss_kind": "ipo"}, "file"),
        (KTOTrainer, "kto", {"desirable_weight": 2.0}, "objects"),
        (RewardModelTrainer, "dpo", {"center": 0.01}, "file"),
    ],
)
def test_from_rows_that_exist(
    tmp_path: Path, trainer: Callable[..., Any], rows: str, options: dict[str, Any], how: str
) -> None:
    data: dict[str, Any] = {"dataset": ROWS[rows]}
    if how == "file":
        data = {"dataset_id": str(write(tmp_path / "ds_tool_calling_v1.jsonl", ROWS[rows]))}
    made = trainer(model="builtin:tiny", **data, **options, **two_steps(tmp_path))
    section = getattr(made.config, made.algorithm)
    assert {key: getattr(section, key) for key in options} == options
    report = made.train()
    assert report.steps == 2 and report.state == "finished" and report.checkpoint is not None
    assert [row["grad_norm"] > 0 for row in report.rows] == [True, True]
    assert ["entropy" in row for row in report.rows] == [trainer is not RewardModelTrainer] * 2


def by_length(episode: Any) -> float:
    trajectory: Trajectory = episode.trajectory
    return float(sum(trajectory.turns[0].completion.token_ids) % 3)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (GRPOTrainer, {"kl": 0.01, "group_size": 4}),
        (PPOTrainer, {"critic": "separate", "group_size": 2, "update_epochs": 2}),
        (RFTTrainer, {"threshold": 2.0, "group_size": 4, "train_truncated": True}),
    ],
)
def test_from_rewards(tmp_path: Path, trainer: Callable[..., Any], options: dict[str, Any]) -> None:
    made = trainer(
        model="builtin:tiny",
        environment={"environment_id": "calculator", "tools": ["calculator"], "async_execution": True},
        reward_function=by_length,
        async_rollout=True,
        **options,
        **two_steps(tmp_path) | {"sampling": {"max_tokens": 6, "slots": 8}},
    )
    assert getattr(made.config, made.algorithm) and made.config.training.group_size == options["group_size"]
    report = made.train()
    assert report.steps == 2 and report.checkpoint is not None
    assert any(row.get("grad_norm", 0) > 0 for row in report.rows)
    assert [row["staleness/max"] for row in report.rows] == [0, 1]


def test_a_model_object_and_an_environment_by_id() -> None:
    made = GRPOTrainer(
        model=Qwen3Model("Qwen/Qwen3-4B", thinking=False, dtype="bfloat16"),
        environment_id="env_search_v1",
        epochs=3,
    )
    assert made.config.model.model_dump(exclude_unset=True) == {
        "name": "Qwen/Qwen3-4B", "family": "qwen3", "thinking": False, "dtype": "bfloat16",
    }  # fmt: skip
    assert made.config.training.num_epochs == 3 and made.config.environment.environment_id == "env_search_v1"
    assert PPOTrainer(environment=Parity).objects.environment is Parity


def test_tools_of_the_environment_and_others_are_both_there() -> None:
    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    made = GRPOTrainer(environment={"environment_id": "calculator", "tools": ["sql"]}, tools=[add, "search"])
    assert [entry.name for entry in made.config.tools] == ["sql", "search"]
    assert [tool.spec.name for tool in made.objects.tools] == ["add"]


def test_plain_keys_find_their_section() -> None:
    made = DPOTrainer(beta=0.3, warmup_steps=5, max_tokens=9, r=4, quantization="none", dpo={"margin": 1.0})
    config = made.config
    assert (config.dpo.beta, config.dpo.margin) == (0.3, 1.0)
    assert (config.training.warmup_steps, config.sampling.max_tokens, config.lora.r) == (5, 9, 4)
    over = GRPOTrainer(config=TrainingConfig(batch_size=4, group_size=4), batch_size=2).config.training
    assert (over.batch_size, over.group_size) == (2, 4)
    assert GRPOTrainer(kl=0.5).config.grpo.kl == 0.5 and PPOTrainer(kl=0.5).config.ppo.kl == 0.5


def test_plain_keys_of_model_and_environment_stay_beside_their_names() -> None:
    made = GRPOTrainer(
        model="builtin:tiny",
        environment="search",
        max_turns=3,
        max_length=512,
        dtype="float32",
        thinking=False,
    )
    assert made.config.model.model_dump(exclude_unset=True) == {
        "name": "builtin:tiny", "max_length": 512, "dtype": "float32", "thinking": False,
    }  # fmt: skip
    assert made.config.environment.model_dump(exclude_unset=True) == {
        "environment_id": "search",
        "max_turns": 3,
    }
    made = GRPOTrainer(
        model={"name": "a"}, environment={"environment_id": "search"}, max_turns=3, max_length=64
    )
    assert (made.config.model.name, made.config.model.max_length) == ("a", 64)
    assert (made.config.environment.environment_id, made.config.environment.max_turns) == ("search", 3)
    assert RFTTrainer(reward="learned", outcome_weight=0.5).config.reward.type == "learned"
    made = GRPOTrainer(environment=Parity, max_turns=3, config=TrainingConfig(environment="search"))
    assert made.objects.environment is Parity
    assert made.config.environment.max_turns == 3 and made.config.environment.environment_id is None


def test_what_the_run_does_not_use_is_said() -> None:
    def said(trainer: Callable[..., Any], **options: Any) -> list[str]:
        return trainer(**options).notices

    assert any("grpo.kl: options of grpo" in text for text in said(DPOTrainer, grpo={"kl": 0.1}))
    (text,) = said(SFTTrainer, dataset=ROWS["sft"], group_size=4)
    assert text == "training.group_size: sft samples no groups of episodes"
    (text,) = said(SFTTrainer, dataset=ROWS["sft"], max_tokens=9, sampling={"slots": 3})
    assert text.startswith("sampling.max_tokens, sampling.slots: sft samples only")
    assert said(SFTTrainer, dataset=ROWS["sft"], environment=Parity, max_tokens=9, eval_every=1) == []
    assert said(GRPOTrainer, environment=Parity, max_tokens=9, group_size=4) == []
    (text,) = said(DPOTrainer, dataset=ROWS["dpo"], heldout=ROWS["dpo"][:1])
    assert text == "heldout: nothing is evaluated without training.eval_every"
    (text,) = said(GRPOTrainer, environment=Parity, adapter="x", lora={"enabled": True, "r": 4})
    assert text.startswith("lora.r: model.adapter keeps")


@pytest.mark.parametrize("how", ["objects", "file"])
def test_held_out_rows(tmp_path: Path, how: str) -> None:
    heldout: Any = ROWS["dpo"][2:]
    if how == "file":
        heldout = write(tmp_path / "heldout.jsonl", heldout)
    options: dict[str, Any] = two_steps(tmp_path) | {"max_steps": 1, "eval_every": 1}
    made = DPOTrainer(model="builtin:tiny", dataset=ROWS["dpo"][:2], heldout=heldout, **options)
    report = made.train()
    assert report.rows[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert "eval/accuracy" in report.rows[-1]


def test_the_split_of_held_out_rows(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [{"prompt": f"p{n}", "completion": "c"} for n in range(5)]
    both = DatasetDict({"train": Dataset.from_list(rows[:3]), "test": Dataset.from_list(rows[3:])})
    both.save_to_disk(str(tmp_path / "both"))
    both["train"].save_to_disk(str(tmp_path / "one"))

    def ids(examples: Any) -> list[str]:
        return [example.conversations[0].messages[0].content for example in examples.usable]

    made = SFTTrainer(dataset=both, heldout=both)
    assert made.objects.examples is not None
    assert (ids(made.objects.examples), ids(made.objects.heldout)) == (["p0", "p1", "p2"], ["p3", "p4"])
    saved = str(tmp_path / "both")
    config = SFTTrainer(dataset=saved, heldout=saved, eval_every=1).config
    assert ids(read_heldout(config, saved, saved)) == ["p3", "p4"]
    same: list[tuple[Any, dict[str, Any]]] = [
        (saved, {"heldout_split": "train"}),
        (str(tmp_path / "one"), {}),
        (both, {"dataset_split": "test"}),
        (rows, {}),
    ]
    for source, options in same:
        with pytest.raises(ValueError, match=r"data.heldout and data.dataset are the same rows"):
            SFTTrainer(
                dataset=source, heldout=source, eval_every=1, output_dir=str(tmp_path / "runs"), **options
            ).train()
    assert not (tmp_path / "runs").exists()


def test_train_takes_a_config_and_the_model_can_be_saved(tmp_path: Path) -> None:
    trainer = SFTTrainer(model="builtin:tiny", dataset=ROWS["sft"], **two_steps(tmp_path))
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        trainer.save_model()
    with pytest.raises(ValueError, match=r"training.algorithm is grpo, but SFTTrainer trains with sft"):
        trainer.train(TrainingConfig(algorithm="grpo"))
    report = trainer.train(TrainingConfig(max_steps=1, data={"count": 3}, sft={"turns": "last"}))
    assert report.steps == 1 and trainer.config.training.batch_size == 2
    assert trainer.config.sft.turns == "last" and len(trainer.objects.examples or ()) == 3
    saved = trainer.save_model()
    assert saved.path == report.run / "model" and saved.source == report.checkpoint
    assert (saved.path / "config.json").is_file() and not (saved.path / "learner.json").exists()
    assert trainer.save_model(tmp_path / "mine").path == tmp_path / "mine"
    assert trainer.train({"max_steps": 2, "use_lora": True}).steps == 2
    assert trainer.save_model(tmp_path / "merged", merge=True).kind == "merged"


@pytest.mark.parametrize(
    ("trainer", "options", "text"),
    [
        (GRPOTrainer, {"environment": Parity, "environment_id": "search"}, "environment_id is given twice"),
        (GRPOTrainer, {"environment": {"max_turns": 2}, "max_turns": 3}, "max_turns is given twice"),
        (GRPOTrainer, {"model": {"max_length": 64}, "max_length": 64}, "max_length is given twice"),
        (SFTTrainer, {"model": Qwen3Model("a", thinking=False), "thinking": True}, "thinking is given twice"),
        (SFTTrainer, {"dataset": "a.jsonl", "data": {"dataset": "b.jsonl"}}, "dataset is given twice"),
        (
            SFTTrainer,
            {"training": {"algorithm": "grpo"}},
            "training.algorithm is grpo, but SFTTrainer trains with",
        ),
        (SFTTrainer, {"algorithm": "dpo"}, "training.algorithm is dpo, but SFTTrainer trains with sft"),
        (SFTTrainer, {"training": 4}, "training"),
        (GRPOTrainer, {"environment": "search", "heldout": ROWS["sft"]}, "end before the model's turn"),
        (DPOTrainer, {"dataset": ROWS["dpo"], "heldout": [{"text": "x"}]}, "row 0 of the dataset lacks"),
        (GRPOTrainer, {"betta": 0.2}, "betta"),
        (PPOTrainer, {"beta": 0.2}, "beta"),  # of another algorithm
        (DPOTrainer, {"beta": -1.0}, "dpo.beta"),
        (DPOTrainer, {"beta": 0.2, "dpo": {"beta": 0.1}}, "beta is given twice"),
        (
            SFTTrainer,
            {"seed": 3},
            r"seed is an option of training and of data; write training=\{'seed': \.\.\.\}",
        ),
        (SFTTrainer, {"model": 3}, "model is a int; give a name"),
        (SFTTrainer, {"dataset": [{"text": "x"}]}, "row"),
        (SFTTrainer, {"dataset": []}, "empty"),
        (GRPOTrainer, {"tools": [len], "tasks": []}, r"tool len: .*use named parameters only"),
        (SFTTrainer, {"learning_rate": 0.0}, "training.learning_rate"),
        (GRPOTrainer, {"dataset": [{"messages": []}]}, "not on a dataset"),
    ],
)
def test_mistakes(trainer: Callable[..., Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        trainer(**options)


def test_every_algorithm_has_its_trainer() -> None:
    wanted = set(get_args(TrainingSection.model_fields["algorithm"].annotation))
    assert {getattr(services, name).algorithm for name in services.__all__} == wanted
    with pytest.raises(AttributeError, match="NoTrainer"):
        _ = services.NoTrainer  # pyright: ignore[reportAttributeAccessIssue]


def test_one_step_is_singular(tmp_path: Path) -> None:
    given = two_steps(tmp_path) | {"max_steps": 1}
    SFTTrainer(model="builtin:tiny", dataset=ROWS["sft"], **given).train()
    assert any(text.endswith(": 1 step") for text in given["watcher"].said), given["watcher"].said
