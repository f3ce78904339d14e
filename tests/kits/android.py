"""Simulated Android devices: they speak adbd's protocol over loopback TCP, so that a real adb client and server connect
to them. Each has a launcher, settings and contacts. `python -m tests.kits.android 3` serves three."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import re
import shlex
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from PIL import Image

ADB = Path(__file__).parents[2] / ".servers" / "adb" / "adb"
WIDTH, HEIGHT, ROW = 360, 640, 60
PACKAGES = {
    "home": "com.android.launcher3",
    "settings": "com.android.settings",
    "contacts": "com.android.contacts",
}
COLORS = {
    "settings": (200, 0, 0), "contacts": (0, 200, 0), "clock": (0, 0, 200), "wifi_on": (200, 200, 0),
    "airplane_mode_on": (0, 200, 200), "storage": (200, 0, 200), "name": (90, 0, 0), "phone": (0, 90, 0),
    "save": (0, 0, 90), "": (90, 90, 90),
}  # fmt: skip
MAX_DATA = 65536


@dataclass
class Widget:
    name: str
    kind: str
    text: str
    on: bool | None = None  # None: not checkable


class SimulatedDevice:
    """The state of a device, its screen, and the programs of its shell. Rows of a screen change places at HOME."""

    def __init__(self, seed: int = 0) -> None:
        self.links: set[Link] = set()
        self.factory_reset(seed)

    def factory_reset(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.settings = {("global", "wifi_on"): "0", ("global", "airplane_mode_on"): "0"}
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE phones (_id INTEGER PRIMARY KEY, display_name TEXT, data1 TEXT)")
        self.files: dict[str, str] = {}
        self.lines: list[str] = []  # of the shell
        self.xml: str | None = None  # instead of the screen's own
        self.png: bytes | None = None  # instead of the screen's own
        self.extra: list[str] = []  # further texts on every screen
        self.booted = True
        self.hangs = False
        self.hook: Callable[[str], None] = lambda line: None  # called before every line of the shell
        self.accepts = True
        self.home()

    def home(self) -> None:
        self.screen, self.focus = "home", None
        self.fields = {"name": "", "phone": ""}
        self.order = self.rng.sample(range(3), 3)

    def drop(self) -> None:
        """Go offline: close every connection and refuse new ones."""
        self.accepts = False
        for link in list(self.links):
            link.writer.close()

    @property
    def widgets(self) -> list[Widget]:
        if self.screen == "home":
            rows = [Widget("settings", "TextView", "Settings"), Widget("contacts", "TextView", "Contacts")]
            rows.append(Widget("clock", "TextView", "Clock"))
        elif self.screen == "settings":
            names = {"wifi_on": "Wi-Fi", "airplane_mode_on": "Airplane mode"}
            rows = [
                Widget(key, "Switch", text, self.settings["global", key] == "1")
                for key, text in names.items()
            ]
            rows.append(Widget("storage", "TextView", "Storage"))
        else:
            rows = [Widget(name, "EditText", text or name.title()) for name, text in self.fields.items()]
            rows.append(Widget("save", "Button", "Save"))
        return [rows[place] for place in self.order] + [Widget("", "TextView", text) for text in self.extra]

    def dump(self) -> str:
        package = PACKAGES[self.screen]
        nodes = []
        for place, widget in enumerate(self.widgets):
            flags = {
                "clickable": bool(widget.name),
                "checkable": widget.on is not None,
                "checked": bool(widget.on),
            }
            flags["focused"] = bool(widget.name) and self.focus == widget.name
            shown = " ".join(f'{name}="{str(value).lower()}"' for name, value in flags.items())
            bounds = f"[0,{place * ROW}][{WIDTH},{(place + 1) * ROW}]"
            nodes.append(
                f'<node text={quoteattr(widget.text)} class="android.widget.{widget.kind}" package="{package}" {shown} '
                f'enabled="true" bounds="{bounds}"/>'
            )
        frame = (
            f'<node class="android.widget.FrameLayout" package="{package}" bounds="[0,0][{WIDTH},{HEIGHT}]">'
        )
        header = "<?xml version='1.0' encoding='UTF-8' standalone='yes' ?>"
        return f'{header}<hierarchy rotation="0">{frame}{"".join(nodes)}</node></hierarchy>'

    def picture(self) -> bytes:
        """A PNG of the screen. Rows have the colors of their widgets; a switch that is on is white at the right."""
        picture = Image.new("RGB", (WIDTH, HEIGHT), "black")
        for place, widget in enumerate(self.widgets):
            picture.paste(COLORS[widget.name], (0, place * ROW, WIDTH, (place + 1) * ROW))
            if widget.on:
                picture.paste((255, 255, 255), (WIDTH - ROW, place * ROW, WIDTH, (place + 1) * ROW))
        file = io.BytesIO()
        picture.save(file, "PNG")
        return file.getvalue()

    def tap(self, x: int, y: int) -> None:
        place = y // ROW
        widgets = self.widgets
        name = widgets[place].name if place < len(widgets) else ""
        if self.screen == "home" and name in PACKAGES:
            self.screen = name
        elif name in ("wifi_on", "airplane_mode_on"):
            self.settings["global", name] = str(1 - int(self.settings["global", name]))
        elif name == "save":
            values = (self.fields["name"], self.fields["phone"])
            self.database.execute("INSERT INTO phones (display_name, data1) VALUES (?, ?)", values)
        elif name in self.fields:
            self.focus = name

    def run(self, line: str) -> tuple[str | bytes, int]:  # noqa: C901  # one case per program
        """Run a line of the shell; return its output and status."""
        self.lines.append(line)
        self.hook(line)
        match shlex.split(line):
            case ["uiautomator", "dump", "/dev/tty"]:
                return (
                    self.dump() if self.xml is None else self.xml
                ) + "UI hierchary dumped to: /dev/tty\n", 0
            case ["screencap", "-p"]:
                return (self.picture() if self.png is None else self.png), 0
            case ["input", "tap", x, y]:
                self.tap(int(x), int(y))
            case ["input", "text", text] if self.focus is not None:
                self.fields[self.focus] += re.sub("%s", " ", text)
            case ["input", "keyevent", "KEYCODE_HOME" | "KEYCODE_BACK"]:
                self.home()
            case ["input", "swipe" | "keyevent" | "text", *_]:
                pass
            case ["monkey", "-p", package, *_]:
                screens = {package: screen for screen, package in PACKAGES.items()}
                if package not in screens:
                    return "** No activities found to run, monkey aborted.\n", 252
                self.screen = screens[package]
            case ["getprop", "sys.boot_completed"]:
                return f"{int(self.booted)}\n", 0
            case ["getprop", name]:
                values = {"ro.build.version.release": "14", "ro.product.model": "Simulated"}
                return values.get(name, "") + "\n", 0
            case ["wm", "size"]:
                return f"Physical size: {WIDTH}x{HEIGHT}\n", 0
            case ["pm", "clear", package]:
                if package not in PACKAGES.values():
                    return "Failed\n", 1
                self.database.execute("DELETE FROM phones")
                return "Success\n", 0
            case ["settings", "get", namespace, key]:
                return self.settings.get((namespace, key), "null") + "\n", 0
            case ["settings", "put", namespace, key, value]:
                self.settings[namespace, key] = value
            case ["svc", "wifi", state]:
                self.settings["global", "wifi_on"] = str(int(state == "enable"))
            case ["cmd", "connectivity", "airplane-mode", state]:
                self.settings["global", "airplane_mode_on"] = str(int(state == "enable"))
            case ["content", "query", "--uri", _, "--projection", column, "--where", where]:
                rows = self.database.execute(f"SELECT {column} FROM phones WHERE {where}").fetchall()
                lines = [f"Row: {number} {column}={value}\n" for number, [value] in enumerate(rows)]
                return "".join(lines) or "No result found.\n", 0
            case ["content", "delete", "--uri", _, "--where", where]:
                self.database.execute(f"DELETE FROM phones WHERE {where}")
            case ["head", "-c", _, path]:
                return (self.files[path], 0) if path in self.files else (f"head: {path}: No such file\n", 1)
            case ["rm", "-f", path]:
                self.files.pop(path, None)
            case ["am", "force-stop", _]:
                self.home()
            case ["dumpsys", "activity", "activities"]:
                return f"  topResumedActivity=ActivityRecord{{1a u0 {PACKAGES[self.screen]}/.Main t7}}\n", 0
            case ["pm", "list", "features"]:
                return "feature:android.hardware.touchscreen\n", 0
            case ["pm", "list", "packages", *_]:
                return "".join(f"package:{package}\n" for package in PACKAGES.values()), 0
            case ["cmd", "package", "query-activities", *_]:
                return "".join(f"  packageName={package}\n" for package in PACKAGES.values()), 0
            case words:
                return f"/system/bin/sh: {words[:1]}: inaccessible or not found\n", 127
        return "", 0


@dataclass(eq=False)
class Link:
    """One connection of an adb server: adbd's messages, with one stream per service."""

    device: SimulatedDevice
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    windows: dict[int, asyncio.Semaphore] = field(default_factory=dict)  # of open streams, by our number
    services: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self) -> None:
        if not self.device.accepts:
            self.writer.close()
            return
        self.device.links.add(self)
        try:
            while True:
                head = struct.unpack("<4s5I", await self.reader.readexactly(24))
                data = await self.reader.readexactly(head[3])
                self.receive(head[0].decode(), head[1], head[2], data)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.device.links.discard(self)
            self.writer.close()

    def receive(self, command: str, first: int, second: int, data: bytes) -> None:
        if command == "CNXN":
            self.send("CNXN", 0x01000001, MAX_DATA, b"device::ro.product.name=sim;features=shell_v2,cmd")
        elif command == "OPEN":
            number = max(self.windows, default=0) + 1
            self.windows[number] = asyncio.Semaphore(0)
            self.send("OKAY", number, first)
            task = asyncio.ensure_future(self.service(number, first, data.rstrip(b"\0").decode()))
            self.services.add(task)
            task.add_done_callback(self.services.discard)
        elif command == "OKAY" and second in self.windows:
            self.windows[second].release()
        elif command == "WRTE":
            self.send("OKAY", second, first)

    def send(self, command: str, first: int, second: int, data: bytes = b"") -> None:
        number = struct.unpack("<I", command.encode())[0]
        checksum = sum(data) & 0xFFFFFFFF
        header = struct.pack("<6I", number, first, second, len(data), checksum, number ^ 0xFFFFFFFF)
        self.writer.write(header + data)

    async def service(self, number: int, peer: int, name: str) -> None:
        kind, _, line = name.partition(":")
        while self.device.hangs:
            await asyncio.sleep(0.01)
        output, status = self.device.run(line)
        content = output if isinstance(output, bytes) else output.encode()
        if kind.startswith("shell,v2"):
            packets = [struct.pack("<BI", 1, len(content)) + content] if content else []
            content = b"".join(packets) + struct.pack("<BI", 3, 1) + bytes([status])
        for start in range(0, len(content), MAX_DATA):
            self.send("WRTE", number, peer, content[start : start + MAX_DATA])
            await self.windows[number].acquire()
        self.send("CLSE", number, peer)
        del self.windows[number]


