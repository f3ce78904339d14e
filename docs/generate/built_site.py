"""Checks of the built site: every link, anchor, image, script and style leads to a file of the site."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("source", "srcset"),
    ("iframe", "src"),
    ("video", "src"),
}


class PageLinks(HTMLParser):
    """The ids of a page, its links, and the addresses that a browser loads with it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif (tag, name) in LOADED and value:
                self.loaded.append(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)


def broken_links(site: Path) -> list[str]:
    """Return a line for every address that leads nowhere, and for every file that a page loads from another host."""
    pages = {path: PageLinks(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for address in page.loaded:
            if urlsplit(address).scheme in ("http", "https"):
                problems.append(f"{where} loads {address} from the network")
        for address in [*page.links, *page.loaded]:
            if not leads_somewhere(address, path, pages, site):
                problems.append(f"{where} links to {address}, which does not exist")
    return problems


def leads_somewhere(address: str, page: Path, pages: dict[Path, PageLinks], site: Path) -> bool:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return True
    start = site if parts.path.startswith("/") else page.parent
    target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
    if target.is_dir():
        target = target / "index.html"
    if target not in pages:
        return target.is_file()
    anchor = unquote(parts.fragment)
    return not anchor or anchor in pages[target].ids or anchor.startswith("only-") or anchor.startswith("__")
