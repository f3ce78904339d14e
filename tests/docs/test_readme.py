"""What the README prints runs as printed; its programs run in test_notebook.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.kits.cli import Run
from tests.kits.docs import ROOT, Page
from TrainingFactory.config import load_config
from TrainingFactory.data.trajectories import load_trajectories

README = Page("README.md")
block = README.block


def test_the_environment_runs_as_printed(tfactory: Run) -> None:
    code = block("class Weather")
    assert len(code.splitlines()) <= 25
    Path("weather.py").write_text(code, encoding="utf-8")
    program, *arguments = shlex.split(block("tfactory rollout weather.py\n").strip())
    assert program == "tfactory"
    status, out, err = tfactory(*arguments)
    assert status == 0 and "How warm is it in Oslo?" in out and "temperature(city)" in out, err
    saved = re.search(r"saved 3 episodes to (\S+)", err)
    assert saved, err
    trajectories = list(load_trajectories(saved[1]))
    assert [trajectory.task.id for trajectory in trajectories] == ["Oslo", "Cairo", "Lima"]
    assert all(trajectory.reward is not None for trajectory in trajectories)


def test_every_printed_command_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {words[1] for words in README.commands() if words[0] == "make"} <= targets


def test_the_map_is_right() -> None:
    table = README.text[README.text.index("## Map") :]
    for path in (ROOT / "TrainingFactory").iterdir():
        if path.name[0] != "_" and (path.is_dir() or path.suffix == ".py"):
            assert path.name in table, path.name


def test_it_says_where_it_runs_and_what_is_not_there_yet() -> None:
    text = README.text[README.text.index("## Where it runs") : README.text.index("## Config")]
    parts = {part.partition(".**")[0]: part for part in text.split("**", 1)[1].split("\n\n**")}
    assert list(parts) == ["GPUs", "Notebooks", "Real models offline", "On a cluster", "Not there yet"]
    for part, words in {
        "GPUs": ("model.device", "lora.enabled", "configs/qwen3_grpo_lora.yaml"),
        "Notebooks": ("train_async", "resume=True"),
        "Real models offline": ("HF_HUB_OFFLINE=1", "GGUF"),
        "Not there yet": ("Images", "Android", "Closed models", "docs/TOOLS.md", "docs/JUDGES.md"),
    }.items():
        assert all(word in parts[part] for word in words), part
    load_config(ROOT / "configs/qwen3_grpo_lora.yaml", ["model.quantization=4bit", "lora.enabled=true"])
