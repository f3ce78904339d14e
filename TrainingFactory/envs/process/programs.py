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

ADAPTERS_FOLDER = Path(adapters.__file__).parent
SERVER_FILE = ADAPTERS_FOLDER / "server.py"
FOLDER_VARIABLE = "TFACTORY_ENVS"  # environment variable: folder of the virtual environments
LOCK_FILE = "requirements.lock"
NON_ADAPTERS = ("__init__", "server", "agent_turns")  # other files in the folder


def list_adapters() -> list[str]:
    return sorted(path.stem for path in ADAPTERS_FOLDER.glob("*.py") if path.stem not in NON_ADAPTERS)


def find_environments_folder() -> Path:
    """Return the folder with one virtual environment per adapter."""
    if path := os.environ.get(FOLDER_VARIABLE):
        return Path(path).expanduser()
    data_home = os.environ.get("XDG_DATA_HOME")
    return (Path(data_home) if data_home else Path.home() / ".local" / "share") / "tfactory" / "envs"


def find_program(
    environment_id: str, *, python: str | None = None, readable: Sequence[str] = (), **options: Any
) -> Program:
    """Return the program of an `environment_id`; raise ValueError if it is not installed."""
    adapter, _, env_name = environment_id.partition(":")
    for path in readable:
        if not Path(path).expanduser().exists():
            raise ValueError(f"environment.options.readable: there is no file or folder {path}")
    extra_paths = [str(Path(path).expanduser().resolve()) for path in readable]
    if adapter == "process":
        command, command_paths = _resolve_command(env_name)
        return Program(command, env_name, readable=[*command_paths, *extra_paths], **options)
    if not env_name:
        raise ValueError(f"environment_id {environment_id!r} names no environment. Write {adapter}:NAME")
    interpreter = Path(python).expanduser().absolute() if python else find_installed_python(adapter)
    if not interpreter.is_file():
        raise ValueError(f"environment.options.python: there is no file {interpreter}")
    command = [str(interpreter), "-I", str(SERVER_FILE), str(ADAPTERS_FOLDER / f"{adapter}.py")]
    readable_folders = [interpreter.parent.parent, interpreter.resolve().parent.parent, ADAPTERS_FOLDER]
    files: list[str] = []
    if is_file_name(env_name):  # trl:FILE.py:Factory
        file, member = split_name(env_name)
        if not Path(file).expanduser().is_file():
            raise ValueError(f"environment_id {environment_id}: there is no file {file} in {Path.cwd()}")
        files = [str(Path(file).expanduser().resolve())]
        env_name = ":".join(filter(None, [*files, member]))
    return Program(command, env_name, readable=[*map(str, readable_folders), *files, *extra_paths], **options)


def _resolve_command(command: str) -> tuple[list[str], list[str]]:
    """Return the arguments of a command, with files as absolute paths, and the paths that the command must be able to
    read."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"environment_id process:{command}: {error}") from error
    program = shutil.which(argv[0]) if argv else None
    if program is None:
        program_name = argv[0] if argv else ""
        raise ValueError(
            f"environment_id process:{command}: cannot find the program {program_name!r}, neither on the PATH nor in "
            f"{Path.cwd()}. Install it or correct the command"
        )
    argument_files = [os.path.abspath(argument) for argument in argv[1:] if os.path.isfile(argument)]
    arguments = [os.path.abspath(argument) if os.path.isfile(argument) else argument for argument in argv[1:]]
    program_path = Path(program).absolute()
    readable_paths = [str(program_path), str(program_path.resolve()), *argument_files]
    for prefix in {program_path.parent.parent, program_path.resolve().parent.parent}:
        # Installations such as ~/.nvm/versions/node/v24; never a folder above the user's own files.
        has_user_files = any(folder.is_relative_to(prefix) for folder in (Path.home(), Path.cwd()))
        if not has_user_files and ("/" not in argv[0] or program_path.parent.name == "bin"):
            readable_paths.append(str(prefix))
    return [str(program_path), *arguments], readable_paths


def find_installed_python(adapter: str) -> Path:
    """Return the interpreter of an adapter's virtual environment; raise ValueError with the command to install it."""
    python = find_environments_folder() / adapter / "bin" / "python"
    if not (python.parent.parent / LOCK_FILE).is_file():
        raise ValueError(f"environment {adapter}:NAME is not installed. Run: tfactory envs add {adapter}")
    return python


def read_requirements(adapter: str) -> list[str]:
    """Return the `REQUIREMENTS` of an adapter without importing it."""
    if adapter not in list_adapters():
        names = ", ".join(list_adapters())
        raise ValueError(
            f"unknown environment {adapter!r}{did_you_mean(nearest(adapter, list_adapters()))} (known: {names})"
        )
    for node in ast.parse((ADAPTERS_FOLDER / f"{adapter}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "REQUIREMENTS":
            return ast.literal_eval(node.value)
    raise AssertionError(f"adapter {adapter} has no REQUIREMENTS")


def install_adapter(adapter: str, report: Callable[[str], None] = lambda _: None) -> Path:
    """Create the virtual environment of an adapter, install its packages, and write a lock file with the hash of every
    file. With a lock file, install exactly those files. Return the lock file."""
    requirements = read_requirements(adapter)
    folder = find_environments_folder() / adapter
    lock_file = folder / LOCK_FILE
    python = folder / "bin" / "python"
    report(f"creating {folder}")
    _run_command([sys.executable, "-m", "venv", str(folder)])
    pip_command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    if lock_file.is_file():
        report(f"installing the {len(lock_file.read_text().splitlines())} packages of {lock_file}")
        _run_command([*pip_command, "--require-hashes", "-r", str(lock_file)])
        return lock_file
    report(f"installing {', '.join(requirements) or 'no packages'}")
    if requirements:
        report_file = folder / "install.json"
        _run_command([*pip_command, "--force-reinstall", "--report", str(report_file), *requirements])
        packages = json.loads(report_file.read_text(encoding="utf-8"))["install"]
        lock_lines = sorted(map(_make_lock_line, packages))
        report_file.unlink()
    else:
        lock_lines = []
    lock_file.write_text("".join(lock_lines), encoding="utf-8")
    report(f"installed {len(lock_lines)} packages; versions and hashes are in {lock_file}")
    return lock_file


def _make_lock_line(package: dict[str, Any]) -> str:
    metadata, archive = package["metadata"], package["download_info"].get("archive_info", {})
    digest = archive.get("hashes", {}).get("sha256")
    requirement = f"{metadata['name']}=={metadata['version']}"
    return f"{requirement} --hash=sha256:{digest}\n" if digest else f"{requirement}\n"


def _run_command(command: list[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        output_lines = (process.stderr or process.stdout).strip().split("\n")
        raise ValueError(f"`{' '.join(command)}` failed:\n  " + "\n  ".join(output_lines[-5:]))
