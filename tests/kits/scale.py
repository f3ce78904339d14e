"""Ray and vLLM's CPU build, where `make servers` has installed them: a folder that only these tests see.

Tests that use them are marked with `SCALE`: they share one process of the suite, one Ray and one vLLM engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[2] / ".servers" / "scale"
SCALE = pytest.mark.xdist_group("scale")


def packages() -> str:
    """Return the folder with their packages; skip where they are not installed."""
    if not HOME.with_suffix(".installed").is_file():
        pytest.skip("Ray and vLLM are not installed: `make servers` does it, where PyPI can be reached")
    [found] = HOME.glob("lib/python*/site-packages")
    return str(found)


@pytest.fixture(scope="session")
def scale() -> Iterator[None]:
    """Make ray and vllm importable, here and in the processes that a test starts."""
    folder = packages()
    before = os.environ.get("PYTHONPATH")
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), folder])
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"}
    assert find_spec("ray") is not None and find_spec("vllm") is not None
    yield
    sys.path.remove(folder)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def ray_head(scale: None) -> Iterator[str]:
    """One Ray on this machine for all tests; its address, which `compute.address` takes."""
    from TrainingFactory.cluster.ray_session import RaySession

    session = RaySession()
    session._connect()  # in this thread, which lives as long
    import ray  # pyright: ignore[reportMissingImports]

    yield ray.get_runtime_context().gcs_address
    session._disconnect()
