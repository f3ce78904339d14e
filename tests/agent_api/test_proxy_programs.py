"""Programs of agents: how they fail, what they know, and that they end with all that they started."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kits.proxy import TALK, TASK, line, play
from tests.kits.waiting import wait_until
from TrainingFactory.agent_api.agent_program import AgentProgram
from TrainingFactory.types import Reward

FAILURES = {
    "": ("error", "no successful request"),
    TALK: ("done", 'printed a line of JSON with "reward" nor posted'),
    TALK + line(reward="much"): ("done", "reward is invalid"),
    TALK + "print('{\"reward\": NaN}')": ("done", "reward is invalid"),
    TALK + line(reward=1) + "sys.exit('no ' + os.environ['MY_SECRET'])": ("error", "status 1: no ***"),
    TALK + "os.kill(os.getpid(), 9)": ("error", "ended with SIGKILL"),
    "os.kill(os.getpid(), 40)": ("error", "ended with signal 40"),
    "import nothing_like_it": ("error", "ModuleNotFoundError"),
}  # fmt: skip


@pytest.mark.parametrize("code", FAILURES)
def test_a_program_that_fails_is_named_and_never_scored_zero(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    status, text = FAILURES[code]
    [trajectory], counts, sampler = play(tmp_path, code, env=["MY_SECRET"])
    assert (trajectory.status, trajectory.reward) == (status, None)
    assert text in (trajectory.error or "") and "hunter2" not in (trajectory.error or "")
    assert counts["proxy/turns"] == len(trajectory.turns) == (2 if code.startswith(TALK) else 0)
    assert sampler.opened == sampler.closed


def test_a_program_knows_its_task_and_its_key_and_no_secret_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-users-own-key")
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    code = TALK + (
        "task = json.load(sys.stdin)\n"
        "assert task == json.load(open(os.environ['TFACTORY_TASK'])), task\n"
        "assert task == {'id': 't', 'prompt': 'Where is it?', 'answer': 'Rome', 'metadata': {'name': 'tower'}}\n"
        "open('seen.json', 'a').write(json.dumps(dict(os.environ)) + '\\n')\n"
        "post('/reward', {'reward': 0.25, 'parts': {'speed': 1}})\n"
        "os.remove(os.environ['TFACTORY_TASK'])\n"
        "os.rmdir(os.path.dirname(os.environ['TFACTORY_TASK']))\n"
    )
    episodes, counts, _ = play(tmp_path, code, episodes=3)
    assert [each.reward for each in episodes] == [Reward(0.25, parts={"speed": 1.0})] * 3
    assert counts["proxy/extended"] == 1.0 and counts["proxy/rows"] == 3.0
    seen = [json.loads(text) for text in (tmp_path / "seen.json").read_text().splitlines()]
    keys = {row["OPENAI_API_KEY"] for row in seen}
    assert len(keys) == 3 and "the-users-own-key" not in keys
    assert all("MY_SECRET" not in row for row in seen)
    assert not any(key in caplog.text for key in keys) and "tf-" not in repr(episodes)
    assert not any(Path(row["TFACTORY_TASK"]).exists() for row in seen)


LINGERING = (  # with a child, and one that leaves the group
    "import subprocess, time\n"
    "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']\n"
    "both = [subprocess.Popen(sleep, start_new_session=new) for new in (False, True)]\n"
    "open('new', 'w').write(f'{os.getpid()} {both[0].pid} {both[1].pid}')\n"
    "os.rename('new', 'pids')\n"
    "time.sleep(600)\n"
)
IN_GROUP = LINGERING.replace("(False, True)", "(False, False)")


def test_a_program_that_runs_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    code = TALK + LINGERING
    [trajectory], _, _ = play(tmp_path, code, episode_timeout=3.0)
    assert trajectory.status == "error" and "longer than 3 s" in str(trajectory.error)
    assert len(trajectory.turns) == 2 and trajectory.reward is None
    wait_until(lambda: not any(map(running, (tmp_path / "pids").read_text().split())))


KILLER = """
import os, signal, time
def parent(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
pids = [pid for pid in os.listdir("/proc") if pid.isdigit()] if os.path.isdir("/proc") else []
for pid in set(pids) - set(open("others").read().split()):
    try:
        if int(pid) != os.getpid() and parent(pid) == str(os.getppid()):
            open("environments", "a").write(open(f"/proc/{pid}/environ").read())
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
open("ready", "w").close()
time.sleep(20)
open("survived", "w").close()
"""


async def test_a_program_that_kills_what_the_run_started_ends_all_the_same_and_finds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    others = [str(process.pid) for process in psutil.Process().children()]  # of other tests
    (tmp_path / "others").write_text(" ".join(others))
    (tmp_path / "agent.py").write_text(KILLER)
    program = AgentProgram(shlex.join([sys.executable, "-S", "agent.py"]), {"cwd": str(tmp_path)})
    playing = asyncio.ensure_future(program(TASK).run_client(None))  # type: ignore[arg-type]
    while not (tmp_path / "ready").exists():
        await asyncio.sleep(0.02)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    survived, environments = (tmp_path / "survived").exists(), tmp_path / "environments"
    found_secret = environments.exists() and "hunter2" in environments.read_text()
    assert (survived, found_secret) == (False, False)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_program_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    code = f"""if True:
        import asyncio
        from TrainingFactory.agent_api.agent_program import AgentProgram
        from TrainingFactory.types import Task
        program = AgentProgram({shlex.join([sys.executable, "-S", "agent.py"])!r}, {{}})
        asyncio.run(program(Task("t", "?")).run_client(None))"""
    (tmp_path / "agent.py").write_text("import os, sys\nprint(os.environ['TFACTORY_TASK'])\n" + IN_GROUP)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env) as run:
        wait_until(lambda: (tmp_path / "pids").exists() or run.poll() is not None)
        assert run.poll() is None
        run.kill()
    wait_until(lambda: not any(map(running, (tmp_path / "pids").read_text().split())))


def running(pid: str) -> bool:
    return psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
