"""`tfactory factories`: the project's ids for datasets, environments, models and machines."""

from __future__ import annotations

import json
from typing import Literal

from cyclopts import App

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json

factories = App(name="factories", help="List and add ids for datasets, environments, models and machines.")


@factories.command(name="list")
def list_ids(*, as_json: Json = False) -> None:
    """List the ids in factories.yaml of the current folder, and which sibling factory packages are installed.

    ```
    tfactory factories list
    ```
    """
    from TrainingFactory.resolve import factories as project_ids
    from TrainingFactory.resolve.siblings import SIBLING_FACTORIES

    targets = {
        kind: {
            name: project_ids.describe_target(kind, entry) or "a conversation with tools"
            for name, entry in ids.items()
        }
        for kind, ids in project_ids.read_entries().items()
    }
    installed = {sibling.package: sibling.is_installed for sibling in SIBLING_FACTORIES.values()}
    if as_json:
        print(json.dumps({"ids": targets, "installed": installed}, indent=2, ensure_ascii=False))
        return
    if rows := [(kind, name, target) for kind, ids in targets.items() for name, target in ids.items()]:
        show.print_columns(("kind", "id", "target"), rows)
    else:
        show.note(f"no ids in {project_ids.IDS_FILE} of this folder; add one with: tfactory factories add")
    for package, is_installed in installed.items():
        show.note(f"{package} is {'installed' if is_installed else 'not installed'}")


@factories.command
def add(
    kind: Literal["model", "dataset", "environment", "compute"],
    name: str,
    target: str,
    /,
    *extra_targets: str,
) -> None:
    """Add an id to factories.yaml of the current folder; the file is created if it does not exist.

    ```
    tfactory factories add dataset ds_tool_calling_v1 data/calls.jsonl
    tfactory factories add environment env_shop_v1 environment_id=shop.py max_turns=4 data.tasks=questions.jsonl
    tfactory factories add compute alloc-8 num_gpus=8
    ```

    Args:
        kind: Kind of resource that the id names.
        name: The id.
        target: File, name or hub id, as in a config; or config keys as key=value, of the id's own section or any other.
        extra_targets: Further config keys as key=value.
    """
    from TrainingFactory.resolve import factories as project_ids

    section = kind if kind == "compute" else f"{kind}s"
    project_ids.add_entry(section, name, [target, *extra_targets])
    entry = project_ids.read_entries()[section][name]
    print(f"{project_ids.IDS_FILE}: {name} is {project_ids.describe_target(section, entry)}")
