"""The server under a real Chromium: what its policy forbids, and what another site's page cannot do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kits.browser import Tab
from tests.kits.page import Served, serving
from tests.kits.registry import made_run, model_folder
from TrainingFactory.registry.catalogue import Catalogue

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Served]:
    made_run(tmp_path / "runs", "mine")
    catalogue = Catalogue(tmp_path / "runs" / "registry.sqlite")
    catalogue.add("agent", model_folder(tmp_path / "model", "a"), {"folder": "a"})
    with serving(tmp_path / "runs") as served:
        yield served


@pytest.fixture
def tab(module_tab: Tab, page: Served) -> Tab:
    """The tab of the module with the cookie of the page. It may report errors: tests provoke them."""
    module_tab.errors.clear()
    module_tab.requests.clear()
    module_tab.enter(page.entry)
    return module_tab


def test_the_api_is_shown(tab: Tab, page: Served) -> None:
    tab.goto(f"{page.url}/docs")
    tab.wait("document.querySelectorAll('h2').length > 20")
    assert "/api/runs/{name}/metrics" in tab.text("main")
    assert all(address.startswith(page.url) for address in tab.requests)
    assert tab.errors == []
    # What a page of ours would not do even if somebody got a script or a style into it.
    tab.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 1\">')")
    tab.run("document.body.insertAdjacentHTML('beforeend', '<p id=p style=\"color: red\">x</p>')")
    tab.run(
        "(() => { const it = document.createElement('script'); it.textContent = 'window.hacked = 1'; "
        "document.body.append(it) })()"
    )
    assert tab.run("fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'forbidden')") == "forbidden"
    assert tab.run(
        "window.hacked === undefined && getComputedStyle(document.getElementById('p')).color != 'rgb(255, 0, 0)'"
    )
    assert any("Content Security Policy" in each for each in tab.errors)


class Evil(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<h1>evil</h1>")

    def log_message(self, format: str, *args: object) -> None: ...


def test_another_site_can_neither_read_nor_change(tab: Tab, page: Served, tmp_path: Path) -> None:
    evil = ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=evil.serve_forever, daemon=True).start()
    body = '{"number": 1, "alias": "champion"}'
    try:
        # Under another name of the machine it is another site; under the same one only its port differs.
        for name in ("localhost", "127.0.0.1"):
            tab.goto(f"http://{name}:{evil.server_port}/")
            read = f"fetch('{page.url}/api/about').then(it => it.text(), () => 'refused')"
            assert tab.run(read) == "refused"
            send = (
                f"fetch('{page.url}/api/models/agent/alias', {{method: 'POST', body: '{body}', mode: MODE, "
                f"headers: HEADERS}}).then(it => it.status + '', () => 'refused')"
            )
            known = "{'content-type': 'application/json', 'x-tfactory-page': '1'}"
            assert tab.run(send.replace("MODE", "'cors'").replace("HEADERS", known)) == "refused"
            assert tab.run(send.replace("MODE", "'no-cors'").replace("HEADERS", "{}")) in ("0", "refused")
            script = (
                "new Promise(done => { const it = document.createElement('script'); document.body.append(it); "
                "it.onload = () => done('read'); it.onerror = () => done('refused'); "
                f"it.src = '{page.url}/api/about' }})"
            )
            assert tab.run(script) == "refused"
    finally:
        evil.shutdown()
    assert Catalogue(tmp_path / "runs" / "registry.sqlite").alias("agent", "champion") is None
