"""Modules named `hello_agents` for the textbook's imports. Import this module before them.

Without the package `hello_agents`, its names refer to our classes. An installed package stays in use and gets our
`RLTrainingTool`, our `rl`, and `LLMConfig`, which no version of the package has."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from TrainingFactory.integrations.hello_agents import agents, datasets, rewards, rl
from TrainingFactory.integrations.hello_agents.tool import Result, RLTraining, RLTrainingTool

RL_MODULES = {"": rl, ".trainers": rl, ".utils": rl, ".datasets": datasets, ".rewards": rewards}
# module -> its names if the package is not installed
EXPORTED_NAMES = {
    "": ("HelloAgentsLLM", "LLMConfig", "SimpleAgent", "ToolRegistry"),
    ".core": ("HelloAgentsLLM", "LLMConfig"),
    ".agents": ("SimpleAgent",),
    ".tools": ("Tool", "ToolParameter", "ToolRegistry"),
    ".tools.builtin": (),
}
TOOL_MODULE = "hello_agents.tools.builtin.rl_training_tool"


def install() -> None:
    """Register the modules `hello_agents` that the textbook imports, unless they are registered already."""
    package = sys.modules.get("hello_agents")
    if package is None and importlib.util.find_spec("hello_agents") is None:
        for suffix, names in EXPORTED_NAMES.items():
            _register_module(f"hello_agents{suffix}", {name: getattr(agents, name) for name in names})
        _add_our_modules(RLTrainingTool)
    elif package is None or not hasattr(package, "_tfactory"):
        try:
            tools_module = [import_module(f"hello_agents.{name}") for name in ("core", "tools")][-1]
        except ImportError as error:
            raise ValueError(f"hello_agents cannot be imported: {error}. Repair or uninstall it.") from error
        _add_our_modules(make_tool_class(tools_module))


def _add_our_modules(tool_class: type) -> None:
    """Add `RLTrainingTool`, `rl` and a missing `LLMConfig` to the registered modules `hello_agents`."""
    package, core, tools = (sys.modules[f"hello_agents{name}"] for name in ("", ".core", ".tools"))
    for name, module in RL_MODULES.items():
        sys.modules[f"hello_agents.rl{name}"] = module
    tool_module = sys.modules.get(TOOL_MODULE) or _register_module(TOOL_MODULE, {})
    for module in (tools, tool_module):
        vars(module)["RLTrainingTool"] = tool_class
    vars(core).setdefault("LLMConfig", agents.LLMConfig)
    vars(package).update(rl=rl, _tfactory=True)


def _register_module(name: str, attributes: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "A module of HelloAgents, provided by TrainingFactory.")
    vars(module).update(attributes, __path__=[])  # __path__ makes it a package
    sys.modules[name] = module
    parent, _, child_name = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child_name, module)
    return module


def make_tool_class(tools: ModuleType) -> type:
    """Return the RLTrainingTool class for an installed `hello_agents.tools`. In version 0.2 its `run` returns text. In
    1.0 it returns a ToolResponse that is also that text with the same keys, so that one program works with both
    versions."""
    result_class = _make_response_class(tools) if hasattr(tools, "ToolResponse") else Result  # foreign module
    class_members = {"parameter_class": tools.ToolParameter, "result_class": result_class}
    return type("RLTrainingTool", (RLTraining, tools.Tool), class_members)


def _make_response_class(tools: ModuleType) -> type:
    statuses = {"success": tools.ToolStatus.SUCCESS, "error": tools.ToolStatus.ERROR}

    class Response(Result, tools.ToolResponse):
        def __init__(self, data: dict[str, Any]) -> None:
            status = statuses.get(data["status"], tools.ToolStatus.PARTIAL)
            text, error = str(self), None
            if data["status"] == "error":
                text = data["message"]
                error = {"code": tools.ToolErrorCode.INVALID_PARAM, "message": text}
            tools.ToolResponse.__init__(self, status=status, text=text, data=data, error_info=error)

    return Response


install()
