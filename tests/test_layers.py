"""The rules of docs/ARCHITECTURE.md that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from TrainingFactory.config.problems import leaves
from TrainingFactory.config.schema import TrainingConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "TrainingFactory"

# Highest first. A module may import what stands in a later row, and its own folder; never its own row.
LAYERS = [
    ["cli"],
    ["integrations", "web"],
    ["services"],
    ["cluster", "http"],
    ["rollout", "sampling", "learning"],
    ["envs", "rewards", "algorithms", "wordnet"],
    ["tools", "models", "data"],
    ["catalog", "config", "user_code", "sql", "arithmetic", "endpoint", "workers"],
    ["protocols", "openai_form", "options", "running", "seeds"],
    ["types", "texts"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}

# The core never imports a satellite, nor the edge, which knows both.
EDGE = ["services/build"]
SATELLITES = [
    "cli", "web", "wordnet", "integrations", "cluster", "http", "workers", "sql", "arithmetic.py", "endpoint.py",
    "envs/builtin", "tools/mcp", "tools/cache", "tools/builtin", "tools/sandbox", "rewards/rules",
    "rewards/judge", "rewards/workers", "services/evaluation", "services/serving",
    "services/reports", "services/judge_audit", "services/demo", "services/doctor", "services/plan", "services/proxy",
    "services/recipes", "services/registry", "services/views", "services/export.py", "services/datasets.py",
    "data/convert.py", "data/gsm8k.py",
    "learning/reward_models.py", "models/faces.py", "models/qwen3.py", "models/tools_format.py",
    "models/llama.py", "models/deepseek.py", "sampling/vllm_engine.py", "sampling/vllm_worker.py",
    "learning/publishing.py", "learning/sharding.py",
    # faces of satellite folders, and what users call
    "tools/custom_tools.py", "tools/mcp_tools.py", "tools/tool_cache.py", "rewards/rule_based.py",
    "rewards/model_judge.py", "rewards/tool_verified.py", "services/trainers.py",
    "services/keywords.py", "services/trl.py", "services/model_registry.py", "services/sft_trainer.py",
    "services/rl_trainer.py", "services/reward_model.py", "services/async_executor.py", "services/process_reward.py",
]  # fmt: skip
TOTAL_LINES = 52_300  # of Python in the package

NO_TORCH = [
    "types", "protocols", "openai_form", "options", "running", "seeds", "config", "catalog", "user_code", "workers",
    "tools", "envs", "rewards", "rollout", "http", "web",
]  # fmt: skip
READS_CONFIG = [
    "__init__",
    "config",
    "services",
    "integrations",
    "cli",
    "web",
]  # the first: the names that the package exports
ONE_PLACE_EACH = ["ray", "vllm", "mcp", "fastapi", "starlette", "uvicorn", "sse_starlette"]
INTERPRETER = PACKAGE / "tools" / "sandbox" / "interpreter.py"  # runs code by trade, in a locked process
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder or file directly under the package: envs/search.py is in `envs`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Drops the trees at the end: half a million objects that every collection of garbage would look at."""
    yield
    nodes.cache_clear()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions and under TYPE_CHECKING included: a
    type from above is a dependency too."""
    package = ("TrainingFactory", *path.relative_to(PACKAGE).parent.parts)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from TrainingFactory import envs` imports envs
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in FILES} - {"__init__", "__main__", "py.typed"}
    assert parts <= LEVEL.keys()


def test_imports_point_down() -> None:
    wrong = []
    for path in FILES:
        part = part_of(path)
        for line, name in imports(path):
            owner, *rest = name.split(".")
            if owner != "TrainingFactory" or rest[0].startswith("__") or rest[0] == part:
                continue
            if LEVEL[rest[0]] <= LEVEL.get(part, -1):
                wrong.append(f"{where(path, line)} ({part}) imports {rest[0]}")
    assert not wrong, "\n".join(wrong)


def test_config_is_read_at_the_top_only() -> None:
    wrong = [
        where(path, line)
        for path in FILES
        if part_of(path) not in READS_CONFIG
        for line, name in imports(path)
        if name.startswith("TrainingFactory.config")
    ]
    assert not wrong, wrong


def test_no_torch_where_none_is_needed() -> None:
    wrong = [
        where(path, line)
        for path in FILES
        if part_of(path) in NO_TORCH
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "transformers")
    ]
    assert not wrong, wrong


def test_light_parts_import_without_torch() -> None:
    code = (
        "import sys, TrainingFactory.rollout, TrainingFactory.envs, TrainingFactory.tools\n"
        "import TrainingFactory.config, TrainingFactory.catalog, TrainingFactory.cli\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_heavy_packages_are_imported_in_one_folder_each() -> None:
    for package in ONE_PLACE_EACH:
        users = {path.parent for path in FILES for _, name in imports(path) if name.split(".")[0] == package}
        assert len(users) <= 1, (package, users)


def ring(name: str) -> str:
    """core, edge or satellite, of a path in the package without its ending."""
    for kind, parts in (("edge", EDGE), ("satellite", SATELLITES)):
        if any(name == part.removesuffix(".py") or name.startswith(f"{part}/") for part in parts):
            return kind
    return "core"


def ring_of(path: Path) -> str:
    return ring(path.relative_to(PACKAGE).as_posix().removesuffix(".py").removesuffix("/__init__"))


def test_the_core_imports_no_satellite() -> None:
    wrong = []
    for path in FILES:
        # The faces of folders name what users import; they load it when it is used.
        if ring_of(path) != "core" or path.name == "__init__.py":
            continue
        for line, name in imports(path):
            owner, *rest = name.split(".")
            if owner == "TrainingFactory" and any(
                ring("/".join(rest[:n])) != "core" for n in range(1, len(rest) + 1)
            ):
                wrong.append(f"{where(path, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle() -> None:
    """Between modules, imports inside functions and under TYPE_CHECKING included."""
    modules = {
        ".".join(("TrainingFactory", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in FILES
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        if path.name == "__init__.py":
            continue
        found = (name if name in modules else name.rpartition(".")[0] for _, name in imports(path))
        graph[module] = {name for name in found if name in modules}
    left = dict(graph)
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert not left, sorted(left)


def test_the_package_keeps_to_its_total() -> None:
    total = sum(path.read_text(encoding="utf-8").count("\n") for path in FILES)
    assert total <= TOTAL_LINES, f"the package has {total} lines"


def test_nothing_runs_code_from_data() -> None:
    wrong = []
    for path in FILES:
        wrong += [where(path, line) for line, name in imports(path) if name.split(".")[0] in UNSAFE_MODULES]
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec") and path != INTERPRETER:
                wrong.append(where(path, node.lineno))
            for keyword in node.keywords:
                literal = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if (keyword.arg, literal) in (("trust_remote_code", True), ("weights_only", False)):
                    wrong.append(where(path, node.lineno))
    assert not wrong, wrong


def test_files_and_functions_are_short() -> None:
    wrong = []
    for folder in ("TrainingFactory", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if (lines := text.count("\n")) > 500:
                wrong.append(f"{where(path, 1)}: {lines} lines")
            for node in nodes(path):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > 80:
                        wrong.append(f"{where(path, node.lineno)} {node.name}: {length} lines")
    assert not wrong, "\n".join(wrong)


def test_every_config_key_is_described_and_tested() -> None:
    keys = leaves(TrainingConfig)
    # a mapping such as step_rewards is one level deeper than its key
    assert max(key.count(".") + 1 for key in keys) <= 2
    assert all(field.description for field in keys.values())
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    words = {word for path in tests for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert not [key for key in keys if key.split(".")[-1] not in words]
