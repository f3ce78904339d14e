"""Task folders in the formats of Harbor (task.toml) and Terminal-Bench (task.yaml), read as they are.

Harbor          instruction.md  task.toml  environment/Dockerfile  tests/test.sh     solution/solve.sh
Terminal-Bench  task.yaml       Dockerfile                         run-tests.sh, tests/  solution.sh
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEFAULT_TEST_SECONDS = {"harbor": 600.0, "terminal-bench": 60.0}
BUILD_SECONDS = 600.0
# What the formats can ask for and this environment does not give. A path of keys -> what it is.
UNSUPPORTED_KEYS = {
    "steps": "several steps",
    "environment.gpus": "a GPU",
    "environment.tpu": "a TPU",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "a health check",
    "verifier.environment": "a separate container for its tests",
}
VARIABLE_PATTERN = re.compile(r"\$\{")


@dataclass(slots=True, frozen=True)
class ContainerTask:
    """A task folder. Paths are on this machine; None: the folder has no such file."""

    id: str
    folder: Path
    task_format: str  # harbor or terminal-bench
    instruction: str
    image_name: str | None  # name of an existing image; None: built from `context_folder`
    context_folder: Path | None  # with the Dockerfile
    test_paths: tuple[Path, ...]  # copied to /tests
    test_script: str  # in the container
    solution_file: Path | None
    test_seconds: float
    build_seconds: float = BUILD_SECONDS
    cpus: float | None = None
    memory_mb: int | None = None
    workdir: str | None = None
    user: str | None = None  # of the agent
    env: Mapping[str, str] = field(default_factory=dict)
    test_env: Mapping[str, str] = field(default_factory=dict)

    @property
    def writes_reward(self) -> bool:
        """Return whether the tests write a reward file; else their exit status is the reward."""
        return self.task_format == "harbor"

    def make_image_tag(self) -> str:
        """Return a tag for the image that depends on the contents of the build context."""
        folder = self.context_folder
        assert folder is not None
        digest = hashlib.blake2b(digest_size=12)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                digest.update(repr((path.relative_to(folder).as_posix(), path.stat().st_mode)).encode())
                digest.update(hashlib.blake2b(path.read_bytes()).digest())
        return f"localhost/tfactory-task:{digest.hexdigest()}"


def read_task_folders(folder: Path) -> list[ContainerTask]:
    """Return the tasks of a folder, which is a task itself or contains tasks. Raise ValueError with the folder and key
    of a task that cannot be played."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder of tasks")
    if is_task_folder(folder):
        return [read_task(folder)]
    tasks = [read_task(path) for path in sorted(folder.iterdir()) if is_task_folder(path)]
    if not tasks:
        raise ValueError(
            f"{folder} has no task: a folder with task.toml (Harbor) or task.yaml (Terminal-Bench)"
        )
    return tasks


def is_task_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("task.toml", "task.yaml"))


def read_task(folder: Path) -> ContainerTask:
    folder = folder.resolve()
    _reject_outside_links(folder)
    return _read_harbor(folder) if (folder / "task.toml").is_file() else _read_terminal_bench(folder)


def _read_harbor(folder: Path) -> ContainerTask:
    path = folder / "task.toml"
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    for key, feature in UNSUPPORTED_KEYS.items():
        if _get_nested(config, key):
            raise ValueError(
                f"{path}: {key}: the task needs {feature}, which is not supported. Leave the task out"
            )
    environment, verifier = _get_section(config, "environment", path), _get_section(config, "verifier", path)
    if str(environment.get("os", "linux")).lower() != "linux":
        raise ValueError(
            f"{path}: environment.os is {environment['os']}: only Linux containers are supported"
        )
    if (folder / "environment" / "docker-compose.yaml").exists():
        raise ValueError(f"{folder}/environment/docker-compose.yaml: several services are not supported")
    image_name = environment.get("docker_image")
    build_context = folder / "environment"
    if image_name is None and not (build_context / "Dockerfile").is_file():
        raise ValueError(
            f"{folder} has neither environment/Dockerfile nor environment.docker_image in task.toml"
        )
    return ContainerTask(
        folder.name,
        folder,
        "harbor",
        _read_text(folder / "instruction.md"),
        image_name,
        None if image_name else build_context,
        (_get_file(folder / "tests" / "test.sh").parent,),
        "/tests/test.sh",
        _find_file(folder / "solution" / "solve.sh"),
        _get_number(verifier, "timeout_sec", path, DEFAULT_TEST_SECONDS["harbor"]),
        _get_number(environment, "build_timeout_sec", path, BUILD_SECONDS),
        _get_number(environment, "cpus", path, None),
        _get_memory_mb(environment, path),
        environment.get("workdir"),
        _as_user_name(_get_section(config, "agent", path).get("user")),
        _get_variables(environment, path, "environment"),
        _get_variables(verifier, path, "verifier"),
    )


