"""`tfactory cluster`: what runs where on a Ray cluster."""

from __future__ import annotations

import json
import time
from typing import Any

from cyclopts import App

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json

cluster = App(name="cluster", help="Look at a Ray cluster.")


@cluster.command
def status(*, address: str = "auto", as_json: Json = False) -> None:
    """Show the machines of a cluster, what is free on them, and the samplers, judges, rewards and tools that runs have
    there.

    ```
    tfactory cluster status
    tfactory cluster status --address 10.0.0.1:6379 --json
    ```

    Args:
        address: Its head, as HOST:PORT; auto is the cluster that this machine is part of.
    """
    from TrainingFactory.cluster.ray_session import RaySession
    from TrainingFactory.running import run

    async def look() -> dict[str, Any]:
        session = RaySession(address)
        await session.open()
        try:
            return await session.status()
        finally:
            await session.close()

    found = run(look)
    if as_json:
        print(json.dumps(found))
        return
    kinds = {"CPU": 1, "GPU": 1, "memory": 2**30}
    show.columns(
        ["machine", "CPU (free)", "GPU (free)", "GiB (free)"],
        [
            (
                node["name"],
                *(f"{node['resources'][k] / u:.4g} ({node['free'][k] / u:.4g})" for k, u in kinds.items()),
            )
            for node in found["nodes"]
        ],
    )
    started = [time.strftime("%F %T", time.localtime(actor["since"])) for actor in found["actors"]]
    rows = [
        (a["what"], a["node"], str(a["pid"]), since)
        for a, since in zip(found["actors"], started, strict=True)
    ]
    if rows:
        show.columns(["what", "machine", "process", "since"], rows)
    else:
        show.note("nothing of TrainingFactory runs there")
