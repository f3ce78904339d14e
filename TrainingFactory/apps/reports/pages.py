"""HTML pages from templates. Every page extends `base.html.jinja`, is self-contained and escapes all values."""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from TrainingFactory.common.images import label, split_text, thumbnail
from TrainingFactory.common.texts import escape_control
from TrainingFactory.types import Image, Message

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """Render a template; escape HTML in the values and write out control characters."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = _content
    return environment


def _content(message: Message) -> Markup:
    """Return the texts of a message and small copies of its images."""
    pieces = split_text(message.content, message.images) or ["(no text)"]
    return Markup().join(
        _picture(piece) if isinstance(piece, Image) else escape_control(piece) for piece in pieces
    )


def _picture(image: Image) -> Markup | str:
    try:
        data = base64.b64encode(thumbnail(image)).decode()
    except ValueError as error:  # the file of the run is missing or damaged
        return f"{label(image)} ({error})"
    style = "display: block; max-width: 320px; height: auto"
    return Markup('<img src="data:image/jpeg;base64,{}" alt="{}" title="{}" style="{}"/>').format(
        data, label(image), label(image), style
    )


def _shown(value: object) -> object:
    """Return markup from our own macros unchanged, and any other value as text without control characters."""
    return value if isinstance(value, Markup) else escape_control(str(value))
