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
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from TrainingFactory.apps.plan.memory import amount, cache_bytes, free_bytes
from TrainingFactory.apps.serving.served import Served, load_served, served_config
from TrainingFactory.apps.serving.server import ChatServer
from TrainingFactory.assembly.fleet import elsewhere
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.loading import pick_device, pick_dtype
from TrainingFactory.registry.catalogue import Catalogue, registry_path
from TrainingFactory.registry.rows import WRITTEN
from TrainingFactory.resolve.model_names import Named, find_model

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
    catalogue = Catalogue(registry_path(runs, registry))

    def config_of(version: str) -> TrainingConfig:
        return served_config(find_model(version, runs, registry), overrides)

    if elsewhere(config_of(str(found.version))):
        raise ValueError(
            f"{found.written} is followed by engines of this process only: name a version, such as AGENT:3"
        )
    follower = Follower(server, catalogue, found.version.model, written["alias"], config_of, say)
    follower.tell(None)
    ended = threading.Event()
    # A daemon: a large model that is being loaded must not keep a stopped server alive.
    thread = threading.Thread(target=follower.watch, args=(ended,), name="alias-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LAST)


@dataclass(slots=True)
class Follower:
    """Looks at an alias, and frees what versions that answer no more leave behind."""

    server: ChatServer
    catalogue: Catalogue
    model: str
    alias: str
    config_of: Callable[[str], TrainingConfig]
    say: Callable[[str], None]
    _tried: str = ""  # the version that could not be loaded
    _again: float = 0.0  # when it is tried once more
    _loaded: int = 0  # models in memory beside the one that answers
    _freed: bool = (
        False  # just now, when the last answer of a model may still have held it: it is done once more
    )

    def watch(self, ended: threading.Event) -> None:
        """Look every second until it has ended."""
        while not ended.wait(EVERY):
            try:
                self.look()
            except Exception as error:  # whatever it is, the old version answers
                failed = f"{self._tried} cannot be loaded: " if self._tried else ""
                self.tell(f"{failed}{error}; {self.server.served.version} goes on answering")
            count, again = len(self.server.finishing()), self._freed
            if (fewer := count < self._loaded) or again:
                _free()
            self._loaded, self._freed = count, fewer

    def look(self) -> None:
        """Let the version that the alias names take over, where it is another one; raise where it cannot."""
        tried, self._tried = self._tried, ""
        number = self.catalogue.alias(self.model, self.alias)
        if number is None:  # the newest one is meant, or there is an error that tells what is there
            number = self.catalogue.get(f"{self.model}@{self.alias}").number
        version = f"{self.model}:{number}"
        if version != self.server.served.version:
            self._tried = version
            if version == tried and time.monotonic() < self._again:
                return
            self._again = time.monotonic() + AGAIN
            config = self.config_of(version)
            check_room(config, self.server.served)
            self._loaded += 1
            self.server.switch(load_served(config, version))
            self._tried = ""
            self.say(f"{self.model}@{self.alias} is {version} now, which answers new requests")
        self.tell(None)

    def tell(self, problem: str | None) -> None:
        """Tell in /health what is wrong, and in the log where that is something new."""
        told, name = self.server.follows, f"{self.model}@{self.alias}"
        self.server.follows = {"follows": name, "problem": problem}
        if problem is not None and told != self.server.follows:
            self.say(f"{name}: {problem}")


def check_room(config: TrainingConfig, beside: Served) -> None:
    """Raise MemoryError, with what is missing, where a model does not fit beside the one that answers."""
    device = pick_device(config.model.device)
    needed, there = needed_bytes(config, beside), free_bytes(device)
    if needed > there:
        raise MemoryError(
            f"it needs {amount(needed)} beside {beside.version}, and {device} has {amount(there)} free: "
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
