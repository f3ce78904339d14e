"""Export of a registered version to MLflow: a run with files and metrics, and a model version with tags and aliases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.registry.card import format_title
from TrainingFactory.registry.rows import Version

EXPERIMENT_NAME = "training-factory"


def upload_to_mlflow(version: Version, folder: Path, uri: str, evaluations: Sequence[dict[str, Any]]) -> str:
    """Upload a version, whose files are in `folder`, to the MLflow at `uri`; return its `models:/` URI."""
    try:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"the export needs the MLflow package: pip install 'training-factory[mlflow]' ({error})"
        ) from error
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        existing = client.get_experiment_by_name(EXPERIMENT_NAME)
        experiment_id = (
            existing.experiment_id if existing else client.create_experiment(EXPERIMENT_NAME, _make_uri(uri))
        )
        run = client.create_run(experiment_id, run_name=str(version), tags=_format_tags(version))
        run_id = run.info.run_id
        for record in evaluations:
            for metric_name, value in record.get("metrics", {}).items():
                metric_key = f"{format_title(record)}/{metric_name}".replace("@", "_at_")
                metric_key = metric_key.replace("^", "_all_").replace(",", "")
                client.log_metric(run_id, metric_key, value)
        client.log_artifacts(run_id, str(folder), "model")
        if not client.search_registered_models(f"name = '{version.model}'"):
            client.create_registered_model(version.model)
        model_uri, version_tags = f"{run.info.artifact_uri}/model", _format_tags(version)
        new_version = client.create_model_version(
            version.model, model_uri, run_id, version_tags, description=version.description
        )
        for alias in version.aliases:
            client.set_registered_model_alias(version.model, alias, new_version.version)
        client.set_terminated(run_id)
    except MlflowException as error:
        raise OSError(f"cannot export {version} to MLflow at {uri}: {error}") from error
    return f"models:/{version.model}/{new_version.version}"


def _make_uri(uri: str) -> str | None:
    """Return the URI of the artifact folder beside a local SQLite database; None for any other `uri`, so that the
    MLflow server decides."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).expanduser().resolve().parent / "mlartifacts").as_uri()


def _format_tags(version: Version) -> dict[str, str]:
    return version.tags | {"tfactory.version": str(version), "tfactory.digest": version.digest}
