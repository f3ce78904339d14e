"""Fixtures for all tests."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.internal.conjecture import providers

from tests.kits.cli import Run
from tests.kits.scale import scale, vllm_place  # noqa: F401  # fixtures

# The tests are written for CPUs; the benchmarks gpu_*.py check GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

gc.disable()  # until all modules are imported: none of what they make is garbage, and looking for it takes seconds


def pytest_collection_finish() -> None:
    """Leaves what the modules have made out of every later collection."""
    gc.freeze()
    gc.enable()


# Hypothesis would read the constants of all imported modules of the project, 800 files in each process of the suite, to
# draw some of them at times. The strategies of the tests say themselves what may break the code.
providers._get_local_constants = lambda: providers._local_constants

SERVERS = re.compile(r"""\.servers["/]|kits\.(scale|gyms|browser|android)\b|\bNODE\b|kit\.PYTHON""")
OF_SERVERS = {"scale", "vllm_place"}  # fixtures


# What a test module names that trains or samples with a model; `make check` leaves its tests out.
TRAINING = re.compile(
    r"\.train\(|\btrain\(|tfactory\(|Training\(|NativeEngine|load_model"
    r"|kits\.(run|warm|serve|page|proxy|engine|ahead|forked|learner|compat)\b"
)


@functools.cache
def names(module: Path, pattern: re.Pattern[str]) -> bool:
    """Return whether a test module's text matches. Each module is searched once, not once for every test."""
    return pattern.search(module.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a module all of whose tests `-m` leaves out: `make check` starts in seconds."""
    if not collection_path.name.startswith("test_"):
        return None
    patterns = {"not servers": SERVERS, "not training": TRAINING}
    left_out = [pattern for part, pattern in patterns.items() if part in config.option.markexpr]
    return any(names(collection_path, pattern) for pattern in left_out) or None


def pytest_itemcollected(item: Any) -> None:
    """Mark tests that need servers or train a model. Keep tests with a module-scoped fixture in one process of the
    suite, so that the fixture is made once."""
    if names(item.path, SERVERS) or OF_SERVERS & set(item.fixturenames):
        item.add_marker(pytest.mark.servers)
    if names(item.path, TRAINING):
        item.add_marker(pytest.mark.training)
    if item.get_closest_marker("xdist_group") is None and any(
        made[-1].scope == "module" for made in item._fixtureinfo.name2fixturedefs.values()
    ):
        item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test that is an `async def` in an event loop of its own. One with async fixtures is marked `anyio`, whose
    plugin runs both in one loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.get_closest_marker("anyio") is not None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def warm() -> Path:
    """A tiny model that does a task with a tool now and then; see `tests/kits/warm.py`."""
    from tests.kits.warm import WARM  # torch takes seconds, and most tests do without

    return WARM


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `brief` that nothing has disturbed."""
    from tests.kits.run import brief, train

    return train(brief(tmp_path_factory.mktemp("runs")), "whole").run


@pytest.fixture
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for judges in the environment, and no proxy between them and the loopback."""
    from tests.kits.judge import KEY

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Makes packages of the other factories: `install(DataFactory=DATA)`."""
    from tests.kits.siblings import installing

    with installing(tmp_path / "packages") as install:
        yield install


@pytest.fixture
def tfactory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in an empty folder: (status, stdout, stderr)."""
    from TrainingFactory.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
