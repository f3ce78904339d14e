"""What code in the interpreter cannot do."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.python import make, run, texts
from TrainingFactory.tools.sandbox import Isolation, PythonTool, python_tool

ROOT = Path(__file__).resolve().parents[2]


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
    stopped = [result for result in results if "code wrote to the pipe" in result.content]
    assert stopped and not stopped[0].ok and stopped[0].error == "exception"
    assert not any("forged" in result.content for result in results[2:])
    assert results[3].content.endswith("'two'") and results[4].content == "'three'"


@pytest.mark.parametrize("begin", ["'[\"' + '0' * 16 + '\", '", f"'[\"' + {TICKET} + '\", '"])
def test_an_answer_of_absurd_size_is_neither_awaited_nor_parsed(begin: str, monkeypatch: pytest.MonkeyPatch):
    sizes, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: sizes.append(len(text)) or loads(text))
    flood = f"write({begin} + '[],' * 20_000_000)"
    results = run(make(max_output_chars=1000), INTO_THE_PIPE, flood, "'next'")
    assert "it answered with more than" in results[1].content and results[1].error == "exception"
    assert results[2].content.endswith("'next'")
    assert max(sizes) < 100_000


def test_whatever_code_may_print_fits_into_an_answer():
    codes = [f"print(chr({number}) * 100_000)" for number in (0, 0x1F600, 120)]
    codes += ["import sys\nsys.stdout.buffer.write(b'\\xff' * 100_000)"]
    ends = ["raise SystemExit(chr(0) * 10**7)", "raise ValueError(chr(0x1F600) * 10**6)"]
    results = texts(make(max_output_chars=50_000), *codes, *ends)
    assert all("cut ...]" in text for text in results[:4]), [text[:200] for text in results]
    assert results[4].startswith("SystemExit") and results[5].startswith("Traceback")


def test_packages_only_where_they_are_asked_for():
    pytest.importorskip("numpy")
    code = "import numpy\nint(numpy.arange(5).sum())"
    assert "ModuleNotFoundError" in texts(make(), code)[0]
    assert texts(make(packages=True, memory_mb=1024), code) == ["10"]
    with pytest.raises(ValueError, match="not a folder"):
        PythonTool(packages=["/no/such/folder"])


def test_a_machine_that_cannot_isolate_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    weak = Isolation(None, "seccomp", "seccomp", "seccomp", "x", "x", ("landlock: this kernel has none",))
    monkeypatch.setattr(python_tool, "probe_isolation", lambda limits: weak)
    with pytest.raises(ValueError, match=r"code from files \(landlock.*allow_unsafe=True"):
        PythonTool()
    assert PythonTool(allow_unsafe=True).isolation.files is None


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
    program = confine.make_filter_program(machine, 77, False)
    threads = confine.make_filter_program(machine, 77, True)
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
