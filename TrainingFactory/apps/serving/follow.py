"""Hot-swapping a server's model: when the alias `agent@champion` moves to another version, load that version beside the
current one and switch to it. If loading fails, the current version keeps serving."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig

from TrainingFactory.apps.plan.memory import format_bytes
from TrainingFactory.apps.serving.served import ServedModel, load_served_model, make_serving_config
from TrainingFactory.apps.serving.server import ChatServer
from TrainingFactory.assembly.fleet import samples_elsewhere
from TrainingFactory.assembly.memory import get_cache_bytes, get_free_bytes, get_state_bytes, release_models
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.dtypes import pick_device, pick_dtype
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.registry.rows import VERSION_NAME
from TrainingFactory.resolve.model_names import ResolvedModel, find_model

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # seconds between two polls of the alias
RETRY_SECONDS = 30.0  # seconds until a failed load is retried
SHUTDOWN_SECONDS = 10.0  # seconds to wait at shutdown for a version that is being loaded


@contextmanager
def follow_alias(
    server: ChatServer,
    model: ResolvedModel,
    overrides: Sequence[str] = (),
    runs_folder: str | Path = "runs",
    registry_file: str | Path | None = None,
    notify: Callable[[str], None] = log.warning,
) -> Iterator[None]:
    """Make the server follow the alias in its model's name; do nothing if the name has no alias."""
    name_match = VERSION_NAME.fullmatch(model.query)
    if model.version is None or name_match is None or name_match["alias"] is None:
        yield
        return
    catalogue = Catalogue(get_registry_path(runs_folder, registry_file))

    def make_config(version_name: str) -> TrainingConfig:
        return make_serving_config(find_model(version_name, runs_folder, registry_file), overrides)

    if samples_elsewhere(make_config(str(model.version))):
        raise ValueError(
            f"{model.query}: only engines in this process can follow an alias; name a version, such as AGENT:3"
        )
    follower = Follower(server, catalogue, model.version.model, name_match["alias"], make_config, notify)
    follower.report_problem(None)
    stop_event = threading.Event()
    # A daemon: a large model that is being loaded must not keep a stopped server alive.
    thread = threading.Thread(target=follower.watch, args=(stop_event,), name="alias-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join(SHUTDOWN_SECONDS)


@dataclass(slots=True)
class Follower:
    """Poller of an alias, which switches the server to the alias's version and frees the memory of replaced
    versions."""

    server: ChatServer
    catalogue: Catalogue
    model: str
    alias: str
    make_config: Callable[[str], TrainingConfig]
    notify: Callable[[str], None]
    _failed_version: str = ""  # the version that failed to load
    _retry_at: float = 0.0  # time of its next retry
    _num_loaded: int = 0  # models in memory besides the current one
    # Memory was just released; release again, as the last response may still have held it.
    _was_freed: bool = False

    def watch(self, stop_event: threading.Event) -> None:
        """Poll every `POLL_SECONDS` seconds until `stop_event` is set."""
        while not stop_event.wait(POLL_SECONDS):
            try:
                self.check_alias()
            except Exception as error:  # whatever the error, the current version keeps serving
                failure = f"{self._failed_version} cannot be loaded: " if self._failed_version else ""
                self.report_problem(f"{failure}{error}; {self.server.model.version} keeps serving")
            num_finishing, was_freed = len(self.server.list_finishing()), self._was_freed
            if (has_freed := num_finishing < self._num_loaded) or was_freed:
                release_models()
            self._num_loaded, self._was_freed = num_finishing, has_freed

    def check_alias(self) -> None:
        """Switch to the alias's version if the server serves another; raise if that version cannot be loaded."""
        failed_version, self._failed_version = self._failed_version, ""
        version_number = self.catalogue.alias(self.model, self.alias)
        if version_number is None:  # means the newest version; otherwise `get` raises and lists what exists
            version_number = self.catalogue.get(f"{self.model}@{self.alias}").number
        version_name = f"{self.model}:{version_number}"
        if version_name != self.server.model.version:
            self._failed_version = version_name
            if version_name == failed_version and time.monotonic() < self._retry_at:
                return
            self._retry_at = time.monotonic() + RETRY_SECONDS
            config = self.make_config(version_name)
            check_free_memory(config, self.server.model)
            self._num_loaded += 1
            self.server.switch_model(load_served_model(config, version_name))
            self._failed_version = ""
            self.notify(f"{self.model}@{self.alias} is now {version_name}, which serves new requests")
        self.report_problem(None)

    def report_problem(self, problem: str | None) -> None:
        """Report a problem (None: none) in /health, and log it if it is new."""
        previous_status, alias_name = self.server.follows, f"{self.model}@{self.alias}"
        self.server.follows = {"follows": alias_name, "problem": problem}
        if problem is not None and previous_status != self.server.follows:
            self.notify(f"{alias_name}: {problem}")


def check_free_memory(config: TrainingConfig, current_model: ServedModel) -> None:
    """Raise MemoryError, with the missing bytes, if a model does not fit in memory beside the current one."""
    device = pick_device(config.model.device)
    required_bytes, available_bytes = estimate_needed_bytes(config, current_model), get_free_bytes(device)
    if required_bytes > available_bytes:
        raise MemoryError(
            f"it needs {format_bytes(required_bytes)} beside {current_model.version}, but {device} has "
            f"{format_bytes(available_bytes)} free; free {format_bytes(required_bytes - available_bytes)} more"
        )


def estimate_needed_bytes(config: TrainingConfig, current_model: ServedModel) -> int:
    """Return the bytes of the weights and of a full KV cache. A model without a local folder, such as an adapter's base
    on the hub, counts as large as the current model."""
    model, base_folder = config.model, Path(config.model.name)
    value_bytes = pick_dtype(model.dtype, pick_device(model.device)).itemsize
    weight_bytes = value_bytes if model.quantization == "none" else 1  # bytes per weight
    folders = [Path(folder) for folder in (base_folder, model.adapter) if folder is not None]
    total_bytes = weight_bytes * sum(map(_count_weights, folders))
    if base_folder.is_dir():
        model_config = AutoConfig.from_pretrained(base_folder, trust_remote_code=model.trust_remote_code)
    else:
        model_config = current_model.model.config
        total_bytes += sum(param.nbytes for param in current_model.model.parameters())
    slots, length = config.sampling.slots, current_model.sampler.max_length
    text_config = model_config.get_text_config()
    total_bytes += get_cache_bytes(text_config, slots, length, value_bytes)
    return total_bytes + get_state_bytes(text_config, slots, value_bytes)


def _count_weights(folder: Path) -> int:
    """Count the values in a folder's safetensors files, from their headers."""
    num_values = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            num_values += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return num_values
