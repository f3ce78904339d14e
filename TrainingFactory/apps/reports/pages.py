"""HTML pages from templates. Every page extends `base.html.jinja`, is self-contained and escapes all values."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from TrainingFactory.common.texts import escape_control
from TrainingFactory.runs.embedded_images import EmbeddedImages

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """Render a template. HTML in the values is escaped, and control characters are written out. Templates show messages
    with their images by calling `images.shown`."""
    return _environment().get_template(template).render(values, images=EmbeddedImages())


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
    return environment


def _shown(value: object) -> object:
    """Return markup from our own macros unchanged, and any other value as text without control characters."""
    return value if isinstance(value, Markup) else escape_control(str(value))