def _read_terminal_bench(folder: Path) -> ContainerTask:
    path = folder / "task.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str):
        raise ValueError(f"{path} needs a text `instruction`")
    if config.get("run_tests_in_same_shell"):
        raise ValueError(f"{path}: run_tests_in_same_shell is not supported: each command has its own shell")
    _check_compose(folder / "docker-compose.yaml")
    _get_file(folder / "Dockerfile")
    paths = (_get_file(folder / "run-tests.sh"), *([folder / "tests"] if (folder / "tests").is_dir() else []))
    return ContainerTask(
        folder.name,
        folder,
        "terminal-bench",
        config["instruction"],
        None,
        folder,
        paths,
        "/tests/run-tests.sh",
        _find_file(folder / "solution.sh"),
        _get_number(config, "max_test_timeout_sec", path, DEFAULT_TEST_SECONDS["terminal-bench"]),
        test_env={"TEST_DIR": "/tests"},
    )


def _check_compose(path: Path) -> None:
    """Raise ValueError for a compose file with several services. A missing compose file is valid."""
    if not path.is_file():
        return
    try:
        services = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("services") or {}
    except (ValueError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if len(services) > 1:
        raise ValueError(f"{path} has several services ({', '.join(services)}), which are not supported")


def _get_nested(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _get_section(config: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    section = config.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{path}: {name} must be a table")
    return section


def _get_number(section: Mapping[str, Any], key: str, path: Path, default: Any) -> Any:
    number = section.get(key, default)
    if number is default:
        return default
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not math.isfinite(number)
        or number <= 0
    ):
        raise ValueError(f"{path}: {key} must be a number above 0, not {number!r}")
    return number


def _get_memory_mb(environment: Mapping[str, Any], path: Path) -> int | None:
    """Return the memory in MB, also of the older form `memory = "2G"`."""
    if "memory_mb" in environment:
        return int(_get_number(environment, "memory_mb", path, None))
    if "memory" not in environment:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMK])B?", str(environment["memory"]).strip().upper())
    if match is None:
        raise ValueError(
            f'{path}: environment.memory must be a size such as "2G", not {environment["memory"]!r}'
        )
    return max(1, int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]]))


def _get_variables(section: Mapping[str, Any], path: Path, name: str) -> dict[str, str]:
    variables = section.get("env") or {}
    for key, value in variables.items():
        if VARIABLE_PATTERN.search(str(value)):
            raise ValueError(
                f"{path}: {name}.env.{key} takes its value from this machine ({value}); containers get no variables "
                "of this machine. Write a value"
            )
    return {str(key): str(value) for key, value in variables.items()}


def _as_user_name(user: Any) -> str | None:
    return None if user is None else str(user)


def _read_text(path: Path) -> str:
    return _get_file(path).read_text(encoding="utf-8").strip()


def _get_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}")
    return path


def _find_file(path: Path) -> Path | None:
    return path if path.is_file() else None


def _reject_outside_links(folder: Path) -> None:
    """Raise ValueError for a symbolic link out of the task folder, because it would copy files of this machine into a
    container."""
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(folder):
            raise ValueError(f"{path} links to a file outside of its task folder")
