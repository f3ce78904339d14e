"""The code interpreter: what it does, and what code in it cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.mcp import children, wait_until
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.sandbox import Isolation, PythonTool, python_tool
from TrainingFactory.tools.sandbox.python_tool import START_SECONDS
from TrainingFactory.types import ToolCall, ToolResult

ROOT = Path(__file__).resolve().parents[2]
HANG_GUARD = 30.0  # seconds; nothing here takes long


def make(**options: Any) -> PythonTool:
    try:
        return PythonTool(**{"timeout": HANG_GUARD} | options)
    except ValueError as error:
        pytest.skip(f"no isolation on this machine: {error}")


async def play(tool: PythonTool, *codes: str) -> list[ToolResult]:
    """One episode."""
    executor = AsyncToolExecutor([tool])
    try:
        name = tool.spec.name
        return [(await executor.batch_execute([ToolCall(name, {"code": code})]))[0] for code in codes]
    finally:
        await executor.close()


def run(tool: PythonTool, *codes: str) -> list[ToolResult]:
    return asyncio.run(play(tool, *codes))


def texts(tool: PythonTool, *codes: str) -> list[str]:
    return [result.content for result in run(tool, *codes)]


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
    assert leaving == "SystemExit: 3 (the interpreter goes on)"
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
    tool = make(timeout=3.0)
    results = run(tool, "x = 1", "while True:\n    pass", "'x' in globals()", "2")
    # The model's own doing, so no "timeout", which would leave a reward that runs its code unscored.
    assert results[1].error == "exception" and results[1].content.startswith(
        "the interpreter was stopped after 3 s"
    )
    assert tool.options.timeout is not None and tool.options.timeout > START_SECONDS + tool.timeout
    assert results[2].content == (
        "[a fresh interpreter: the last one was stopped after 3 s; its variables and files are gone]\nFalse"
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


def test_no_process_can_be_started():
    # Bounded attempts: if the lock failed, only a few harmless processes would come of it.
    forks = (
        "import os\nmade = 0\nfor way in (os.fork, getattr(os, 'forkpty')):\n    for _ in range(3):\n"
        "        try:\n            pid = way()\n        except OSError:\n            continue\n"
        "        if pid == 0:\n            os._exit(0)\n        made += 1\nmade"
    )
    raw = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "clone, vfork = (56, 58) if os.uname().machine == 'x86_64' else (220, 220)\n"
        "def attempt(number, *arguments):\n    pid = libc.syscall(number, *arguments)\n"
        "    if pid == 0:\n        libc._exit(0)\n    return pid\n"
        "[attempt(clone, 17, 0, 0, 0, 0), attempt(435, bytes(88), 88)]"
    )
    spawned = "import subprocess\nsubprocess.run(['/bin/true'])"
    execed = "import os\nos.execv('/bin/true', ['true'])"
    thread = "import threading\nthreading.Thread(target=print).start()"
    results = texts(make(), forks, raw, spawned, execed, thread, "1")
    assert results[0] == "0" and results[1] == "[-1, -1]"
    assert "PermissionError" in results[2] and "PermissionError" in results[3]
    assert "can't start new thread" in results[4] and results[5] == "1"


def test_threads_where_they_are_allowed():
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool:\n    print(list(pool.map(abs, [-1, -2])))"
    )
    fork = "import os\nos.fork()"
    answers = texts(make(threads=True), code, fork)
    assert answers[0] == "[1, 2]" and "PermissionError" in answers[1]


def attempts(*lines: str) -> str:
    """Code that says of each line whether it could be done."""
    return "import os, shutil, glob, pathlib\ndone = []\n" + "".join(
        f"try:\n    {line}\n    done.append({line!r})\nexcept (OSError, ValueError) as error:\n    pass\n"
        for line in lines
    )


def test_files_outside_the_folder(tmp_path: Path):
    target = tmp_path / "theirs.txt"
    target.write_text("untouched")
    before = target.stat()
    code = attempts(
        "open('/etc/passwd').read()",
        f"open({str(ROOT / 'pyproject.toml')!r}).read()",
        f"open({str(ROOT / 'TrainingFactory' / 'types.py')!r}).read()",
        "open('/proc/self/environ', 'rb').read()",
        "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "os.listdir('/')",
        "os.listdir('..')",
        f"open({str(target)!r}).read()",
        f"open({str(target)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.remove({str(target)!r})",
        f"os.rename({str(target)!r}, 'mine')",
        f"os.link({str(target)!r}, 'mine')",
        f"os.truncate({str(target)!r}, 0)",
        f"os.mkdir({str(tmp_path / 'new')!r})",
        f"os.symlink({str(target)!r}, 'way') or open('way').read()",
        "os.mknod('device', 0o20600, os.makedev(1, 1))",
        "os.chroot('.')",
        "open('/dev/kmsg')",
    )
    code += f"os.chmod({str(target)!r}, 0o777)\nos.utime({str(target)!r}, (1, 1))\ndone"
    assert texts(make(), code) == ["[]"]
    after = target.stat()
    assert target.read_text() == "untouched" and list(tmp_path.iterdir()) == [target]
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_what_may_be_read_cannot_be_changed(tmp_path: Path):
    file = tmp_path / "theirs.py"
    file.write_text("v = 5")
    before = file.stat()
    code = "import theirs\n" + attempts(
        "os.open(theirs.__file__, os.O_RDONLY | os.O_TRUNC)",
        "open(theirs.__file__, 'a')",
        "os.remove(theirs.__file__)",
        "os.truncate(theirs.__file__, 0)",
    )
    code += "os.fchmod(os.open(theirs.__file__, os.O_RDONLY), 0o777)\ntheirs.v, done"
    assert texts(make(packages=[str(tmp_path)]), code) == ["(5, [])"]
    assert file.read_text() == "v = 5" and file.stat().st_mode == before.st_mode


def test_files_inside_the_folder():
    code = attempts(
        "os.makedirs('a/b')",
        "open('a/b/c.txt', 'w').write('x')",
        "shutil.copy('a/b/c.txt', 'd.txt')",
        "os.rename('d.txt', 'a/e.txt')",
        "pathlib.Path('a/e.txt').read_text() + open(os.devnull).read()",
        "shutil.rmtree('a')",
        "__import__('tempfile').TemporaryFile().write(b'x')",
        "__import__('sqlite3').connect('x.db').execute('create table t(a)')",
    )
    # Importing works after the lock, and from the folder too.
    more = "open('mine.py', 'w').write('v = 5')\nimport mine, zoneinfo, ssl, csv\nmine.v"
    done, value = texts(make(), code + "len(done)", more)
    assert (done, value) == ("8", "5")


def test_no_network(tmp_path: Path):
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    with contextlib.closing(tcp), contextlib.closing(unix):
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        port = tcp.getsockname()[1]
        code = "import socket, urllib.request, ctypes\nlibc = ctypes.CDLL(None)\n" + attempts(
            f"socket.create_connection(('127.0.0.1', {port}), 5)",
            f"urllib.request.urlopen('http://127.0.0.1:{port}', timeout=5)",
            f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
            f"socket.socketpair()[0].connect({str(tmp_path / 's')!r})",
            "socket.getaddrinfo('localhost', 80)",
        )
        raw = "socket_call = 41 if os.uname().machine == 'x86_64' else 198\n"
        raw += "[libc.syscall(socket_call, 2, 1, 0), libc.syscall(425, 8, bytes(120))]"  # 425: io_uring_setup
        assert texts(make(), code + "done", raw) == ["[]", "[-1, -1]"]
        tcp.setblocking(False)
        unix.setblocking(False)
        for listener in (tcp, unix):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_no_secret_of_the_trainer_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    (text,) = texts(
        make(), "import os, sys\nprint(sorted(os.environ), sys.argv, sys.flags)\nos.environ.values()"
    )
    assert "sk-very-secret" not in text and "API_KEY" not in text and "PATH" in text


def test_no_signal_reaches_another_process():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        code = "import signal, fcntl\n" + attempts(
            f"os.kill({bystander.pid}, 9)",
            f"os.kill({bystander.pid}, 0)",
            # Signal 0 asks only whether one may be sent: no harm is done should the lock ever fail.
            "os.kill(os.getppid(), 0)",
            "os.kill(-1, 0)",
            "os.killpg(os.getpgid(os.getppid()), 0)",
            f"os.setpriority(os.PRIO_PROCESS, {bystander.pid}, 19)",
            f"fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {bystander.pid})",
            f"__import__('resource').prlimit({bystander.pid}, 7, (1, 1))",
            f"signal.pidfd_send_signal(os.pidfd_open({bystander.pid}), 9)",
        )
        assert texts(make(), code + "done") == ["[]"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


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


INTO_THE_PIPE = """
import json, os, time
def write(text):
    for n in range(40, 64):
        try:
            os.write(n, text.encode() + b"\\n")
        except OSError:
            pass
