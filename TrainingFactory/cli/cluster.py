"""`tfactory cluster`: what runs where on a Ray cluster."""

from __future__ import annotations

import json
import time
from contextlib import AsyncExitStack
from typing import Any

from cyclopts import App

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json

KINDS = ("CPU", "GPU")
SHOWN = 12  # characters of a node's id: enough to tell nodes of one machine apart
cluster = App(name="cluster", help="Look at a Ray cluster.")


@cluster.command
def status(*, address: str = "auto", as_json: Json = False) -> None:
    """Show the machines of a cluster, what is free on them, and what runs of TrainingFactory have there.

    ```
    tfactory cluster status
    tfactory cluster status --address 10.0.0.1:6379 --json
    ```

    Args:
        address: Its head, as HOST:PORT; auto is the cluster that this machine is part of.
    """
    from TrainingFactory.cluster.ray_session import RaySession
    from TrainingFactory.common.event_loop import run

    async def look() -> dict[str, Any]:
        async with AsyncExitStack() as held:
            session = RaySession(address)
            held.push_async_callback(session.close)
            await session.open()
            return await session.status()

    found = run(look)
    if as_json:
        print(json.dumps(found))
        return
    machines = [
        (
            node["name"],
            node["id"][:SHOWN],
            *(f"{node['free'].get(key, 0):g} of {node['resources'].get(key, 0):g}" for key in KINDS),
        )
        for node in found["nodes"]
    ]
    show.columns(["machine", "node", *(f"free {key}" for key in KINDS)], machines)
    actors = [
        (each["what"], each["node"], each["node_id"][:SHOWN], str(each["pid"]), _time(each["since"]))
        for each in found["actors"]
    ]
    if actors:
        show.columns(["what", "machine", "node", "process", "since"], actors)
    else:
        show.note("nothing of TrainingFactory runs there")


def _time(seconds: float) -> str:
    return time.strftime("%F %T", time.localtime(seconds))
