"""HTTP API whose handlers take a body and return JSON or server-sent events, with JSON errors and an optional key."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from TrainingFactory.common.http.listen import is_loopback

log = logging.getLogger(__name__)
KEY_LOCATIONS = "authorization: Bearer KEY, x-api-key: KEY, x-goog-api-key: KEY or ?key=KEY"
MAX_BODY_BYTES = 16 * 1024 * 1024  # bytes
BODY_TIMEOUT_SECONDS = 60  # maximum seconds to receive a body
ERROR_HEADERS = {408: {"connection": "close"}, 429: {"retry-after": "1"}}
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An error response in OpenAI's format: HTTP status, and JSON with message, type, field and code."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        error_type = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}


StreamEvent = str | dict[str, str]  # the data of a server-sent event, or its fields "event" and "data"
HandlerResult = dict[str, Any] | AsyncGenerator[bytes, None]  # JSON, or server-sent events
Handler = Callable[..., Awaitable[HandlerResult]]  # gets the body, and the variables of the path by name


class ErrorFormat(Protocol):
    """Format of the error responses in one API dialect."""

    def make_error_body(self, error: ApiError) -> dict[str, Any]: ...

    def make_error_event(self, error: ApiError) -> StreamEvent: ...


def encode_events(events: Iterable[StreamEvent]) -> bytes:
    """Encode server-sent events as bytes. The data of an event must be a single line, such as JSON."""
    event_texts = [
        f"data: {event}\n\n"
        if isinstance(event, str)
        else f"event: {event['event']}\ndata: {event['data']}\n\n"
        for event in events
    ]
    return "".join(event_texts).encode()


class OpenAIErrors:
    def make_error_body(self, error: ApiError) -> dict[str, Any]:
        return error.body

    def make_error_event(self, error: ApiError) -> StreamEvent:
        return json.dumps(error.body)


OPENAI_ERRORS = OpenAIErrors()


class Api:
    """HTTP API. Clients must send `key`, if there is one, in one of `KEY_LOCATIONS`. With `is_local_only`, the API
    accepts only requests to a loopback host name, which prevents DNS rebinding by web pages."""

    def __init__(self, key: str | None = None, is_local_only: bool = True) -> None:
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._routes: list[str] = []
        self.app.add_exception_handler(HTTPException, partial(make_not_found_response, routes=self._routes))
        self._key, self._is_local_only = key, is_local_only
        AppStatus.disable_automatic_graceful_drain()  # streams may finish within `SHUTDOWN_SECONDS` after Ctrl-C

    def get(self, path: str, make_answer: Callable[[], dict[str, Any]], needs_key: bool = True) -> None:
        async def handle_request(request: Request) -> Response:
            self._check_host(request)
            if needs_key and not self._has_valid_key(request):
                raise _make_key_error()
            return json_response(make_answer())

        self._add_route("GET", path, handle_request)

    def post(self, path: str, handler: Handler, errors: ErrorFormat = OPENAI_ERRORS) -> None:
        """Add a POST route whose handler gets the JSON body. The handler is cancelled when the client disconnects."""
        self._add_post_route(path, lambda request: handler if self._has_valid_key(request) else None, errors)

    def post_by_key(
        self, path: str, find_handler: Callable[[str], Handler | None], errors: ErrorFormat = OPENAI_ERRORS
    ) -> None:
        """Add a route whose handler `find_handler` selects by the request's key; None for an unknown key."""

        def find_by_key(request: Request) -> Handler | None:
            return find_handler(request.headers.get("x-tfactory-episode") or _find_request_key(request))

        self._add_post_route(path, find_by_key, errors)

    def _add_post_route(
        self, path: str, find_handler: Callable[[Request], Handler | None], errors: ErrorFormat
    ) -> None:
        async def handle_request(request: Request) -> Response:
            self._check_host(request)
            if (body_handler := find_handler(request)) is None:
                raise _make_key_error()
            handler_call = body_handler(await read_json_body(request), **request.path_params)
            result = await _run_unless_disconnected(request, handler_call)
            if result is None:
                return Response(status_code=499)  # the client has disconnected
            return json_response(result) if isinstance(result, dict) else EventStreamResponse(result, errors)

        self._add_route("POST", path, handle_request, errors)

    def _add_route(
        self,
        method: str,
        path: str,
        handler: Callable[[Request], Awaitable[Response]],
        errors: ErrorFormat = OPENAI_ERRORS,
    ) -> None:
        async def handle_errors(request: Request) -> Response:
            """Convert every exception into a JSON response."""
            try:
                return await handler(request)
            except asyncio.CancelledError:  # only when `SHUTDOWN_SECONDS` have passed after Ctrl-C
                error: BaseException = _make_stopping_error()
            except Exception as exception:
                error = exception
            api_error = as_api_error(error)
            headers = ERROR_HEADERS.get(api_error.status)
            return json_response(errors.make_error_body(api_error), api_error.status, headers)

        self._routes.append(f"{method} {path}")
        self.app.add_api_route(path, handle_errors, methods=[method], response_model=None)

    def _check_host(self, request: Request) -> None:
        host_match = re.match(r"\[([^\]]*)\]|([^:]*)", request.headers.get("host", ""))
        assert host_match is not None  # the pattern also matches an empty header
        if self._is_local_only and not is_loopback(host_match[1] or host_match[2] or ""):
            text = "this server accepts only local requests; use the host name 127.0.0.1 or localhost"
            raise ApiError(text, "host", status=403, code="forbidden")

    def _has_valid_key(self, request: Request) -> bool:
        key = _find_request_key(request).encode("latin-1")  # the bytes as sent
        return self._key is None or hmac.compare_digest(key, self._key.encode())


