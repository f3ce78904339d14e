"""`tfactory ui`: the web page over runs and models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Where

TOKEN = "TFACTORY_UI_TOKEN"


def ui(
    *,
    where: Where = "runs",
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 7860,
    open_browser: Annotated[bool, Parameter(name="--open")] = False,
    token_file: Path | None = None,
    no_token: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Serve a web page over the runs and models of this machine: see runs live, read their episodes, start and stop
    them. Open the address that it prints: it carries the token that every request needs. Ctrl-C and SIGTERM stop the
    page; the runs that it started continue. As process 1 of a container, which ends with it, the page first stops its
    runs with checkpoints.

    ```
    tfactory ui
    tfactory ui --runs /data/runs --port 7861 --open
    tfactory ui --host 0.0.0.0
    tfactory ui --token-file ~/.tfactory-token
    ```

    Args:
        host: The address to serve at; by default only this machine can connect.
        port: 0 picks a free one.
        open_browser: Open the page in a browser.
        token_file: Use the token in this file, which only you may read (mode 0600); a new token is written if the file
            does not exist. Without this option the token is the value of TFACTORY_UI_TOKEN, or a new one.
        no_token: Admit everybody who can connect. On a shared machine every user can then run programs as you.
    """
    # Imported here: fastapi and uvicorn take a second, and help should not wait for them.
    from TrainingFactory.common.http import listen
    from TrainingFactory.web.site import Page

    token = _token(token_file, no_token)
    if not listen.is_loopback(host):
        show.note(f"warning: --host {host} lets other machines connect, without encryption")
    if token is None:
        show.note("warning: --no-token lets everybody who can connect run programs as you")
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


def _token(file: Path | None, no_token: bool) -> str | None:
    """Return the token of the page, which the programs that it starts must not find in their environment."""
    token, source = os.environ.pop(TOKEN, "").strip() or secrets.token_urlsafe(24), TOKEN
    if no_token and file is not None:
        raise ValueError("--no-token and --token-file exclude each other. Remove one of them.")
    if file is not None:
        token, source = _kept_token(file.expanduser(), token), f"--token-file {file}"
    if not re.fullmatch(r"[A-Za-z0-9_.~-]{16,}", token):
        raise ValueError(f"{source}: the token must have at least 16 letters, digits or characters of _.~-")
    return None if no_token else token


def _kept_token(file: Path, new: str) -> str:
    """Return the token in a file, and write a new one if it does not exist; raise ValueError if other users may read or
    write it."""
    private = partial(os.open, mode=0o600)
    with contextlib.suppress(FileExistsError), open(file, "x", encoding="utf-8", opener=private) as made:
        made.write(f"{new}\n")
    found = file.stat()
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077):
        raise ValueError(f"--token-file {file}: other users can read or change it. Run: chmod 600 {file}")
    return file.read_text(encoding="utf-8").strip()
