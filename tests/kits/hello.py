"""What tests of the HelloAgents tools share: problems of GSM8K's form, a program's run, an LLM that asks for a tool."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PREFIX = "hello_agents"
STARTED = pytest.mark.xdist_group("started")  # one process of the suite trains the model for all
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen2-0.5B-Instruct")


def problems(count: int) -> list[dict[str, str]]:
    """Sums in GSM8K's form: a question, and reasoning with marks and the answer after ####."""
    rows = []
    for n in range(1, count + 1):
        worked = f"She has {n} + 2 = <<{n}+2={n + 2}>>{n + 2} now."
        rows.append({"question": f"She has {n} and gets 2. How many?", "answer": f"{worked}\n#### {n + 2}"})
    return rows


def write_gsm8k(folder: Path, train: int = 4, test: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        lines = [json.dumps(row) + "\n" for row in problems(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def make_started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has seen the problems: it solves them now and then, so that rewards differ."""
    from TrainingFactory.integrations.hello_agents import RLTrainingTool

    folder = tmp_path_factory.mktemp("started")
    call = {"algorithm": "sft", "model_name": "builtin:tiny", "use_lora": False, "num_epochs": 40,
            "learning_rate": 3e-3, "output_dir": str(folder / "model"), "save_steps": 1000, "logging_steps": 1000,
            "use_tensorboard": False, "data.tasks": str(write_gsm8k(folder / "gsm8k"))}  # fmt: skip
    assert RLTrainingTool().run(call)["status"] == "success"
    return folder / "model"


def means(model: str | Path) -> None:
    """Let the names of the text's models lead to this one, in the current folder; its answers are cut after a while."""
    entry = {"model": {"name": str(model)}, "sampling": {"max_tokens": 56}}
    Path("factories.yaml").write_text(json.dumps({"models": dict.fromkeys(MODELS, entry)}))


def without_hello() -> Iterator[None]:
    """Leave no module of that name behind."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == PREFIX]:
        del sys.modules[name]


def completion(message: dict[str, Any]) -> bytes:
    """What an OpenAI-compatible endpoint answers."""
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    about = {"id": "1", "object": "chat.completion", "created": 1, "model": "fixed", "usage": usage}
    return json.dumps(about | {"choices": [choice]}).encode()


def tool_call(arguments: dict[str, Any]) -> bytes:
    function = {"name": "rl_training", "arguments": json.dumps(arguments)}
    return completion({"content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]})
