"""The devices of a run: an episode leases one, gets it in its initial state, and releases it. A device that fails is
quarantined: no episode gets it until a later health check succeeds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.options import STRICT, NotNegative, Positive, Text
from TrainingFactory.envs.android.adb import Adb, Device, DeviceUnavailable
from TrainingFactory.envs.android.state import Package

log = logging.getLogger(__name__)
POLL_SECONDS = 0.02  # seconds between two looks for a free device; a call of adb takes about as long
MAX_HEALTH_CHECKS = 3
RETRY_DELAY_SECONDS = 0.5  # seconds after the second check; none after the first
BOOT_TIMEOUT_SECONDS = 120.0  # seconds, after a snapshot was loaded


@checked_dataclass(config=STRICT, frozen=True)
class FarmOptions:
    """Connection and reset of the devices."""

    devices: Annotated[list[Text], Field(min_length=1)]
    """Serials as in `adb devices`. HOST:PORT is connected with `adb connect`."""
    adb: Text = "adb"
    """The adb program."""
    server_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of adb's server. null: 5037."""
    reset: Literal["none", "packages", "snapshot"] = "none"
    """Reset before an episode: nothing but the task's setup, `pm clear` of `packages`, or an emulator's snapshot."""
    packages: list[Package] = Field(default_factory=list)
    snapshot: Text = "clean"
    call_timeout: Positive = 20.0
    """Seconds per adb call."""
    lease_timeout: Positive = 600.0
    """Seconds that an episode waits for a device."""
    quarantine: NotNegative = 300.0
    """Seconds until the health of a quarantined device is checked again."""

    def __post_init__(self) -> None:
        if len(set(self.devices)) < len(self.devices):
            raise ValueError("environment.options.devices names a device twice; remove one")
        if (self.reset == "packages") != bool(self.packages):
            raise ValueError("set reset: packages together with packages: [NAMES], or leave both out")


@dataclass(slots=True)
class Quarantine:
    reason: str
    ends_at: float  # time.monotonic()


class DeviceFarm:
    """Pool that leases devices, first come first served. All farms of a process share their leases, because two
    environments may name the same device. Therefore locks and times belong to threads, not to an event loop."""

    _leased_devices: ClassVar[set[tuple[int | None, str]]] = set()
    _lock = threading.Lock()

    def __init__(self, options: FarmOptions) -> None:
        self.options = options
        self.adb = Adb(options.adb, options.server_port, options.call_timeout)
        self.quarantines: dict[str, Quarantine] = {}
        self.event_counts: Counter[str] = Counter()
        self._wait_queue: deque[object] = deque()

    async def lease_device(self) -> Device:
        """Return a healthy device in its initial state. Raise DeviceUnavailable if there is none."""
        while True:
            device = Device(self.adb, await self._wait_for_device())
            try:
                await self._check_health(device)
                await self._reset_device(device)
            except DeviceUnavailable as error:
                device.failure = str(error)
                self.release_device(device)
                continue  # with the next device, until all are quarantined
            except BaseException:
                self.release_device(device)
                raise
            if self.quarantines.pop(device.serial, None):
                log.warning("Android device %s is healthy again", device.serial)
            self.event_counts["leases"] += 1
            return device

    def release_device(self, device: Device) -> None:
        """Release a device; quarantine it if it was unavailable to a call."""
        if device.failure is not None:
            ends_at = time.monotonic() + self.options.quarantine
            self.quarantines[device.serial] = Quarantine(device.failure, ends_at)
            self.event_counts["failures"] += 1
            log.warning(
                "Android device %s is quarantined for %g s (%d of %d devices are): %s",
                device.serial, self.options.quarantine, len(self.quarantines), len(self.options.devices),
                device.failure,
            )  # fmt: skip
        with self._lock:
            self._leased_devices.discard(self._make_lease_key(device.serial))

    def metrics(self) -> dict[str, float]:
        """Return the number of leases and device failures so far, and of devices that are quarantined now."""
        return {
            "android/leases": self.event_counts["leases"],
            "android/failures": self.event_counts["failures"],
            "android/quarantined": len(self.quarantines),
        }

    async def _wait_for_device(self) -> str:
        """Wait for a free device and mark it as leased."""
        ticket, started_at = object(), time.monotonic()
        self._wait_queue.append(ticket)
        try:
            while True:
                if self._wait_queue[0] is ticket and (serial := self._lease_free_device()) is not None:
                    return serial
                if time.monotonic() - started_at > self.options.lease_timeout:
                    raise DeviceUnavailable(
                        f"no Android device was free for {self.options.lease_timeout:g} s "
                        "(environment.options.lease_timeout). Name more devices, or set environment.num_workers to "
                        "their number. A reward that compares the episodes of a group needs one device per episode"
                    )
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._wait_queue.remove(ticket)

    def _lease_free_device(self) -> str | None:
        """Lease a usable device and return its serial; None if all usable devices are leased."""
        now = time.monotonic()
        usable_serials = [
            serial
            for serial in self.options.devices
            if serial not in self.quarantines or self.quarantines[serial].ends_at <= now
        ]
        with self._lock:
            for serial in usable_serials:
                if self._make_lease_key(serial) not in self._leased_devices:
                    self._leased_devices.add(self._make_lease_key(serial))
                    return serial
        if not usable_serials:
            reasons = "; ".join(quarantine.reason for quarantine in self.quarantines.values())
            raise DeviceUnavailable(f"every Android device is quarantined: {reasons}")
        return None

    def _make_lease_key(self, serial: str) -> tuple[int | None, str]:
        return self.options.server_port, serial

    async def _check_health(self, device: Device) -> None:
        device_state = "unknown"
        for attempt in range(MAX_HEALTH_CHECKS):  # adb's server may just be starting
            if ":" in device.serial:  # does nothing if it is connected
                await self.adb.call("connect", device.serial)
            device_state = await device.read_state()
            if device_state == "device":
                break
            await asyncio.sleep(attempt * RETRY_DELAY_SECONDS)
        else:
            raise DeviceUnavailable(f"Android device {device.serial} is unavailable: {device_state}")
        boot_result = await device.shell("getprop", "sys.boot_completed")
        if boot_result.output.strip() != "1":
            raise DeviceUnavailable(f"Android device {device.serial} has not finished booting")

    async def _reset_device(self, device: Device) -> None:
        if self.options.reset == "snapshot":
            command = ("emu", "avd", "snapshot", "load", self.options.snapshot)
            load_result = await device.call(*command, timeout=BOOT_TIMEOUT_SECONDS)
            if load_result.status != 0 or "OK" not in load_result.output.split():
                reason = (load_result.stderr or load_result.output).strip()[:200]
                raise DeviceUnavailable(
                    f"{device.serial} cannot load snapshot {self.options.snapshot}: {reason}"
                )
            await device.call("wait-for-device", timeout=BOOT_TIMEOUT_SECONDS)
        for package in self.options.packages:
            clear_result = await device.shell("pm", "clear", package)
            if clear_result.output.strip() != "Success":
                reason = (clear_result.stderr or clear_result.output).strip()[:200]
                raise DeviceUnavailable(f"{device.serial} cannot clear {package}: {reason}")
        await device.shell("input", "keyevent", "KEYCODE_HOME")
