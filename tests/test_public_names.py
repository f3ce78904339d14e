"""The names that users import, and what the first import costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import TrainingFactory
from tests.kits import public_api
from TrainingFactory.trainers.trainer import Trainer

NAMES = """
services.sft_trainer:SFTTrainer services.rl_trainer:GRPOTrainer services.rl_trainer:PPOTrainer
services.rl_trainer:DPOTrainer services.reward_model:RewardModelTrainer services.async_executor:AsyncToolExecutor
services.process_reward:ProcessReward services.model_registry:ModelRegistry
models.qwen3:Qwen3Model models.deepseek:DeepSeekModel models.llama:LlamaModel
tools.mcp_tools:MCPTools tools.custom_tools:SqlTool tools.tool_cache:ToolCache
rewards.rule_based:make_rule rewards.model_judge:model_judge rewards.process_reward:ProcessReward
algorithms.ppo:PPO algorithms.dpo:DPO algorithms.grpo:GRPO algorithms.rft:RFT
services:SFTTrainer models:Qwen3Model tools:MCPTools rewards:ProcessReward
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_where_it_is_looked_for(name: str):
    module, _, attribute = name.partition(":")
    assert getattr(import_module(f"TrainingFactory.{module}"), attribute).__name__ == attribute


def test_the_package_gives_what_a_program_needs_first():
    for name in TrainingFactory.__all__:
        value = getattr(TrainingFactory, name)
        assert name.endswith("Like") or value.__name__ == name  # an alias of types has no name
    assert {"GRPOTrainer", "Task", "TrainingConfig", "tool"} <= set(TrainingFactory.__all__)
    with pytest.raises(AttributeError, match="NoTrainer"):
        _ = TrainingFactory.NoTrainer  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "line", ["import TrainingFactory", "from TrainingFactory import Task, TrainingConfig, tool"]
)
def test_the_first_import_is_quick(line: str):
    heavy = "torch transformers datasets mcp" + (" pydantic" if line.startswith("import") else "")
    look = f"import sys; {line}; sys.exit(', '.join(set({heavy.split()}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_and_signatures_are_the_listed_ones():
    assert public_api.PATH.read_text(encoding="utf-8") == public_api.listing(), (
        "The public interface differs from tests/public_api.txt. If that is intended, run `make stubs`, commit the "
        "file, and mention the change in CHANGELOG.md"
    )


def test_no_argument_of_a_trainer_is_untyped():
    parameters = inspect.signature(Trainer).parameters.values()
    assert [each.name for each in parameters if each.annotation == "Any"] == [
        "options"
    ]  # typed by keyword_types.pyi
