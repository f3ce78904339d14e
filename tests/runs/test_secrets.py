"""Secrets stay out of everything that a run writes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kits import mcp as kit
from tests.kits.run import Quiet
from TrainingFactory.assembly import sampler
from TrainingFactory.common.texts import iter_secrets
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.models import chat_format
from TrainingFactory.protocols import Episode
from TrainingFactory.tools import tool
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, Step, Task, ToolCall

PLANTED = {
    "OPENAI_API_KEY": "plant-0001-in-a-known-variable",
    "MY_SERVICE_TOKEN": "plant-0002-in-a-variable-of-ours",
    "OF_THE_SERVER": "plant-0003-through-the-file",
}
IN_ARGUMENTS = ("plant-0004-with-a-sign", "plant-0005-after-its-name", "plant-0006-in-a-header")


@tool
def leak() -> str:
    """Everything."""
    return json.dumps({name: os.environ[name] for name in PLANTED})


class Careless(ToolEnvironment):
    """Whatever the model says, it asks those who tell too much."""

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> list[Task]:
        return [Task("one", "Go."), Task("two", "Go.")]

    async def step(self, message: Message) -> Step:
        calls = [ToolCall("leak", {}), ToolCall("say", {"text": "everything"})]
        done = await super().step(Message("assistant", tool_calls=calls))
        return dataclasses.replace(done, done=True)

    def reward(self, episode: Episode) -> float:
        return float(sum(episode.trajectory.turns[-1].completion.token_ids) % 5)


def training(folder: Path, **sections: Any) -> Training:
    first, second, third = IN_ARGUMENTS
    arguments = ["", f"--api-key={first}", "--token", second, "--header", f"Authorization: Bearer {third}"]
    server = kit.own("tiny.py", *arguments) | {"env": {"A_KEY": "${OF_THE_SERVER}"}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"tiny": server}}))
    config = TrainingConfig(
        sampling={"max_tokens": 6},
        training={"max_steps": 1, "batch_size": 2, "group_size": 2},
        logging={"record_tools": True, "output_dir": str(folder / "runs")},
        tools=[{"name": "tiny", "config": str(folder / "mcp.json")}],
        **sections,
    )
    objects = UserObjects(environment=Careless, tools=[leak])
    return Training(config, name="a", objects=objects, watcher=Quiet())


def test_no_planted_key_is_in_any_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_chat(config: Any, loaded: Any, day: Any = None, notify: Any = None) -> Any:
        chat = chat_format(loaded.tokenizer)
        chat.stop_ids = tuple(range(len(loaded.tokenizer)))  # an untrained model hardly ever ends a turn
        return chat

    monkeypatch.setattr(sampler, "make_chat", make_chat)
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    training(tmp_path).train()
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"config.yaml", "trajectories.jsonl", "tool_calls.jsonl", "tools.json"} <= {
        path.name for path in files
    }
    calls = (tmp_path / "runs" / "a" / "tool_calls.jsonl").read_text()
    assert "OPENAI_API_KEY" in calls and "--api-key=***" in calls  # they did tell
    assert not [
        (path.name, n) for path in files for n in range(1, 7) if b"plant-%04d" % n in path.read_bytes()
    ]


@pytest.mark.parametrize(
    "options",
    [
        {
            "base_url": "http://127.0.0.1:9/v1",
            "options": {"extra_headers": {"Authorization": "Bearer plant-1"}},
        },
        {"base_url": "http://127.0.0.1:9/v1", "options": {"body": [{"x-api-key": "plant-1"}]}},
        {"base_url": "http://127.0.0.1:9/v1", "options": {"args": ["--verbose", "--api-key=plant-1"]}},
    ],
)
def test_a_config_that_holds_a_secret_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    reward = {"type": "model_judge", "model": "m", "options": options | {"api_key_env": None}}
    with pytest.raises(ValueError, match=r"reward\.options.*api_key_env") as caught:
        training(tmp_path, reward=reward)
    assert "plant-1" not in str(caught.value) and not (tmp_path / "runs").exists()


def test_what_is_secret_in_a_tree() -> None:
    tree = {
        "a": {
            "api_key": "x",
            "api_key_env": "NAME",
            "password": "${NAME}",
            "max_tokens": 5,
            "key": "a minor",
        },
        "token": ["0123456789abcdef", "short"],
        "args": ["--token", "0123456789abcdef", "--verbose", "file.txt", "-H", "Cookie: id=7"],
        "text": "see https://me:word@host/",
        "prompt": "Secret: you are a spy",
    }
    assert [key for key, _ in iter_secrets(tree)] == [
        ("a", "api_key"), ("token", 0), ("args", 1), ("args", 5), ("text",)
    ]  # fmt: skip
