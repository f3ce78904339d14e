"""The interpreter of model-written code, in a sandboxed process without site-packages and without this package. This is
the only module that executes text written by a model."""

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
MAX_FRAMES = 6  # of a traceback, counted from the innermost
RESERVE_BYTES = 8 * 2**20  # freed after a MemoryError, so that the answer can still be written


class CappedOutput:
    """Output of unlimited length of which only `max_bytes` bytes are kept: the beginning and the end."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.max_head_bytes = max_bytes, max_bytes * 3 // 4
        self.clear()

    def clear(self) -> None:
        self.buffer, self.num_cut_bytes = bytearray(), 0

    def write(self, data: Any) -> int:
        data = bytes(data)
        self.buffer += data
        num_excess_bytes = max(len(self.buffer) - self.max_bytes, 0)
        del self.buffer[self.max_head_bytes : self.max_head_bytes + num_excess_bytes]
        self.num_cut_bytes += num_excess_bytes
        return len(data)

    def get_text(self) -> str:
        marker = f"\n[... {self.num_cut_bytes} bytes cut ...]\n".encode() if self.num_cut_bytes else b""
        output = self.buffer[: self.max_head_bytes] + marker + self.buffer[self.max_head_bytes :]
        return output.decode("utf-8", errors="replace")


class OutputStream(io.RawIOBase):
    """Stream that writes to an output. The stream of one call may be closed, and later calls use the same output."""

    def __init__(self, output: CappedOutput) -> None:
        self.output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self.output.write(data)


class Interpreter:
    """The Python session of one episode, with its variables in a module called __main__."""

    def __init__(self, max_output_bytes: int, stray_output_fd: int) -> None:
        self.output = CappedOutput(max_output_bytes)
        self.max_bytes = max_output_bytes
        self.stray_output_fd = stray_output_fd  # to read what code writes to descriptors 1 and 2
        self.module = ModuleType("__main__")
        self.module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self.module
        self.num_calls = 0
        self.memory_reserve: bytearray | None = bytearray(RESERVE_BYTES)

    def run(self, code: str) -> dict[str, Any]:
        self.num_calls += 1
        self.output.clear()
        sys.stdout = sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(OutputStream(self.output)), "utf-8", errors="replace", write_through=True
        )
        source_name = f"<call {self.num_calls}>"
        linecache.cache[source_name] = (len(code), None, code.splitlines(keepends=True), source_name)
        error = None
        try:
            self._execute(code, source_name)
        except BaseException as exception:  # SystemExit too: only the parent may end this process
            if isinstance(exception, MemoryError):
                self.memory_reserve = None
            error = self._format_error(exception)
        return self._make_answer(error)

    def _execute(self, code: str, source_name: str) -> None:
        """Run the statements, and print the value of a final expression, as at a prompt."""
        tree = ast.parse(code, source_name)
        namespace = self.module.__dict__
        last_expression = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last_expression = ast.Expression(tree.body[-1].value)
            del tree.body[-1]
        exec(compile(tree, source_name, "exec"), namespace)
        if last_expression is not None:
            value = eval(compile(last_expression, source_name, "eval"), namespace)
            if value is not None:
                print(repr(value)[: self.max_bytes + 1000])

    def _format_error(self, error: BaseException) -> str:
        try:
            if isinstance(error, SystemExit):
                exit_code = str(error.code)[:MAX_TRACEBACK_CHARS]
                return f"SystemExit: {exit_code} (ignored; the interpreter keeps running)"
            trace = error.__traceback__
            while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
                trace = trace.tb_next  # skip the frames of this module
            lines = traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES)
            text = "".join(lines).strip()
        except BaseException:  # the methods of the exception are foreign code too, and memory may be short
            text = type(error).__name__
        half_chars = MAX_TRACEBACK_CHARS // 2
        return text if len(text) <= 2 * half_chars else f"{text[:half_chars]}\n[...]\n{text[-half_chars:]}"

    def _make_answer(self, error: str | None) -> dict[str, Any]:
        try:
            sys.stdout.flush()
        except BaseException:  # the code closed or replaced it
            error = error or "the output could not be read: sys.stdout was closed or replaced"
        with contextlib.suppress(OSError):  # the pipe is empty
            self.output.write(os.read(self.stray_output_fd, 65536))
        answer = {"text": self.output.get_text(), "error": error, "spent": False}
        if self.memory_reserve is None:
            answer["spent"] = not self._recover_memory()
        return answer

    def _recover_memory(self) -> bool:
        """Free memory after a MemoryError; return False if the process must be replaced."""
        gc.collect()
        try:
            probe_buffer = bytearray(4 * RESERVE_BYTES)
            del probe_buffer
            self.memory_reserve = bytearray(RESERVE_BYTES)
        except MemoryError:
            return False
        return True


def divert_output() -> int:
    """Redirect descriptors 1 and 2 to a pipe, and return its read end."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)  # a full pipe raises an error in the code instead of blocking
    os.dup2(write_fd, 1)
    os.dup2(write_fd, 2)
    os.close(write_fd)
    return read_fd


def start(settings: dict[str, Any]) -> Callable[[dict[str, str]], dict[str, Any]]:
    """Sandbox this process. Return the message handler: {"code": ...} runs code, {} returns the isolation report."""
    del sys.path[0]  # this folder
    sys.path += settings["readable"]
    sys.dont_write_bytecode = True
    stray_output_fd = divert_output()
    report = confine(settings)
    sys.path.insert(0, "")
    for name in ("interpreter", "confine", "syscalls"):
        del sys.modules[name]
    interpreter = Interpreter(settings["max_output"], stray_output_fd)
    return lambda message: interpreter.run(message["code"]) if "code" in message else report
