"""HTML pages that need nothing beside them: the frame, the style and the escaping that all of them share."""

from __future__ import annotations

from html import escape

from TrainingFactory.services.reports.texts import clean


def page(title: str, body: str, style: str = "") -> str:
    """`title` is any text, `body` is HTML, `style` is CSS beside the common one."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{text(title)}</title><style>{STYLE}{style}</style></head><body>{body}\n</body></html>\n"
    )


def text(value: object) -> str:
    """Text of anybody as text of a page: no markup, no characters that a page may not hold."""
    return escape(clean(str(value)))


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { margin: 0 0 .5rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .9rem; text-align: left; }
@media (max-width: 600px) { th, td { padding: .3rem .4rem; } }
tr { border-bottom: 1px solid #8884; } td { font-variant-numeric: tabular-nums; }
.small { font-size: .85rem; opacity: .75; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 1rem; margin-top: 1rem; }
.sides > div { border: 1px solid #8886; border-radius: 8px; padding: .8rem 1rem; }
.sides p { margin: .25rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.sides b { display: inline-block; min-width: 5.2em; font-weight: 600; }
.calls { color: #b58100; } .tool { color: #a347ba; } .end { font-weight: 600; border-top: 1px solid #8884; }
.bar { display: inline-block; height: .8em; background: #3b82c4; }
svg { width: 100%; max-width: 640px; } svg text { font-size: 12px; fill: currentColor; }
svg line { stroke: #8886; } svg rect { fill: none; stroke: #8886; }
svg polyline { fill: none; stroke: #3b82c4; stroke-width: 2.5; }
svg circle { fill: #3b82c4; opacity: .6; }
code { background: #8882; padding: .1em .35em; border-radius: 4px; }
"""
