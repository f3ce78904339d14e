"""The screen as text: the XML of `uiautomator dump` becomes numbered elements.

Apps and web pages determine the XML's texts, so all of it is untrusted: documents with a DOCTYPE are rejected, and
size, depth and texts are limited. An element is one line; its text is quoted, so it cannot imitate another line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

MAX_XML = 4 << 20  # characters
MAX_DEPTH = 200
MAX_ELEMENTS = 80
DEFAULT_BOUNDS = (0, 0, 1080, 1920)  # of a screen that names none
MAX_TEXT_CHARS = 120  # characters of an element's text
CHAR_REF = re.compile(r"&#(?:[xX]([0-9a-fA-F]{1,8})|([0-9]{1,9}));")
BOUNDS_PATTERN = re.compile(r"\[(-?\d{1,6}),(-?\d{1,6})\]\[(-?\d{1,6}),(-?\d{1,6})\]")
ACTION_ATTRIBUTES = ("clickable", "long-clickable", "checkable", "scrollable")


class ScreenError(ValueError):
    """Raised if the device returned no readable screen."""


@dataclass(slots=True)
class _Node:
    attributes: dict[str, str]
    children: list[_Node] = field(default_factory=list)

    def is_set(self, name: str) -> bool:
        return self.attributes.get(name) == "true"

    @property
    def text(self) -> str:
        labels = (_clean_text(self.attributes.get(name, "")) for name in ("text", "content-desc"))
        return next(filter(None, labels), "")

    @property
    def kind(self) -> str:
        """Return the element's class without its package, such as Button, Switch or EditText."""
        return re.sub(r"\W", "", self.attributes.get("class", "").rpartition(".")[2])[:30] or "View"

    @property
    def is_actionable(self) -> bool:
        return any(map(self.is_set, ACTION_ATTRIBUTES)) or self.kind.endswith("EditText")

    @property
    def bounds(self) -> tuple[int, int, int, int] | None:
        match = BOUNDS_PATTERN.fullmatch(self.attributes.get("bounds", ""))
        if match is None:
            return None
        left, top, right, bottom = map(int, match.groups())
        return (left, top, right, bottom) if left < right and top < bottom else None


@dataclass(slots=True, frozen=True)
class Element:
    """An element of the screen, which the model names by its number."""

    kind: str
    text: str
    states: tuple[str, ...]
    bounds: tuple[int, int, int, int]

    @property
    def center(self) -> tuple[int, int]:
        left, top, right, bottom = self.bounds
        return (left + right) // 2, (top + bottom) // 2

    def __str__(self) -> str:
        return " ".join([self.kind, json.dumps(self.text, ensure_ascii=False), *self.states])


@dataclass(slots=True, frozen=True)
class Screen:
    package: str
    elements: list[Element]
    bounds: tuple[int, int, int, int]
    num_hidden: int = 0  # elements over MAX_ELEMENTS

    def __str__(self) -> str:
        lines = [f"{number} {element}" for number, element in enumerate(self.elements, 1)]
        if self.num_hidden:
            lines.append(f"({self.num_hidden} more elements are not listed)")
        return "\n".join([f"app {self.package}", *lines])

    def get_element(self, number: int) -> Element | None:
        return self.elements[number - 1] if 1 <= number <= len(self.elements) else None


def parse_screen(output: str) -> Screen:
    """Parse the output of `uiautomator dump`. Raise ScreenError if it contains no valid hierarchy."""
    start, end = output.find("<hierarchy"), output.rfind("</hierarchy>")
    if start < 0 or end < start:
        raise ScreenError(f"uiautomator returned no screen: {_clean_text(output)[:200] or 'nothing'}")
    if "<!" in output[:start] or len(output) > MAX_XML:
        raise ScreenError("the screen's XML is too large" if len(output) > MAX_XML else "it has a DOCTYPE")
    root = _parse_xml(_repair_xml(output[start : end + len("</hierarchy>")]))
    elements = list(_find_elements(root))
    packages = (re.sub(r"[^\w.]", "", node.attributes.get("package", ""))[:100] for node in root.children)
    package = next(filter(None, packages), "unknown")
    bounds = next((node.bounds for node in root.children if node.bounds), DEFAULT_BOUNDS)
    return Screen(package, elements[:MAX_ELEMENTS], bounds, max(0, len(elements) - MAX_ELEMENTS))


