"""Tools from MCP servers: the face of `tools/mcp/`."""

from TrainingFactory.tools.mcp.source import MCPTools

__all__ = ["MCPTools"]
