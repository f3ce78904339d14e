"""`RLTrainingTool` as a tool of an installed HelloAgents, in the protocol of its version."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from TrainingFactory.integrations.hello_agents.results import Result
from TrainingFactory.integrations.hello_agents.tool import RLTraining


def tool_for(tools: ModuleType) -> type:
    """Return the class for `hello_agents.tools`: its `run` returns text in 0.2, and in 1.0 a ToolResponse that is the
    same text with the same keys, so that one program runs with either."""
    base, parameter = tools.Tool, tools.ToolParameter
    answer = _response(tools) if hasattr(tools, "ToolResponse") else Result  # foreign module

    class RLTrainingTool(RLTraining, base):
        def __init__(self, language: str | None = None) -> None:
            RLTraining.__init__(self, language)
            base.__init__(self, name=self.name, description=self.description)

        def get_parameters(self) -> list[Any]:
            return [parameter(**each) for each in self.listed()]

        def run(self, parameters: dict[str, Any]) -> Any:
            return answer(self.answer(parameters).data)

    return RLTrainingTool


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
