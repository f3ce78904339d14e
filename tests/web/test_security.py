"""Who is let in: every refusal of the guard, over a real socket."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.kits.page import Served, serving
from tests.kits.registry import made_run
from TrainingFactory.http import api
from TrainingFactory.http.site import POLICY, event, json_text
from TrainingFactory.services.runs.folder import METRICS
from TrainingFactory.services.views import shapes
from TrainingFactory.web import site


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs = tmp_path_factory.mktemp("page") / "runs"
    made_run(runs, "mine")
    (runs.parent / "secret.txt").write_text("secret")
    with serving(runs) as served:
        yield served


def asked(
    page: Served, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    """Ask as no browser and no library would: nothing is made tidy on the way."""
    place = urlsplit(page.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    given = {"Host": place.netloc} | {name.replace("_", "-"): value for name, value in headers.items()}
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
    token = page.about()["page_token"]
    headers = {"origin": origin, "x-tfactory-page": token, "content-type": "application/json"}
    assert asked(page, "/api/check", "POST", b"{}", **headers)[0] == 403
    assert asked(page, "/api/runs", origin=origin)[0] == 403
    own = headers | {"origin": page.url}
    assert asked(page, "/api/check", "POST", b"{}", **own)[0] == 200


def test_what_a_browser_sends_here_for_another_site_is_refused(page: Served) -> None:
    for site_ in ("cross-site", "same-site"):
        assert asked(page, "/api/about", sec_fetch_site=site_)[0] == 403
        assert asked(page, "/docs", sec_fetch_site=site_)[0] == 200  # a link to the page is none of that
    assert asked(page, "/api/about", sec_fetch_site="same-origin")[0] == 200


def test_changes_need_the_token_of_the_page(page: Served) -> None:
    for path in ("/api/check", "/api/train", "/api/runs/mine/stop", "/api/models/a/rollback", "/api/no/such"):
        for token in ({}, {"x_tfactory_page": "wrong"}, {"x_tfactory_page": "\xff"}):
            status, text = asked(page, path, "POST", b"{}", content_type="application/json", **token)
            assert (status, "x-tfactory-page" in text) == (403, True)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "FROB"):
        assert asked(page, "/api/runs", method, b"{}", content_type="application/json")[0] == 403


def test_a_body_is_json_and_not_too_long(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    token = page.about()["page_token"]
    assert (
        asked(page, "/api/check", "POST", b"{}", x_tfactory_page=token, content_type="text/plain")[0] == 415
    )
    assert page.client.post("/api/check", content=b"{", headers=_json(token)).status_code == 422
    monkeypatch.setattr(api, "MAX_BODY", 1000)
    answer = page.client.post("/api/check", content=b" " * 1001, headers=_json(token))
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")


def _json(token: str) -> dict[str, str]:
    return {"x-tfactory-page": token, "content-type": "application/json"}


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
    token = page.about()["page_token"]
    for end in ("", "/config", "/log", "/metrics", "/episodes", "/groups?step=1&task=a", "/diff/mine"):
        assert asked(page, f"/api/runs/{name}{end}")[0] in (404, 405), end
    assert asked(page, f"/api/runs/mine/diff/{name}")[0] == 404
    assert asked(page, f"/api/events?run={name}")[0] == 404
    headers = {"x_tfactory_page": token, "content_type": "application/json"}
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
        assert answer.headers["content-security-policy"] == POLICY, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in POLICY


def test_pages_have_nothing_that_the_policy_forbids() -> None:
    for path in site.STATIC.rglob("*.html"):
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


def test_another_address_needs_the_token_once(tmp_path: Path) -> None:
    with serving(tmp_path / "runs", "0.0.0.0", "right") as page:
        for path in (
            "/",
            "/docs",
            "/api/about",
            "/api/events",
            "/static/docs.js",
            "/?token=wrong",
            "/docs?token=right",
        ):
            assert asked(page, path)[0] == 401, path
        port = urlsplit(page.url).port
        assert asked(page, "/api/about", cookie=f"tfactory-{port}=wrong")[0] == 401
        assert asked(page, "/?token=right", Host="evil.example")[0] == 403
        entered = page.client.get("/?token=right")
        cookie = entered.headers["set-cookie"]
        assert (
            entered.status_code == 200
            and "httponly" in cookie.lower()
            and "samesite=strict" in cookie.lower()
        )
        assert page.client.get("/api/about").status_code == 200
        assert page.send("/api/check", yaml="").status_code == 200
        for host in (f"192.168.1.7:{port}", f"[fe80::1]:{port}"):  # an address is nobody's name
            assert asked(page, "/api/about", Host=host, cookie=f"tfactory-{port}=right")[0] == 200


def test_what_json_has_not_can_be_sent() -> None:
    odd = {"name": "\udcff", "reward": float("nan"), "far": [-float("inf")]}
    view = shapes.ConfigView(yaml="", options=odd, changed=[])
    for text in (json_text(view), json_text(view.model_dump()), event("done", view)["data"]):
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
    (runs / "deep" / "config.yaml").write_text("a: " + "[" * 40_000)
    with serving(runs) as page:
        rows = {row["name"]: row for row in page.get("/api/runs")["runs"]}
        assert {name: row["state"] for name, row in rows.items() if row["problem"]} == dict.fromkeys(
            ("te?t", "folder", "deep"), "unreadable"
        )
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