class Phones:
    """Devices on a thread with its own event loop, and an adb server of their own."""

    def __init__(self, count: int) -> None:
        self.devices = [SimulatedDevice(seed) for seed in range(count)]
        self.serials: list[str] = []
        self.adb_port = free_port()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __getitem__(self, place: int) -> SimulatedDevice:
        return self.devices[place]

    @property
    def options(self) -> dict[str, object]:
        return {"devices": self.serials, "adb": str(ADB), "server_port": self.adb_port, "settle": 0.0}

    def adb(self, *arguments: str) -> str:
        command = [str(ADB), "-P", str(self.adb_port), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the devices' thread."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (function(), done.set()))
        done.wait(10)

    def start(self) -> None:
        self.thread.start()
        for device in self.devices:
            serving = asyncio.start_server(
                lambda reader, writer, device=device: Link(device, reader, writer).serve(), "127.0.0.1", 0
            )
            server = asyncio.run_coroutine_threadsafe(serving, self.loop).result(10)
            self.serials.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

        self.adb("start-server")

    def _cancel_links(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()

    def stop(self) -> None:
        self.adb("kill-server")
        self.call(self._cancel_links)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


@contextlib.contextmanager
def phones(count: int) -> Iterator[Phones]:
    """Simulated devices with an adb server that looks for no others. Skips the test where there is no adb."""
    if not ADB.is_file():
        pytest.skip("adb is not installed; run: make servers")
    os.environ["ADB_LOCAL_TRANSPORT_MAX_PORT"] = "5553"  # below the first port where adb looks for emulators
    running = Phones(count)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    with phones(int(sys.argv[1])) as started:
        print(*started.serials, "adb server port", started.adb_port, flush=True)
        threading.Event().wait()
