"""A real Chromium, headless and offline, driven over its DevTools protocol by a pair of pipes: no other program and no
port is needed. `make servers` installs it; where there is none, tests skip.

def test_the_page(browser, page):           # page: a server of `tests/kits/page.py`
    with browser.tab(page.entry) as tab:
        tab.wait("document.querySelector('h1')")
        tab.click("#stop")
        assert tab.text("h1") == "Runs"
        assert not tab.errors
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kits.waiting import HANG
from TrainingFactory.envs.web_page.devtools import LAUNCH_SCRIPT

PROGRAM = Path(__file__).resolve().parents[2] / ".servers" / "chromium" / "browser"
FLAGS = [
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-zygote", "--disable-gpu",
    "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
    # Nothing but the loopback can be reached.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost",
]  # fmt: skip


class Browser:
    """One Chromium; each tab has cookies and storage of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tfactory-browser-")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        begin = [sys.executable, "-I", "-S", "-c", LAUNCH_SCRIPT, str(commands), str(answers)]
        self._process = subprocess.Popen(
            [*begin, str(PROGRAM), *FLAGS, f"--user-data-dir={self._folder.name}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(commands, answers),
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._number = 0
        self._replies: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        waiting = b""
        while data := os.read(self._answers, 1 << 20):
            *messages, waiting = (waiting + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._replies[message["id"]].put(message)
                elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                    tab.heard(message["method"], message["params"])

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        reply = self._replies[number] = queue.Queue()
        message = {"id": number, "method": method, "params": params}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        found = reply.get(timeout=HANG)
        del self._replies[number]
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    @contextlib.contextmanager
    def tab(
        self, url: str = "about:blank", width: int = 1400, height: int = 900, dark: bool = False
    ) -> Iterator[Tab]:
        """Open a page in a profile of its own."""
        profile = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=profile)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.send(f"{domain}.enable")
        tab.look(width, height, dark)
        try:
            if url != "about:blank":
                tab.enter(url)
            yield tab
        finally:
            del self._tabs[session]
            self.send("Target.disposeBrowserContext", browserContextId=profile)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, OSError, queue.Empty):
            self.send("Browser.close")
        try:
            self._process.wait(HANG)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        self._folder.cleanup()


class Tab:
    """`errors` has what the page complained of (scripts that failed, what its policy forbade), `requests` every address
    that it asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = threading.Event()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(" ".join(str(each.get("value", each)) for each in params["args"]))

    def look(self, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and the colours that the system asks for. Nothing moves: an animation that is
        drawn by the processor keeps a core busy."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.send("Emulation.setEmulatedMedia", features=[scheme, motion])

    def goto(self, url: str) -> None:
        self._loaded.clear()
        found = self.send("Page.navigate", url=url)
        if "errorText" in found:
            raise RuntimeError(f"{url}: {found['errorText']}")
        if "loaderId" in found:  # another hash loads nothing
            assert self._loaded.wait(HANG), f"{url} was never loaded"

    def enter(self, url: str) -> None:
        """Load the page by an address with a token, and wait until the page has taken it."""
        self.goto(url)
        self.wait("!location.search && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the JSON value of an expression, awaited if it is a promise."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.send("Runtime.evaluate", **given)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", script))
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = HANG) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while True:
            try:
                if found := self.run(
                    f"(() => {{ const it = {script}; return it instanceof Node ? true : it }})()"
                ):
                    return found
            except RuntimeError as error:  # what it looks at is not there yet
                wrong = str(error)
            else:
                wrong = "it stayed false"
            assert time.monotonic() < end, f"{script}: {wrong}; the page says: {self.text('body')[-1500:]}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        """Click as a hand does: where the element is, with whatever lies over it."""
        where = json.dumps(selector)
        self.wait(f"document.querySelector({where})")
        place = self.run(
            f"(() => {{ const it = document.querySelector({where}); it.scrollIntoView({{block: 'center'}}); "
            "const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, **at)

    def fill(self, selector: str, text: str) -> None:
        """Put the text into a field, in place of what stands there, as by typing."""
        # One expression, because the page may draw the field anew between two.
        self.wait(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it?.focus(); it?.select?.(); "
            "return it !== null })()"
        )
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key: a character, or a name such as Enter, Tab, Escape."""
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37}.get(key)
        more: dict[str, Any] = {"windowsVirtualKeyCode": code} if code else {"text": key}
        if key == "Enter":
            more["text"] = "\r"
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path, full: bool = False) -> None:
        given: dict[str, Any] = {"format": "png"}
        if full:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            given |= {"captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **given)["data"]))
