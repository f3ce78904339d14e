"""The code interpreter: what it does, and how its processes end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.kits.mcp import children, lives
from tests.kits.python import make, run, texts
from tests.kits.waiting import wait_until
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.sandbox.python_tool import START_SECONDS
from TrainingFactory.types import ToolCall

ROOT = Path(__file__).resolve().parents[2]


def test_output_values_and_state():
    shown = {
        "import math\nx = 6\nprint('hello')\nx * 7": "hello\n42",
        "def area(r):\n    return math.pi * r * x\nround(area(1), 3)": "18.85",
        "import sys, os\nprint('err', file=sys.stderr)\nos.write(1, b'raw\\n')": "err\n4\nraw",
        "y = 3": "(no output)",
        "None": "(no output)",
        "import asyncio\nasyncio.run(asyncio.sleep(0, 'awaited'))": "'awaited'",
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    a: int\nP(1)": "P(a=1)",
        "print('é 北京')": "é 北京",
        "": "(no output)",
    }
    results = run(make(), *shown)
    assert [result.content for result in results] == list(shown.values())
    assert all(result.ok for result in results)


def test_nothing_is_kept_across_episodes():
    tool = make()
    assert texts(tool, "x = 1\nopen('f', 'w').write('a')") == ["1"]
    assert texts(tool, "import os\n'x' in globals(), os.listdir('.')") == ["(False, [])"]


def test_errors_are_short_and_leave_the_state():
    results = run(
        make(),
        "x = 1",
        "def f(n):\n    return 1 / n\nf(0)",
        "if True print(1)",
        "class Bad(Exception):\n    def __str__(self):\n        raise ValueError\nraise Bad",
        "def deep():\n    return deep()\ndeep()",
        "import sys\nsys.exit(3)",
        "raise KeyboardInterrupt",
        "print('before')\nassert False, 'no'",
        "x",
    )
    division, syntax, bad, deep, leaving = [result.content for result in results[1:6]]
    assert division.startswith("Traceback") and division.endswith("ZeroDivisionError: division by zero")
    assert "return 1 / n" in division and "interpreter.py" not in division
    assert "SyntaxError" in syntax and "interpreter.py" not in syntax and "ast.py" not in syntax
    assert "Bad" in bad
    assert "RecursionError" in deep and len(deep) < 2500
    assert leaving.startswith("SystemExit: 3 ")
    assert results[7].content.startswith("before\nTraceback")
    assert not any(result.ok for result in results[1:8])
    assert {result.error for result in results[1:8]} == {"exception"}
    assert results[8].content == "1"


def test_output_is_bounded_where_it_is_made():
    long, value, lines = texts(
        make(max_output_chars=1000, memory_mb=256),
        "for _ in range(300):\n    print('a' * 999_999)\nprint('end')",
        "'b' * 10_000_000",
        "import sys\nfor i in range(200_000):\n    sys.stdout.write(f'{i}\\n')",
    )
    assert long.startswith("a" * 700) and long.endswith("a\nend") and "bytes cut" in long
    assert all(len(text) < 1200 for text in (long, value, lines))
    assert lines.startswith("0\n1\n") and lines.endswith("199998\n199999")


def test_an_endless_loop_is_stopped_and_the_next_call_told():
    tool = make(timeout=1.5)
    results = run(tool, "x = 1", "while True:\n    pass", "'x' in globals()", "2")
    # The model's own doing, so no "timeout", which would leave a reward that runs its code unscored.
    assert results[1].error == "exception" and results[1].content.startswith(
        "the interpreter was stopped after 1.5 s"
    )
    assert tool.options.timeout is not None and tool.options.timeout > START_SECONDS + tool.timeout
    assert results[2].content == (
        "[a fresh interpreter: the last one was stopped after 1.5 s; its variables and files are gone]\nFalse"
    )
    assert results[3].content == "2"


def test_a_loop_that_ignores_signals_is_stopped_and_cpu_time_is_bounded():
    code = (
        "import signal\nfor s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(s, signal.SIG_IGN)\n"
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    )
    assert texts(make(timeout=1.0), code)[0].startswith("the interpreter was stopped after 1 s")
    assert texts(make(cpu_seconds=1), "while True: pass")[0].startswith("the interpreter died of SIGXCPU")


def test_a_memory_bomb_meets_its_limit():
    tool = make(memory_mb=128)
    results = run(
        tool,
        "x = 1",
        "big = bytearray(10**12)",
        "x",
        "hoard = []\nwhile True:\n    hoard.append(bytearray(10**6))",
        "'x' in globals()",
    )
    assert "MemoryError" in results[1].content and results[2].content == "1"
    # The hoard is in a variable: there is no more memory to work with, so the process is given up.
    assert "MemoryError" in results[3].content and "the next call begins with a fresh" in results[3].content
    assert results[4].content.endswith("\nFalse") and "ran out of memory" in results[4].content


def test_the_disk_is_bounded():
    tool = make(disk_mb=4)
    if tool.isolation.disk is None or "tmpfs" not in tool.isolation.disk:
        pytest.skip(f"the disk is bounded by file only: {tool.isolation.missing}")
    code = "for i in range(9):\n    open(f'f{i}', 'wb').write(bytes(10**6))"
    (text,) = texts(tool, code)
    assert "OSError" in text and "No space left" in text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os\nos._exit(3)", "ended with status 3"),
        ("import os\nos.abort()", "died of SIGABRT"),
        ("import ctypes\nctypes.string_at(0)", "died of SIGSEGV"),
        ("import os\nos.kill(os.getpid(), 9)", "was killed"),
        ("import os\nos.closerange(3, 64)", "ended with status 1"),
    ],
)
def test_a_process_that_ends_is_replaced(code: str, says: str):
    first, second = run(make(), code, "x = 2\nx")
    assert not first.ok and first.error == "exception" and says in first.content
    assert "[a fresh interpreter: " in second.content and second.content.endswith("\n2")


def test_what_is_cached_belongs_to_one_interpreter(tmp_path: Path):
    tools = [make(), make(memory_mb=256), make(timeout=20.0), make(packages=[str(tmp_path)])]
    assert len({tool.options.version for tool in tools}) == 4
    assert make().options.version == tools[0].options.version


def test_code_that_meddles_with_its_own_output():
    results = texts(
        make(),
        "import sys\nsys.stdout.close()",
        "sys.stdout = None\nsys.stderr = 3",
        "import builtins\nbuiltins.print = lambda *a: 1 / 0\nimport os\nos.close(1); os.close(2); os.close(0)",
        "del builtins.print",
        "'still here'",
    )
    assert len(results) == 5 and all(isinstance(text, str) for text in results)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tool = make(timeout=1.5)
    run(tool, "1")  # what is made once and kept is made
    processes, files = children(), open_files()
    run(tool, "open('f', 'w').write('x')", "while True: pass", "1", "import os\nos._exit(1)")

    async def cancelled() -> None:
        executor = AsyncToolExecutor([tool])
        call = executor.batch_execute([ToolCall("python", {"code": "import time\ntime.sleep(1000)"})])
        task = asyncio.create_task(call)
        while not any(tmp_path.iterdir()):  # until its process is being started
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await executor.close()
        await executor.close()

    asyncio.run(cancelled())
    lost = tool.session()  # an episode that nobody closes ends with its object
    asyncio.run(lost.run({"code": "1"}))
    assert children() - processes
    del lost
    wait_until(lambda: not children() - processes and open_files() <= files and not any(tmp_path.iterdir()))


async def test_an_episode_that_is_over_starts_no_process():
    session = make().session()
    await session.close()
    result = await session.run({"code": "1"})
    assert result.error == "unavailable" and "was closed" in result.content


async def test_the_memory_of_idle_episodes_is_bounded():
    sessions = [tool.session() for tool in [make(idle_memory_mb=250)] for _ in range(4)]
    for size, session in zip((60, 110, 80, 5), sessions, strict=True):
        await session.run({"code": f"kept = b'x' * ({size} * 2**20)"})
    said = [(await session.run({"code": "len(kept) // 2**20"})).content for session in sessions]
    for session in sessions:
        await session.close()
    first, largest, third, last = said
    assert (first, third, last) == ("60", "80", "5")
    assert "over 250 MiB" in largest and "NameError" in largest


async def test_sixteen_episodes_at_once():
    tool = make()
    codes = ("x = {}\nopen('f', 'w').write(str(x))", "import time\ntime.sleep(0.01)", "x, open('f').read()")

    async def episode(number: int) -> str:
        executor = AsyncToolExecutor([tool])
        calls = [ToolCall("python", {"code": code.format(number)}) for code in codes]
        results = await executor.batch_execute(calls)  # of one turn, and in order
        await executor.close()
        return results[-1].content

    assert await asyncio.gather(*map(episode, range(16))) == [
        f"({number}, '{number}')" for number in range(16)
    ]


PARENT = """
import asyncio, sys
from TrainingFactory.tools.sandbox import PythonTool
async def main():
    session = PythonTool(timeout=1000, cpu_seconds=60).session()
    print((await session.run({"code": "import os; os.getpid()"})).content, flush=True)
    await session.run({"code": sys.argv[1] + "while True: pass"})
asyncio.run(main())
"""
ALL_PIPES = (
    "import fcntl, os\nfor pipe in range(3, 64):\n    try:\n        %s\n    except OSError:\n        pass\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
@pytest.mark.parametrize(
    "first",
    [
        "",
        ALL_PIPES % "if pipe < 40: os.close(pipe)",
        ALL_PIPES % "fcntl.fcntl(pipe, fcntl.F_SETFL, 0)",
        "import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        + ALL_PIPES % "if pipe < 40: os.close(pipe)",
    ],
)
def test_the_process_dies_with_a_killed_trainer(first: str, tmp_path: Path):
    make()
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # a killed trainer leaves its folder behind, empty
    command = [sys.executable, "-c", PARENT, first]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        idle = worker.cpu_times().user
        wait_until(
            lambda: worker.cpu_times().user > idle
        )  # the loop runs: it reads no pipe that could end it
        parent.kill()
    wait_until(lambda: not lives(worker))
    assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] in ([], [[]])