def forge(ticket):
    write(json.dumps([ticket, {"text": "forged", "error": None, "spent": False}, None]))
"""
TICKET = "__import__('sys')._getframe(4).f_locals['ticket']"


@pytest.mark.parametrize(
    "code",
    [
        "forge(None)",
        "forge('0' * 16)",
        "write('[1]')",
        "write('[' * 100_000)",
        # With the right ticket it lies about itself, but the answer that is left over may not reach the next call.
        f"forge({TICKET})",
        f"forge({TICKET})\ntime.sleep(0.5)",
    ],
)
def test_answers_stay_in_step_with_calls(code: str):
    results = run(make(), INTO_THE_PIPE, code, "'one'", "'two'", "'three'")
    stopped = [result for result in results if "code wrote into the pipe for its answers" in result.content]
    assert stopped and not stopped[0].ok and stopped[0].error == "exception"
    assert not any("forged" in result.content for result in results[2:])
    assert results[3].content.endswith("'two'") and results[4].content == "'three'"


def test_what_is_cached_belongs_to_one_interpreter(tmp_path: Path):
    tools = [make(), make(memory_mb=256), make(timeout=20.0), make(packages=[str(tmp_path)])]
    assert len({tool.options.version for tool in tools}) == 4
    assert make().options.version == tools[0].options.version


def test_a_stopped_call_is_not_the_same_history_as_one_that_ended(tmp_path: Path):
    tool, cache = make(stateful=True), ToolCache(tmp_path / "cache.sqlite")
    runtime = ToolRuntime(cache=cache)
    calls = ["import time\ntime.sleep(1)\nx = 1", "'x' in globals()"]

    async def episode(limit: float) -> list[ToolResult]:
        executor = AsyncToolExecutor([tool])
        executor.attach(runtime, limit, task="the same")
        results = []
        for tool.timeout, code in zip((limit, HANG_GUARD), calls, strict=True):
            results += await executor.batch_execute([ToolCall("python", {"code": code})])
        await executor.close()
        return results

    async def all_of_them() -> list[list[ToolResult]]:
        return [await episode(limit) for limit in (0.2, HANG_GUARD, HANG_GUARD)]

    stopped, ended, again = asyncio.run(all_of_them())
    cache.close()
    assert not stopped[0].ok and stopped[1].content.endswith("False")
    assert ended[0].ok and (ended[1].content, ended[1].cached) == ("True", False)
    assert (again[1].content, again[1].cached) == ("True", True)


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
    tool = make(timeout=3.0)
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


def test_a_call_cancelled_before_its_process_exists_starts_none():
    tool = make()
    processes = children()

    async def cancelled() -> None:
        session = tool.session()
        task = asyncio.create_task(session.run({"code": "1"}))
        await asyncio.sleep(0)  # its thread is asked for, no more
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await session.close()
        result = await session.run({"code": "1"})
        assert result.error == "unavailable" and "was closed" in result.content

    for _ in range(5):
        asyncio.run(cancelled())
    wait_until(lambda: not children() - processes)


def test_sixteen_episodes_at_once():
    tool = make()

    async def all_of_them() -> list[str]:
        kept, wait, shown = (
            "open('f', 'w').write(str(x))",
            "import time\ntime.sleep(0.01)",
            "x, open('f').read()",
        )
        played = await asyncio.gather(*(play(tool, f"x = {n}\n{kept}", wait, shown) for n in range(16)))
        return [results[-1].content for results in played]

    assert asyncio.run(all_of_them()) == [f"({number}, '{number}')" for number in range(16)]


def test_calls_of_one_turn_run_in_order():
    async def turn() -> list[str]:
        executor = AsyncToolExecutor([make()])
        calls = [ToolCall("python", {"code": f"x = {n} if {n} == 0 else x + 1\nx"}, str(n)) for n in range(4)]
        try:
            return [result.content for result in await executor.batch_execute(calls)]
        finally:
            await executor.close()

    assert asyncio.run(turn()) == ["0", "1", "2", "3"]


PARENT = """
import asyncio
from TrainingFactory.tools.sandbox import PythonTool
async def main():
    session = PythonTool(timeout=1000, cpu_seconds=60).session()
    print((await session.run({"code": "import os; os.getpid()"})).content, flush=True)
    await session.run({"code": "while True: pass"})
