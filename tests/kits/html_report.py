"""HTML pages that stand alone and obey nobody."""

from __future__ import annotations

import re
from xml.etree import ElementTree

HOSTILE = '<script src="http://evil/x.js">alert(1)</script>"\'&amp;</td>\x1b[31m\u202e]]>'
SHOWN = '<script src="http://evil/x.js">alert(1)</script>'  # what must be read of it
ACTIVE = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}


def parsed(page: str) -> ElementTree.Element:
    """Return the page, which is well-formed, needs nothing beside it, and has no text of others in its markup."""
    page.encode()  # no half characters
    assert page.startswith("<!DOCTYPE html>\n") and not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", page)
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert not {element.tag for element in root.iter()} & ACTIVE
    names = {name for element in root.iter() for name in element.attrib}
    assert not names & {"src", "srcset", "action", "data"} and not any(
        name.startswith("on") for name in names
    )
    assert all(link.attrib["href"].startswith("#") for link in root.iter() if "href" in link.attrib)
    style = root.findtext("head/style") or ""
    assert "url(" not in style and "@import" not in style
    return root


def words(root: ElementTree.Element) -> str:
    return " ".join("".join(root.itertext()).split())
