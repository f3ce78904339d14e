"""`RLTrainingTool` as a tool of an installed HelloAgents, in the protocol of its version."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from TrainingFactory.integrations.hello_agents.results import Result
from TrainingFactory.integrations.hello_agents.tool import RLTraining

INVALID = "INVALID_PARAM"


def tool_for(tools: ModuleType) -> type:
    """Return the class for `hello_agents.tools`: its `run` returns text in 0.2, and in 1.0 a ToolResponse, which here
    is text with keys as well."""
    response, base, parameter = getattr(tools, "ToolResponse", None), tools.Tool, tools.ToolParameter

    class RLTrainingTool(RLTraining, base):
        def __init__(self, language: str | None = None) -> None:
            RLTraining.__init__(self, language)
            base.__init__(self, name=self.name, description=self.description)

        def get_parameters(self) -> list[Any]:
            return [parameter(**each) for each in self.parameters()]

        def run(self, parameters: dict[str, Any]) -> Any:
            result = self.answer(parameters)
            return result if response is None else _responded(result, tools)

    return RLTrainingTool


def _responded(result: Result, tools: ModuleType) -> Result:
    class Response(Result, tools.ToolResponse):
        """Both at once, so that the same program runs with either version."""

    made = Response(result.data)
    failed = result.get("status") == "error"
    states = {"success": tools.ToolStatus.SUCCESS, "error": tools.ToolStatus.ERROR}
    tools.ToolResponse.__init__(
        made,
        status=states.get(str(result.get("status")), tools.ToolStatus.PARTIAL),
        text=result["message"] if failed else str(result),
        data=result.data,
        error_info={"code": INVALID, "message": result["message"]} if failed else None,
    )
    return made
