"""HTML pages from templates. Every page extends `base.html.jinja`, is self-contained and escapes all values."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from TrainingFactory.common.texts import escape_control
from TrainingFactory.runs.embedded_images import EmbeddedImages

TEMPLATES_FOLDER = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """Render a template; escape HTML and control characters in its values. Templates show messages with their images by
    calling `images.render`."""
    return _make_environment().get_template(template).render(values, images=EmbeddedImages())


@cache
def _make_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escape,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment


def _escape(value: object) -> object:
    """Return markup unchanged, and any other value as text without control characters."""
    return value if isinstance(value, Markup) else escape_control(str(value))