asyncio.run(main())
"""


def test_the_process_dies_with_a_killed_trainer(tmp_path: Path):
    make()
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # a killed trainer leaves its folder behind, empty
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        idle = worker.cpu_times().user
        wait_until(
            lambda: worker.cpu_times().user > idle
        )  # the loop runs: it reads no pipe that could end it
        parent.kill()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] in ([], [[]])


def test_packages_only_where_they_are_asked_for():
    pytest.importorskip("numpy")
    code = "import numpy\nint(numpy.arange(5).sum())"
    assert "ModuleNotFoundError" in texts(make(), code)[0]
    assert texts(make(packages=True, memory_mb=1024), code) == ["10"]
    with pytest.raises(ValueError, match="not a folder"):
        PythonTool(packages=["/no/such/folder"])


def test_a_machine_that_cannot_isolate_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    weak = Isolation(None, "seccomp", "seccomp", "seccomp", "x", "x", ("landlock: this kernel has none",))
    monkeypatch.setattr(python_tool, "isolation_here", lambda limits: weak)
    with pytest.raises(ValueError, match=r"cannot keep code from files \(landlock.*allow_unsafe=True"):
        PythonTool()
    assert PythonTool(allow_unsafe=True).isolation.files is None


@pytest.mark.parametrize("option", ["timeout", "memory_mb", "disk_mb", "cpu_seconds", "max_output_chars"])
def test_options_out_of_range_are_refused(option: str):
    tool: Any = PythonTool
    with pytest.raises(ValueError, match=rf"{option}\n  Input should be greater than"):
        tool(**{option: 0})


def verdict(program: list[tuple[int, int, int, int]], arch: int, number: int, *arguments: int) -> int:
    """The filter run by hand: loads, ands, two jumps and returns are all it has."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(arguments + (0,) * 6)[:6])
    value = at = 0
    while True:
        code, yes, no, k = program[at]
        at += 1
        if code == 0x20:
            value = struct.unpack_from("=I", data, k)[0]
        elif code == 0x54:
            value &= k
        elif code in (0x15, 0x45):
            at += yes if (value == k if code == 0x15 else value & k) else no
        else:
            assert code == 0x06
            return k


