"""A web site for the people of one machine: files, an API that describes itself, streams of events. Every request
passes one guard, and every answer carries the headers that keep other pages out."""

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
from typing import Any, Literal, get_type_hints

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from TrainingFactory.common.http.api import (
    HEADERS,
    ApiError,
    Stream,
    as_json,
    failure,
    json_body,
    no_such_page,
)
from TrainingFactory.common.http.listen import is_loopback

PAGE_HEADER = "x-tfactory-page"  # whatever its value: a browser sends no such header for another site
READ_TIME = 60.0  # seconds that a GET may take in a thread
SAFE = ("GET", "HEAD")  # methods that change nothing
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
ALWAYS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".json": "application/json", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip
# With an empty icon: browsers would ask for /favicon.ico, which is not there.
ENTER = (
    "<!doctype html><title>TrainingFactory</title><link rel=icon href='data:,'>"
    "<meta http-equiv=refresh content='0; url=/'>"
)
NO_TOKEN = (
    "This page needs its token. Open the address that `tfactory ui` printed, which ends in /?token=..., or start "
    "`tfactory ui` again to get a new one. Scripts send the token as the header `authorization: Bearer TOKEN`."
)

Event = dict[str, Any]  # event: its name; data: a JSON text
Events = AsyncGenerator[Event, None]
IN_QUERY = Depends()  # of an argument: Annotated[Kind, IN_QUERY] has its fields from the query


class Refused(BaseModel):
    """Says what went wrong: `message`, in words; `param`, the field of the request; `code`."""

    error: dict[str, str | None]


def event(name: str, data: BaseModel | dict[str, Any]) -> Event:
    """Return an event with its data as JSON."""
    return {"event": name, "data": json_text(data)}


def json_text(data: BaseModel | dict[str, Any]) -> str:
    """Return JSON, where NaN is null and half a surrogate pair, which the name of a file may have, is escaped."""
    with contextlib.suppress(PydanticSerializationError):
        if isinstance(data, BaseModel):
            return data.model_dump_json()
    text = json.dumps(data.model_dump() if isinstance(data, BaseModel) else data)
    return json.dumps(json.loads(text, parse_constant=lambda _: None))


class Site:
    """`static`: the folder of its files. `host`: where it listens. `token`: what every request must carry, as a cookie
    or as a header; None admits everybody who can connect."""

    def __init__(self, title: str, version: str, static: Path, host: str, token: str | None) -> None:
        self._static = static
        self._api = FastAPI(title=title, version=version, docs_url=None, redoc_url=None, openapi_url=None)
        self._api.add_exception_handler(HTTPException, no_such_page)
        self._api.add_exception_handler(RequestValidationError, _wrong_request)
        self.app = _Guard(self._api, host, token)

    def add(self, method: Literal["GET", "POST"], path: str, answer: Callable[..., Any]) -> None:
        """Answer with the pydantic object that a function returns, or with the events. Its arguments are the parts of
        the path, those of the query, and of a pydantic type the JSON body. A plain function runs in a thread, and a GET
        that takes longer than `READ_TIME` there fails."""
        waits = inspect.iscoroutinefunction(answer)
        seconds = READ_TIME if method == "GET" else None
        work = answer if waits else functools.partial(_in_thread, seconds, answer)

        @functools.wraps(answer)
        async def guarded(*given: Any, **named: Any) -> Response:
            try:
                found = await work(*given, **named)
                if isinstance(found, AsyncGenerator):
                    return Stream(_with_error(found))
                return Response(json_text(found), media_type="application/json")
            except Exception as error:
                told = _told(error)
                return as_json(told.body, told.status, HEADERS.get(told.status))

        kind = get_type_hints(answer).get("return")
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        text = " ".join((inspect.getdoc(answer) or "").split())
        more: Any = {"response_model": model, "description": text, "responses": {"4XX": {"model": Refused}}}
        self._api.add_api_route(path, guarded, methods=[method], **more)

    def add_files(self) -> None:
        """Serve the files and the description of the API, after all other routes."""
        self._api.add_api_route("/api/openapi.json", lambda: self._api.openapi(), include_in_schema=False)
        self._api.add_api_route("/{path:path}", self._file, methods=["GET", "HEAD"], include_in_schema=False)
        # A name is looked up among the files that were there at the start, so that no path can lead elsewhere.
        files = [each for each in self._static.rglob("*.*") if each.suffix in TYPES and each.is_file()]
        self._files = {each.relative_to(self._static).as_posix(): _served(each) for each in files}

    async def _file(self, request: Request, path: str) -> Response:
        name = {"": "index.html", "docs": "docs.html"}.get(path, path.removeprefix("static/"))
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404, "there is no such page")
        content, headers = found
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)


