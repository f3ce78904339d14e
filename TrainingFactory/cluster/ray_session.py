"""A connection to Ray: started on this machine for a run, or to a cluster that is there."""

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

VISIBLE = "CUDA_VISIBLE_DEVICES"
PREFIX = "tfactory"  # of the names of our actors
OBJECT_STORE = 256 * 2**20  # bytes; weights travel by it only to other machines
PROBE = 5.0  # seconds in which the head of a cluster must take a connection
CHECK = 60.0  # seconds in which every machine must tell its versions
Resources = Mapping[str, float]


def require_ray() -> Any:
    """Return the package, or say how to install it."""
    try:
        import ray  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise ValueError("Ray is not installed: pip install 'training-factory[ray]'") from error
    return ray


def versions() -> dict[str, str]:
    """Return what must be equal on all machines of a cluster, as it is in this process."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "Ray": require_ray().__version__, "TrainingFactory": __version__}


class RaySession:
    """Connects to Ray and places work there. `address` is as in compute.address; without one Ray is started on this
    machine, reachable from it alone. All sessions of a process share its connection: what the first one began ends with
    the last one, and a connection that was there before stays."""

    _lock = threading.Lock()
    _open: ClassVar[set[RaySession]] = set()
    _began: ClassVar[list[tempfile.TemporaryDirectory[str]]] = []  # by the first one; holds what Ray writes

    def __init__(self, address: str | None = None, num_gpus: int | None = None) -> None:
        self.address, self._num_gpus = address, num_gpus

    async def open(self) -> None:
        """Connect without blocking the event loop, and compare the versions on all machines; again does nothing."""
        if self not in self._open:
            # Ray's own processes end with the thread that started them: those of `in_thread` never end.
            await in_thread(self._connect)

    async def close(self) -> None:
        await in_thread(self._disconnect)

    def _connect(self) -> None:
        with self._lock:
            if self.address is None:  # read when Ray is imported: 127.0.0.1, which others cannot reach
                os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
                # Ray lets its workers give way to everything else: samplers would starve beside the run itself.
                os.environ.setdefault("RAY_worker_niceness", "0")
            else:  # seconds for a head that takes connections and does not answer; Ray's own 20 are for one that starts
                os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
            # A lost machine would print the end of its raylet's log twice, over what the run says of it.
            os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Raylet is terminated")
            ray = require_ray()
            if not ray.is_initialized():
                logging.getLogger("ray").setLevel(logging.ERROR)
                folder = tempfile.TemporaryDirectory(prefix="tfactory-ray-", ignore_cleanup_errors=True)
                quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
                if self.address is not None:
                    _join(ray, self.address, quiet)
                else:  # "local" also where RAY_ADDRESS names a cluster
                    own = {"object_store_memory": OBJECT_STORE, "_temp_dir": folder.name} | quiet
                    own |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
                    with _last_gpus(ray, self._num_gpus):
                        ray.init("local", num_gpus=self._num_gpus, **own)
                self._began.append(folder)
            self._open.add(self)
        try:
            if self.address is not None:
                _check_versions(ray)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        with self._lock:
            self._open.discard(self)
            if self._began and not self._open:
                require_ray().shutdown()
                self._began.pop().cleanup()

    def gpus(self, asked: float | None, usual: bool = True) -> float:
        """Return the GPUs that one process requests: those asked for, else 1 where that is `usual` and the cluster has
        any."""
        return float(usual and "GPU" in require_ray().cluster_resources()) if asked is None else asked

    async def check(self, bundles: Sequence[Resources], what: str) -> None:
        """Raise where the cluster could not hold the bundles even if it were empty."""
        nodes = [node["Resources"] for node in await in_thread(require_ray().nodes) if node["Alive"]]
        have, want = _total(nodes), _total(bundles)
        reason = f"asked for {_told(want)}, and the whole cluster has {_told(have)}"
        if _fits(want, have):
            lone = [bundle for bundle in bundles if not any(_fits(bundle, node) for node in nodes)]
            if not lone:
                return
            reason = f"one machine must have {_told(lone[0])}, and they have {'; '.join(map(_told, nodes))}"
        raise ValueError(
            f"{what} cannot be placed: {reason}. Ask for less (compute.samplers, gpus_per_sampler, cpus_per_sampler), "
            "or add machines by `ray start`"
        )

    async def placed(self, bundles: Sequence[Resources], what: str, timeout: float) -> Any:
        """Return a placement group with one bundle of resources each, such as {"CPU": 1, "GPU": 1}. Raise at once
        where the cluster could never hold them, else when the time is over."""
        await self.check(bundles, what)
        ray = require_ray()
        # A bundle of nothing cannot be placed: this much of the memory is on every machine.
        some = [{k: v for k, v in bundle.items() if v} or {"memory": 1.0} for bundle in bundles]
        group = ray.util.placement_group(some)
        try:
            if await in_thread(group.wait, timeout):
                return group
            free = _told(await in_thread(ray.available_resources))
            raise ValueError(
                f"{what} could not be placed in {timeout:g} s: asked for {_told(_total(some))}, and free are {free}; "
                "wait until others have ended, or ask for less (`tfactory cluster status`)"
            )
        except BaseException:
            self.unplace(group)
            raise

    def unplace(self, group: Any) -> None:
        """Give the resources of a placement group back; actors in it end."""
        ray = require_ray()
        if ray.is_initialized():
            ray.util.remove_placement_group(group)

    def options(self, what: str, group: Any = None, bundle: int = 0, **more: Any) -> dict[str, Any]:
        """Return options for an actor that `tfactory cluster status` shows as `what`: in a bundle of a placement group
        if one is given, never restarted by Ray and no call repeated, since its state would be gone."""
        if group is not None:
            inside = require_ray().util.scheduling_strategies.PlacementGroupSchedulingStrategy
            more["scheduling_strategy"] = inside(group, bundle)
        name = f"{PREFIX}:{what}:{uuid.uuid4().hex[:8]}"
        return {"num_cpus": 0, **more, "name": name, "max_restarts": 0, "max_task_retries": 0}

    async def status(self) -> dict[str, Any]:
        """Return the machines of the cluster with their resources, and the actors of TrainingFactory."""
        return await in_thread(status, require_ray())


@contextmanager
def _last_gpus(ray: Any, count: int | None) -> Iterator[None]:
    """Show a Ray that starts meanwhile only the last `count` GPUs: the run's own process uses the first one."""
    before, gpus_of = os.environ.get(VISIBLE), ray._private.accelerators.get_accelerator_manager_for_resource
    machine = range(gpus_of("GPU").get_current_node_num_accelerators())
    gpus = [*map(str, machine)] if before is None else before.split(",")
    if count is not None and len(gpus) > count:
        os.environ[VISIBLE] = ",".join(gpus[-count:])
    try:
        yield
    finally:
        os.environ.pop(VISIBLE, None)
        os.environ |= {} if before is None else {VISIBLE: before}


