"""Connection to Ray: an instance started on this machine for the run, or an existing cluster."""

from __future__ import annotations

import logging
import os
import platform
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from TrainingFactory import __version__
from TrainingFactory.tools.threads import in_thread

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
ACTOR_PREFIX = "tfactory"  # of the names of our actors
STORE_BYTES = 256 * 2**20  # bytes; it carries weights only to other machines
CONNECT_SECONDS = 5.0  # seconds in which the cluster's head must accept a connection
VERSIONS_SECONDS = 60.0  # seconds in which every machine must report its versions
Resources = Mapping[str, float]


def require_ray() -> Any:
    """Return the ray package; raise ValueError with the install command if it is missing."""
    try:
        import ray  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise ValueError("Ray is not installed: pip install 'training-factory[ray]'") from error
    return ray


def read_versions() -> dict[str, str]:
    """Return the versions of Python and packages in this process that must be equal on all machines of a cluster."""
    python_version = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python_version, "Ray": require_ray().__version__, "TrainingFactory": __version__}


class RaySession:
    """Connection to Ray that allocates resources. `address` is compute.address; None: start Ray on this machine,
    reachable only from it. The sessions of a process share one connection; the last one closes it, unless it existed
    before."""

    _lock = threading.Lock()
    _open_sessions: ClassVar[set[RaySession]] = set()
    _ray_folders: ClassVar[list[tempfile.TemporaryDirectory[str]]] = []  # Ray's, if a session started it

    def __init__(self, address: str | None = None, num_gpus: int | None = None) -> None:
        self.address, self._num_gpus = address, num_gpus

    async def open(self) -> None:
        """Connect without blocking the event loop, and compare versions on all machines. Further calls do nothing."""
        if self not in self._open_sessions:
            # Ray's processes end with the thread that started them; threads of `in_thread` never end.
            await in_thread(self._connect)

    async def close(self) -> None:
        await in_thread(self._disconnect)

    def _connect(self) -> None:
        with self._lock:
            if self.address is None:  # read when Ray is imported: listen on 127.0.0.1 only
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
                # Ray lowers its workers' priority: samplers would starve beside the run itself.
                os.environ.setdefault("RAY_worker_niceness", "0")
            else:  # seconds for a head that accepts connections but does not answer; Ray's default is 20
                os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
            # Do not print the raylet log of a lost machine over the run's own message.
            os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Raylet is terminated")
            ray = require_ray()
            if not ray.is_initialized():
                logging.getLogger("ray").setLevel(logging.ERROR)
                folder = tempfile.TemporaryDirectory(prefix="tfactory-ray-", ignore_cleanup_errors=True)
                quiet_options = {"log_to_driver": False, "logging_level": logging.ERROR}
                if self.address is not None:
                    _join_cluster(ray, self.address, quiet_options)
                else:  # "local" overrides RAY_ADDRESS
                    options = {"object_store_memory": STORE_BYTES, "_temp_dir": folder.name} | quiet_options
                    options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
                    with _show_last_gpus(ray, self._num_gpus):
                        ray.init("local", num_gpus=self._num_gpus, **options)
                self._ray_folders.append(folder)
            self._open_sessions.add(self)
        try:
            if self.address is not None:
                _check_versions(ray)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        with self._lock:
            self._open_sessions.discard(self)
            if self._ray_folders and not self._open_sessions:
                require_ray().shutdown()
                self._ray_folders.pop().cleanup()

    def pick_gpus(self, requested_gpus: float | None, uses_gpu: bool = True) -> float:
        """Return the number of GPUs per process: `requested_gpus`; if it is None, 1 with `uses_gpu` on a cluster with
        GPUs, else 0."""
        if requested_gpus is not None:
            return requested_gpus
        return float(uses_gpu and "GPU" in require_ray().cluster_resources())

    async def check_capacity(self, bundles: Sequence[Resources], role: str) -> None:
        """Raise ValueError if the cluster could not hold the bundles even when idle."""
        nodes = [node["Resources"] for node in await in_thread(require_ray().nodes) if node["Alive"]]
        total_resources, requested_resources = _sum_resources(nodes), _sum_resources(bundles)
        reason = f"requested {_describe(requested_resources)}, but the whole cluster has {_describe(total_resources)}"
        if _fits(requested_resources, total_resources):
            oversized = [bundle for bundle in bundles if not any(_fits(bundle, node) for node in nodes)]
            if not oversized:
                return
            machines = "; ".join(map(_describe, nodes))
            reason = f"one machine must have {_describe(oversized[0])}, but the machines have {machines}"
        raise ValueError(
            f"Cannot place {role}: {reason}. Request less (compute.samplers, gpus_per_sampler, cpus_per_sampler), or "
            "add machines with `ray start`"
        )

    async def allocate_group(self, bundles: Sequence[Resources], role: str, timeout: float) -> Any:
        """Allocate a placement group with these resource bundles, such as {"CPU": 1, "GPU": 1}. Raise ValueError at
        once if the cluster could never hold them, or after `timeout` seconds if they are not free."""
        await self.check_capacity(bundles, role)
        ray = require_ray()
        # Ray rejects an empty bundle; one byte of memory is free on every machine.
        nonempty_bundles = [
            {key: amount for key, amount in bundle.items() if amount} or {"memory": 1.0} for bundle in bundles
        ]
        group = ray.util.placement_group(nonempty_bundles)
        try:
            if await in_thread(group.wait, timeout):
                return group
            free_resources = _describe(await in_thread(ray.available_resources))
            raise ValueError(
                f"Could not place {role} within {timeout:g} s: requested "
                f"{_describe(_sum_resources(nonempty_bundles))}, free are {free_resources}. Wait until other jobs have "
                "ended, or request less (`tfactory cluster status`)"
            )
        except BaseException:
            self.remove_group(group)
            raise

    def remove_group(self, group: Any) -> None:
        """Release the resources of a placement group; this ends its actors."""
        ray = require_ray()
        if ray.is_initialized():
            ray.util.remove_placement_group(group)

    def options(self, role: str, group: Any = None, bundle_index: int = 0, **options: Any) -> dict[str, Any]:
        """Return the options of an actor that `tfactory cluster status` shows as `role`. If a placement group is given,
        the actor runs in its bundle number `bundle_index`. The options forbid Ray to restart the actor or retry its
        calls, because its state would be lost."""
        if group is not None:
            strategy = require_ray().util.scheduling_strategies.PlacementGroupSchedulingStrategy
            options["scheduling_strategy"] = strategy(group, bundle_index)
        name = f"{ACTOR_PREFIX}:{role}:{uuid.uuid4().hex[:8]}"
        return {"num_cpus": 0, **options, "name": name, "max_restarts": 0, "max_task_retries": 0}

    async def describe_cluster(self) -> dict[str, Any]:
        """Return the cluster's machines with their resources, and TrainingFactory's actors."""
        return await in_thread(read_cluster_status, require_ray())


