"""`tfactory factories`: what the ids of a project lead to."""

from __future__ import annotations

import json
from typing import Literal

from cyclopts import App

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json

factories = App(name="factories", help="Say what ids of datasets, environments, models and machines lead to.")


@factories.command(name="list")
def list_ids(*, as_json: Json = False) -> None:
    """Show the ids in factories.yaml of this folder, and which other factories are installed.

    ```
    tfactory factories list
    ```
    """
    from TrainingFactory.resolve import factories as known
    from TrainingFactory.resolve.siblings import SIBLINGS

    found = {
        kind: {
            name: known.leads_to(kind, entry) or "a conversation with tools" for name, entry in ids.items()
        }
        for kind, ids in known.entries().items()
    }
    installed = {each.package: each.installed for each in SIBLINGS.values()}
    if as_json:
        print(json.dumps({"ids": found, "installed": installed}, indent=2, ensure_ascii=False))
        return
    if rows := [(kind, name, target) for kind, ids in found.items() for name, target in ids.items()]:
        show.columns(("kind", "id", "leads to"), rows)
    else:
        show.note(f"no ids in {known.FILE} of this folder; tfactory factories add writes one")
    for package, there in installed.items():
        show.note(f"{package} is {'installed' if there else 'not installed'}")


@factories.command
def add(
    kind: Literal["model", "dataset", "environment", "compute"], name: str, target: str, /, *more: str
) -> None:
    """Write an id into factories.yaml of this folder, which is made if there is none.

    ```
    tfactory factories add dataset ds_tool_calling_v1 data/calls.jsonl
    tfactory factories add environment env_shop_v1 environment_id=shop.py max_turns=4 data.tasks=questions.jsonl
    tfactory factories add compute alloc-8 num_gpus=8
    ```

    Args:
        kind: What the id stands for.
        name: The id.
        target: What it leads to, as a config names it: a file, a name, a hub id; or key=value, with keys of
            its section or of others.
        more: More key=value.
    """
    from TrainingFactory.resolve import factories as known

    kinds = kind if kind == "compute" else f"{kind}s"
    known.add(kinds, name, [target, *more])
    print(f"{known.FILE}: {name} is {known.leads_to(kinds, known.entries()[kinds][name])}")
