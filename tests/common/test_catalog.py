"""Names lead to objects, lazily, and a wrong one to the nearest."""

from __future__ import annotations

import pytest

from TrainingFactory.common import catalog
from TrainingFactory.envs import CalculatorEnvironment, SearchEnvironment


def test_names_and_aliases() -> None:
    assert catalog.find("environment", "calculator") is CalculatorEnvironment
    for name in ("search", "env_search", "env_search_v1"):
        assert catalog.find("environment", name) is SearchEnvironment
    assert catalog.names("environment")["env_search"] == "search"
    assert catalog.names("environment")["search"] is None


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"environment 'serch'; did you mean search\?"):
        catalog.find("environment", "serch")


def test_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_CATALOG", {"environment": {"broken": "TrainingFactory.nothing:X"}})
    with pytest.raises(ValueError, match="could not be imported"):
        catalog.find("environment", "broken")


def test_entry_points_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    def installed(group: str) -> list[EntryPoint]:
        return [EntryPoint("plugin", "TrainingFactory.envs:SearchEnvironment", group)]

    monkeypatch.setattr(catalog, "entry_points", installed)
    assert catalog.find("environment", "plugin") is SearchEnvironment


def test_a_name_that_ends_with_a_slash_is_the_beginning_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_CATALOG", {"environment": {"upper/": "string:capwords"}})
    assert catalog.find("environment", "upper/some/words") == "Some/words"
    with pytest.raises(ValueError, match=r"environment 'lower/some'"):
        catalog.find("environment", "lower/some")
