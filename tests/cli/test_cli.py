"""The command line as users meet it: episodes shown and saved, help, and what is started from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import ENVIRONMENT, ROOT, Run, python
from tests.kits.forks import FORKED, Command
from TrainingFactory import __version__
from TrainingFactory.cli.app import App, app
from TrainingFactory.cli.show import escape_control
from TrainingFactory.data.trajectories import load_trajectories


def test_rollout_shows_and_saves(tfactory: Run) -> None:
    flags = "--tasks 3 --group-size 2 --max-tokens 8 --show 1 --out a/b.jsonl"
    status, out, err = tfactory("rollout", "calculator", *flags.split())
    assert status == 0, err
    for text in ("user ", "calculator(expression)", "episode 1 of 6", "reward", "tokens", "6: 6 truncated"):
        assert text in out
    assert "episode 2 of 6" not in out
    assert "saved 6 episodes to a/b.jsonl" in err
    saved = list(load_trajectories("a/b.jsonl"))
    assert len({trajectory.task.id for trajectory in saved}) == 3
    assert [trajectory.member for trajectory in saved] == [0, 1] * 3
    assert os.listdir("a") == ["b.jsonl"]


def test_the_same_seed_gives_the_same_episodes(tfactory: Run) -> None:
    flags = ("--tasks", "2", "--max-tokens", "8", "--show", "0", "sampling.deterministic=true")
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert tfactory("rollout", "search", *flags, "--seed", seed, "--out", name)[0] == 0
    ids = {
        name: [trajectory.turns[0].completion.token_ids for trajectory in load_trajectories(name)]
        for name in "abc"
    }
    assert ids["a"] == ids["b"] != ids["c"]


def test_a_config_with_overrides(tfactory: Run) -> None:
    config = str(ROOT / "configs" / "qwen3_grpo.yaml")
    options = "model.name=tiny sampling.max_tokens=4 data.count=1 training.group_size=2 tools=[]"
    status, out, err = tfactory("rollout", config, *options.split(), "optimization.tool_cache=false")
    assert status == 0, err
    assert "episode 2 of 2" in out
    assert "saved 2 episodes to runs/rollouts/env_search_v1-" in err


def test_tasks_from_a_file(tfactory: Run) -> None:
    Path("tasks.jsonl").write_text('{"id": "one", "prompt": "1 + 1 = ?", "answer": "2"}\n')
    status, out, err = tfactory("rollout", "calculator", "--tasks", "tasks.jsonl", "--max-tokens", "4")
    assert status == 0, err
    assert "1 + 1 = ?" in out and "task one" in out


def test_foreign_text_is_neither_markup_nor_a_terminal_command(tfactory: Run) -> None:
    Path("mine.py").write_text(ENVIRONMENT)
    status, out, err = tfactory("rollout", "mine.py", "--tasks", "1", "--max-tokens", "4")
    assert status == 0, err
    assert "[bold]hello[/bold] \\x1b[31m" in out
    assert "\x1b" not in out + err


def test_clean() -> None:
    assert escape_control("a\n\tb é 語") == "a\n\tb é 語"
    assert escape_control("\x1b]0;x\x07\r\x9b\u202e\ud800") == "\\x1b]0;x\\x07\\r\\x9b\\u202e\\ud800"


def test_logs_are_cleaned_too() -> None:
    code = (
        "import logging\nfrom TrainingFactory.cli import main\ntry: main(['--version'])\n"
        "except SystemExit: logging.getLogger('x').warning('a %s', '\\x1b[31mb')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "a \\x1b[31mb\n"


@pytest.mark.skipif(sys.platform != "linux", reason="on_exit is of glibc")
def test_an_error_is_the_last_thing_on_the_screen() -> None:
    """As C code of libraries does: at the end of the process it writes to the descriptor 2, which here is the exit
    status too."""
    code = (
        "import ctypes\nfrom TrainingFactory.cli import main\nlibc = ctypes.CDLL(None)\n"
        "libc.strdup.restype = ctypes.c_void_p\n"
        "libc.on_exit(libc.dprintf, ctypes.c_void_p(libc.strdup(b'leaked\\n')))\nmain(['train', 'no.yaml'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: no.yaml") and "leaked" not in done.stderr


def test_cluster_status_tells_nodes_of_one_machine_apart(
    tfactory: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from TrainingFactory.cluster.ray_session import RaySession

    ids = "5d3c0ffee00001" * 4, "77aa0ffee00002" * 4
    nodes = [{"name": "vm", "id": node, "resources": {"CPU": 2.0}, "free": {"CPU": 1.0}} for node in ids]
    actors = [{"what": "sampler 0", "node": "vm", "node_id": ids[1], "pid": 7, "since": 0.0}]

    async def nothing(self: RaySession) -> None: ...

    async def describe_cluster(self: RaySession) -> Any:
        return {"nodes": nodes, "actors": actors}

    for name, method in {"open": nothing, "close": nothing, "describe_cluster": describe_cluster}.items():
        monkeypatch.setattr(RaySession, name, method)
    code, out, _ = tfactory("cluster", "status")
    lines = out.splitlines()
    assert code == 0 and out.count("5d3c0ffee000") == 1 and out.count("77aa0ffee000") == 2
    assert "sampler 0" in lines[-1] and "77aa0ffee000" in lines[-1]


def test_a_new_environment_runs_at_once(tfactory: Run) -> None:
    assert tfactory("new", "env", "my_cities")[0] == 0
    status, out, err = tfactory("rollout", "my_cities.py", "--max-tokens", "4")
    assert status == 0, err
    assert "population(city)" in out and "saved 3 episodes to runs/rollouts/my_cities-" in err
    before = Path("my_cities.py").read_text()
    status, _, err = tfactory("new", "env", "my_cities")
    assert status == 2 and "exists" in err
    assert Path("my_cities.py").read_text() == before
    for name in ("task", "tool", "_"):  # names that the file uses itself, or that are hardly any
        assert tfactory("new", "env", name)[0] == 0
        assert tfactory("rollout", f"{name}.py", "--max-tokens", "2", "--show", "0")[0] == 0


def test_a_named_class_of_a_file(tfactory: Run) -> None:
    Path("mine.py").write_text(ENVIRONMENT + "class Other(Mine): pass\n")
    assert tfactory("rollout", "mine.py:Other", "--tasks", "1", "--max-tokens", "2")[0] == 0


def test_debug_shows_the_traceback(tfactory: Run) -> None:
    status, _, err = tfactory("rollout", "serch", "--debug")
    assert status == 2 and "Traceback" in err and "did you mean search?" in err


def test_only_files_are_replaced_and_only_by_a_result(tfactory: Run) -> None:
    Path("old.jsonl").write_text("precious")
    assert tfactory("rollout", "search", "--model", "./nothing", "--out", "old.jsonl")[0] == 2
    assert Path("old.jsonl").read_text() == "precious"
    os.mkfifo("pipe")
    status, _, err = tfactory("rollout", "search", "--out", "pipe")
    assert status == 2 and "not a regular file" in err
    assert Path("pipe").is_fifo()
    Path("link.jsonl").symlink_to("real.jsonl")
    assert tfactory("rollout", "search", "--tasks", "1", "--max-tokens", "2", "--out", "link.jsonl")[0] == 0
    assert Path("link.jsonl").is_symlink() and len(list(load_trajectories("real.jsonl"))) == 1


def test_lists_and_the_version(tfactory: Run) -> None:
    assert tfactory("--version")[1].strip() == __version__
    assert "calculator" in tfactory("envs")[1]
    out = tfactory("models")[1]
    assert "builtin:tiny" in out and "Qwen/Qwen3-4B-Instruct-2507" in out


def commands(parent: App, *before: str) -> Iterator[tuple[str, ...]]:
    for name in parent:
        if not name.startswith("-"):
            yield (*before, name)
            yield from commands(parent[name], *before, name)


COMMANDS = [(), *commands(app)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples(tfactory: Run, command: tuple[str, ...]) -> None:
    status, out, _ = tfactory(*command, "--help")
    told, typed = " ".join(out.split()), " ".join(("tfactory", *command))
    assert status == 0 and f"Usage: {typed}" in told
    group = any(other[:-1] == command for other in COMMANDS if other)
    assert group or told.count(f"{typed} ") > 1, "there is no example"


def test_what_is_light_does_not_wait_for_torch(tmp_path: Path) -> None:
    light = ["rollout --help", "runs list", "demo --env serch"]
    code = (
        "import sys\nfrom TrainingFactory.cli import main\nheavy = {'torch', 'transformers', 'datasets'}\n"
        f"for command in {light}:\n"
        "    try: main(command.split())\n"
        "    except SystemExit: pass\n"
        "    print('\\nafter', command, sorted(heavy & set(sys.modules)))"
    )
    out, err = python(tmp_path, "-c", code).communicate()
    told = [line for line in out.splitlines() if line.startswith("after ")]
    assert told == [f"after {command} []" for command in light], out + err


@FORKED
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    waiting = "    async def reset(self):\n        import asyncio\n"
    waiting += "        await asyncio.sleep(0 if int(self.task.id) < 2 else 1000)\n"
    (tmp_path / "mine.py").write_text(ENVIRONMENT + waiting + "        return await super().reset()\n")
    command = ["rollout", "mine.py", "--tasks", "4", "--max-tokens", "2", "--out", "out.jsonl"]
    run = Command(tmp_path, *command)
    growing = tmp_path / "out.jsonl.part"
    while run.running and (not growing.exists() or growing.read_text().count("\n") < 2):
        time.sleep(0.05)
    run.signal(signal.SIGINT)
    status, _, err = run.end(60)
    assert status == 130, err
    assert "interrupted: 2 of 4 episodes" in err and "Traceback" not in err
    assert [trajectory.task.id for trajectory in load_trajectories(tmp_path / "out.jsonl")] == ["0", "1"]