def _parse_xml(xml: str) -> _Node:
    root = _Node({})
    ancestors = [root]

    def begin_element(_: str, attributes: dict[str, str]) -> None:
        if len(ancestors) > MAX_DEPTH:
            raise ScreenError(f"the screen's XML is nested deeper than {MAX_DEPTH} levels")
        node = _Node(attributes)
        ancestors[-1].children.append(node)
        ancestors.append(node)

    def end_element(_: str) -> None:
        ancestors.pop()

    def reject_doctype(*_: object) -> None:
        raise ScreenError("the screen's XML has a DOCTYPE, which uiautomator never writes")

    parser = expat.ParserCreate()
    parser.StartElementHandler = begin_element
    parser.EndElementHandler = end_element
    parser.StartDoctypeDeclHandler = reject_doctype
    try:
        parser.Parse(xml.encode("utf-8", errors="replace"), True)
    except expat.ExpatError as error:
        raise ScreenError(f"the screen's XML is invalid: {error}") from error
    return root.children[0]  # <hierarchy>


def _repair_xml(text: str) -> str:
    """Return the text as valid XML, with two errors of uiautomator repaired: emojis as two references to surrogates,
    and control characters."""

    def replace_char(match: re.Match[str]) -> str:
        hexadecimal, decimal = match.groups()
        code_point = int(hexadecimal, 16) if hexadecimal else int(decimal)
        if 0xD800 <= code_point <= 0xDFFF:
            return chr(code_point)
        return match.group() if code_point in (9, 10, 13) or 32 <= code_point < 0x110000 else " "

    xml = CHAR_REF.sub(replace_char, text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", " ", xml)


def _find_elements(node: _Node) -> Iterator[Element]:
    """Yield the actionable or readable elements in the order of the screen. An actionable element without a text of its
    own is labelled with the texts inside it, which are not listed again."""
    for child in node.children:
        bounds = child.bounds
        text = child.text
        label_ids: set[int] = set()
        if bounds is not None and child.is_actionable:
            if not text:
                text = _clean_text(" ".join(_collect_labels(child, label_ids)))
            yield Element(child.kind, text, _list_states(child), bounds)
        elif bounds is not None and text:
            yield Element(child.kind, text, _list_states(child), bounds)
        yield from _find_elements(_remove_texts(child, label_ids) if label_ids else child)


def _collect_labels(node: _Node, label_ids: set[int]) -> Iterator[str]:
    for child in node.children:
        if not child.is_actionable:
            if child.text:
                label_ids.add(id(child))
                yield child.text
            yield from _collect_labels(child, label_ids)


def _remove_texts(node: _Node, label_ids: set[int]) -> _Node:
    """Return the node without the texts of the nodes whose ids are in `label_ids`."""
    children = [_remove_texts(child, label_ids) for child in node.children]
    cleared_attributes = {"text": "", "content-desc": ""} if id(node) in label_ids else {}
    return _Node(node.attributes | cleared_attributes, children)


def _list_states(node: _Node) -> tuple[str, ...]:
    states = []
    if node.is_set("checkable"):
        states.append("on" if node.is_set("checked") else "off")
    states += [name for name in ("focused", "selected", "scrollable", "password") if node.is_set(name)]
    if node.attributes.get("enabled") == "false":
        states.append("disabled")
    return tuple(states)


def _clean_text(text: str) -> str:
    """Return a text as one line of at most MAX_TEXT_CHARS printable characters."""
    words = "".join(char if char.isprintable() else " " for char in text[: 10 * MAX_TEXT_CHARS]).split()
    line = " ".join(words)
    return line if len(line) <= MAX_TEXT_CHARS else line[: MAX_TEXT_CHARS - 1] + "…"
