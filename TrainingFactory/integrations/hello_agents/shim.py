"""Make the textbook's imports work: `import TrainingFactory.integrations.hello_agents.shim` before them.

Where no `hello_agents` is installed, its names lead here. Where one is, it stays what it is, and gets our
`RLTrainingTool`, our `rl`, and `LLMConfig`, which no version of it has."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from TrainingFactory.integrations.hello_agents import agents, datasets, rewards, rl
from TrainingFactory.integrations.hello_agents.tool import Result, RLTraining, RLTrainingTool

RL = {"": rl, ".trainers": rl, ".utils": rl, ".datasets": datasets, ".rewards": rewards}
# module -> the names that it has where no package is installed
NAMES = {
    "": ("HelloAgentsLLM", "LLMConfig", "SimpleAgent", "ToolRegistry"),
    ".core": ("HelloAgentsLLM", "LLMConfig"),
    ".agents": ("SimpleAgent",),
    ".tools": ("Tool", "ToolParameter", "ToolRegistry"),
    ".tools.builtin": (),
}
TOOL = "hello_agents.tools.builtin.rl_training_tool"


def install() -> None:
    """Put the names in place, once."""
    there = sys.modules.get("hello_agents")
    if there is None and importlib.util.find_spec("hello_agents") is None:
        for name, names in NAMES.items():
            _module(f"hello_agents{name}", {each: getattr(agents, each) for each in names})
        _complete(RLTrainingTool)
    elif there is None or not hasattr(there, "_tfactory"):
        try:
            tools = [import_module(f"hello_agents.{name}") for name in ("core", "tools")][-1]
        except ImportError as error:
            raise ValueError(
                f"hello_agents is installed and cannot be imported: {error}; install what it needs, or remove it"
            ) from error
        _complete(tool_for(tools))


def _complete(tool: type) -> None:
    """Add what is ours to the modules that are there."""
    top, core, tools = (sys.modules[f"hello_agents{name}"] for name in ("", ".core", ".tools"))
    for name, module in RL.items():
        sys.modules[f"hello_agents.rl{name}"] = module
    own = sys.modules.get(TOOL) or _module(TOOL, {})
    for module in (tools, own):
        vars(module)["RLTrainingTool"] = tool
    vars(core).setdefault("LLMConfig", agents.LLMConfig)
    vars(top).update(rl=rl, _tfactory=True)


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    made = ModuleType(name, "A name of the HelloAgents text that leads to TrainingFactory.")
    vars(made).update(names, __path__=[])  # a package
    sys.modules[name] = made
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)
    return made


def tool_for(tools: ModuleType) -> type:
    """Return the class for an installed `hello_agents.tools`: its `run` returns text in 0.2, and in 1.0 a ToolResponse
    that is the same text with the same keys, so that one program runs with either."""
    answer = _response(tools) if hasattr(tools, "ToolResponse") else Result  # foreign module
    own = {"parameter": tools.ToolParameter, "result": answer}
    return type("RLTrainingTool", (RLTraining, tools.Tool), own)


def _response(tools: ModuleType) -> type:
    states = {"success": tools.ToolStatus.SUCCESS, "error": tools.ToolStatus.ERROR}

    class Response(Result, tools.ToolResponse):
        def __init__(self, data: dict[str, Any]) -> None:
            state, text, info = states.get(data["status"], tools.ToolStatus.PARTIAL), str(self), None
            if data["status"] == "error":
                text = data["message"]
                info = {"code": tools.ToolErrorCode.INVALID_PARAM, "message": text}
            tools.ToolResponse.__init__(self, status=state, text=text, data=data, error_info=info)

    return Response


install()
