"""Names of environments, tools, and of whatever else is chosen by name. A name leads to `module:attribute`, which
is imported when it is asked for: a name costs nothing, and what stands in higher layers can be listed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from TrainingFactory.options import did_you_mean, nearest

# kind -> name -> "module:attribute", the object itself, or the name it is an alias of
_CATALOG: dict[str, dict[str, Any]] = {
    "environment": {
        "search": "TrainingFactory.envs:SearchEnvironment",
        "calculator": "TrainingFactory.envs:CalculatorEnvironment",
        "text2sql": "TrainingFactory.envs.builtin.text2sql:Text2SqlEnvironment",
        "env_search": "search",
        "env_search_v1": "search",
    },
    "tool": {  # called with a config's options they give a tool or a source of tools
        "calculator": "TrainingFactory.tools.custom_tools:make_calculator",
        "python": "TrainingFactory.tools.custom_tools:PythonTool",
        "sql": "TrainingFactory.tools.custom_tools:SqlTool",
        "search": "TrainingFactory.tools.custom_tools:SearchTool",
        "model": "TrainingFactory.tools.custom_tools:ModelTool",
        "agent": "TrainingFactory.tools.custom_tools:AgentTool",
    },
}


def register(kind: str, name: str, target: Any) -> None:
    """Makes `target` (an object, or "module:attribute") known by name.

    Packages do the same without code of ours, by an entry point in the group `TrainingFactory.environments`.
    """
    if kind not in _CATALOG:
        raise ValueError(f"there is no kind {kind!r} in the catalog; the kinds are {', '.join(_CATALOG)}")
    if not name or "=" in name or name != name.strip():
        raise ValueError(f"{name!r} cannot be the name of an {kind}")
    known = _known(kind)
    if name in known and known[name] is not target and known[name] != target:
        raise ValueError(f"{kind} {name!r} is registered already")
    _CATALOG[kind][name] = target


def names(kind: str) -> dict[str, str | None]:
    """Every known name of a kind, with the name it is an alias of, if it is one."""
    known = _known(kind)
    return {
        name: target if isinstance(target, str) and target in known else None
        for name, target in known.items()
    }


def find(kind: str, name: str) -> Any:
    """The object behind a name; ValueError with the nearest name if there is none."""
    known = _known(kind)
    target = known.get(name)
    if isinstance(target, str):
        target = known.get(target, target)  # an alias
    if target is None:
        hint = did_you_mean(nearest(name, known))
        raise ValueError(f"there is no {kind} {name!r}{hint} (known: {', '.join(sorted(known))})")
    if not isinstance(target, str):
        return target
    return _imported(kind, name, target)


def _known(kind: str) -> Mapping[str, Any]:
    plugins = {point.name: point.value for point in entry_points(group=f"TrainingFactory.{kind}s")}
    return plugins | _CATALOG[kind]


def _imported(kind: str, name: str, target: str) -> Any:
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ValueError(
            f"{kind} {name!r} leads to {target!r}, which is neither a known name nor module:attribute"
        )
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r} could not be imported from {target}: {error}") from error
