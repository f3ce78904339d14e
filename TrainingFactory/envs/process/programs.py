"""Programs of environments in other processes: the user's own, and adapters in virtual environments of their own."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.user_code import is_file_name, split_name
from TrainingFactory.envs import adapters
from TrainingFactory.envs.process.process import Program

ADAPTERS = Path(adapters.__file__).parent
SERVER = ADAPTERS / "server.py"
FOLDER = "TFACTORY_ENVS"  # environment variable: folder of the virtual environments
LOCK = "requirements.lock"
NON_ADAPTERS = ("__init__", "server", "agent_turns")  # other files in the folder


def adapter_names() -> list[str]:
    return sorted(path.stem for path in ADAPTERS.glob("*.py") if path.stem not in NON_ADAPTERS)


def environments_folder() -> Path:
    """Return the folder with one virtual environment per adapter."""
    if path := os.environ.get(FOLDER):
        return Path(path).expanduser()
    data_home = os.environ.get("XDG_DATA_HOME")
    return (Path(data_home) if data_home else Path.home() / ".local" / "share") / "tfactory" / "envs"


def find_program(
    environment_id: str, *, python: str | None = None, readable: Sequence[str] = (), **options: Any
) -> Program:
    """Return the program of an `environment_id`; raise ValueError if it is not installed."""
    kind, _, name = environment_id.partition(":")
    for path in readable:
        if not Path(path).expanduser().exists():
            raise ValueError(f"environment.options.readable: there is no file or folder {path}")
    extra_paths = [str(Path(path).expanduser().resolve()) for path in readable]
    if kind == "process":
        command, command_paths = _resolve_command(name)
        return Program(command, name, readable=[*command_paths, *extra_paths], **options)
    if not name:
        raise ValueError(f"environment_id {environment_id!r} names no environment. Write {kind}:NAME")
    interpreter = Path(python).expanduser().absolute() if python else installed_python(kind)
    if not interpreter.is_file():
        raise ValueError(f"environment.options.python: there is no file {interpreter}")
    command = [str(interpreter), "-I", str(SERVER), str(ADAPTERS / f"{kind}.py")]
    folders = [interpreter.parent.parent, interpreter.resolve().parent.parent, ADAPTERS]
    files: list[str] = []
    if is_file_name(name):  # trl:FILE.py:Factory
        file, member = split_name(name)
        if not Path(file).expanduser().is_file():
            raise ValueError(f"environment_id {environment_id}: there is no file {file} in {Path.cwd()}")
        files = [str(Path(file).expanduser().resolve())]
        name = ":".join(filter(None, [*files, member]))
    return Program(command, name, readable=[*map(str, folders), *files, *extra_paths], **options)


def _resolve_command(command: str) -> tuple[list[str], list[str]]:
    """Return the arguments of a command, with files as absolute paths, and the paths that the command must be able to
    read."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"environment_id process:{command}: {error}") from error
    program = shutil.which(argv[0]) if argv else None
    if program is None:
        name = argv[0] if argv else ""
        raise ValueError(
            f"environment_id process:{command}: cannot find the program {name!r}, neither on the PATH nor in "
            f"{Path.cwd()}. Install it or correct the command"
        )
    files = [os.path.abspath(argument) for argument in argv[1:] if os.path.isfile(argument)]
    arguments = [os.path.abspath(argument) if os.path.isfile(argument) else argument for argument in argv[1:]]
    path = Path(program).absolute()
    readable = [str(path), str(path.resolve()), *files]
    for prefix in {path.parent.parent, path.resolve().parent.parent}:
        # Installations such as ~/.nvm/versions/node/v24; never a folder above the user's own files.
        above_own_files = any(folder.is_relative_to(prefix) for folder in (Path.home(), Path.cwd()))
        if not above_own_files and ("/" not in argv[0] or path.parent.name == "bin"):
            readable.append(str(prefix))
    return [str(path), *arguments], readable


def installed_python(kind: str) -> Path:
    """Return the interpreter of an adapter's virtual environment; raise ValueError with the command to install it."""
    python = environments_folder() / kind / "bin" / "python"
    if not (python.parent.parent / LOCK).is_file():
        raise ValueError(f"environment {kind}:NAME is not installed. Run: tfactory envs add {kind}")
    return python


def requirements_of(kind: str) -> list[str]:
    """Return the `REQUIREMENTS` of an adapter without importing it."""
    if kind not in adapter_names():
        names = ", ".join(adapter_names())
        raise ValueError(
            f"unknown environment {kind!r}{did_you_mean(nearest(kind, adapter_names()))} (known: {names})"
        )
    for node in ast.parse((ADAPTERS / f"{kind}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "REQUIREMENTS":
            return ast.literal_eval(node.value)
    raise AssertionError(f"adapter {kind} has no REQUIREMENTS")


def install(kind: str, report: Callable[[str], None] = lambda _: None) -> Path:
    """Create the virtual environment of an adapter, install its packages, and write a lock file with the hash of every
    file. With a lock file, install exactly those files. Return the lock file."""
    requirements = requirements_of(kind)
    folder = environments_folder() / kind
    lock_file = folder / LOCK
    python = folder / "bin" / "python"
    report(f"creating {folder}")
    _run_command([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    if lock_file.is_file():
        report(f"installing the {len(lock_file.read_text().splitlines())} packages of {lock_file}")
        _run_command([*pip, "--require-hashes", "-r", str(lock_file)])
        return lock_file
    report(f"installing {', '.join(requirements) or 'no packages'}")
    if requirements:
        report_file = folder / "install.json"
        _run_command([*pip, "--force-reinstall", "--report", str(report_file), *requirements])
        packages = json.loads(report_file.read_text(encoding="utf-8"))["install"]
        lines = sorted(map(_make_lock_line, packages))
        report_file.unlink()
    else:
        lines = []
    lock_file.write_text("".join(lines), encoding="utf-8")
    report(f"installed {len(lines)} packages; versions and hashes are in {lock_file}")
    return lock_file


def _make_lock_line(package: dict[str, Any]) -> str:
    metadata, archive = package["metadata"], package["download_info"].get("archive_info", {})
    digest = archive.get("hashes", {}).get("sha256")
    requirement = f"{metadata['name']}=={metadata['version']}"
    return f"{requirement} --hash=sha256:{digest}\n" if digest else f"{requirement}\n"


def _run_command(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().split("\n")
        raise ValueError(f"`{' '.join(command)}` failed:\n  " + "\n  ".join(lines[-5:]))
