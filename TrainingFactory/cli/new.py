"""`tfactory new` and `tfactory models`: starter files and names of models."""

from __future__ import annotations

import keyword
from pathlib import Path

from TrainingFactory.cli.show import note, print_columns, print_table


def env(name: str) -> None:
    """Create NAME.py, a complete example environment with one tool and one reward.

    ```
    tfactory new env cities
    tfactory rollout cities.py
    ```

    Args:
        name: Name of the environment (a Python identifier). Existing files are never overwritten.
    """
    from jinja2 import Template

    name = name.removesuffix(".py")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot name a Python file. Use letters, digits and _, such as my_env.")
    path = Path(f"{name}.py")
    class_name = "".join(word.title() for word in name.split("_")) + "Env"
    template = Path(__file__).parent / "templates" / "environment.py.jinja"
    code = Template(template.read_text(encoding="utf-8")).render(name=name, title=class_name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(code + "\n")
    except FileExistsError:
        raise ValueError(f"{path} exists already. Choose another name.") from None
    note(f"wrote {path}; try it: tfactory rollout {path}")


def config(name: str | None = None, *, out: Path | None = None) -> None:
    """Copy a config into the current folder, with the files that it reads; list all configs if NAME is left out.

    ```
    tfactory new config
    tfactory new config tiny_sft
    tfactory new config grpo --out my_agent.yaml
    ```

    Args:
        name: Name of the config. Existing files are never overwritten.
        out: File to write. Default: the path in the repository, such as configs/tiny_sft.yaml.
    """
    _copy_or_list("config", name, out)


def example(name: str | None = None) -> None:
    """Copy an example program into examples/ of the current folder; list all examples if NAME is left out.

    ```
    tfactory new example
    tfactory new example group_reward
    ```

    Args:
        name: Name of the example. Existing files are never overwritten.
    """
    _copy_or_list("example", name)


def notebook(name: str | None = None) -> None:
    """Copy a notebook into notebooks/ of the current folder; list all notebooks if NAME is left out.

    ```
    tfactory new notebook
    tfactory new notebook demo
    ```

    Args:
        name: Name of the notebook. Existing files are never overwritten.
    """
    _copy_or_list("notebook", name)


def _copy_or_list(starter_kind: str, starter_name: str | None, out_path: Path | None = None) -> None:
    from TrainingFactory.common.starters import copy_starter, find_starter, list_starters

    if starter_name is None:
        print_table([(starter.name, starter.summary) for starter in list_starters(starter_kind)])
        return
    starter = find_starter(starter_kind, starter_name)
    paths = copy_starter(starter, out_path)
    for path in paths:
        note(f"wrote {path}")
    command = starter.command if out_path is None else f"tfactory train {out_path}"
    note(f"edit it, then run: {command}" if starter.is_template else f"try it: {command}")


def models(family: str | None = None, /, *, compat: bool = False) -> None:
    """List the short names of models. Hub ids, local folders and GGUF files work as well.

    ```
    tfactory models
    tfactory rollout search --model qwen3-4b
    tfactory models --compat
    tfactory models --compat gemma3
    ```

    Args:
        family: With --compat: show only this family, with the reason of every restriction. A family of the table, a
            model_type, a hub id or a model folder.
        compat: Show which model families work with the engine, the learner, LoRA, quantization, vLLM and tools.
    """
    from TrainingFactory.models.names import SUPPORTED_MODELS, TINY_ID, resolve_model_name

    if compat or family is not None:
        _show_compatibility(family)
        return
    print_table(
        [(TINY_ID, "built in, untrained")] + [(name, resolve_model_name(name)) for name in SUPPORTED_MODELS]
    )


def _show_compatibility(family_name: str | None) -> None:
    from TrainingFactory.common.starters import find_docs
    from TrainingFactory.models.compatibility import COLUMN_HEADINGS, find_families, read_compatibility

    if family_name is None:
        families = read_compatibility().families
        rows = [(family.key, *(family.cells[key].status for key in COLUMN_HEADINGS)) for family in families]
        print_columns(["Family", *COLUMN_HEADINGS.values()], rows)
        note(f"Reasons and costs: tfactory models --compat FAMILY, or {find_docs('COMPATIBILITY.md')}")
        return
    for index, family in enumerate(find_families(family_name)):
        rows = [("", "")] if index else []
        rows += [("family", f"{family.name} ({family.key})"), ("model_type", family.model_type)]
        rows += [("built like", f"{family.released}: {family.features}")]
        for key, heading in COLUMN_HEADINGS.items():
            cell = family.cells[key]
            rows.append((heading, f"{cell.status}: {cell.note}" if cell.note else cell.status))
        print_table(rows)
