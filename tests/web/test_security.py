"""Who is let in: every refusal of the guard, over a real socket."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.kits.page import TOKEN, Served, serving
from tests.kits.registry import made_run
from tests.kits.waiting import wait_until
from TrainingFactory.apps.views import shapes
from TrainingFactory.cli import ui
from TrainingFactory.common.http import api
from TrainingFactory.common.http.site import CONTENT_POLICY, make_event, to_json
from TrainingFactory.runs.folder import METRICS
from TrainingFactory.web import site

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs = tmp_path_factory.mktemp("page") / "runs"
    made_run(runs, "mine")
    (runs.parent / "secret.txt").write_text("secret")
    with serving(runs) as served:
        yield served


def asked(
    page: Served, path: str, method: str = "GET", body: bytes | None = None, key: bool = True, **headers: str
) -> tuple[int, str]:
    """Ask as no browser and no library would: nothing is made tidy on the way. `key`: with the token."""
    place = urlsplit(page.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    given = {"Host": place.netloc} | ({"authorization": page.headers["authorization"]} if key else {})
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, given)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::1", "a b"]
)
def test_another_host_is_refused(page: Served, host: str) -> None:
    for path in ("/", "/api/runs", "/static/docs.js"):
        assert asked(page, path, Host=host)[0] == 403


def test_names_of_the_loopback_are_ours(page: Served) -> None:
    port = urlsplit(page.url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "LOCALHOST", "127.0.0.1:9999"):
        assert asked(page, "/api/runs", Host=host)[0] == 200, host


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example"]
)
def test_another_origin_is_refused(page: Served, origin: str) -> None:
    headers = {"origin": origin, "x-tfactory-page": "1", "content-type": "application/json"}
    assert asked(page, "/api/check", "POST", b"{}", **headers)[0] == 403
    assert asked(page, "/api/runs", origin=origin)[0] == 403
    own = headers | {"origin": page.url}
    assert asked(page, "/api/check", "POST", b"{}", **own)[0] == 200


def test_what_a_browser_sends_here_for_another_site_is_refused(page: Served) -> None:
    for site_ in ("cross-site", "same-site"):
        assert asked(page, "/api/about", sec_fetch_site=site_)[0] == 403
        assert asked(page, "/docs", sec_fetch_site=site_)[0] == 200  # a link to the page is none of that
    assert asked(page, "/api/about", sec_fetch_site="same-origin")[0] == 200


def test_changes_need_a_header_that_no_other_site_can_send(page: Served) -> None:
    for path in ("/api/check", "/api/train", "/api/runs/mine/stop", "/api/models/a/rollback", "/api/no/such"):
        status, text = asked(page, path, "POST", b"{}", content_type="application/json")
        assert (status, "x-tfactory-page" in text) == (403, True)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "FROB"):
        assert asked(page, "/api/runs", method, b"{}", content_type="application/json")[0] == 403


def test_a_body_is_json_and_not_too_long(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(page, "/api/check", "POST", b"{}", x_tfactory_page="1", content_type="text/plain")[0] == 415
    assert page.client.post("/api/check", content=b"{", headers=JSON).status_code == 422
    monkeypatch.setattr(api, "MAX_BODY_BYTES", 1000)
    answer = page.client.post("/api/check", content=b" " * 1001, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")


TRICKS = [
    "..",
    "../..",
    "..%2f..",
    "%2e%2e",
    "%2e%2e%2f",
    ".",
    "%00",
    "mine%00",
    "mine/../..",
    "/etc",
    "%5c..%5c",
    "mine/.",
    "~",
    ".mine.part",
]


@pytest.mark.parametrize("name", TRICKS)
def test_names_are_no_paths(page: Served, name: str) -> None:
    for end in ("", "/config", "/log", "/metrics", "/episodes", "/groups?step=1&task=a", "/diff/mine"):
        assert asked(page, f"/api/runs/{name}{end}")[0] in (404, 405), end
    assert asked(page, f"/api/runs/mine/diff/{name}")[0] == 404
    assert asked(page, f"/api/events?run={name}")[0] == 404
    headers = {"x_tfactory_page": "1", "content_type": "application/json"}
    for end in ("/stop", "/resume"):
        assert asked(page, f"/api/runs/{name}{end}", "POST", b"{}", **headers)[0] in (404, 405)
    answer = page.send("/api/train", yaml="", name=name)
    assert (
        (answer.status_code, answer.json()["error"]["param"]) == (400, "name") or "%" in name or name == "~"
    )


@pytest.mark.parametrize(
    "path",
    ["/../site.py", "/static/../site.py", "/static/%2e%2e/site.py", "/static/..%2fsite.py", "//etc/passwd",
     "/static//etc/passwd", "/%2fetc%2fpasswd", "/secret.txt", "/static/../../../../secret.txt", "/site.py",
     "/static/__pycache__", "/.gitignore", "/static/", "/static/docs.js%00.html", "/static/docs.js/"],
)  # fmt: skip
def test_no_file_is_served_but_those_of_the_page(page: Served, path: str) -> None:
    assert asked(page, path)[0] == 404


def test_the_policy_is_on_every_answer(page: Served) -> None:
    answers = [
        page.client.get(path)
        for path in ("/", "/docs", "/static/docs.js", "/api/runs", "/nothing", "/api/runs/x")
    ]
    answers += [
        page.client.get("/api/runs", headers={"host": "evil.example"}),
        page.client.post("/api/check"),
    ]
    for answer in answers:
        assert answer.headers["content-security-policy"] == CONTENT_POLICY, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in CONTENT_POLICY


def test_pages_have_nothing_that_the_policy_forbids() -> None:
    for path in site.STATIC_FOLDER.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:|https?://", text
        ), path


def test_files_are_kept_by_the_browser_until_they_change(page: Served) -> None:
    first = page.client.get("/static/docs.js")
    assert first.headers["content-type"].startswith("text/javascript")
    assert first.headers["cache-control"] == "no-cache"
    again = page.client.get("/static/docs.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert page.client.get("/api/runs").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_every_request_needs_the_token(tmp_path: Path, host: str) -> None:
    made_run(tmp_path / "runs", "mine")
    with serving(tmp_path / "runs", host) as page:
        port = urlsplit(page.url).port
        routes = page.get("/api/openapi.json")["paths"]
        paths = [path.format(name="mine", other="mine", number=1, id="x", digest="0" * 64) for path in routes]
        for path in [*paths, "/api/openapi.json", "/", "/docs", "/?token=wrong", f"/docs?token={TOKEN}"]:
            for cookie in ("", f"tfactory-{port}=wrong"):
                status, text = asked(page, path, key=False, cookie=cookie)
                assert (status, "tfactory ui" in text, TOKEN in text) == (401, True, False), path
        sent = asked(page, "/api/check", "POST", b"{}", key=False, x_tfactory_page="1", **JSON)
        assert sent[0] == 401
        assert asked(page, "/api/about", authorization="Bearer wrong", key=False)[0] == 401
        assert asked(page, f"/?token={TOKEN}", key=False, Host="evil.example")[0] == 403
        assert TOKEN not in asked(page, "/api/about")[1]


def test_the_address_with_the_token_sets_a_cookie(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", "0.0.0.0") as page, httpx.Client(base_url=page.url) as browser:
        port = urlsplit(page.url).port
        entered = browser.get(f"/?token={TOKEN}")
        cookie = entered.headers["set-cookie"].lower()
        assert entered.status_code == 200 and "httponly" in cookie and "samesite=strict" in cookie
        assert "url=/'" in entered.text and TOKEN not in entered.text
        assert browser.get("/api/about").status_code == 200
        assert browser.post("/api/check", json={"yaml": ""}).status_code == 403
        assert (
            browser.post("/api/check", json={"yaml": ""}, headers={"x-tfactory-page": "1"}).status_code == 200
        )
        for host in (f"192.168.1.7:{port}", f"[fe80::1]:{port}"):  # an address is nobody's name
            assert (
                asked(page, "/api/about", key=False, Host=host, cookie=f"tfactory-{port}={TOKEN}")[0] == 200
            )


def test_a_page_without_a_token_is_open_and_still_refuses_other_sites(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", token=None) as page:
        assert asked(page, "/api/about", key=False)[0] == 200
        assert asked(page, "/api/about", key=False, Host="evil.example")[0] == 403
        assert asked(page, "/api/about", key=False, sec_fetch_site="cross-site")[0] == 403
        assert asked(page, "/api/check", "POST", b"{}", key=False, **JSON)[0] == 403


def test_the_token_is_taken_from_the_environment_or_kept_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv(ui.TOKEN_VARIABLE, "x" * 20)
    assert ui._pick_token(None, False) == "x" * 20 and ui.TOKEN_VARIABLE not in os.environ
    made = ui._pick_token(file, False)
    assert (
        made == file.read_text().strip() == ui._pick_token(file, False)
        and file.stat().st_mode & 0o777 == 0o600
    )
    assert ui._pick_token(None, False) != ui._pick_token(None, False) and ui._pick_token(None, True) is None
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        ui._pick_token(file, False)
    with pytest.raises(ValueError, match="--no-token and --token-file"):
        ui._pick_token(file, True)
    monkeypatch.setenv(ui.TOKEN_VARIABLE, "short")
    with pytest.raises(ValueError, match=ui.TOKEN_VARIABLE):
        ui._pick_token(None, False)


def test_a_read_that_never_ends_is_a_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("TrainingFactory.common.http.site.READ_TIMEOUT_SECONDS", 0.05)
    with serving(tmp_path / "runs") as page:
        assert page.page is not None
        free = threading.Event()
        monkeypatch.setattr(page.page.runs, "list_rows", free.wait)
        answer = page.client.get("/api/runs")
        free.set()
        assert (answer.status_code, "0.05 seconds" in answer.text) == (504, True)


def test_a_client_that_hangs_up_in_its_body_is_no_failure(
    page: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="TrainingFactory")
    place = urlsplit(page.url)
    head = "".join(f"{name}: {value}\r\n" for name, value in (page.headers | JSON).items())
    with socket.create_connection((place.hostname or "", place.port or 0)) as client:
        start = f"POST /api/check HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-length: 100\r\n{head}\r\n"
        client.sendall(start.encode() + b"{")
    wait_until(lambda: any("disconnected" in record.message for record in caplog.records))
    page.about()
    assert {record.levelname for record in caplog.records} == {"DEBUG"}, caplog.text


def test_what_json_has_not_can_be_sent() -> None:
    odd = {"name": "\udcff", "reward": float("nan"), "far": [-float("inf")]}
    view = shapes.ConfigView(yaml="", options=odd, changed=[])
    for text in (to_json(view), to_json(view.model_dump()), make_event("done", view)["data"]):
        assert json.loads(text)["options"] == {"name": "\udcff", "reward": None, "far": [None]}


def test_one_run_breaks_nothing_else(tmp_path: Path) -> None:
    """Names that are no text, numbers that are too large, files that are folders: the rest is shown."""
    runs = tmp_path / "runs"
    for name in ("good", "odd", "far", "folder", "deep"):
        made_run(runs, name)
    os.rename(made_run(runs, "text").path, os.fsencode(runs) + b"/te\xfft")
    Path(os.fsdecode(os.fsencode(runs / "odd") + b"/\xff.txt")).write_text("")
    (runs / "far" / METRICS).write_text(
        '{"step": Infinity, "eval/success": NaN}\n{"step": 1, "reward": 1.2.3}\n'
    )
    (runs / "folder" / METRICS).unlink()
    (runs / "folder" / METRICS).mkdir()
    (runs / "deep" / "config.yaml").write_text("a: " + "[" * 500)
    with serving(runs) as page:
        rows = {row["name"]: row for row in page.get("/api/runs")["runs"]}
        assert {name: row["state"] for name, row in rows.items() if row["problem"]} == {
            "te?t": "unreadable",
            "folder": "finished",
            "deep": "finished",
        }
        assert rows["good"]["heldout"]["value"] == 0.5 and rows["far"]["heldout"] is None
        assert "\udcff.txt" in [each["name"] for each in page.get("/api/runs/odd")["files"]]
        assert page.get("/api/runs/far/metrics")["unread"] == 2
        assert "te?t" in page.get("/api/starts")["runs"]
        for path in (
            "/api/runs/folder/metrics",
            f"/api/runs/good/episodes/{10**30}",
            f"/api/runs/good/metrics?after={10**30}",
        ):
            answer = page.client.get(path)
            assert answer.status_code == 400 and "its log" not in answer.json()["error"]["message"], path
