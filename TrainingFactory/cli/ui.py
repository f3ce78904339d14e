"""`tfactory ui`: the web page over runs and models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Where


def ui(
    *,
    where: Where = "runs",
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 7860,
    open_browser: Annotated[bool, Parameter(name="--open")] = False,
) -> int:
    """Serve a web page over the runs and models of this machine: see runs live, read their episodes, start and stop
    them. Ctrl-C and SIGTERM stop the page; the runs that it started continue. As process 1 of a container, which
    ends with it, the page first stops its runs with checkpoints.

    ```
    tfactory ui
    tfactory ui --runs /data/runs --port 7861 --open
    tfactory ui --host 0.0.0.0
    ```

    Args:
        host: The address to serve at; by default this machine only can connect. With another one the address that is
            printed carries a token, without which nobody is let in.
        port: 0 picks a free one.
        open_browser: Open the page in a browser.
    """
    # Imported here: fastapi and uvicorn take a second, and help should not wait for them.
    from TrainingFactory.http import listen
    from TrainingFactory.web.site import Page

    token = None if listen.is_loopback(host) else secrets.token_urlsafe(24)
    if token is not None:
        text = "lets other machines connect, without encryption; they need the token"
        show.note(f"warning: --host {host} {text}")
    page = Page(Path(where).expanduser(), host, token)
    with listen.bind(host, port) as bound, contextlib.suppress(KeyboardInterrupt):
        address = listen.address_of(bound)
        for anywhere in ("0.0.0.0", "[::]"):  # no address that another machine could open
            address = address.replace(f"//{anywhere}:", f"//{socket.gethostname()}:")
        address += f"/?token={token}" if token else "/"
        print(f"the page: {address} (Ctrl-C stops)", flush=True)
        if open_browser:
            webbrowser.open(address)
        asyncio.run(page.serve(bound, listen.make_server(page.site.app)))
    if os.getpid() == 1:  # of a container, whose end kills all processes in it
        show.note("stopping the runs of this page, each with a checkpoint")
        show.note(f"stopped, with {show.count(page.stop_runs(), 'run')}")
    else:
        show.note("stopped; runs continue")
    return 0
