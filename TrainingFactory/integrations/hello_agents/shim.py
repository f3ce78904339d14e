"""Make the textbook's imports work: `import TrainingFactory.integrations.hello_agents.shim` before them.

Where no `hello_agents` is installed, its names lead here. Where one is, it stays what it is, and gets our
`RLTrainingTool`, our `rl`, and `LLMConfig`, which no version of it has."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from TrainingFactory.integrations.hello_agents import agents, datasets, rewards, rl, tool, trainers
from TrainingFactory.integrations.hello_agents.real import tool_for

RL = {"": rl, ".trainers": trainers, ".datasets": datasets, ".rewards": rewards, ".utils": trainers}
CORE = ("LLMConfig", "HelloAgentsLLM")
TOOLS = ("Tool", "ToolParameter", "ToolRegistry")


def install() -> str:
    """Put the names in place; return the version of the package that is there, or nothing."""
    there = sys.modules.get("hello_agents")
    if there is None and importlib.util.find_spec("hello_agents") is None:
        there = _made()
    elif there is None or not hasattr(there, "_tfactory"):
        there = _completed()
    for name, module in RL.items():
        sys.modules[f"hello_agents.rl{name}"] = module
    there.rl = rl  # type: ignore[attr-defined]
    there._tfactory = True  # type: ignore[attr-defined]
    return str(getattr(there, "__version__", ""))


def _module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name, "A name of the HelloAgents text that leads to TrainingFactory.")
    made.__path__ = []  # a package
    made.__dict__.update(names, __all__=[*names])
    sys.modules[name] = made
    return made


def _made() -> ModuleType:
    core = {name: getattr(agents, name) for name in CORE}
    tools = {name: getattr(agents, name) for name in TOOLS} | {"RLTrainingTool": tool.RLTrainingTool}
    parts = {
        "core": _module("hello_agents.core", **core),
        "agents": _module("hello_agents.agents", SimpleAgent=agents.SimpleAgent),
        "tools": _module("hello_agents.tools", **tools),
    }
    names = core | {"SimpleAgent": agents.SimpleAgent, "ToolRegistry": agents.ToolRegistry}
    return _module("hello_agents", **names, **parts)


def _completed() -> ModuleType:
    try:
        import hello_agents  # pyright: ignore[reportMissingImports]
        import hello_agents.core as core  # pyright: ignore[reportMissingImports]
        import hello_agents.tools as tools  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"hello_agents is installed and cannot be imported: {error}; install what it needs, or remove it"
        ) from error
    made = tool_for(tools)
    tools.RLTrainingTool = made
    module = sys.modules.get("hello_agents.tools.builtin.rl_training_tool")
    if module is not None:
        module.RLTrainingTool = made  # type: ignore[attr-defined]
    if not hasattr(core, "LLMConfig"):
        core.LLMConfig = agents.LLMConfig
    return hello_agents


install()
