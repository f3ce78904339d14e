"""`tfactory ui`: the web UI for runs and models."""

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
from TrainingFactory.cli.options import RunsFolder

TOKEN_VARIABLE = "TFACTORY_UI_TOKEN"


def ui(
    *,
    runs: RunsFolder = "runs",
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 7860,
    open_browser: Annotated[bool, Parameter(name="--open")] = False,
    token_file: Path | None = None,
    no_token: Annotated[bool, Parameter(negative="")] = False,
    endpoint: Annotated[list[str] | None, Parameter(negative="")] = None,
) -> int:
    """Serve the web UI: watch runs live, read their episodes, start and stop them.

    Open the printed address: it contains the token that every request needs. Ctrl-C and SIGTERM stop the UI; the runs
    that it started continue. As process 1 of a container, whose exit kills all processes, the UI first stops its runs
    with checkpoints.

    ```
    tfactory ui
    tfactory ui --runs /data/runs --port 7861 --open
    tfactory ui --host 0.0.0.0
    tfactory ui --token-file ~/.tfactory-token
    tfactory ui --endpoint anthropic:MODEL --endpoint teachers/large.yaml
    ```

    Args:
        host: Address to bind. Default: only this machine can connect.
        port: Port; 0 picks a free one.
        open_browser: Open the UI in a browser.
        token_file: File with the token (mode 0600); created with a new token if it does not exist. Default: the value
            of TFACTORY_UI_TOKEN, or a new token.
        no_token: Allow access without a token. On a shared machine every user can then run programs as you.
        endpoint: Model endpoint for the page Play: openai:MODEL, anthropic:MODEL, gemini:MODEL, with @URL for another
            address, or a YAML file. Repeat it for several. YAML files of endpoint options in the working directory are
            offered without it. Keys come from environment variables.
    """
    # Imported here because fastapi and uvicorn take a second: --help should appear at once.
    from TrainingFactory.common.endpoints.names import find_endpoint
    from TrainingFactory.common.http import listen
    from TrainingFactory.web.site import Page

    endpoints = endpoint or []
    for name in endpoints:
        find_endpoint(name).make_endpoint()  # raises for invalid options
    token = _pick_token(token_file, no_token)
    if not listen.is_loopback(host):
        show.note(f"warning: --host {host} lets other machines connect, without encryption")
    if token is None:
        show.note("warning: --no-token lets everybody who can connect run programs as you")
    page = Page(Path(runs).expanduser(), host, token, endpoints)
    with listen.bind(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        address = listen.format_url(listener)
        for wildcard in ("0.0.0.0", "[::]"):  # other machines cannot open these addresses
            address = address.replace(f"//{wildcard}:", f"//{socket.gethostname()}:")
        address += f"/?token={token}" if token else "/"
        print(f"the page: {address} (Ctrl-C stops)", flush=True)
        if open_browser:
            webbrowser.open(address)
        asyncio.run(page.serve(listener, listen.make_server(page.site.app)))
    if os.getpid() == 1:  # the main process of a container, whose exit kills all processes
        show.note("stopping the runs of this UI, each with a checkpoint")
        show.note(f"stopped, with {show.pluralize(page.stop_runs(), 'run')}")
    else:
        show.note("stopped; runs continue")
    return 0


def _pick_token(file: Path | None, no_token: bool) -> str | None:
    """Return the access token; None: no token is required. Removes TFACTORY_UI_TOKEN from the environment, so that
    programs started by the UI cannot read it."""
    token = os.environ.pop(TOKEN_VARIABLE, "").strip() or secrets.token_urlsafe(24)
    source = TOKEN_VARIABLE
    if no_token and file is not None:
        raise ValueError("--no-token and --token-file exclude each other. Remove one of them.")
    if file is not None:
        token = _load_token(file.expanduser(), token)
        source = f"--token-file {file}"
    if not re.fullmatch(r"[A-Za-z0-9_.~-]{16,}", token):
        raise ValueError(f"{source}: the token must have at least 16 letters, digits or characters of _.~-")
    return None if no_token else token


def _load_token(file: Path, new_token: str) -> str:
    """Return the token stored in a file; create the file with `new_token` if it is missing. Raise ValueError if other
    users can read or write it."""
    opener = partial(os.open, mode=0o600)
    with contextlib.suppress(FileExistsError), open(file, "x", encoding="utf-8", opener=opener) as stream:
        stream.write(f"{new_token}\n")
    file_stat = file.stat()
    if hasattr(os, "getuid") and (file_stat.st_uid != os.getuid() or file_stat.st_mode & 0o077):
        raise ValueError(f"--token-file {file}: other users can read or change it. Run: chmod 600 {file}")
    return file.read_text(encoding="utf-8").strip()
