"""A connection to Ray: started on this machine for a run, or to a cluster that is there."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from TrainingFactory import __version__
from TrainingFactory.tools.threads import in_thread

NAMESPACE = "training-factory"
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
        raise ValueError(
            "compute.backend is ray, but Ray is not installed: pip install 'training-factory[ray]'"
        ) from error
    return ray


def versions() -> dict[str, str]:
    """Return what must be equal on all machines of a cluster, as it is in this process."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "Ray": require_ray().__version__, "TrainingFactory": __version__}


def _versions_there() -> dict[str, str]:
    return versions()


class RaySession:
    """Connects to Ray and places work there. `address` is as in compute.address; without one Ray is started on this
    machine, reachable from it alone, and ended by `close`. A process that is connected already stays as it is."""

    def __init__(
        self,
        address: str | None = None,
        num_gpus: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.address, self._num_gpus, self._say = address, num_gpus, say
        self._connected = False  # by us
        self._folder: str | None = None  # of what was started here

    async def open(self) -> None:
        """Connect without blocking the event loop, and compare the versions on all machines; again does nothing."""
        # Ray's own processes end with the thread that started them: those of `in_thread` never end.
        await in_thread(self._open)
        if self.address is not None:
            await in_thread(self._check_versions)

    async def close(self) -> None:
        """End what `open` has begun, and only that."""
        if self._connected:
            self._connected = False
            await in_thread(require_ray().shutdown)
        if self._folder is not None:
            await in_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder = None

    def _open(self) -> None:
        if self.address is None:
            # Read when Ray is imported: 127.0.0.1 instead of an address that others can reach.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        ray = require_ray()
        if ray.is_initialized():
            return
        logging.getLogger("ray").setLevel(logging.ERROR)
        common = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.address is None:
            self._folder = tempfile.mkdtemp(prefix="tfactory-ray-")
            ray.init(
                "local",  # also where RAY_ADDRESS names a cluster
                num_gpus=self._num_gpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                _node_ip_address="127.0.0.1",
                _temp_dir=self._folder,
                **common,
            )
        else:
            self._join(ray, self.address, common)
        self._connected = True

    def _join(self, ray: Any, address: str, common: dict[str, Any]) -> None:
        if address != "auto":
            _probe(address)  # Ray itself would try for minutes, and then end the process
        try:
            ray.init(address=address, **common)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(
                f"compute.address is {address}, but this process cannot join a cluster there: {first} Start one by "
                "`ray start --head`, join it on every other machine by `ray start --address=HOST:PORT`, and run this "
                "command on one of them; or leave compute.address out: then Ray starts on this machine"
            ) from error

    def _check_versions(self) -> None:
        """Ask every machine for its versions; raise where one has others, or cannot tell."""
        ray = require_ray()
        at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ask = ray.remote(num_cpus=0, max_retries=0)(_versions_there)
        mine, wrong = versions(), []
        asked = {
            f"{node['NodeName']} ({node['NodeManagerAddress']})": ask.options(
                scheduling_strategy=at(node["NodeID"], soft=False)
            ).remote()
            for node in ray.nodes()
            if node["Alive"]
        }
        for name, answer in asked.items():
            try:
                theirs = ray.get(answer, timeout=CHECK)
            except Exception as error:  # whatever a machine raises that lacks the package, or has another one
                last = str(error).strip().splitlines()[-1]
                wrong.append(f"{name} cannot tell its versions: {type(error).__name__}: {last}")
                continue
            pairs = [(part, theirs.get(part), own) for part, own in mine.items() if theirs.get(part) != own]
            wrong += [f"{name} has {part} {other}, this process has {own}" for part, other, own in pairs]
        if wrong:
            raise ValueError(
                "the machines of a cluster need the same versions: "
                + "; ".join(wrong)
                + ". Install the same there, "
                "or take the machine out of the cluster by `ray stop` on it"
            )

    # -- placing

    async def placed(self, bundles: Sequence[Resources], what: str, timeout: float) -> Any:
        """Return a placement group with one bundle of resources each, such as {"CPU": 1, "GPU": 1}. Raise at once
        where the cluster could not hold them even if it were empty, else when the time is over."""
        ray = require_ray()
        bundles = [{key: value for key, value in bundle.items() if value} for bundle in bundles]
        # A bundle of nothing cannot be placed: this much of the memory is on every machine.
        asked = [bundle or {"memory": 1.0} for bundle in bundles]
        if text := _never(asked, [node["Resources"] for node in await in_thread(ray.nodes) if node["Alive"]]):
            raise ValueError(f"{what} cannot be placed: {text}")
        group = ray.util.placement_group(asked, strategy="PACK")
        try:
            ready = await in_thread(group.wait, timeout)
            if not ready:
                free = await in_thread(ray.available_resources)
                raise ValueError(
                    f"{what} could not be placed in {timeout:g} s: asked for {_told(_total(asked))}, and free are "
                    f"{_told(free)}; wait until others have ended, or ask for less (`tfactory cluster status`)"
                )
        except BaseException:
            self.unplace(group)
            raise
        return group

    def unplace(self, group: Any) -> None:
        """Give the resources of a placement group back; actors in it end."""
        ray = require_ray()
        if ray.is_initialized():
            ray.util.remove_placement_group(group)

    def options(self, what: str, group: Any = None, bundle: int = 0, **more: Any) -> dict[str, Any]:
        """Return options for an actor that `tfactory cluster status` shows as `what`: in a bundle of a placement group
        if one is given, never restarted by Ray and no call repeated, since its state would be gone."""
        inside = require_ray().util.scheduling_strategies.PlacementGroupSchedulingStrategy
        if group is not None:
            more["scheduling_strategy"] = inside(group, bundle)
        name = f"{PREFIX}:{what}:{uuid.uuid4().hex[:8]}"
        fixed = {"name": name, "namespace": NAMESPACE, "max_restarts": 0, "max_task_retries": 0}
        return {"num_cpus": 0, **more, **fixed}

    async def status(self) -> dict[str, Any]:
        """Return the machines of the cluster with their resources, and the actors of TrainingFactory."""
        return await in_thread(_status, require_ray())


def _probe(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") or not host or not port.isdigit():
        raise ValueError(f"compute.address is {address}; it must be auto, or HOST:PORT of the cluster's head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE).close()
    except OSError as error:
        raise ValueError(
            f"compute.address is {address}, but nothing answers there ({error}); `ray status` on the cluster's head "
            "tells whether it runs, and its port, 6379 by default, must be reachable from here"
        ) from error


def _never(asked: Sequence[Resources], nodes: Sequence[Resources]) -> str | None:
    """Return why an empty cluster could not hold the bundles, if it could not."""
    have, want = _total(nodes), _total(asked)
    if any(amount > have.get(key, 0.0) for key, amount in want.items()):
        return f"asked for {_told(want)}, and the whole cluster has {_told(have)}. {_REMEDY}"
    for bundle in asked:
        if not any(all(node.get(key, 0.0) >= amount for key, amount in bundle.items()) for node in nodes):
            most = "; ".join(_told(node) for node in nodes)
            return f"one machine must have {_told(bundle)}, and the machines have {most}. {_REMEDY}"
    return None


_REMEDY = (
    "Ask for less (compute.samplers, gpus_per_sampler, cpus_per_sampler), or add machines by `ray start`"
)


def _total(each: Sequence[Resources]) -> dict[str, float]:
    keys = sorted({key for one in each for key in one})
    return {key: sum(one.get(key, 0.0) for one in each) for key in keys}


def _told(resources: Resources) -> str:
    """Return cores, GPUs and resources of users' own in words; machines also have memory and their own names."""
    own = {
        key: value for key, value in resources.items() if not key.startswith(("node:", "bundle", "memory"))
    }
    shown = {"CPU": 0.0, "GPU": 0.0} | {key: value for key, value in own.items() if "_" not in key}
    return ", ".join(f"{value:g} {key}" for key, value in shown.items())


def _status(ray: Any) -> dict[str, Any]:
    state = ray._private.state  # the public way needs the dashboard
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = {node["NodeID"]: node["NodeName"] for node in nodes}
    actors = [
        {
            "what": actor["Name"].split(":")[1],
            "node": names.get(actor["Address"]["NodeID"], "?"),
            "pid": actor["Pid"],
            "state": actor["State"],
            "since": actor["StartTime"] / 1000,
        }
        for actor in state.actors().values()
        if actor["Name"].startswith(f"{PREFIX}:") and actor["State"] != "DEAD"
    ]
    free = state.available_resources_per_node()
    return {
        "nodes": [
            {
                "name": node["NodeName"],
                "address": node["NodeManagerAddress"],
                "resources": {key: node["Resources"].get(key, 0.0) for key in ("CPU", "GPU", "memory")},
                "free": {key: free.get(node["NodeID"], {}).get(key, 0.0) for key in ("CPU", "GPU", "memory")},
            }
            for node in nodes
        ],
        "actors": sorted(actors, key=lambda actor: (actor["what"], actor["since"])),
    }
