"""`tfactory cluster`: machines, free resources and TrainingFactory's actors of a Ray cluster."""

from __future__ import annotations

import json
import time
from contextlib import AsyncExitStack
from typing import Any

from cyclopts import App

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Json

RESOURCE_NAMES = ("CPU", "GPU")
ID_LENGTH = 12  # printed characters of a node id, enough to distinguish nodes of one machine
cluster = App(name="cluster", help="Inspect a Ray cluster.")


@cluster.command
def status(*, address: str = "auto", as_json: Json = False) -> None:
    """Show the machines of a cluster, their free CPUs and GPUs, and the actors that TrainingFactory runs on them.

    ```
    tfactory cluster status
    tfactory cluster status --address 10.0.0.1:6379 --json
    ```

    Args:
        address: Head node as HOST:PORT; auto is the cluster that this machine belongs to.
    """
    from TrainingFactory.cluster.ray_session import RaySession
    from TrainingFactory.common.event_loop import run

    async def fetch_status() -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            session = RaySession(address)
            stack.push_async_callback(session.close)
            await session.open()
            return await session.describe_cluster()

    status = run(fetch_status)
    if as_json:
        print(json.dumps(status))
        return
    rows = [
        (
            node["name"],
            node["id"][:ID_LENGTH],
            *(f"{node['free'].get(key, 0):g} of {node['resources'].get(key, 0):g}" for key in RESOURCE_NAMES),
        )
        for node in status["nodes"]
    ]
    show.print_columns(["machine", "node", *(f"free {key}" for key in RESOURCE_NAMES)], rows)
    actor_rows = []
    for actor in status["actors"]:
        node_id, start_time = actor["node_id"][:ID_LENGTH], _format_local_time(actor["since"])
        actor_rows.append((actor["what"], actor["node"], node_id, str(actor["pid"]), start_time))
    if actor_rows:
        show.print_columns(["actor", "machine", "node", "process", "since"], actor_rows)
    else:
        show.note("no TrainingFactory actors on this cluster")


def _format_local_time(timestamp: float) -> str:
    return time.strftime("%F %T", time.localtime(timestamp))