@pytest.mark.parametrize(
    ("machine", "arch", "numbers"),
    [
        ("x86_64", 0xC000003E, (0, 41, 59, 56, 62, 257)),
        ("aarch64", 0xC00000B7, (63, 198, 221, 220, 129, 56)),
    ],
)
def test_the_filter_of_each_architecture(
    machine: str, arch: int, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    calls = dict(zip(("read", "socket", "execve", "clone", "kill", "openat"), numbers, strict=True))
    monkeypatch.syspath_prepend(str(Path(python_tool.__file__).parent))
    confine = importlib.import_module("confine")
    program = confine.filter_program(machine, 77, False)
    threads = confine.filter_program(machine, 77, True)
    allowed, refused = 0x7FFF0000, 0x00050000 | errno.EPERM
    assert verdict(program, arch, calls["read"]) == allowed
    for name in ("socket", "execve", "clone"):
        assert verdict(program, arch, calls[name]) == refused
    assert verdict(threads, arch, calls["clone"], 0x3D0F00) == allowed  # as pthread_create asks
    assert verdict(threads, arch, calls["clone"], 17) == refused  # as fork does
    assert verdict(program, arch, calls["kill"], 77) == allowed
    assert verdict(program, arch, calls["kill"], 78) == refused
    assert verdict(program, arch, calls["openat"], 0, 0, os.O_RDONLY | os.O_TRUNC) == refused
    assert verdict(program, arch, calls["openat"], 0, 0, os.O_WRONLY | os.O_TRUNC | os.O_CREAT) == allowed
    assert verdict(program, arch, 9999) == refused  # what kernels will invent
    assert verdict(program, 0x40000003, calls["read"]) == 0x80000000  # calls of another architecture
    assert max(jump for _, yes, no, _ in program for jump in (yes, no)) < 256 and len(program) < 4096
