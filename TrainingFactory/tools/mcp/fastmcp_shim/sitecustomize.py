"""Lets servers that are written for mcp 1.x (`from mcp.server.fastmcp import FastMCP`) run with mcp 2.x, which calls
that class MCPServer. Python imports this file when it starts, because `stdio.py` puts the folder into PYTHONPATH of the
servers that it starts. It may run in a Python without TrainingFactory, and does nothing where mcp is 1.x."""

import importlib.util
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder

OLD, NEW = "mcp.server.fastmcp", "mcp.server.mcpserver"
# Arguments of FastMCP that are about HTTP; a server that is started here speaks over stdin and stdout.
HTTP = ("host", "port", "mount_path", "sse_path", "message_path", "streamable_http_path", "json_response",
        "stateless_http", "transport_security", "event_store", "retry_interval")  # fmt: skip


class FastMCPFinder(Loader):
    """Finds the modules of FastMCP: those of MCPServer under their old names."""

    def find_spec(self, name, path=None, target=None):
        if name != OLD and not name.startswith(f"{OLD}."):
            return None
        if importlib.util.find_spec(NEW) is None:
            return None
        return ModuleSpec(name, self, is_package=name == OLD)

    def create_module(self, spec):
        module = importlib.import_module(spec.name.replace(OLD, NEW, 1))
        self._own = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self._own  # the import has put that of the old name there
        if module.__name__ == NEW:
            vars(module)["FastMCP"] = make_fastmcp(module.MCPServer)


def make_fastmcp(base):
    """Return the class with the arguments that it had in mcp 1.x."""

    class FastMCP(base):
        def __init__(self, name=None, instructions=None, **options):
            given = {key: value for key, value in options.items() if key not in HTTP}
            super().__init__(name, instructions=instructions, **given)

    return FastMCP


sys.meta_path.insert(0, FastMCPFinder())
# The environment may have a sitecustomize of its own, which this one hides.
others = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]
if (own := PathFinder.find_spec("sitecustomize", others)) is not None and own.loader is not None:
    own.loader.exec_module(importlib.util.module_from_spec(own))
