"""Lets servers that are written for mcp 1.x (`from mcp.server.fastmcp import FastMCP`) run with mcp 2.x, which calls
that class MCPServer. Python imports this file when it starts, because `stdio.py` puts the folder into PYTHONPATH of the
servers that it starts. It may run in a Python without TrainingFactory, and does nothing where mcp is 1.x."""

import importlib.util
import inspect
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder

OLD, NEW = "mcp.server.fastmcp", "mcp.server.mcpserver"


class FastMCPFinder(Loader):
    """Finds the modules of FastMCP: those of MCPServer under their old names."""

    def find_spec(self, name, path=None, target=None):
        ours = f"{name}.".startswith(f"{OLD}.") and importlib.util.find_spec(NEW) is not None
        return ModuleSpec(name, self, is_package=name == OLD) if ours else None

    def create_module(self, spec):
        module = importlib.import_module(spec.name.replace(OLD, NEW, 1))
        self._own = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self._own  # the import has put that of the old name there
        if module.__name__ == NEW:
            vars(module)["FastMCP"] = make_fastmcp(module.MCPServer)


def make_fastmcp(base):
    """Return the class with the arguments of mcp 1.x; those about HTTP, such as host and port, go unused."""
    known = inspect.signature(base).parameters

    class FastMCP(base):
        def __init__(self, name=None, instructions=None, **options):
            given = {key: options[key] for key in options if key in known}
            super().__init__(name, instructions=instructions, **given)

    return FastMCP


sys.meta_path.insert(0, FastMCPFinder())
# The environment may have a sitecustomize of its own, which this one hides.
others = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]
if (own := PathFinder.find_spec("sitecustomize", others)) is not None and own.loader is not None:
    own.loader.exec_module(importlib.util.module_from_spec(own))