class EventStreamResponse(EventSourceResponse):
    """Response of server-sent events. A stream that outlasts `SHUTDOWN_SECONDS` after Ctrl-C ends with an error. The
    generator of the events is always closed, even if the client disconnects."""

    def __init__(self, events: AsyncGenerator[Any, None], errors: ErrorFormat = OPENAI_ERRORS) -> None:
        super().__init__(events, ping=0, sep="\n")
        self._events, self._errors = events, errors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            last_event = encode_events([self._errors.make_error_event(_make_stopping_error())])
            await send({"type": "http.response.body", "body": last_event, "more_body": False})
        finally:
            await self._events.aclose()


def _find_request_key(request: Request) -> str:
    """Return the API key from the first of `KEY_LOCATIONS` in which the request has one, else ""."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer_key = key.strip() if scheme.lower() == "bearer" else ""
    header_key = request.headers.get("x-api-key") or request.headers.get("x-goog-api-key")
    query_key = request.query_params.get("key", "").encode("utf-8", "surrogatepass")
    return bearer_key or header_key or query_key.decode("latin-1")  # as headers are decoded


def _make_key_error() -> ApiError:
    text = f"missing or invalid API key; send it as {KEY_LOCATIONS}"
    return ApiError(text, "authorization", status=401, code="invalid_api_key")


def _make_stopping_error() -> ApiError:
    return ApiError("the server is stopping", status=503, code="server_stopping")


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception into the error that the client sees. Unexpected exceptions are logged."""
    if isinstance(error, ExceptionGroup):
        return as_api_error(error.exceptions[0])
    if isinstance(error, ApiError):
        return error
    log.error("a request failed", exc_info=error)
    text = f"internal server error ({type(error).__name__}); see the server's log for details"
    return ApiError(text, status=500, code="internal_error")


async def _run_unless_disconnected(
    request: Request, handler_call: Awaitable[HandlerResult]
) -> HandlerResult | None:
    """Return the result of the handler. If the client disconnects first, cancel the handler and return None."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnect_task = (asyncio.ensure_future(handler_call), asyncio.create_task(wait_for_disconnect()))
    try:
        await asyncio.wait((task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(task, disconnect_task, return_exceptions=True)


async def make_not_found_response(request: Request, error: Exception, routes: Sequence[str] = ()) -> Response:
    """Return a 404 response that lists the available `routes`."""
    assert isinstance(error, HTTPException)
    error_text = f"{request.method} {request.url.path[:80]}: {error.detail}"
    error_text += f"; available: {', '.join(routes)}" if routes else ""
    api_error = ApiError(error_text, status=error.status_code, code="not_found")
    return json_response(api_error.body, api_error.status)


async def read_json_body(request: Request) -> bytes:
    """Return the request body. Raise ApiError if it is not declared as JSON, too long or too slow."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        text = "the body must be JSON, sent with the header content-type: application/json"
        raise ApiError(text, "content-type", status=415, code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    text = f"the body is longer than the limit of {MAX_BODY_BYTES} bytes"
                    raise ApiError(text, "body", status=413, code="request_too_large")
    except TimeoutError:
        text = f"the body did not arrive within {BODY_TIMEOUT_SECONDS} seconds"
        raise ApiError(text, "body", status=408, code="request_timeout") from None
    except ClientDisconnect:
        log.debug("A client disconnected after %d bytes of its request.", len(body))
        raise ApiError("The client disconnected.", "body", status=499, code="client_closed_request") from None
    return bytes(body)


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII, because a lone surrogate, which JSON from a client may contain, cannot be encoded as UTF-8.
    return Response(json.dumps(body), status, headers, media_type="application/json")
