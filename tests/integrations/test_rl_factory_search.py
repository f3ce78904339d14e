"""The Search-R1 task of examples/search_r1: a retrieval server over MCP, answers in tags, and what they earn."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from TrainingFactory.assembly.environment import load_environment_file, make_environment
from TrainingFactory.assembly.named_files import read_config
from TrainingFactory.assembly.rewards import make_reward
from TrainingFactory.assembly.run_tools import RunTools, with_tools
from TrainingFactory.integrations.rl_factory import Env
from TrainingFactory.models import chat_format
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.rollout import play
from TrainingFactory.training.dataset import make_tasks
from TrainingFactory.types import Message, ToolCall, Trajectory

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "search_r1"
SEARCH = Message("assistant", tool_calls=[ToolCall("web_search", {"query": "Boris"})])


def scored(trajectory: Trajectory) -> tuple[float, dict[str, float], list[float]]:
    assert trajectory.reward is not None, trajectory.error
    return trajectory.reward.outcome, trajectory.reward.parts, trajectory.reward.steps


def test_search_and_answer_in_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    config = read_config(EXAMPLE / "config.yaml", [f"logging.output_dir={tmp_path}"])
    own = read_config(
        EXAMPLE / "config.yaml",
        [f"logging.output_dir={tmp_path}", "environment.environment_id=search_env.py"],
    )
    chat = chat_format(make_tiny_tokenizer())

    async def episodes() -> tuple[list[Trajectory], list[Trajectory]]:
        tools = RunTools(config, (), None)
        try:
            plain = await tools.equip(make_environment(config, True))
            task = make_tasks(config, plain)[0]  # Where does Boris live?
            assert task.answer == ["Hanoi"]
            reward = make_reward(config)

            async def said(text: str, environment: type, **options: object) -> Trajectory:
                script = [SEARCH, Message("assistant", text)]
                return await play(environment(task), chat, script, **options)  # type: ignore[arg-type]

            texts = ("<answer>the Hanoi</answer>", "Hanoi", "<answer>old Hanoi</answer> is it")
            by_rules = [await said(text, plain, reward=reward) for text in texts]
            theirs = with_tools(make_environment(own, True), tools._tool_sources)
            return by_rules, [await said(text, theirs) for text in texts]
        finally:
            await tools.close()

    by_rules, by_env = asyncio.run(episodes())
    first = by_rules[0]
    assert "Boris lives in Hanoi" in first.turns[0].replies[0].content  # from the server, over the corpus
    assert scored(first) == (pytest.approx(1.3), {"em": 1.0, "f1": 1.0, "form": 1.0}, [])
    assert scored(by_rules[1])[1] == {"em": 0.0, "f1": 0.0, "form": 0.0}
    assert scored(by_rules[2])[1] == {"em": 0.0, "f1": pytest.approx(2 / 3), "form": 0.0}
    assert [scored(each)[0] for each in by_env] == [1.0, 0.0, 0.0]
    assert scored(by_env[0])[2] == [0.0, 0.0]  # a call that can be read costs nothing
    assert issubclass(load_environment_file(str(EXAMPLE / "search_env.py")), Env)
