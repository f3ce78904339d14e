"""The documentation site: generated pages, options of papers, links, printed commands, drawn curves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from benchmarks import curves
from docs.generate.built_site import broken_links
from docs.generate.cli_page import cli_page
from docs.generate.config_page import config_page
from docs.generate.links import rewrite_outside_links
from docs.generate.python_page import python_page
from tests.kits.docs import ROOT, Page
from TrainingFactory.cli.app import app
from TrainingFactory.config import load_config
from TrainingFactory.config.schema import ToolEntry, get_sections
from TrainingFactory.trainers.notices import list_unused_options

DOCS = ROOT / "docs"
PACKAGES = ROOT / ".servers" / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
PRINTED = ["docs/README.md", "docs/PAPERS.md", "docs/PUBLISHED_RESULTS.md"] + [
    page for page in PAGES if page.startswith("docs/algorithms/")
]


def test_the_config_reference_has_every_option_with_its_default() -> None:
    page = config_page()
    for name, section in (get_sections() | {"tools": ToolEntry}).items():
        for key in section.model_fields:
            [row] = [line for line in page.splitlines() if f'id="{name}.{key}"' in line]
            assert row.count(" | ") == 3 and not row.endswith("|  |"), row
    assert "`grpo` | `grpo`, `ppo`, `rft`" in page and "| `1e-06` | number > 0 |" in page


def test_the_command_reference_has_every_command() -> None:
    page = cli_page()
    commands = list(command_names(app, "tfactory"))
    assert {"tfactory train", "tfactory runs resume"} <= set(commands)
    headings = set(re.findall(r"^#+ (.+)$", page, re.MULTILINE))
    assert set(commands) <= headings


def command_names(parent, name: str) -> Iterator[str]:
    for child in parent:
        if not child.startswith("-"):
            yield f"{name} {child}"
            yield from command_names(parent[child], f"{name} {child}")


def test_the_python_reference_has_every_public_name() -> None:
    entries = set(re.findall(r"^### (\w+)$", python_page(), re.MULTILINE))
    for module in ("", ".config", ".tools", ".envs", ".rewards", ".services"):
        assert set(import_module(f"TrainingFactory{module}").__all__) <= entries, module


def test_a_public_name_without_docstring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = import_module("TrainingFactory.tools")
    monkeypatch.setattr(tools.as_tool, "__doc__", None)
    with pytest.raises(ValueError, match=r"TrainingFactory\.tools\.as_tool .*docstring"):
        python_page()


def test_the_options_of_every_paper_load() -> None:
    rows = re.findall(r"^\| .+ \| `([\w.]+=[^`]*)` \|$", Page("docs/PAPERS.md").text, re.MULTILINE)
    assert len(rows) > 30
    for row in rows:
        config = load_config(None, row.split())
        assert not list_unused_options(config, has_episodes=True), row


def test_the_variants_of_grpo_load() -> None:
    text = Page("docs/algorithms/grpo.md").text
    table = text[text.index("## Published variants") : text.index("## Bias")]
    variants = re.findall(r"^\| [^|]+ \| `(\w+: .*)` \|$", table, re.MULTILINE)
    assert len(variants) == 9
    for variant in variants:
        options = yaml.safe_load(f"{{{variant}}}")
        load_config(None, [f"grpo.{key}={value}" for key, value in options.items()])


@pytest.mark.parametrize("page", PRINTED)
def test_every_printed_command_exists(page: str) -> None:
    assert Page(page).commands()  # fails for a command or option that does not exist


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", Page(page).text, flags=re.MULTILINE | re.DOTALL)
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in address or address.endswith("-mode-only"):
            continue
        path, _, anchor = address.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page} links to {address}"
        assert not anchor or anchor in anchors(target), f"{page} links to {address}"


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'^<a id="([\w-]+)"></a>$', text, re.MULTILINE))


def test_links_out_of_the_docs_become_pages_or_text() -> None:
    text = (
        "[options](../TrainingFactory/config/schema.py) [README](../README.md) [the tests](../tests) "
        "[tools](TOOLS.md)\n```\n[kept](../README.md)\n```\n"
    )
    assert rewrite_outside_links(text, DOCS, "UI.md", ROOT) == (
        "[options](reference/config.md) `README.md` `tests` [tools](TOOLS.md)\n```\n[kept](../README.md)\n```\n"
    ).replace("`tests`", "the tests (`tests`)")
    nested = rewrite_outside_links("[cli](../../TrainingFactory/cli/app.py)", DOCS, "algorithms/ppo.md", ROOT)
    assert nested == "[cli](../reference/cli.md)"
    with pytest.raises(ValueError, match=r"UI\.md .*missing\.py"):
        rewrite_outside_links("[x](../missing.py)", DOCS, "UI.md", ROOT)


def test_broken_links_and_foreign_hosts_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b.html#here">b</a><a href="#top">up</a>')
    (tmp_path / "b.html").write_text(
        '<a href="a.html#gone">a</a><img src="none.png"><a href="https://example.org">x</a>'
        '<script src="https://example.org/x.js"></script><p id="here"></p>'
    )
    assert broken_links(tmp_path) == [
        "b.html loads https://example.org/x.js from the network",
        "b.html links to a.html#gone, which does not exist",
        "b.html links to none.png, which does not exist",
    ]


def test_the_curves_are_drawn_from_the_recorded_figures() -> None:
    recorded = curves.read_curves()
    assert list(recorded) == list(curves.EXPERIMENTS)
    for name, curve in recorded.items():
        picture = (curves.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert picture == curves.draw(curves.EXPERIMENTS[name], curve), (
            f"python -m benchmarks.curves --draw: {name}"
        )
        config, *overrides = [word for word in curve.command.split() if "=" in word or "/" in word]
        load_config(ROOT / config, overrides)
        assert curve.heldout[-1][1] > curve.heldout[0][1]


def test_the_fonts_of_the_equations_are_in_the_folder() -> None:
    folder = DOCS / "assets" / "katex"
    fonts = re.findall(r"url\(([^)]+)\)", (folder / "katex.min.css").read_text(encoding="utf-8"))
    assert fonts and all((folder / font).is_file() for font in fonts)


@pytest.mark.slow
@pytest.mark.servers
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    if not PACKAGES.is_dir():
        pytest.skip("needs MkDocs: make servers")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(PACKAGES), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    found = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any(entry["location"].startswith("reference/config.html#grpo") for entry in found)
