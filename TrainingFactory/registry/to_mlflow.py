"""A registered model in MLflow: a run with the files and metrics, and a model version with tags and aliases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.registry.card import what_of
from TrainingFactory.registry.rows import Version

EXPERIMENT = "training-factory"


def to_mlflow(version: Version, folder: Path, uri: str, evaluations: Sequence[dict[str, Any]]) -> str:
    """Write a version whose files are in a folder to the MLflow at an address, and return what it is called there."""
    try:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"an export to MLflow needs its package: pip install 'training-factory[mlflow]' ({error})"
        ) from error
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT, _artifacts(uri))
        run = client.create_run(experiment, run_name=str(version), tags=_tags(version))
        number = run.info.run_id
        for each in evaluations:
            for name, value in each.get("metrics", {}).items():
                key = f"{what_of(each)}/{name}".replace("@", "_at_").replace("^", "_all_").replace(",", "")
                client.log_metric(number, key, value)
        client.log_artifacts(number, str(folder), "model")
        if not client.search_registered_models(f"name = '{version.model}'"):
            client.create_registered_model(version.model)
        made = client.create_model_version(
            version.model,
            f"{run.info.artifact_uri}/model",
            number,
            _tags(version),
            description=version.description,
        )
        for alias in version.aliases:
            client.set_registered_model_alias(version.model, alias, made.version)
        client.set_terminated(number)
    except MlflowException as error:
        raise OSError(f"MLflow at {uri} did not take {version}: {error}") from error
    return f"models:/{version.model}/{made.version}"


def _artifacts(uri: str) -> str | None:
    """Return where the files go: beside the database where it is one on this machine; else the server says."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).expanduser().resolve().parent / "mlartifacts").as_uri()


def _tags(version: Version) -> dict[str, str]:
    return version.tags | {"tfactory.version": str(version), "tfactory.digest": version.digest}
