"""Compatibility of servers written for mcp 1.x (`from mcp.server.fastmcp import FastMCP`) with mcp 2.x, which renamed
that class to MCPServer. Python imports this file at start-up, because `stdio.py` adds its folder to the PYTHONPATH of
the servers. It may run in a Python without TrainingFactory, and does nothing if mcp 1.x is installed."""

import importlib.util
import inspect
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder

OLD_NAME, NEW_NAME = "mcp.server.fastmcp", "mcp.server.mcpserver"


class FastMCPFinder(Loader):
    """Imports the modules of MCPServer under the old names of FastMCP."""

    def find_spec(self, name, path=None, target=None):
        is_old_name = f"{name}.".startswith(f"{OLD_NAME}.") and importlib.util.find_spec(NEW_NAME) is not None
        return ModuleSpec(name, self, is_package=name == OLD_NAME) if is_old_name else None

    def create_module(self, spec):
        module = importlib.import_module(spec.name.replace(OLD_NAME, NEW_NAME, 1))
        self._original_spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self._original_spec  # the import system has replaced it
        if module.__name__ == NEW_NAME:
            vars(module)["FastMCP"] = make_fastmcp(module.MCPServer)


def make_fastmcp(base_class):
    """Return a subclass that accepts the arguments of mcp 1.x and ignores those for HTTP, such as host and port."""
    supported_options = inspect.signature(base_class).parameters

    class FastMCP(base_class):
        def __init__(self, name=None, instructions=None, **options):
            options = {key: options[key] for key in options if key in supported_options}
            super().__init__(name, instructions=instructions, **options)

    return FastMCP


sys.meta_path.insert(0, FastMCPFinder())
# Also run the environment's own sitecustomize, if there is one: this file hides it.
other_folders = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]
if (spec := PathFinder.find_spec("sitecustomize", other_folders)) is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
