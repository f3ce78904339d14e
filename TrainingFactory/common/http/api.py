"""An HTTP API: handlers that take a body and give JSON or a stream of events, errors told as JSON, a key if asked."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from TrainingFactory.common.http.listen import is_loopback

log = logging.getLogger(__name__)
MAX_BODY = 16 * 1024 * 1024  # bytes
BODY_TIME = 60  # seconds for a body to come
HEADERS = {408: {"connection": "close"}, 429: {"retry-after": "1"}}
KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """Tells a client what is wrong, as OpenAI's servers do: a status, and in JSON the field and why."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = KINDS.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


# JSON, or the data of server-sent events
Answer = dict[str, Any] | AsyncGenerator[str, None]
Handler = Callable[[bytes], Awaitable[Answer]]


class Api:
    """`key`: what clients must send as `authorization: Bearer KEY`. `local`: it is reached under names of this machine
    only, so a web page that gave its own name this address is turned away."""

    def __init__(self, key: str | None = None, local: bool = True) -> None:
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._pages: list[str] = []
        self.app.add_exception_handler(HTTPException, partial(no_such_page, pages=self._pages))
        self._key, self._local = key, local
        AppStatus.disable_automatic_graceful_drain()  # streams may finish within the time after Ctrl-C

    def get(self, path: str, answer: Callable[[], dict[str, Any]], keyed: bool = True) -> None:
        async def handler(request: Request) -> Response:
            self._check_host(request)
            if keyed and not self._opens(request):
                raise _wrong_key()
            return as_json(answer())

        self._add("GET", path, handler)

    def post(self, path: str, answer: Handler) -> None:
        """Take JSON. The answer is cancelled as soon as the client has hung up."""
        self._post(path, lambda request: answer if self._opens(request) else None)

    def post_by_key(self, path: str, find: Callable[[str], Handler | None]) -> None:
        """Do so for the one that `find` gives for the request's key; None for a key that is nobody's."""
        self._post(path, lambda request: find(request.headers.get("x-tfactory-episode") or _key_in(request)))

    def _post(self, path: str, find: Callable[[Request], Handler | None]) -> None:
        async def handler(request: Request) -> Response:
            self._check_host(request)
            if (answer := find(request)) is None:
                raise _wrong_key()
            found = await _unless_gone(request, answer(await json_body(request)))
            if found is None:
                return Response(status_code=499)  # nobody reads it
            return as_json(found) if isinstance(found, dict) else Stream(found)

        self._add("POST", path, handler)

    def _add(self, method: str, path: str, handler: Callable[[Request], Awaitable[Response]]) -> None:
        async def guarded(request: Request) -> Response:
            """Tell the client as JSON whatever goes wrong."""
            try:
                return await handler(request)
            except asyncio.CancelledError:  # the time after Ctrl-C is over: only then is a request cancelled
                error: BaseException = _stopping()
            except Exception as caught:
                error = caught
            told = failure(error)
            return as_json(told.body, told.status, HEADERS.get(told.status))

        self._pages.append(f"{method} {path}")
        self.app.add_api_route(path, guarded, methods=[method], response_model=None)

    def _check_host(self, request: Request) -> None:
        host = re.match(r"\[([^\]]*)\]|([^:]*)", request.headers.get("host", ""))
        assert host is not None  # it matches nothing, too
        if self._local and not is_loopback(host[1] or host[2] or ""):
            text = "this server is for programs on its own machine; call it by 127.0.0.1 or localhost"
            raise ApiError(text, "host", status=403, code="forbidden")

    def _opens(self, request: Request) -> bool:
        given = _key_in(request).encode("latin-1")  # the bytes as they were sent
        return self._key is None or hmac.compare_digest(given, self._key.encode())


class Stream(EventSourceResponse):
    """Server-sent events; one that outlasts the time after Ctrl-C ends with an error. However the client leaves, the
    generator of the texts is closed, and with it what it holds."""

    def __init__(self, texts: AsyncGenerator[str, None]) -> None:
        super().__init__(texts, ping=0, sep="\n")
        self._texts = texts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            last = ServerSentEvent(json.dumps(_stopping().body), sep="\n").encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await self._texts.aclose()


def _key_in(request: Request) -> str:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


def _wrong_key() -> ApiError:
    text = "this server wants an API key: the header authorization: Bearer KEY, with the right key"
    return ApiError(text, "authorization", status=401, code="invalid_api_key")


def _stopping() -> ApiError:
    return ApiError("the server is stopping", status=503, code="server_stopping")


def failure(error: BaseException) -> ApiError:
    """Return what a client is told of something that went wrong; what is not its fault goes to the log."""
    if isinstance(error, ExceptionGroup):
        return failure(error.exceptions[0])
    if isinstance(error, ApiError):
        return error
    log.error("a request failed", exc_info=error)
    text = f"the server failed on this request ({type(error).__name__}); its log has the details"
    return ApiError(text, status=500, code="internal_error")


async def _unless_gone(request: Request, work: Awaitable[Answer]) -> Answer | None:
    """Await the work; None where the client hangs up before it is done, and then it is cancelled."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def no_such_page(request: Request, error: Exception, pages: Sequence[str] = ()) -> Response:
    """Say which `pages` there are instead."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:80]}: {error.detail}"
    text += f"; there is {', '.join(pages)}" if pages else ""
    told = ApiError(text, status=error.status_code, code="not_found")
    return as_json(told.body, told.status)


async def json_body(request: Request) -> bytes:
    """Return the body, which must say that it is JSON, and must not be too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = "the body must be JSON, sent with the header content-type: application/json"
        raise ApiError(text, "content-type", status=415, code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIME):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    text = f"the body is longer than {MAX_BODY} bytes"
                    raise ApiError(text, "body", status=413, code="request_too_large")
    except TimeoutError:
        text = f"the body did not come within {BODY_TIME} seconds"
        raise ApiError(text, "body", status=408, code="request_timeout") from None
    except ClientDisconnect:
        log.debug("A client hung up after %d bytes of its request.", len(body))
        raise ApiError("The client hung up.", "body", status=499, code="client_closed_request") from None
    return bytes(body)


def as_json(data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # A lone surrogate, which a client can write in JSON, has no UTF-8 form: ASCII can always be sent.
    return Response(json.dumps(data), status, headers, media_type="application/json")
