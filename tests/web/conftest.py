"""A page over the runs of a test module, and a tab of a real Chromium that shows it. The browser ends
with the last test of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits import forked
from tests.kits.browser import PROGRAM, Browser, Tab
from tests.kits.page import Served, serving


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A real Chromium; see `tests/kits/browser.py`."""
    if not PROGRAM.is_file():
        pytest.skip("there is no Chromium for this machine; make servers installs one where it can")
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    with forked.forks():
        yield


@pytest.fixture(scope="module")
def forked_jobs(forks: None) -> Iterator[None]:
    """Jobs that need a model are forked from one process, which has torch already."""
    with forked.forked_jobs():
        yield


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[Served]:
    with contextlib.chdir(runs.parent), serving(runs) as served:
        yield served


@pytest.fixture
def tab(browser: Browser, page: Served) -> Iterator[Tab]:
    """An open page, which in the end must not have complained of anything, nor asked anybody else."""
    with browser.tab(page.entry) as tab:
        yield tab
        assert tab.errors == []
        asked = {address.split("/")[2] for address in tab.requests if not address.startswith("data:")}
        assert asked == {page.url.split("/")[2]}
