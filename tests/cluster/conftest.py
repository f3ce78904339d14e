"""One Ray for all tests of this folder, which ends with the last of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.scale import importable


@pytest.fixture(scope="package")
def ray_head() -> Iterator[str]:
    """One Ray on this machine for all tests that ask for it; its address, which `compute.address` takes."""
    from TrainingFactory.cluster.ray_session import RaySession

    with importable():
        session = RaySession()
        session._connect()  # in this thread, which lives as long
        import ray  # pyright: ignore[reportMissingImports]

        yield ray.get_runtime_context().gcs_address
        session._disconnect()
