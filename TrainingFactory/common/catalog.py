"""Registry of named environments and tools. A name maps to `module:attribute`, which is imported on lookup. Therefore
listing is cheap, and entries may refer to modules of higher layers."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from TrainingFactory.common.options import UnknownNameError, did_you_mean, nearest

# kind -> name -> "module:attribute", or the name of which it is an alias. A name that ends in / is a prefix: its
# function is called with the rest of the name. One that ends in : is the prefix of an environment in another process:
# its function is called with the whole name.
_CATALOG: dict[str, dict[str, str]] = {
    "environment": {
        "search": "TrainingFactory.envs:SearchEnvironment",
        "calculator": "TrainingFactory.envs:CalculatorEnvironment",
        "text2sql": "TrainingFactory.envs.builtin.text2sql:Text2SqlEnvironment",
        "screen": "TrainingFactory.envs.builtin.screen:ScreenAdapter",
        "charts": "TrainingFactory.envs.builtin.charts:ChartAdapter",
        "web_page": "TrainingFactory.envs.web_page.environment:WebPageAdapter",
        "android": "TrainingFactory.envs.android.environment:AndroidAdapter",
        "containers": "TrainingFactory.envs.containers.environment:ContainerAdapter",
        "reasoning_gym/": "TrainingFactory.integrations.reasoning_gym:make_environment_class",
        "bfcl/": "TrainingFactory.integrations.bfcl:make_environment_class",
        "gymnasium:": "TrainingFactory.envs.process.environment:make_adapter_class",
        "openenv:": "TrainingFactory.envs.process.environment:make_adapter_class",
        "textarena:": "TrainingFactory.envs.process.environment:make_adapter_class",
        "trl:": "TrainingFactory.envs.process.environment:make_adapter_class",
        "verifiers:": "TrainingFactory.envs.process.environment:make_adapter_class",
        "verifiers_v0:": "TrainingFactory.envs.process.environment:make_adapter_class",
        "process:": "TrainingFactory.envs.process.environment:make_adapter_class",
        "conversation": "TrainingFactory.envs:ToolEnvironment",  # the task's prompt and the model's answer
        "env_search": "search",
        "env_search_v1": "search",
    },
    "tool": {  # called with the options of a config, each returns a tool or tool source
        "calculator": "TrainingFactory.tools.custom_tools:calculator",
        "python": "TrainingFactory.tools.custom_tools:PythonTool",
        "sql": "TrainingFactory.tools.custom_tools:SqlTool",
        "search": "TrainingFactory.tools.custom_tools:SearchTool",
        "retrieval": "TrainingFactory.retrieval:RetrievalTool",
        "model": "TrainingFactory.tools.custom_tools:ModelTool",
        "agent": "TrainingFactory.tools.custom_tools:AgentTool",
        "wordnet": "TrainingFactory.apps.recipes.wordnet:WordNet",
        "code_interpreter": "python",  # its name in RL-Factory
    },
}


def names(kind: str) -> dict[str, str | None]:
    """Return every name of a kind, with the name that it is an alias of, or None."""
    targets = _find_targets(kind)
    return {name: target if target in targets else None for name, target in targets.items()}


def find(kind: str, name: str) -> Any:
    """Return the object with this name. Raise ValueError with the closest match if it is unknown."""
    targets = _find_targets(kind)
    if (process_prefix := f"{name.partition(':')[0]}:") in targets:
        return _load(kind, name, targets[process_prefix])(name)
    prefix, separator, entry_name = name.partition("/")
    if separator and f"{prefix}/" in targets:
        return _load(kind, name, targets[f"{prefix}/"])(entry_name)
    if name not in targets:
        hint = did_you_mean(nearest(name, targets))
        raise UnknownNameError(name, f"unknown {kind} {name!r}{hint} (known: {', '.join(sorted(targets))})")
    return _load(kind, name, targets.get(targets[name], targets[name]))  # resolves an alias


def _load(kind: str, name: str, target: str) -> Any:
    try:
        return EntryPoint(name, target, kind).load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r} could not be imported from {target}: {error}") from error


def _find_targets(kind: str) -> dict[str, str]:
    """Return the targets of all names of a kind: built-in entries, and entry points of other packages in groups like
    `TrainingFactory.tools`."""
    plugins = {point.name: point.value for point in entry_points(group=f"TrainingFactory.{kind}s")}
    return plugins | _CATALOG[kind]
