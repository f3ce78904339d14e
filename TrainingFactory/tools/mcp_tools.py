"""Tools from MCP servers: the public interface of `tools/mcp/`."""

from TrainingFactory.tools.mcp.source import MCPTools

__all__ = ["MCPTools"]
