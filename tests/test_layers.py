"""The rules of docs/ARCHITECTURE.md that a machine can check."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from TrainingFactory.config.problems import map_fields
from TrainingFactory.config.schema import TrainingConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "TrainingFactory"

# Highest first. A module may import from later rows and from its own folder, never from its own row.
LAYERS = [
    ["cli"],
    ["integrations", "web"],
    ["services"],
    ["apps"],
    ["trainers"],
    ["promotion"],
    ["evaluation"],
    ["assembly"],
    ["agent_api", "resolve"],
    ["training", "registry"],
    ["runs"],
    ["cluster"],
    ["rollout", "sampling", "learning"],
    ["envs", "rewards", "algorithms", "retrieval"],
    ["tools", "models", "data"],
    ["config"],
    ["common"],
    ["protocols"],
    ["types"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}

# The core never imports a satellite, nor the edge, which knows both.
EDGE = ["assembly", "resolve", "trainers"]
SATELLITES = [
    "cli", "web", "apps", "services", "integrations", "cluster", "registry", "evaluation", "promotion", "agent_api",
    "retrieval", "common/http", "common/workers", "common/sql", "common/arithmetic.py", "common/endpoints",
    "envs/builtin", "envs/android", "envs/process", "envs/adapters", "envs/users",
    "envs/containers", "envs/web_page", "tools/mcp", "tools/cache", "tools/builtin",
    "tools/sandbox", "tools/endpoints",
    "rewards/rules", "rewards/judge", "rewards/workers", "data/convert.py", "data/provider_rows.py",
    "learning/reward_models.py", "models/faces.py", "models/qwen3.py", "models/tools_format.py",
    "models/llama.py", "models/deepseek.py", "sampling/vllm_engine.py", "sampling/vllm_worker.py",
    "learning/publishing.py", "learning/sharding.py",
]  # fmt: skip
# Modules that only re-export names, so that users find them where the first release had them.
RE_EXPORTS = [
    "tools/custom_tools.py", "tools/mcp_tools.py", "tools/tool_cache.py", "rewards/rule_based.py",
    "rewards/model_judge.py", "rewards/tool_verified.py", "services/async_executor.py", "services/model_registry.py",
    "services/process_reward.py", "services/reward_model.py", "services/rl_trainer.py", "services/sft_trainer.py",
]  # fmt: skip
# What every training step passes through.
HEART = [
    "types.py", "protocols.py", "training", "rollout", "algorithms", "data/samples.py", "data/packing.py",
    "learning/learner.py", "learning/step.py", "learning/policy.py", "learning/forward.py", "learning/logprobs.py",
    "learning/optim.py",
]  # fmt: skip
HEART_LINES = 7_850
TOTAL_LINES = 78_500  # of Python in the package
STATIC_LINES = 8_900  # of web/static
LARGEST_SHARE = 0.15  # of the package's lines in one folder

NO_TORCH = ["types", "protocols", "common", "config", "tools", "envs", "rewards", "rollout", "web"]
READS_CONFIG = [
    "__init__", "config", "runs", "training", "resolve", "assembly", "evaluation", "promotion", "trainers", "apps",
    "integrations", "cli", "web",
]  # fmt: skip
ONE_PLACE_EACH = ["ray", "vllm", "mcp", "fastapi", "starlette", "uvicorn", "sse_starlette"]
INTERPRETER = PACKAGE / "tools" / "sandbox" / "interpreter.py"  # runs code by trade, in a locked process
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal"}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder or file directly under the package: envs/search.py is in `envs`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Drops the trees at the end, and collects no garbage until then: each collection would look at half a million
    objects."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


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
        "import TrainingFactory.config, TrainingFactory.common.catalog, TrainingFactory.cli\n"
        "loaded = {'fastapi'} & set(sys.modules)\n"
        "import TrainingFactory.apps.views.runs, TrainingFactory.apps.views.index\n"
        "import TrainingFactory.apps.views.registry\n"
        "print(sorted(loaded | {'torch', 'transformers'} & set(sys.modules)))"
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


def is_re_export(path: Path) -> bool:
    return path.name == "__init__.py" or path.relative_to(PACKAGE).as_posix() in RE_EXPORTS


def test_the_core_imports_no_satellite() -> None:
    wrong = []
    for path in FILES:
        if ring_of(path) != "core" or is_re_export(path):
            continue
        for line, name in imports(path):
            owner, *rest = name.split(".")
            if owner == "TrainingFactory" and any(
                ring("/".join(rest[:n])) != "core" for n in range(1, len(rest) + 1)
            ):
                wrong.append(f"{where(path, line)} imports {name}")
    assert not wrong, "\n".join(wrong)


def without_leaves(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a graph that are on a cycle or above one."""
    left = dict(graph)
    while free := [node for node, needs in left.items() if not needs & left.keys()]:
        for node in free:
            del left[node]
    return sorted(left)