def _served(file: Path) -> tuple[bytes, dict[str, str]]:
    """Return a file's content and headers; it is asked for each time, and answered in a few bytes while unchanged."""
    content = file.read_bytes()
    mark = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    return content, {"etag": mark, "cache-control": "no-cache", "content-type": TYPES[file.suffix]}


async def _in_thread(seconds: float | None, answer: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(answer, *given, **named)
    except TimeoutError:
        text = f"Reading took longer than {seconds:g} seconds. Check the disk, then reload the page."
        raise ApiError(text, status=504, code="timeout") from None


async def _with_error(events: Events) -> AsyncGenerator[Any, None]:
    """Yield the events; what goes wrong becomes the last one, named error."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield event("error", _told(error).body)
    finally:
        await events.aclose()


def _told(error: BaseException) -> ApiError:
    """Return what the page is told: what users are told by a ValueError, or by the disk, is for them to read."""
    plain = isinstance(error, ValueError | OverflowError | RecursionError | OSError)
    return ApiError(str(error)) if plain else failure(error)


async def _wrong_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    told = ApiError(f"{place}: {first['msg']}", place, status=422)
    return as_json(told.body, told.status)


class _Guard:
    """Lets through what comes from the site's own pages, and puts the headers on every answer."""

    def __init__(self, app: Any, host: str, token: str | None) -> None:
        self._app, self._host, self._token = app, host.lower(), token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("cache-control", "no-store")
                headers.update(ALWAYS)
            await send(message)

        request = Request(scope, receive)
        try:
            self._check_names(request)
            answer = self._enter(request)
            if answer is None and request.method not in SAFE:
                receive = await self._checked_body(request)
        except ApiError as error:
            answer = as_json(error.body, error.status, HEADERS.get(error.status))
        await (answer or self._app)(scope, receive, told)

    def _check_names(self, request: Request) -> None:
        """Check that the page was opened under its own name, and that the request comes from that page: another site
        may give its name our address, or send a browser here."""
        host = request.headers.get("host", "").lower()
        if not self._is_ours(host):
            text = f"this page is not served under the name {host[:80]!r}; open the address that tfactory ui printed"
            raise ApiError(text, "host", status=403, code="forbidden")
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        foreign = site not in ("none", "same-origin") and request.url.path.startswith("/api/")
        if foreign or origin not in (None, f"http://{host}"):
            raise ApiError("this request comes from another site", "origin", status=403, code="forbidden")

    def _is_ours(self, host: str) -> bool:
        named = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::\d+)?", host)
        name = named and (named[1] or named[2])
        if not named or not name or is_loopback(name) or name == self._host:
            return bool(name)
        # Every address of this machine, and its own name: any other could be anybody's.
        address = named[1] or re.fullmatch(r"[\d.]+", name)
        return self._host in ("0.0.0.0", "::") and bool(address or name == socket.gethostname().lower())

    def _enter(self, request: Request) -> Response | None:
        """Check the cookie or the header with the token; return the answer that sets the cookie to a browser that
        opens the address with the token, and the page that explains the address to one that has neither."""
        given = request.headers.get("authorization", "")
        if self._token is None or _equal(given, f"Bearer {self._token}"):
            return None
        cookie = f"tfactory-{request.scope['server'][1]}"  # by port: cookies are sent to all of them
        if request.url.path == "/" and _equal(request.query_params.get("token", ""), self._token):
            # A page that goes on by itself: along with a redirect that began on another site no strict cookie is sent.
            answer = Response(ENTER, media_type="text/html")
            answer.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            return answer
        if _equal(request.cookies.get(cookie, ""), self._token):
            return None
        if request.url.path.startswith("/api/"):
            raise ApiError(NO_TOKEN, "token", status=401, code="unauthorized")
        return Response(f"{NO_TOKEN}\n", 401, media_type="text/plain")

    async def _checked_body(self, request: Request) -> Callable[[], Awaitable[Any]]:
        """Check that our own page sent it, and return what the application reads the body from."""
        if PAGE_HEADER not in request.headers:
            text = f"Requests that change something need the header {PAGE_HEADER}: 1."
            raise ApiError(text, PAGE_HEADER, status=403, code="forbidden")
        messages = [{"type": "http.request", "body": await json_body(request), "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await request.receive()

        return receive


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())
