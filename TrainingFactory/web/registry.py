"""Routes of the model registry: versions, comparisons, aliases and promotion."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from TrainingFactory.apps.views import registry as views
from TrainingFactory.apps.views import shapes
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Events, Site
from TrainingFactory.registry.catalogue import Catalogue, registry_path
from TrainingFactory.web.pool import Pool


class Alias(BaseModel):
    alias: str = "champion"
    number: int = 0  # version number; for a rollback, the expected current version (0: any)


class Promote(Alias):
    suite: str  # name from GET /api/suites
    first: bool = False  # the alias does not exist yet


class Moved(BaseModel):
    version: str  # current version of the alias
    was: int | None  # number of its previous version
    command: str  # equivalent command


class Suites(BaseModel):
    suites: dict[str, str]  # name -> file


class RegistryRoutes:
    def __init__(self, site: Site, runs: Path, pool: Pool) -> None:
        self._runs, self._pool, self._catalogue = runs, pool, Catalogue(registry_path(runs))
        site.add("GET", "/api/models", self.models)
        site.add("GET", "/api/models/{name}/{number}", self.version)
        site.add("GET", "/api/compare", self.compare)
        site.add("GET", "/api/suites", self.suites)
        site.add("POST", "/api/models/{name}/alias", self.alias)
        site.add("POST", "/api/models/{name}/rollback", self.rollback)
        site.add("POST", "/api/models/{name}/promote", self.promote)

    def models(self) -> shapes.ModelList:
        """List the registered models with their versions."""
        return views.models(self._catalogue)

    def version(self, name: str, number: int) -> shapes.VersionView:
        """Show a version with its lineage, evaluations and promotion decisions."""
        return views.version_view(self._catalogue, f"{name}:{number}")

    def compare(self, first: str, second: str) -> shapes.ComparisonView:
        """Compare two models or runs by their recorded evaluations."""
        return views.comparison_view(first, second, self._runs, self._catalogue)

    def suites(self) -> Suites:
        """List the suites with a gate in the server's working directory and its `suites/` folder."""
        return Suites(suites={name: str(path) for name, path in _suites().items()})

    def alias(self, name: str, asked: Alias) -> Moved:
        """Set an alias to a version."""
        version, was = self._catalogue.set_alias(f"{name}:{asked.number}", asked.alias)
        command = f"tfactory registry alias {version} {asked.alias}{views.where_of(self._runs)}"
        return Moved(version=str(version), was=was, command=command)

    def rollback(self, name: str, asked: Alias) -> Moved:
        """Roll an alias back to its previous version."""
        if asked.number and (now := self._catalogue.alias(name, asked.alias)) != asked.number:
            text = f"{name}@{asked.alias} has moved from version {asked.number} to {now}; reload the page"
            raise ApiError(text, "number", status=409)
        version, was = self._catalogue.rollback(name, asked.alias)
        command = f"tfactory registry rollback {name} --alias {asked.alias}{views.where_of(self._runs)}"
        return Moved(version=str(version), was=was, command=command)

    async def promote(self, name: str, asked: Promote) -> Events:
        """Promote a version if it passes the suite's gate; events `told`, then `done` with `promoted` and why."""
        if (suite := _suites().get(asked.suite)) is None:
            known = ", ".join(_suites()) or "none here"
            raise ApiError(f"no suite {asked.suite!r} with a gate; available: {known}", "suite")
        version = str(self._catalogue.get(f"{name}:{asked.number}"))
        given = {"version": version, "alias": asked.alias, "suite": str(suite), "first": asked.first}
        return self._pool.events("promote", "promote", given | {"runs": str(self._runs)})


def _suites() -> dict[str, Path]:
    paths = [path for folder in (Path(), Path("suites")) for path in sorted(folder.glob("*.y*ml"))]
    return {path.stem: path for path in paths if path.is_file() and b"\ngate:" in b"\n" + path.read_bytes()}
