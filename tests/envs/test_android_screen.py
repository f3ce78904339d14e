"""The screen of a device as text, from XML that apps determine."""

from __future__ import annotations

from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from TrainingFactory.envs.android.screen import ScreenError, parse_screen

TAIL = "UI hierchary dumped to: /dev/tty\n"


def screen(*nodes: str) -> str:
    return f"<?xml version='1.0'?><hierarchy rotation=\"0\">{''.join(nodes)}</hierarchy>{TAIL}"


def node(text: str = "", children: str = "", bounds: str = "[0,0][10,20]", **attributes: str) -> str:
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<node text="{text}" class="android.widget.Button" package="a.b" bounds="{bounds}"{given}>{children}</node>'


def test_elements_are_numbered_with_kind_text_and_states() -> None:
    shown = parse_screen(
        screen(node("Wi-Fi", checkable="true", checked="true"), node("Off", enabled="false"))
    )
    assert str(shown) == 'app a.b\n1 Button "Wi-Fi" on\n2 Button "Off" disabled'
    second = shown.get_element(2)
    assert second is not None and second.center == (5, 10)
    assert shown.get_element(0) is None and shown.get_element(3) is None


def test_the_texts_inside_a_row_are_its_label() -> None:
    row = node("", node("Wi-Fi") + node("", node("Connected")), clickable="true")
    assert str(parse_screen(screen(row))) == 'app a.b\n1 Button "Wi-Fi Connected"'


def test_invisible_and_empty_nodes_are_left_out() -> None:
    nodes = (node("a", bounds="[5,5][5,9]"), node("b", bounds="odd"), node("c", bounds=""), node(""))
    assert parse_screen(screen(*nodes)).elements == []


def test_uiautomators_surrogates_and_control_characters_are_read() -> None:
    shown = parse_screen(screen(node("&#55357;&#56832; &#0;&#1;a\x07b &amp; &lt;node&gt; &quot;&#10;")))
    assert shown.elements[0].text == '😀 a b & <node> "'


@pytest.mark.parametrize(
    "xml",
    [
        '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><hierarchy><node text="&e;"/></hierarchy>',
        '<hierarchy><!DOCTYPE x [<!ENTITY e "a">]></hierarchy>',
        "<hierarchy>" + "<node>" * 300 + "</node>" * 300 + "</hierarchy>",
        '<hierarchy><node text="&unknown;"/></hierarchy>',
        "<hierarchy><node></hierarchy>",
        "ERROR: could not get idle state.",
        "",
        "<hierarchy>" + " " * (5 << 20) + "</hierarchy>",
    ],
)
def test_what_uiautomator_never_writes_is_rejected(xml: str) -> None:
    with pytest.raises(ScreenError):
        parse_screen(xml)


def test_long_texts_and_many_elements_are_limited() -> None:
    shown = parse_screen(screen(*(node("x" * 5000) for _ in range(200))))
    assert len(str(shown)) < 80 * 160 and "(120 more elements are not listed)" in str(shown)


@settings(max_examples=30)
@given(st.text(max_size=80))
def test_no_text_can_imitate_another_element(text: str) -> None:
    quoted = escape(text.encode("utf-8", "replace").decode(), {'"': "&quot;"})
    shown = parse_screen(screen(node(quoted, clickable="true"), node("last")))
    assert len(str(shown).splitlines()) == 3 and str(shown).endswith('2 Button "last"')
