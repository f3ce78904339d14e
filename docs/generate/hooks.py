"""Hooks of MkDocs: generated pages, links to files outside docs/, and a check of every link of the built site."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # MkDocs loads this file by its path

from docs.generate.built_site import broken_links  # noqa: E402
from docs.generate.cli_page import cli_page  # noqa: E402
from docs.generate.config_page import config_page  # noqa: E402
from docs.generate.links import rewrite_outside_links  # noqa: E402
from docs.generate.python_page import python_page  # noqa: E402

GENERATED = {"config": config_page, "cli": cli_page, "python": python_page}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, make_page in GENERATED.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by:
        return markdown
    return rewrite_outside_links(markdown, Path(config.docs_dir), page.file.src_uri, ROOT)


def on_post_build(config: MkDocsConfig) -> None:
    if problems := broken_links(Path(config.site_dir)):
        raise PluginError("\n".join(["The built site has broken links:", *problems]))
