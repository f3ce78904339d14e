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


@pytest.fixture(scope="module")
def module_tab(browser: Browser) -> Iterator[Tab]:
    """One tab for all tests of a module: opening one takes three seconds of processor time."""
    with browser.tab() as tab:
        yield tab


@pytest.fixture
def tab(module_tab: Tab, page: Served) -> Iterator[Tab]:
    """A page that has just been loaded. At the end of the test it must have reported no error, and have sent requests
    to its own server only."""
    module_tab.errors.clear()
    module_tab.requests.clear()
    module_tab.enter(page.entry)
    yield module_tab
    module_tab.run("localStorage.clear()")
    assert module_tab.errors == []
    addresses = [address for address in module_tab.requests if not address.startswith("data:")]
    assert {address.split("/")[2] for address in addresses} == {page.url.split("/")[2]}