def _join(ray: Any, address: str, quiet: dict[str, Any]) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in host or not host or not port.isdigit()):
        raise ValueError(f"compute.address is {address}; it must be auto, or HOST:PORT of the cluster's head")
    tried = address
    try:
        # Ray itself would try for minutes, and then end the process; for 127.0.0.1 it takes the machine's own address.
        tried = ray._private.services.canonicalize_bootstrap_address_or_die(address)
        host, _, port = tried.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), PROBE).close()
        ray.init(address=tried, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        at = "" if tried == address else f" at {tried}, where Ray looks for it"
        raise ValueError(
            f"compute.address is {address}, but there is no cluster that this process can join{at}: "
            f"{str(error).strip().splitlines()[0]} Start one by `ray start --head`, join it on every other machine by "
            "`ray start --address=HOST:PORT`, and run this command on one of them; or leave compute.address out: then "
            "Ray starts on this machine"
        ) from error


def _check_versions(ray: Any) -> None:
    """Ask every machine for its versions; raise where one has others, or cannot tell."""
    at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    ask, mine, wrong = ray.remote(num_cpus=0, max_retries=0)(versions), versions(), list[str]()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = [ask.options(scheduling_strategy=at(node["NodeID"], soft=False)).remote() for node in nodes]
    for node, answer in zip(nodes, asked, strict=True):
        try:
            theirs = ray.get(answer, timeout=CHECK)
        except Exception as error:  # whatever a machine raises that lacks the package, or has another one
            theirs = dict.fromkeys(mine, f"unknown ({str(error).strip().splitlines()[-1]})")
        other = [f"{part} {theirs[part]} (here {own})" for part, own in mine.items() if theirs[part] != own]
        wrong += [f"{node['NodeName']} has {', '.join(other)}"] if other else []
    if wrong:
        raise ValueError(
            f"the machines of a cluster need the same versions: {'; '.join(wrong)}. Install the same there, or "
            "take the machine out of the cluster by `ray stop` on it"
        )


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(key, 0.0) >= amount for key, amount in bundle.items())


def _total(each: Sequence[Resources]) -> dict[str, float]:
    return {key: sum(one.get(key, 0.0) for one in each) for one in each for key in one}


def _told(resources: Resources) -> str:
    return ", ".join(f"{resources.get(key, 0.0):g} {key}" for key in ("CPU", "GPU"))


def status(ray: Any) -> dict[str, Any]:
    state = ray._private.state  # the public way needs the dashboard
    free, alive = state.available_resources_per_node(), [node for node in ray.nodes() if node["Alive"]]
    nodes = {
        node["NodeID"]: {
            "name": node["NodeName"], "id": node["NodeID"], "address": node["NodeManagerAddress"],
            "resources": node["Resources"], "free": free.get(node["NodeID"], {}),
        }
        for node in alive
    }  # fmt: skip
    actors = [
        {
            "what": actor["Name"].split(":")[1], "pid": actor["Pid"], "since": actor["StartTime"] / 1000,
            "node": nodes.get(actor["Address"]["NodeID"], {}).get("name", "?"),
            "node_id": actor["Address"]["NodeID"],
        }
        for actor in state.actors().values()
        if actor["Name"].startswith(f"{PREFIX}:") and actor["State"] != "DEAD"
    ]  # fmt: skip
    return {"nodes": [*nodes.values()], "actors": sorted(actors, key=lambda actor: actor["what"])}