@cache
def module_graph() -> dict[str, set[str]]:
    """Imports between modules, those inside functions and under TYPE_CHECKING included."""
    modules = {
        ".".join(("TrainingFactory", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in FILES
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        if is_re_export(path):
            continue
        targets = (name if name in modules else name.rpartition(".")[0] for _, name in imports(path))
        graph[module] = {name for name in targets if name in modules}
    return graph


def test_no_import_cycle_between_modules() -> None:
    assert not without_leaves(module_graph())


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_no_import_cycle_between_folders(depth: int) -> None:
    def folder(module: str) -> str:
        return ".".join(module.split(".")[:-1][: depth + 1])

    graph: dict[str, set[str]] = {}
    for module, needs in module_graph().items():
        graph.setdefault(folder(module), set()).update(folder(need) for need in needs)
    for name, needs in graph.items():
        needs.discard(name)
    assert not without_leaves(graph)


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_the_package_keeps_to_its_limits() -> None:
    static = [
        path for path in (PACKAGE / "web" / "static").rglob("*") if path.suffix in (".js", ".css", ".html")
    ]
    lines = {path: lines_of(path) for path in [*FILES, *static]}
    assert sum(lines[path] for path in FILES) <= TOTAL_LINES
    assert sum(lines[path] for path in static) <= STATIC_LINES
    heart = [PACKAGE / name for name in HEART]
    assert all(path.exists() for path in heart)
    in_heart = [path for path in FILES if any(path == each or each in path.parents for each in heart)]
    assert sum(lines[path] for path in in_heart) <= HEART_LINES
    folders: Counter[str] = Counter()
    for path, count in lines.items():
        top, *rest = path.relative_to(PACKAGE).parts
        folders[f"{top}/{rest[0]}" if top == "apps" or rest[:1] == ["static"] else top] += count
    share = {name: count / sum(lines.values()) for name, count in folders.items()}
    assert max(share.values()) <= LARGEST_SHARE, share


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        # Other projects prescribe the names of integrations; every adapter is a program of its own.
        if part_of(path) == "integrations" or path.parent == PACKAGE / "envs" / "adapters":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(where(path, node.lineno))
    assert not {name: places for name, places in homes.items() if len(places) > 1}


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
            if (lines := lines_of(path)) > 500:
                wrong.append(f"{where(path, 1)}: {lines} lines")
            for node in nodes(path):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > 80:
                        wrong.append(f"{where(path, node.lineno)} {node.name}: {length} lines")
    assert not wrong, "\n".join(wrong)


def test_every_config_key_is_described_and_tested() -> None:
    keys = map_fields(TrainingConfig)
    # only an optional part of a section, such as training.branching, has keys of its own
    assert max(key.count(".") + 1 for key in keys) <= 3
    assert all(field.description for field in keys.values())
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    words = {word for path in tests for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert not [key for key in keys if key.split(".")[-1] not in words]


def test_every_kit_is_listed() -> None:
    listed = re.findall(r"^\| `(\w+\.py)`", (ROOT / "tests/kits/README.md").read_text(encoding="utf-8"), re.M)
    assert sorted([*listed, "__init__.py"]) == sorted(
        path.name for path in (ROOT / "tests/kits").glob("*.py")
    )
