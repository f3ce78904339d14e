"""A server that follows an alias: when `agent@champion` names another version, that one is loaded beside the one that
answers, and takes over. What cannot be loaded leaves the old one answering."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.loading import pick_device, pick_dtype
from TrainingFactory.services.build.model_names import Named, find_model
from TrainingFactory.services.doctor.memory import amount, cache_bytes, free_bytes
from TrainingFactory.services.registry.catalogue import Catalogue, registry_path
from TrainingFactory.services.registry.rows import WRITTEN
from TrainingFactory.services.serving.served import Served, load_served, served_config
from TrainingFactory.services.serving.server import ChatServer

log = logging.getLogger(__name__)
EVERY = 1.0  # seconds between two looks at the alias
AGAIN = 30.0  # seconds until a version that could not be loaded is tried once more
LAST = 10.0  # seconds that a version which is being loaded is waited for at the end


@contextmanager
def following(
    server: ChatServer,
    found: Named,
    overrides: Sequence[str] = (),
    runs: str | Path = "runs",
    registry: str | Path | None = None,
    say: Callable[[str], None] = log.warning,
) -> Iterator[None]:
    """Let the server follow the alias that its model was named by; nothing is followed for any other name."""
    written = WRITTEN.fullmatch(found.written)
    if found.version is None or written is None or written["alias"] is None:
        yield
        return
    follower = Follower(server, found.version.model, written["alias"], overrides, runs, registry, say)
    ended = threading.Event()
    # A daemon: a large model that is being loaded must not keep a stopped server alive.
    thread = threading.Thread(target=follower.watch, args=(ended,), name="alias-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LAST)


class Follower:
    """Looks at an alias, and at what the versions that do not answer any more leave behind."""

    def __init__(
        self,
        server: ChatServer,
        model: str,
        alias: str,
        overrides: Sequence[str],
        runs: str | Path,
        registry: str | Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._server, self._model, self._alias = server, model, alias
        self._overrides, self._runs, self._registry, self._say = overrides, runs, registry, say
        self._catalogue = Catalogue(registry_path(runs, registry))
        self._name = f"{model}@{alias}"
        self._tried, self._again = "", 0.0  # the version that could not be loaded, and when it is tried again
        self._loaded = 0  # models in memory beside the one that answers, and what loading has left there
        self._tell(None)

    def watch(self, ended: threading.Event) -> None:
        """Look every second until it has ended."""
        while not ended.wait(EVERY):
            try:
                self.look()
            except Exception as error:  # whatever it is, the old version answers
                self._tell(f"{self._name}: {error}; {self._server.served.version} goes on answering")
            if (count := len(self._server.finishing())) < self._loaded:
                _free()
            self._loaded = count

    def look(self) -> None:
        """Let the version that the alias names take over, where it is another one; raise where it cannot."""
        version = self._named()
        if version != self._server.served.version:
            if version == self._tried and time.monotonic() < self._again:
                return
            self._tried, self._again = version, time.monotonic() + AGAIN
            config = served_config(find_model(version, self._runs, self._registry), self._overrides)
            check_room(version, config, self._server.served)
            self._loaded += 1
            self._server.switch(self._load(config, version))
            self._say(f"{self._name} is {version} now, which answers new requests")
        self._tried = ""
        self._tell(None)

    def _named(self) -> str:
        try:
            number = self._catalogue.alias(self._model, self._alias)
            # without a row it is the newest one, or an error that tells what is there
            return f"{self._model}:{number or self._catalogue.get(self._name).number}"
        except Exception:
            self._tried = ""
            raise

    def _load(self, config: TrainingConfig, version: str) -> Served:
        try:
            return load_served(config, version)
        except Exception as error:  # foreign code
            text = str(error) or type(error).__name__
            raise ValueError(f"{version} cannot be loaded: {text}") from error

    def _tell(self, problem: str | None) -> None:
        """Tell in /health what is wrong, and in the log where that is something new."""
        told = self._server.follows
        self._server.follows = {"follows": self._name, "problem": problem}
        if problem is not None and told != self._server.follows:
            self._say(problem)


def check_room(version: str, config: TrainingConfig, beside: Served) -> None:
    """Raise MemoryError, with what is missing, where a model does not fit beside the one that answers."""
    device = pick_device(config.model.device)
    needed, there = needed_bytes(config, beside), free_bytes(device)
    if needed > there:
        raise MemoryError(
            f"{version} needs {amount(needed)} beside {beside.version}, and {device} has {amount(there)} free: "
            f"{amount(needed - there)} are missing"
        )


def needed_bytes(config: TrainingConfig, beside: Served) -> int:
    """Return the memory for the weights and for the keys and values of all slots. What is in no folder, such as a base
    of the hub under an adapter, is taken to be as large as what answers now."""
    model, base = config.model, Path(config.model.name)
    size = pick_dtype(model.dtype, pick_device(model.device)).itemsize
    weights = size if model.quantization == "none" else 1  # bytes of one
    needed = weights * sum(_values(Path(each)) for each in (base, model.adapter) if each is not None)
    if base.is_dir():
        shape = AutoConfig.from_pretrained(base, trust_remote_code=model.trust_remote_code)
    else:
        shape = beside.model.config
        needed += sum(each.nbytes for each in beside.model.parameters())
    slots, length = config.sampling.slots, beside.sampler.max_length
    return needed + cache_bytes(shape.get_text_config(), slots, length, size)


def _values(folder: Path) -> int:
    """Count the values in the safetensors of a folder, by their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def _free() -> None:
    """Give back what nobody uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
