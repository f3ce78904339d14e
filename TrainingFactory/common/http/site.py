"""Local web site: static files, an API with an OpenAPI description, and event streams. One guard checks every request
and adds security headers to every response."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import inspect
import json
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from TrainingFactory.common.http.api import (
    ERROR_HEADERS,
    ApiError,
    EventStreamResponse,
    as_api_error,
    json_response,
    make_not_found_response,
    read_json_body,
)
from TrainingFactory.common.http.listen import is_loopback

PAGE_HEADER = "x-tfactory-page"  # with any value: browsers do not send custom headers across sites
READ_TIMEOUT_SECONDS = 60.0  # maximum seconds of a GET handler in a thread
SAFE_METHODS = ("GET", "HEAD")  # methods that change nothing
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".json": "application/json", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip
# The empty icon keeps browsers from requesting /favicon.ico, which does not exist.
SIGN_IN_PAGE = (
    "<!doctype html><title>TrainingFactory</title><link rel=icon href='data:,'>"
    "<meta http-equiv=refresh content='0; url=/'>"
)
NO_TOKEN_TEXT = (
    "Missing or invalid token. Open the address that `tfactory ui` printed, which ends in /?token=..., or restart "
    "`tfactory ui` to get a new one. Scripts send the token as the header `authorization: Bearer TOKEN`."
)

Event = dict[str, Any]  # event: its name; data: a JSON text
Events = AsyncGenerator[Event, None]
IN_QUERY = Depends()  # Annotated[Kind, IN_QUERY]: the argument's fields come from the query string


class ErrorResponse(BaseModel):
    """An error response: `message` for people, `param` the field of the request, `code` for programs."""

    error: dict[str, str | None]


class Picture(NamedTuple):
    """A PNG file as a response. Browsers may cache it forever, because its URL identifies its content."""

    content: bytes


PICTURE_HEADERS = {"cache-control": "private, max-age=31536000, immutable", "content-disposition": "inline"}


def make_event(name: str, payload: BaseModel | dict[str, Any]) -> Event:
    return {"event": name, "data": to_json(payload)}


def to_json(payload: BaseModel | dict[str, Any]) -> str:
    """Serialize to JSON. NaN becomes null; lone surrogates, which file names may contain, are escaped."""
    with contextlib.suppress(PydanticSerializationError):
        if isinstance(payload, BaseModel):
            return payload.model_dump_json()
    encoded = json.dumps(payload.model_dump() if isinstance(payload, BaseModel) else payload)
    return json.dumps(json.loads(encoded, parse_constant=lambda _: None))


class Site:
    """Web site with static files from `static_folder`, listening on `host`. Every request must carry `token`,
    as a cookie or header; None: no token is required."""

    def __init__(self, title: str, version: str, static_folder: Path, host: str, token: str | None) -> None:
        self._folder = static_folder
        self._api = FastAPI(title=title, version=version, docs_url=None, redoc_url=None, openapi_url=None)
        self._api.add_exception_handler(HTTPException, make_not_found_response)
        self._api.add_exception_handler(RequestValidationError, _make_validation_response)
        self.app = _Guard(self._api, host, token)

    def add(self, method: Literal["GET", "POST"], path: str, answer: Callable[..., Any]) -> None:
        """Add a handler that returns a pydantic object or a generator of events. FastAPI fills its arguments from the
        path, the query string and, for a pydantic type, the JSON body. A handler that is not a coroutine function runs
        in a thread, with a limit of `READ_TIMEOUT_SECONDS` seconds for GET."""
        timeout = READ_TIMEOUT_SECONDS if method == "GET" else None
        is_async = inspect.iscoroutinefunction(answer)
        handler = answer if is_async else functools.partial(_run_in_thread, timeout, answer)

        @functools.wraps(answer)
        async def handle(*args: Any, **kwargs: Any) -> Response:
            try:
                result = await handler(*args, **kwargs)
                if isinstance(result, Picture):
                    return Response(result.content, media_type="image/png", headers=PICTURE_HEADERS)
                if isinstance(result, AsyncGenerator):
                    return EventStreamResponse(_append_error_event(result))
                return Response(to_json(result), media_type="application/json")
            except Exception as error:
                api_error = _to_api_error(error)
                return json_response(api_error.body, api_error.status, ERROR_HEADERS.get(api_error.status))

        return_type = get_type_hints(answer).get("return")
        model = return_type if isinstance(return_type, type) and issubclass(return_type, BaseModel) else None
        description = " ".join((inspect.getdoc(answer) or "").split())
        route_options: Any = {
            "response_model": model,
            "description": description,
            "responses": {"4XX": {"model": ErrorResponse}},
        }
        self._api.add_api_route(path, handle, methods=[method], **route_options)

    def add_files(self) -> None:
        """Serve the static files and the OpenAPI description. Call after all other routes have been added."""
        self._api.add_api_route("/api/openapi.json", lambda: self._api.openapi(), include_in_schema=False)
        self._api.add_api_route("/{path:path}", self._serve, methods=["GET", "HEAD"], include_in_schema=False)
        # Only files that exist at start-up are served, by exact name, which rules out path traversal.
        paths = [
            path for path in self._folder.rglob("*.*") if path.suffix in CONTENT_TYPES and path.is_file()
        ]
        self._files = {path.relative_to(self._folder).as_posix(): _load_file(path) for path in paths}

    async def _serve(self, request: Request, path: str) -> Response:
        file_name = {"": "index.html", "docs": "docs.html"}.get(path, path.removeprefix("static/"))
        static_file = self._files.get(file_name)
        if static_file is None:
            raise HTTPException(404, "page not found")
        content, headers = static_file
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)


def _load_file(path: Path) -> tuple[bytes, dict[str, str]]:
    """Return a file's content and headers. Browsers revalidate it by ETag on every use and get 304 if unchanged."""
    content = path.read_bytes()
    etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    return content, {"etag": etag, "cache-control": "no-cache", "content-type": CONTENT_TYPES[path.suffix]}


