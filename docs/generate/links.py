"""Links of pages to files of the repository that are not part of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path

# A source file and the page of the site that is generated from it. On GitHub the link opens the source.
GENERATED_FROM = {
    "TrainingFactory/config/schema.py": "reference/config.md",
    "TrainingFactory/cli/app.py": "reference/cli.md",
    "TrainingFactory/__init__.py": "reference/python.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def rewrite_outside_links(markdown: str, docs: Path, page: str, root: Path) -> str:
    """Replace links to files outside `docs`: by the page generated from the file, else by the file's path as code.
    Raise ValueError if the file does not exist."""

    def replace(link: re.Match[str]) -> str:
        label, address = link[1], link[2]
        target = Path(os.path.normpath(docs / Path(page).parent / address))
        if target.is_relative_to(docs):
            return link[0]
        path = target.relative_to(root).as_posix()
        if not target.exists():
            raise ValueError(f"docs/{page} links to {address}, but {path} does not exist. Fix the link.")
        if path in GENERATED_FROM:
            return f"[{label}]({os.path.relpath(GENERATED_FROM[path], Path(page).parent)})"
        shown = label.strip("`")
        return f"`{path}`" if shown in path else f"{label} (`{path}`)"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)
