"""Runs model-written code in a locked process, without site-packages and without this package. It is the one place that
executes model text."""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import io
import linecache
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from confine import confine

MAX_TRACEBACK_CHARS = 2000
FRAMES = 6  # of a traceback; the last ones say most
SPARE_BYTES = 8 * 2**20  # given up when memory runs out, so that the answer can still be written


class CappedOutput(io.RawIOBase):
    """Take everything, keep the beginning and the end."""

    def __init__(self, limit: int) -> None:
        self.limit, self.head = limit, limit * 3 // 4
        self.clear()

    def clear(self) -> None:
        self.kept, self.cut = bytearray(), 0

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Stay open for the next call, whatever happened to the wrapper around it."""

    def write(self, data: Any, /) -> int:
        data = bytes(data)
        self.kept += data
        surplus = max(len(self.kept) - self.limit, 0)
        del self.kept[self.head : self.head + surplus]
        self.cut += surplus
        return len(data)

    def text(self) -> str:
        middle = f"\n[... {self.cut} bytes cut ...]\n".encode() if self.cut else b""
        shown = self.kept[: self.head] + middle + self.kept[self.head :]
        return shown.decode("utf-8", errors="replace")


class Interpreter:
    """The state of one episode: a module called __main__, as in any Python session."""

    def __init__(self, limit: int, stray: int) -> None:
        self.output = CappedOutput(limit)
        self.limit = limit
        self.stray = stray  # what is written to descriptors 1 and 2 past sys.stdout arrives here
        self.module = ModuleType("__main__")
        self.module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self.module
        self.calls = 0
        self.spare: bytearray | None = bytearray(SPARE_BYTES)

    def run(self, code: str) -> dict[str, Any]:
        self.calls += 1
        self.output.clear()
        sys.stdout = sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(self.output), "utf-8", errors="replace", write_through=True
        )
        name = f"<call {self.calls}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        error = None
        try:
            self._execute(code, name)
        except BaseException as caught:  # SystemExit too: only the parent ends this process
            if isinstance(caught, MemoryError):
                self.spare = None
            error = self._explain(caught)
            del caught
        return self._answer(error)

    def _execute(self, code: str, name: str) -> None:
        """Run the statements; the value of a last expression is shown, as at a prompt."""
        tree = ast.parse(code, name)
        space, last = self.module.__dict__, None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body[-1].value)
            del tree.body[-1]
        exec(compile(tree, name, "exec"), space)
        if last is not None:
            value = eval(compile(last, name, "eval"), space)
            if value is not None:
                print(repr(value)[: self.limit + 1000])

    def _explain(self, error: BaseException) -> str:
        try:
            if isinstance(error, SystemExit):
                return f"SystemExit: {str(error.code)[:MAX_TRACEBACK_CHARS]} (the interpreter goes on)"
            trace = error.__traceback__
            while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
                trace = trace.tb_next  # a frame of ours
            lines = traceback.format_exception(type(error), error, trace, limit=-FRAMES)
            text = "".join(lines).strip()
        except BaseException:  # the exception's own code is foreign too, and memory may be short
            text = type(error).__name__
        half = MAX_TRACEBACK_CHARS // 2
        return text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"

    def _answer(self, error: str | None) -> dict[str, Any]:
        try:
            sys.stdout.flush()
        except BaseException:  # the code closed or replaced it
            error = error or "the output could not be read: sys.stdout was closed or replaced"
        with contextlib.suppress(OSError):  # nothing there
            self.output.write(os.read(self.stray, 65536))
        answer = {"text": self.output.text(), "error": error, "spent": False}
        if self.spare is None:
            answer["spent"] = not self._recovered()
        return answer

    def _recovered(self) -> bool:
        """Return whether there is memory again after a MemoryError; if not, the process is of no more use."""
        gc.collect()
        try:
            room = bytearray(4 * SPARE_BYTES)
            del room
            self.spare = bytearray(SPARE_BYTES)
        except MemoryError:
            return False
        return True


def divert_output() -> int:
    """Give descriptors 1 and 2 a pipe of their own, and return the end to read from."""
    stray, writing = os.pipe()
    os.set_blocking(stray, False)
    os.set_blocking(writing, False)  # a full pipe is an error for the code, not a standstill
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    return stray


def start(settings: dict[str, Any]) -> Callable[[dict[str, str]], dict[str, Any]]:
    """Lock this process in, and return what answers: to {"code": ...} what it prints, to {} how it is locked in."""
    del sys.path[0]  # this folder
    sys.path += settings["readable"]
    sys.dont_write_bytecode = True
    stray = divert_output()
    report = confine(settings)
    sys.path.insert(0, "")
    for name in ("interpreter", "confine", "syscalls"):
        del sys.modules[name]
    interpreter = Interpreter(settings["max_output"], stray)
    return lambda message: interpreter.run(message["code"]) if "code" in message else report
