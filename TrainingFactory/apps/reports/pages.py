"""HTML pages from templates: every page extends `base.html.jinja`, stands alone and shows foreign text as text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from TrainingFactory.common.texts import clean

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """Fill the template; what a value holds is escaped, and control characters are written out."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: object) -> object:
    """Return HTML of our own (from a macro) as it is, anything else as text that is safe to show."""
    return value if isinstance(value, Markup) else clean(str(value))
