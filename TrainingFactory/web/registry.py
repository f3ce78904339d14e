"""Routes of the model registry: versions, comparisons, aliases and promotion."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from TrainingFactory.apps.views import registry as views
from TrainingFactory.apps.views import shapes
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Events, Site
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.web.pool import Pool


class AliasRequest(BaseModel):
    alias: str = "champion"
    number: int = 0  # version number; for a rollback, the expected current version (0: any)


class PromotionRequest(AliasRequest):
    suite: str  # name from GET /api/suites
    first: bool = False  # the alias does not exist yet


class AliasChange(BaseModel):
    version: str  # current version of the alias
    was: int | None  # number of its previous version
    command: str  # equivalent command


class SuiteList(BaseModel):
    suites: dict[str, str]  # name -> file


class RegistryRoutes:
    def __init__(self, site: Site, runs_folder: Path, pool: Pool) -> None:
        self._runs_folder, self._pool = runs_folder, pool
        self._catalogue = Catalogue(get_registry_path(runs_folder))
        self._runs_option = views.format_runs_option(runs_folder)
        site.add("GET", "/api/models", self.list_models)
        site.add("GET", "/api/models/{name}/{number}", self.show_version)
        site.add("GET", "/api/compare", self.compare)
        site.add("GET", "/api/suites", self.list_suites)
        site.add("POST", "/api/models/{name}/alias", self.set_alias)
        site.add("POST", "/api/models/{name}/rollback", self.roll_back)
        site.add("POST", "/api/models/{name}/promote", self.promote)

    def list_models(self) -> shapes.ModelList:
        """List the registered models with their versions."""
        return views.list_models(self._catalogue)

    def show_version(self, name: str, number: int) -> shapes.VersionView:
        """Show a version with its lineage, evaluations and promotion decisions."""
        return views.make_version_view(self._catalogue, f"{name}:{number}")

    def compare(self, first: str, second: str) -> shapes.ComparisonView:
        """Compare two models or runs by their recorded evaluations."""
        return views.make_comparison_view(first, second, self._runs_folder, self._catalogue)

    def list_suites(self) -> SuiteList:
        """List the suites with a gate in the server's working directory and its `suites/` folder."""
        return SuiteList(suites={name: str(path) for name, path in _find_suites().items()})

    def set_alias(self, name: str, request: AliasRequest) -> AliasChange:
        """Set an alias to a version."""
        version, previous_number = self._catalogue.set_alias(f"{name}:{request.number}", request.alias)
        command = f"tfactory registry alias {version} {request.alias}{self._runs_option}"
        return AliasChange(version=str(version), was=previous_number, command=command)

    def roll_back(self, name: str, request: AliasRequest) -> AliasChange:
        """Roll an alias back to its previous version."""
        if request.number and (current := self._catalogue.alias(name, request.alias)) != request.number:
            text = f"{name}@{request.alias} has moved from version {request.number} to {current}; reload the page"
            raise ApiError(text, "number", status=409)
        version, previous_number = self._catalogue.rollback(name, request.alias)
        command = f"tfactory registry rollback {name} --alias {request.alias}{self._runs_option}"
        return AliasChange(version=str(version), was=previous_number, command=command)

    async def promote(self, name: str, request: PromotionRequest) -> Events:
        """Promote a version if it passes the suite's gate: events `told`, then `done` with the decision."""
        if (suite := _find_suites().get(request.suite)) is None:
            suite_names = ", ".join(_find_suites()) or "none here"
            raise ApiError(f"no suite {request.suite!r} with a gate; available: {suite_names}", "suite")
        version = str(self._catalogue.get(f"{name}:{request.number}"))
        arguments = {"version": version, "alias": request.alias, "suite": str(suite), "first": request.first}
        return self._pool.stream("promote", "promote", arguments | {"runs": str(self._runs_folder)})


def _find_suites() -> dict[str, Path]:
    paths = [path for folder in (Path(), Path("suites")) for path in sorted(folder.glob("*.y*ml"))]
    return {path.stem: path for path in paths if path.is_file() and b"\ngate:" in b"\n" + path.read_bytes()}