async def _run_in_thread(timeout: float | None, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        async with asyncio.timeout(timeout):
            return await asyncio.to_thread(call, *args, **kwargs)
    except TimeoutError:
        text = f"Reading took longer than {timeout:g} seconds. Check the disk, then reload the page."
        raise ApiError(text, status=504, code="timeout") from None


async def _append_error_event(events: Events) -> AsyncGenerator[Any, None]:
    """Yield the events. Convert an exception into a last event named error."""
    try:
        async for streamed_event in events:
            yield streamed_event
    except Exception as error:
        yield make_event("error", _to_api_error(error).body)
    finally:
        await events.aclose()


def _to_api_error(error: BaseException) -> ApiError:
    """Convert an exception into an error response. Messages of ValueError and OSError are written for users."""
    is_user_error = isinstance(error, ValueError | OverflowError | RecursionError | OSError)
    return ApiError(str(error)) if is_user_error else as_api_error(error)


async def _make_validation_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first_error = error.errors()[0]
    field_name = ".".join(str(key_part) for key_part in first_error["loc"][1:]) or str(first_error["loc"][0])
    api_error = ApiError(f"{field_name}: {first_error['msg']}", field_name, status=422)
    return json_response(api_error.body, api_error.status)


class _Guard:
    """Middleware that accepts only requests from the site's own pages and adds security headers to every response."""

    def __init__(self, app: Any, host: str, token: str | None) -> None:
        self._app, self._host, self._token = app, host.lower(), token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("cache-control", "no-store")
                headers.update(SECURITY_HEADERS)
            await send(message)

        request = Request(scope, receive)
        try:
            self._check_origin(request)
            early_response = self._sign_in(request)
            if early_response is None and request.method not in SAFE_METHODS:
                receive = await self._check_body(request)
        except ApiError as error:
            early_response = json_response(error.body, error.status, ERROR_HEADERS.get(error.status))
        await (early_response or self._app)(scope, receive, send_with_headers)

    def _check_origin(self, request: Request) -> None:
        """Check the Host header, to prevent DNS rebinding, and the Origin header, to reject requests from other
        sites."""
        host = request.headers.get("host", "").lower()
        if not self._is_own_host(host):
            text = f"unknown host name {host[:80]!r}; open the address that tfactory ui printed"
            raise ApiError(text, "host", status=403, code="forbidden")
        origin, fetch_site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        is_cross_site = fetch_site not in ("none", "same-origin") and request.url.path.startswith("/api/")
        if is_cross_site or origin not in (None, f"http://{host}"):
            raise ApiError("cross-site requests are not allowed", "origin", status=403, code="forbidden")

    def _is_own_host(self, host: str) -> bool:
        match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::\d+)?", host)
        host_name = match and (match[1] or match[2])
        if not match or not host_name or is_loopback(host_name) or host_name == self._host:
            return bool(host_name)
        # Listening on all interfaces: accept IP addresses and this machine's name. Others could belong to anybody.
        address = match[1] or re.fullmatch(r"[\d.]+", host_name)
        return self._host in ("0.0.0.0", "::") and bool(address or host_name == socket.gethostname().lower())

    def _sign_in(self, request: Request) -> Response | None:
        """Check the token. Return None if it is valid, else a sign-in page or a hint; raise ApiError in the API."""
        authorization = request.headers.get("authorization", "")
        if self._token is None or _equals_secret(authorization, f"Bearer {self._token}"):
            return None
        cookie_name = f"tfactory-{request.scope['server'][1]}"  # browsers share cookies across ports
        if request.url.path == "/" and _equals_secret(request.query_params.get("token", ""), self._token):
            # Not a redirect: browsers send no SameSite=strict cookie with a redirect that began on another site.
            response = Response(SIGN_IN_PAGE, media_type="text/html")
            response.set_cookie(cookie_name, self._token, httponly=True, samesite="strict")
            return response
        if _equals_secret(request.cookies.get(cookie_name, ""), self._token):
            return None
        if request.url.path.startswith("/api/"):
            raise ApiError(NO_TOKEN_TEXT, "token", status=401, code="unauthorized")
        return Response(f"{NO_TOKEN_TEXT}\n", 401, media_type="text/plain")

    async def _check_body(self, request: Request) -> Callable[[], Awaitable[Any]]:
        """Check that the site's own page sent the request. Return a `receive` function that replays the read body."""
        if PAGE_HEADER not in request.headers:
            text = f"Requests that change something must send the header {PAGE_HEADER}: 1."
            raise ApiError(text, PAGE_HEADER, status=403, code="forbidden")
        messages = [{"type": "http.request", "body": await read_json_body(request), "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await request.receive()

        return receive


def _equals_secret(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), secret.encode())
