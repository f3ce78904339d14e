"""Ray and vLLM's CPU build, where `make servers` has installed them: a folder that only these tests see.

Tests that use them are marked with `SCALE`: they share one process of the suite, one Ray and one vLLM engine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).resolve().parents[2] / ".servers" / "scale"
SCALE = pytest.mark.xdist_group("scale")
# Of vLLM: the model runs in the process of the core. A third one would import all of it again, and poll for work.
IN_ONE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def packages() -> str:
    """Return the folder with their packages; skip where they are not installed."""
    if not HOME.with_suffix(".installed").is_file():
        pytest.skip("Ray and vLLM are not installed: `make servers` does it, where PyPI can be reached")
    [found] = HOME.glob("lib/python*/site-packages")
    return str(found)


@contextmanager
def importable() -> Iterator[None]:
    """Make ray and vllm importable, here and in the processes that are started meanwhile. Not for longer: whoever looks
    whether vllm is there, as trl does, would import it."""
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


@pytest.fixture(scope="module")
def scale() -> Iterator[None]:
    with importable():
        yield


@dataclass
class Shared:
    """A place with a vLLM engine, on an event loop that runs while a test waits: `run` takes what is asynchronous, as
    asyncio.run would. `model` is the folder of its config."""

    model: str
    place: Any = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def call(self, method: str, *args: Any) -> Any:
        return self.run(self.place.call(method, *args))


@pytest.fixture(scope="module")
def vllm_place(scale: None) -> Iterator[Shared]:
    """The one vLLM engine of the suite: builtin:tiny in float32, up to 512 tokens, with room for adapters of rank 4. It
    has whatever weights the last test has loaded: every test loads its own."""
    from tests.kits.learner import make_learner
    from TrainingFactory.cluster.local import (
        LocalEngineLauncher,
    )  # torch takes seconds, and most tests do without
    from TrainingFactory.learning.publishing import Publisher
    from TrainingFactory.models import load_model
    from TrainingFactory.sampling.vllm_engine import make_lora_options
    from TrainingFactory.types import EngineSpec

    publisher = Publisher(make_learner(load_model("builtin:tiny", dtype="float32").model))
    shared = Shared(publisher.model_folder)
    options = make_lora_options(4) | {"kv_cache_memory_bytes": 2**28, "distributed_executor_backend": IN_ONE}
    spec = EngineSpec("vllm", shared.model, 512, slots=16, dtype="float32", options=options)
    places = LocalEngineLauncher(spec, {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"})
    shared.place = shared.run(places.launch_engine(0))
    yield shared
    shared.run(places.close())
    publisher.close()
