"""The server of the web page in tests: in a thread of this process by `serving`, or as the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.kits.cli import ROOT
from tests.kits.waiting import HANG
from TrainingFactory.common.http import listen
from TrainingFactory.web.site import Page

TOKEN = "a-token-of-the-tests"


class Served:
    """A page and a client that has its token; `entry` is the address that a browser opens first."""

    def __init__(self, url: str, token: str | None, page: Page | None = None) -> None:
        self.url, self.page = url, page
        self.entry = f"{url}/?token={token}"
        self.headers = {"authorization": f"Bearer {token}", "x-tfactory-page": "1"}
        self.client = httpx.Client(base_url=url, timeout=HANG, trust_env=False, headers=self.headers)

    def about(self) -> dict[str, Any]:
        return self.get("/api/about")

    def get(self, path: str, **query: Any) -> Any:
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, **body: Any) -> Any:
        answer = self.send(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def events(self, path: str, **body: Any) -> Generator[tuple[str, Any], None, None]:
        """Yield the events of a stream; one that is posted to where there is a body."""
        method, more = ("POST", {"json": body}) if body else ("GET", {})
        with self.client.stream(method, path, **more) as answer:
            assert answer.status_code == 200, answer.read()
            name = ""
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)


@contextlib.contextmanager
def serving(
    runs: Path, host: str = "127.0.0.1", token: str | None = TOKEN, endpoints: Sequence[str] = ()
) -> Iterator[Served]:
    """Serve in a thread, at a free port of the loopback whatever `host` says."""
    page = Page(runs, host, token, endpoints)
    with listen.bind("127.0.0.1", 0) as bound:
        server = listen.make_server(page.site.app)
        thread = threading.Thread(target=lambda: asyncio.run(page.serve(bound, server)))
        thread.start()
        try:
            served = Served(listen.format_url(bound), token, page)
            yield served
            served.client.close()
        finally:
            server.should_exit = True
            thread.join(HANG)
            assert not thread.is_alive()


@contextlib.contextmanager
def command(
    folder: Path, *arguments: str, script: str | None = None
) -> Iterator[tuple[Served, subprocess.Popen[str]]]:
    """Run `tfactory ui` in a folder, as a user does, or by a script; what is left of it at the end is killed."""
    program = ["-c", script] if script else ["-m", "TrainingFactory.cli"]
    process = subprocess.Popen(
        [sys.executable, *program, "ui", "--port", "0", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        url, _, token = said.split()[2].partition("/?token=")
        served = Served(url, token)
        yield served, process
        served.client.close()
    finally:
        process.kill()
        process.wait()
