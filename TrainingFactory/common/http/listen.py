"""Listening socket, API key and uvicorn server."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

SHUTDOWN_SECONDS = 5  # seconds that running requests may take to finish after Ctrl-C
HEADER_TIMEOUT_SECONDS = 20  # maximum seconds until the request line and headers have arrived


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_api_key(variable: str | None) -> str | None:
    """Return the API key in an environment variable. None: no key is required."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise ValueError(f"--api-key-env {variable}: the environment variable is not set or empty")
    return key


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Clients that connect before the server runs wait in its backlog."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)  # type: ignore[arg-type]
    except OSError as error:
        text = f"cannot listen on --host {host} --port {port}: {error}; use --port 0 to pick a free port"
        raise ValueError(text) from error


def format_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Connection(H11Protocol):
    """Connection that times out if the request's headers do not arrive, because uvicorn itself would wait forever."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_header_timer()

    def _update_header_timer(self) -> None:
        if self._header_timer is None and self.conn.their_state is h11.IDLE:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self.timeout_keep_alive_handler)
        elif self._header_timer is not None and self.conn.their_state is not h11.IDLE:
            self._header_timer.cancel()
            self._header_timer = None


def make_server(app: Any) -> uvicorn.Server:
    """Create a server that runs until Ctrl-C. It then waits at most `SHUTDOWN_SECONDS` for running requests to
    finish."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that the client closes them
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)
