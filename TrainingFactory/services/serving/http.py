"""The HTTP side of `tfactory serve`; the only file that imports starlette and uvicorn."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from TrainingFactory.services.serving.request import ApiError
from TrainingFactory.services.serving.server import ChatServer, failure

MAX_BODY = 16 * 1024 * 1024  # bytes
GRACE = 5  # seconds that running requests are given after Ctrl-C
T = TypeVar("T")
SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Gone(Exception):
    """The client has hung up."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def key_from(variable: str | None) -> str | None:
    """The API key in an environment variable; None where none is asked for."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):
        raise ValueError(f"--api-key-env {variable}: there is no such environment variable, or it is empty")
    return key


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, which nobody can connect to before it listens."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host}, --port {port}: no such address ({error})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        text = f"cannot serve at {host}, port {port}: {error.strerror}; --port 0 picks a free one"
        raise ValueError(text) from error
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def make_app(server: ChatServer, key: str | None = None, local: bool = True) -> ASGIApp:
    """`local`: it is reached under names of this machine only, so a web page that gave its own name this address
    is turned away."""

    async def chat(request: Request) -> Response:
        _check(request, key, local)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            text = "the body must be JSON, sent with the header content-type: application/json"
            raise ApiError(text, "content-type", status=415, code="unsupported_media_type")
        ask, prompt = await server.read(await _body(request))
        if ask.stream:
            return _Stream(server, ask, prompt)
        with server.admitted(ask):
            return _json(await _unless_gone(request.receive, server.complete(ask, prompt)))

    async def models(request: Request) -> Response:
        _check(request, key, local)
        return _json(server.models())

    async def health(request: Request) -> Response:
        _check(request, None, local)
        return _json(server.health())

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", _guarded(chat), methods=["POST"]),
            Route("/v1/models", _guarded(models), methods=["GET"]),
            Route("/health", _guarded(health), methods=["GET"]),
        ]
    )
    app.add_exception_handler(HTTPException, _no_such_page)
    return app


def run(app: ASGIApp, bound: socket.socket) -> None:
    """Serves until Ctrl-C, which lets running requests finish for a while."""
    server(app).run(sockets=[bound])


def server(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep a connection, so that they are the ones to close it
        timeout_graceful_shutdown=GRACE,
    )
    return uvicorn.Server(config)


class _Stream(Response):
    """Server-sent events, for as long as the client listens."""

    def __init__(self, server: ChatServer, ask: Any, prompt: list[int]) -> None:
        super().__init__(headers=SSE)
        self._server, self._ask, self._prompt = server, ask, prompt
        # Refused here, while a status can still be told; entered for good when the events are sent.
        with server.admitted(ask):
            pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in SSE.items()]

        async def events() -> None:
            with self._server.admitted(self._ask):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                async with aclosing(self._server.stream(self._ask, self._prompt)) as lines:
                    async for line in lines:
                        await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            with suppress(Gone):
                await _unless_gone(receive, events())
        except asyncio.CancelledError:
            last = f"data: {json.dumps(_stopping().body())}\n\n".encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled as soon as the client has hung up."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _guarded(handler: Callable[[Request], Coroutine[Any, Any, Response]]) -> Any:
    """Whatever goes wrong is told to the client as JSON."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except (Gone, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except asyncio.CancelledError:
            return _json(_stopping().body(), 503)
        except Exception as error:
            told = failure(error)
            return _json(told.body(), told.status, {"retry-after": "1"} if told.status == 429 else None)

    return guarded


def _stopping() -> ApiError:
    """For requests that outlast the time after Ctrl-C: only then does the server cancel one."""
    return ApiError("the server is stopping", status=503, code="server_stopping")


def _check(request: Request, key: str | None, local: bool) -> None:
    host = re.match(r"\[([^\]]*)\]|([^:]*)", request.headers.get("host", ""))
    assert host is not None  # it matches nothing, too
    if local and not is_loopback(host[1] or host[2] or ""):
        text = "this server is for programs on its own machine; call it by 127.0.0.1 or localhost"
        raise ApiError(text, "host", status=403, code="forbidden")
    if key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())  # the bytes as they were sent
    if kind.lower() != "bearer" or not same:
        text = "this server wants an API key: the header authorization: Bearer KEY, with the right key"
        raise ApiError(text, "authorization", status=401, code="invalid_api_key")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            text = f"the body is longer than {MAX_BODY} bytes"
            raise ApiError(text, "body", status=413, code="request_too_large")
    return bytes(body)


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:80]}: {error.detail}"
    pages = "POST /v1/chat/completions, GET /v1/models and GET /health"
    told = ApiError(f"{text}; there are {pages}", status=error.status_code, code="not_found")
    return _json(told.body(), told.status)


def _json(data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # A lone surrogate, which a client can write in JSON, has no UTF-8 form: ASCII can always be sent.
    return Response(json.dumps(data), status, headers, media_type="application/json")
