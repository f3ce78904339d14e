"""Names of environments, tools, and of whatever else is chosen by name. A name leads to `module:attribute`, which
is imported when it is asked for: a name costs nothing, and what stands in higher layers can be listed."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from TrainingFactory.common.options import Unknown, did_you_mean, nearest

# kind -> name -> "module:attribute", or the name it is an alias of. A name that ends with / is the beginning of many:
# its function is called with what follows.
_CATALOG: dict[str, dict[str, str]] = {
    "environment": {
        "search": "TrainingFactory.envs:SearchEnvironment",
        "calculator": "TrainingFactory.envs:CalculatorEnvironment",
        "text2sql": "TrainingFactory.envs.builtin.text2sql:Text2SqlEnvironment",
        "reasoning_gym/": "TrainingFactory.integrations.reasoning_gym:environment",
        "bfcl/": "TrainingFactory.integrations.bfcl:environment",
        "conversation": "TrainingFactory.envs:ToolEnvironment",  # of a task's prompt and the model's answer
        "env_search": "search",
        "env_search_v1": "search",
    },
    "tool": {  # called with a config's options they give a tool or a source of tools
        "calculator": "TrainingFactory.tools.custom_tools:calculator",
        "python": "TrainingFactory.tools.custom_tools:PythonTool",
        "sql": "TrainingFactory.tools.custom_tools:SqlTool",
        "search": "TrainingFactory.tools.custom_tools:SearchTool",
        "model": "TrainingFactory.tools.custom_tools:ModelTool",
        "agent": "TrainingFactory.tools.custom_tools:AgentTool",
        "wordnet": "TrainingFactory.apps.recipes.wordnet:WordNet",
        "code_interpreter": "python",  # as RL-Factory's files call it
    },
}


def names(kind: str) -> dict[str, str | None]:
    """Return every known name of a kind, with the name it is an alias of, if it is one."""
    known = _known(kind)
    return {name: target if target in known else None for name, target in known.items()}


def find(kind: str, name: str) -> Any:
    """Return the object behind a name; ValueError with the nearest name if there is none."""
    known = _known(kind)
    beginning, slash, rest = name.partition("/")
    if slash and f"{beginning}/" in known:
        return _loaded(kind, name, known[f"{beginning}/"])(rest)
    if name not in known:
        hint = did_you_mean(nearest(name, known))
        raise Unknown(name, f"there is no {kind} {name!r}{hint} (known: {', '.join(sorted(known))})")
    return _loaded(kind, name, known.get(known[name], known[name]))  # of an alias


def _loaded(kind: str, name: str, target: str) -> Any:
    try:
        return EntryPoint(name, target, kind).load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r} could not be imported from {target}: {error}") from error


def _known(kind: str) -> dict[str, str]:
    """Return our names, and those of other packages: entry points in a group such as `TrainingFactory.tools`."""
    plugins = {point.name: point.value for point in entry_points(group=f"TrainingFactory.{kind}s")}
    return plugins | _CATALOG[kind]