@contextmanager
def _show_last_gpus(ray: Any, num_gpus: int | None) -> Iterator[None]:
    """Show Ray only the last `num_gpus` GPUs inside the block, because the run's own process uses the first one."""
    previous_gpus = os.environ.get(VISIBLE_GPUS)
    accelerator_manager = ray._private.accelerators.get_accelerator_manager_for_resource("GPU")
    gpu_indices = range(accelerator_manager.get_current_node_num_accelerators())
    visible_gpus = [*map(str, gpu_indices)] if previous_gpus is None else previous_gpus.split(",")
    if num_gpus is not None and len(visible_gpus) > num_gpus:
        os.environ[VISIBLE_GPUS] = ",".join(visible_gpus[-num_gpus:])
    try:
        yield
    finally:
        os.environ.pop(VISIBLE_GPUS, None)
        os.environ |= {} if previous_gpus is None else {VISIBLE_GPUS: previous_gpus}


def _join_cluster(ray: Any, address: str, options: dict[str, Any]) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in host or not host or not port.isdigit()):
        raise ValueError(f"Invalid compute.address={address}: use auto, or HOST:PORT of the cluster's head")
    resolved_address = address
    try:
        # Ray itself would retry for minutes and then exit; it replaces 127.0.0.1 by the machine's own address.
        resolved_address = ray._private.services.canonicalize_bootstrap_address_or_die(address)
        host, _, port = resolved_address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address=resolved_address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        resolved_note = "" if resolved_address == address else f" (resolved to {resolved_address})"
        raise ValueError(
            f"Cannot join the Ray cluster at compute.address={address}{resolved_note}: "
            f"{str(error).strip().splitlines()[0]} Start "
            "one with `ray start --head`, join it on every other machine with `ray start --address=HOST:PORT`, and run "
            "this command on one of them; or remove compute.address to start Ray on this machine"
        ) from error


def _check_versions(ray: Any) -> None:
    """Raise ValueError if a machine has other versions than this one, or does not report them."""
    pin_to = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    query = ray.remote(num_cpus=0, max_retries=0)(read_versions)
    local_versions, differences = read_versions(), list[str]()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    refs = [query.options(scheduling_strategy=pin_to(node["NodeID"], soft=False)).remote() for node in nodes]
    for node, ref in zip(nodes, refs, strict=True):
        try:
            remote_versions = ray.get(ref, timeout=VERSIONS_SECONDS)
        except Exception as error:  # the machine may lack the package, or have an incompatible version
            reason = str(error).strip().splitlines()[-1]
            remote_versions = dict.fromkeys(local_versions, f"unknown ({reason})")
        differing_names = [name for name in local_versions if remote_versions[name] != local_versions[name]]
        texts = [f"{name} {remote_versions[name]} (here {local_versions[name]})" for name in differing_names]
        if texts:
            differences.append(f"{node['NodeName']} has {', '.join(texts)}")
    if differences:
        raise ValueError(
            f"All machines of a cluster need the same versions: {'; '.join(differences)}. Install the same versions "
            "there, or remove the machine from the cluster with `ray stop`"
        )


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(key, 0.0) >= amount for key, amount in bundle.items())


def _sum_resources(bundles: Sequence[Resources]) -> dict[str, float]:
    return {key: sum(bundle.get(key, 0.0) for bundle in bundles) for key in set[str]().union(*bundles)}


def _describe(resources: Resources) -> str:
    return ", ".join(f"{resources.get(key, 0.0):g} {key}" for key in ("CPU", "GPU"))


def read_cluster_status(ray: Any) -> dict[str, Any]:
    ray_state = ray._private.state  # the public API needs the dashboard
    free_resources = ray_state.available_resources_per_node()
    live_nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes = {
        node["NodeID"]: {
            "name": node["NodeName"], "id": node["NodeID"], "address": node["NodeManagerAddress"],
            "resources": node["Resources"], "free": free_resources.get(node["NodeID"], {})
        }
        for node in live_nodes
    }  # fmt: skip
    actors = [
        {
            "what": actor["Name"].split(":")[1], "pid": actor["Pid"], "since": actor["StartTime"] / 1000,
            "node": nodes.get(actor["Address"]["NodeID"], {}).get("name", "?"),
            "node_id": actor["Address"]["NodeID"],
        }
        for actor in ray_state.actors().values()
        if actor["Name"].startswith(f"{ACTOR_PREFIX}:") and actor["State"] != "DEAD"
    ]  # fmt: skip
    return {"nodes": [*nodes.values()], "actors": sorted(actors, key=lambda actor: actor["what"])}
