"""A headless Chromium that shows single pages without a network, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from TrainingFactory.common.workers.groups import inherit_variables, signal_group
from TrainingFactory.types import ToolFailure

BROWSER_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER_FLAGS = [
    "--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--disable-renderer-backgrounding",
    "--disable-backgrounding-occluded-windows", "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    # No host has an address, so that what is not intercepted reaches nothing either.
    "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip
# Chromium reads commands from file 3 and writes to file 4.
LAUNCH_SCRIPT = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD_CLOEXEC, 50) for number in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
MAX_MESSAGE_BYTES = 64 << 20
PAGE_URL = "http://page.invalid/"
# WebSockets are not intercepted. Everything else is, and counted.
CONTENT_POLICY = "connect-src 'none'; webrtc 'block'"
# Screenshots do not depend on when they are taken: no blinking cursor, no animation.
NO_ANIMATION_SCRIPT = """
const sheet = new CSSStyleSheet();
sheet.replaceSync("* { caret-color: transparent !important; animation: none !important; transition: none !important }");
document.adoptedStyleSheets = [sheet];
"""
EventListener = Callable[[str, dict[str, Any]], None]


class BrowserLost(ToolFailure):
    """Raised if the browser or a page does not answer. The episode ends as `tool_failure` and is not trained on."""


class ScriptError(ValueError):
    """Raised if an expression raised an exception in the page."""


def find_browser(program: str | None) -> str:
    """Return the path of Chromium. Raise ValueError if it is not installed."""
    names = BROWSER_PROGRAMS if program is None else (program,)
    if (path := next(filter(None, map(shutil.which, names)), None)) is None:
        problem = (
            "environment.options.browser is not a program" if program else "no program of PATH is Chromium"
        )
        raise ValueError(
            f"environment web_page needs Chromium, but {problem} ({', '.join(names)}). Install it (Debian: apt install "
            "chromium), or set environment.options.browser to its path"
        )
    return path


class Chromium:
    """One process of Chromium. Create it with `start`. It ends when its pipe closes, also if this process is killed."""

    def __init__(
        self, process: asyncio.subprocess.Process, command_writer: Any, answer_reader: Any, timeout: float
    ) -> None:
        self.process, self.timeout, self.error = process, timeout, ""
        self.listeners: dict[str, EventListener] = {}  # by session
        self._command_writer, self._answer_reader = command_writer, answer_reader
        self._id_counter = itertools.count(1)
        self._pending_replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._profile_folder: tempfile.TemporaryDirectory[str] | None = None
        self.run_in_background(self._read_messages())

    @classmethod
    async def start(cls, program: str, timeout: float) -> Self:
        loop = asyncio.get_running_loop()
        (command_reader, command_writer), (answer_reader, answer_writer) = os.pipe(), os.pipe()
        profile_folder = tempfile.TemporaryDirectory(prefix="tfactory-browser-", ignore_cleanup_errors=True)
        # The sandbox of Chromium cannot be started by root.
        flags = [*BROWSER_FLAGS, *(["--no-sandbox", "--no-zygote"] if os.geteuid() == 0 else [])]
        launcher = [sys.executable, "-I", "-S", "-c", LAUNCH_SCRIPT, str(command_reader), str(answer_writer)]
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher, program, *flags, f"--user-data-dir={profile_folder.name}", stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
                pass_fds=(command_reader, answer_writer), env=inherit_variables([])
            )  # fmt: skip
        finally:
            os.close(command_reader)
            os.close(answer_writer)
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answer_reader, "rb", 0)
        )
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(command_writer, "wb", 0))
        chromium = cls(process, writer, reader, timeout)
        chromium._profile_folder = profile_folder
        try:
            await chromium.send("Browser.getVersion")
        except BrowserLost as error:
            await chromium.close()
            raise BrowserLost(f"{program} does not start: {error}") from None
        return chromium

    async def send(self, method: str, session_id: str | None = None, **params: Any) -> dict[str, Any]:
        if self.error:
            raise BrowserLost(self.error)
        message_id = next(self._id_counter)
        message = {"id": message_id, "method": method, "params": params}
        self._pending_replies[message_id] = future = asyncio.get_running_loop().create_future()
        self._command_writer.write(
            json.dumps(message | ({"sessionId": session_id} if session_id else {})).encode() + b"\0"
        )
        try:
            async with asyncio.timeout(self.timeout):
                answer = await future
        except TimeoutError:
            raise BrowserLost(f"{method} took longer than {self.timeout:g} s") from None
        finally:
            self._pending_replies.pop(message_id, None)
        if "error" in answer:
            raise BrowserLost(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def run_in_background(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_messages(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = json.loads((await self._answer_reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    if (future := self._pending_replies.get(message["id"])) is not None and not future.done():
                        future.set_result(message)
                elif (listener := self.listeners.get(message.get("sessionId", ""))) is not None:
                    listener(message["method"], message["params"])
        self.error = "the browser has ended"
        for future in self._pending_replies.values():
            if not future.done():
                future.set_exception(BrowserLost(self.error))

    def abandon(self) -> None:
        """Kill the browser process that another event loop started."""
        self.error = self.error or "the browser was closed"
        signal_group(self.process.pid, signal.SIGKILL)
        if self._profile_folder is not None:
            self._profile_folder.cleanup()

    async def close(self) -> None:
        self.error = self.error or "the browser was closed"
        self._command_writer.close()
        signal_group(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._profile_folder is not None:
            await asyncio.to_thread(self._profile_folder.cleanup)


class BrowserPage:
    """A tab with its own cookies and storage that shows one HTML document. All other requests of the page fail and are
    counted."""

    def __init__(self, chromium: Chromium, context_id: str, session_id: str, html: str) -> None:
        self._chromium, self._context_id, self._session_id = chromium, context_id, session_id
        self._html, self.num_blocked = html, 0
        self._load_event = asyncio.Event()
        chromium.listeners[session_id] = self._dispatch_event

    @classmethod
    async def open(cls, chromium: Chromium, html: str, width: int, height: int) -> Self:
        context_id = (await chromium.send("Target.createBrowserContext"))["browserContextId"]
        send = chromium.send
        target = await send("Target.createTarget", url="about:blank", browserContextId=context_id)
        session = await send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = cls(chromium, context_id, session["sessionId"], html)
        await send("Browser.setDownloadBehavior", behavior="deny", browserContextId=context_id)
        await page._send("Page.enable")
        await page._send("Fetch.enable", patterns=[{"urlPattern": "*"}])
        await page._send("Page.addScriptToEvaluateOnNewDocument", source=NO_ANIMATION_SCRIPT)
        await page._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await page._send("Page.navigate", url=PAGE_URL)
        try:
            async with asyncio.timeout(chromium.timeout):
                await page._load_event.wait()
        except TimeoutError:
            raise BrowserLost(f"the page was not loaded within {chromium.timeout:g} s") from None
        return page

    async def tap(self, x: float, y: float) -> None:
        for event in ("mousePressed", "mouseReleased"):
            await self._send("Input.dispatchMouseEvent", type=event, x=x, y=y, button="left", clickCount=1)

    async def type_text(self, text: str) -> None:
        await self._send("Input.insertText", text=text)

    async def evaluate(self, expression: str) -> Any:
        """Return the JSON value of an expression. Raise ScriptError if it fails."""
        answer = await self._send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise ScriptError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    async def take_screenshot(self) -> bytes:
        """Return a PNG file of the visible part."""
        return base64.b64decode((await self._send("Page.captureScreenshot", format="png"))["data"])

    async def close(self) -> None:
        self._chromium.listeners.pop(self._session_id, None)
        with contextlib.suppress(BrowserLost):
            await self._chromium.send("Target.disposeBrowserContext", browserContextId=self._context_id)

    async def _send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._chromium.send(method, self._session_id, **params)

    def _dispatch_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._load_event.set()
        elif method == "Fetch.requestPaused":
            self._chromium.run_in_background(self._answer_request(params["requestId"], params["request"]))
        elif method == "Page.javascriptDialogOpening":
            self._chromium.run_in_background(self._try_send("Page.handleJavaScriptDialog", accept=True))

    async def _answer_request(self, request_id: str, request: dict[str, Any]) -> None:
        if request["url"] != PAGE_URL or request["method"] != "GET":
            self.num_blocked += request["url"] != PAGE_URL + "favicon.ico"  # requested by Chromium itself
            return await self._try_send(
                "Fetch.failRequest", requestId=request_id, errorReason="BlockedByClient"
            )
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": CONTENT_POLICY}
        await self._try_send(
            "Fetch.fulfillRequest", requestId=request_id, responseCode=200,
            responseHeaders=[{"name": name, "value": value} for name, value in headers.items()],
            body=base64.b64encode(self._html.encode()).decode(),
        )  # fmt: skip

    async def _try_send(self, method: str, **params: Any) -> None:
        with contextlib.suppress(BrowserLost):
            await self._send(method, **params)


class SharedBrowser:
    """The browser of a run, started for the first page and restarted if it has ended."""

    def __init__(self, program: str, timeout: float) -> None:
        self.program, self.timeout = program, timeout
        self.chromium: Chromium | None = None
        self.event_counts: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_lock = asyncio.Lock()

    async def open_page(self, html: str, width: int, height: int) -> BrowserPage:
        if self._loop is not (loop := asyncio.get_running_loop()):
            if self.chromium is not None:
                self.chromium.abandon()
            self._loop, self.chromium, self._start_lock = loop, None, asyncio.Lock()
        async with self._start_lock:
            if self.chromium is not None and self.chromium.error:
                self.event_counts["restarts"] += 1
                await self.chromium.close()
                self.chromium = None
            if self.chromium is None:
                self.chromium = await Chromium.start(self.program, self.timeout)
        return await BrowserPage.open(self.chromium, html, width, height)

    async def close_page(self, page: BrowserPage) -> None:
        self.event_counts["requests_blocked"] += page.num_blocked
        await page.close()

    def metrics(self) -> dict[str, float]:
        """Return restarts of the browser and blocked requests since the last call."""
        counts = {"restarts": 0, "requests_blocked": 0} | self.event_counts
        self.event_counts.clear()
        return {f"environment/browser_{name}": float(count) for name, count in counts.items()}

    async def close(self) -> None:
        """End the browser; a later page starts it again."""
        chromium, self.chromium = self.chromium, None
        if chromium is not None:
            await chromium.close()
