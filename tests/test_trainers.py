"""The trainers in the form that people know them by: each trains two steps, and says what it does not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import TrainingFactory.services as services
from tests.run_kit import Parity, Quiet
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
from TrainingFactory.types import Trajectory

TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Where somebody lives.", "parameters": {
    "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}}]  # fmt: skip


def asked(name: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Where does {name} live?"}]


def answered(name: str, place: str) -> list[dict[str, Any]]:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "lookup", "arguments": json.dumps({"name": name})},
    }
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": place},
        {"role": "assistant", "content": place},
    ]


def guessed(place: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": place}]


PEOPLE = [("Ada", "Oslo"), ("Boris", "Lima"), ("Carla", "Rome"), ("David", "Paris")]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"messages": asked(n) + answered(n, p), "tools": TOOLS} for n, p in PEOPLE],
    "dpo": [
        {"prompt": asked(n), "chosen": answered(n, p), "rejected": guessed("Cairo"), "tools": TOOLS}
        for n, p in PEOPLE
    ],
    "kto": [
        {
            "prompt": asked(n),
            "completion": answered(n, p) if good else guessed(p),
            "label": good,
            "tools": TOOLS,
        }
        for n, p in PEOPLE
        for good in (True, False)
    ],
}


def two_steps(folder: Path) -> dict[str, Any]:
    return {
        "num_epochs": 1, "max_steps": 2, "batch_size": 2, "learning_rate": 1e-3, "output_dir": str(folder),
        "watcher": Quiet(), "sampling": {"max_tokens": 6, "deterministic": True, "slots": 8},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("trainer", "rows", "options"),
    [
        (SFTTrainer, "sft", {"turns": "last"}),
        (DPOTrainer, "dpo", {"beta": 0.2, "loss_kind": "ipo"}),
        (KTOTrainer, "kto", {"desirable_weight": 2.0}),
        (RewardModelTrainer, "dpo", {"center": 0.01}),
    ],
)
@pytest.mark.parametrize("how", ["objects", "file"])
def test_from_rows_that_exist(
    tmp_path: Path, trainer: Callable[..., Any], rows: str, options: dict[str, Any], how: str
) -> None:
    data: dict[str, Any] = {"dataset": ROWS[rows]}
    if how == "file":
        path = tmp_path / "ds_tool_calling_v1.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]))
        data = {"dataset_id": str(path)}
    made = trainer(model="builtin:tiny", **data, **options, **two_steps(tmp_path))
    section = getattr(made.config, made.algorithm)
    assert {key: getattr(section, key) for key in options} == options
    report = made.train()
    assert report.steps == 2 and report.state == "finished" and report.checkpoint is not None
    assert [row["grad_norm"] > 0 for row in report.rows] == [True, True]


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
    watcher = Quiet()
    made = trainer(
        model="builtin:tiny",
        environment={"environment_id": "calculator", "tools": ["calculator"], "async_execution": True},
        reward_function=by_length,
        async_rollout=True,
        allocation_id="alloc-7",
        **options,
        **two_steps(tmp_path) | {"watcher": watcher},
    )
    assert getattr(made.config, made.algorithm) and made.config.training.group_size == options["group_size"]
    report = made.train()
    assert report.steps == 2 and report.checkpoint is not None
    assert any(row.get("grad_norm", 0) > 0 for row in report.rows)
    # what is not there yet says what happens instead
    assert "note: optimization.async_rollout: training and sampling do not overlap yet" in watcher.said
    assert any("allocation_id alloc-7" in text and "on this machine" in text for text in watcher.said)


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
    assert GRPOTrainer(kl=0.5).config.grpo.kl == 0.5 and PPOTrainer(kl=0.5).config.ppo.kl == 0.5


@pytest.mark.parametrize(
    ("trainer", "options", "text"),
    [
        (GRPOTrainer, {"betta": 0.2}, "betta"),
        (GRPOTrainer, {"beta": 0.2}, "beta"),  # of another algorithm
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
        (SFTTrainer, {"learning_rate": 0.0}, "training.learning_rate"),
        (GRPOTrainer, {"dataset": [{"messages": []}]}, "takes no dataset"),
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
