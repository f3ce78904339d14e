"""Tools of a config, a Python file or an MCP server file, opened for calls outside of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from TrainingFactory.assembly.environment import load_environment_file, make_environment
from TrainingFactory.assembly.named_files import read_config
from TrainingFactory.assembly.run_tools import with_tools
from TrainingFactory.assembly.tools import make_tools
from TrainingFactory.common.user_code import as_value_error, is_file_name
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ComputeSection
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import ToolSource
from TrainingFactory.tools import AsyncToolExecutor, MCPTools
from TrainingFactory.training.dataset import make_tasks
from TrainingFactory.types import Task


@asynccontextmanager
async def open_tools(tools_file: str | None, tool_name: str) -> AsyncIterator[AsyncToolExecutor]:
    """Open the tools of `tools_file` for one episode: that is a YAML config (its tools, and those of its environment
    for the first task), a Python file, or a file of MCP servers. Without one, `tool_name` is a built-in tool or
    FILE.py:FUNCTION."""
    config, mcp_servers = _read_source(tools_file, tool_name)
    if config.environment.command is not None:
        raise ValueError(f"{tools_file}: environment.command starts a program, which has its own tools")
    environment: Any = make_environment(config, has_user_tools=True)
    try:
        tools = make_tools(config, mcp_servers, environment)
    except ValueError as error:
        if tools_file is not None:
            raise
        message = str(error).removeprefix("tools.0: ")
        raise ValueError(f"{message}; name the config or file that offers it with --config") from error
    async with AsyncExitStack() as exit_stack:
        for tool_source in tools:
            if isinstance(tool_source, ToolSource):
                exit_stack.push_async_callback(tool_source.close)
                await tool_source.open()
        has_no_tasks = environment is ToolEnvironment and config.data.tasks is None
        task = Task("call", "") if has_no_tasks else make_tasks(config, environment, 1)[0]
        try:
            episode_environment = with_tools(environment, tools)(task)
            exit_stack.push_async_callback(episode_environment.executor.close)
            exit_stack.push_async_callback(episode_environment.close)
            await episode_environment.reset()
        except Exception as error:  # foreign code
            raise as_value_error(error) from error
        yield episode_environment.executor


def _read_source(tools_file: str | None, tool_name: str) -> tuple[TrainingConfig, list[ToolSource]]:
    """Return a config with the tools, and MCP servers to add."""
    if tools_file is None:
        return TrainingConfig(tools=[tool_name]), []
    if tools_file.endswith((".yaml", ".yml")):
        # Tools run in this process, also if the run has a cluster.
        return read_config(tools_file).model_copy(update={"compute": ComputeSection()}), []
    if not is_file_name(tools_file):
        return TrainingConfig(), [MCPTools.load_from_config(tools_file)]
    try:
        load_environment_file(tools_file)
    except ValueError as error:
        if "no environment" not in str(error):
            raise
        return TrainingConfig(tools=[tools_file]), []
    return TrainingConfig(environment=tools_file), []
