"""What docs/RL_FACTORY.md prints runs as printed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.kits.cli import Run
from tests.kits.docs import Page
from TrainingFactory.assembly.environment import as_environment_factory, load_environment_file
from TrainingFactory.config import load_config
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.integrations.rl_factory import keys
from TrainingFactory.models import chat_format
from TrainingFactory.models.families import FAMILIES
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.rollout import play
from TrainingFactory.tools.custom_tools import calculator
from TrainingFactory.types import Message, ToolCall

PAGE = Page("docs/RL_FACTORY.md")


def test_the_printed_environment_and_family_train(tfactory: Run) -> None:
    code = f"{PAGE.block('class MyEnv')}\n{PAGE.block('register_family')}"
    Path("my_env.py").write_text(code, encoding="utf-8")
    Path("tasks.jsonl").write_text(PAGE.of("json")[0] * 2, encoding="utf-8")
    Path("run.yaml").write_text(PAGE.block("environment_id: my_env.py:MyEnv"), encoding="utf-8")
    try:
        status, _, err = tfactory(
            "train", "run.yaml", "model.family=my_form", "--name", "a", "training.max_steps=1"
        )
        assert status == 0, err
    finally:
        del FAMILIES["my_form"]
    assert all(each.reward is not None for each in load_trajectories("runs/a/trajectories.jsonl"))
    task, _ = load_tasks("tasks.jsonl")
    script = [
        Message("assistant", tool_calls=[ToolCall("calculator", {"expression": "3*4"})]),
        Message("assistant", "<answer>12</answer>"),
    ]
    environment = as_environment_factory(load_environment_file("my_env.py"), {"use_process_reward": True})(
        task, [calculator]
    )
    found = asyncio.run(play(environment, chat_format(make_tiny_tokenizer()), script))
    assert found.reward is not None and (found.reward.outcome, found.reward.steps) == (1.0, [0.1, 0.0])


def test_printed_configs_commands_and_keys_exist(tmp_path: Path) -> None:
    assert PAGE.commands()
    for text in PAGE.of("yaml"):
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
        load_config(tmp_path / "a.yaml")
    for kind in (keys.ALWAYS, keys.NOT_NEEDED, keys.BY_HAND, keys.NO_COUNTERPART):
        assert f"*{kind}*" in PAGE.text
