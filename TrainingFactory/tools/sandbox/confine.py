"""Sandboxing of the current process without privileges or packages: resource limits, a private disk, Landlock for
files, and a seccomp filter for all other system calls. Runs in the interpreter's process before any foreign code, and
imports nothing of this package, because that import would take longer than the sandboxing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from glob import glob
from typing import Any

from syscalls import ALLOWED, ARCHITECTURES, PRETENDED, RULED, numbers

libc = ctypes.CDLL(None, use_errno=True)
MIB = 2**20

# prctl
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
# unshare
NEW_USER, NEW_MOUNTS, NEW_NETWORK, NEW_IPC = 0x10000000, 0x00020000, 0x40000000, 0x08000000
# mount
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
# Landlock: system calls (the same numbers on all architectures) and rights
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights, one bit each, by ABI version
EXECUTE, SPECIAL_FILES = 1 << 0, (1 << 6) | (1 << 9) | (1 << 11)  # special: devices and sockets


class Unavailable(Exception):
    """Raised if this machine lacks a layer of the sandbox."""


def confine(settings: dict[str, Any]) -> dict[str, Any]:
    """Sandbox this process. Return how each restriction is enforced (None: not at all), and the "missing" layers."""
    missing: list[str] = []
    report: dict[str, Any] = {"missing": missing}

    def layer(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (Unavailable, OSError) as error:
            missing.append(f"{function.__name__}: {error}")
            return None

    folder, disk = settings["folder"], settings["disk_mb"]
    limits(settings)
    private = bool(layer(namespaces, disk, folder)) if sys.platform == "linux" else False
    os.chdir(folder)
    abi = layer(landlock, folder, settings["readable"])
    drop_capabilities()
    if not settings["threads"]:
        layer(no_new_processes)
    filtered = layer(seccomp, settings["threads"])
    report["files"] = f"Landlock (version {abi})" if abi else None
    network = [name for name, active in (("seccomp", filtered), ("network namespace", private)) if active]
    report["network"] = " and ".join(network) or None
    only_limit = "RLIMIT_NPROC" if not settings["threads"] and os.getuid() != 0 else None
    report["processes"] = "seccomp" if filtered else only_limit  # root is exempt from the limit
    report["signals"] = "seccomp" if filtered else None
    report["memory"] = f"{settings['memory_mb']} MiB of address space (RLIMIT_AS)"
    report["disk"] = f"{disk} MiB in all (tmpfs)" if private else f"{disk} MiB a file (RLIMIT_FSIZE)"
    return report


def limits(settings: dict[str, Any]) -> None:
    values = {
        resource.RLIMIT_CPU: settings["cpu_seconds"],
        resource.RLIMIT_AS: settings["memory_mb"] * MIB,
        resource.RLIMIT_FSIZE: settings["disk_mb"] * MIB,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in values.items():
        # For CPU time, the soft limit sends SIGXCPU one second before the hard limit kills the process.
        hard_limit = value + 1 if kind == resource.RLIMIT_CPU else value
        inherited = resource.getrlimit(kind)[1]
        hard_limit = hard_limit if inherited == resource.RLIM_INFINITY else min(hard_limit, inherited)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of the address space
            resource.setrlimit(kind, (min(value, hard_limit), hard_limit))


def no_new_processes() -> None:
    """Forbid new processes and threads: set their limit for this user to 0, which this process alone exceeds."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def namespaces(disk_mb: int, folder: str) -> bool:
    """Enter an empty network namespace, and mount a tmpfs on the folder, which vanishes with the process."""
    uid, gid = os.getuid(), os.getgid()
    _check(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NETWORK | NEW_IPC))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _check(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    options = f"size={disk_mb}m,nr_inodes=10000,mode=700".encode()
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options))
    return True


def drop_capabilities() -> None:
    """Drop all capabilities: those of root, and those that the user namespace granted."""
    if sys.platform != "linux":
        return
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.capset(struct.pack("=II", 0x20080522, 0), bytes(24))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Die with the parent: code may close its pipes, but cannot call prctl. Last: changing capabilities clears it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def landlock(folder: str, readable: list[str], programs: bool = False) -> int:
    """Restrict file access to the folder, and to reading Python and the system libraries. With `programs`, also allow
    to run programs and to use the network. Return the ABI version."""
    if sys.platform != "linux":
        raise Unavailable(f"{sys.platform} has no Landlock")
    abi = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        raise Unavailable("Landlock is missing or disabled in this kernel; it needs Linux 5.13 or later")
    handled = (1 << RIGHTS_BY_ABI.get(abi, 16)) - 1
    # files; TCP (ABI 4); abstract sockets and signals (ABI 6)
    rules = struct.pack("=QQQ", handled, 0 if programs else 3, 3)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _check(libc.syscall(CREATE_RULESET, rules, ctypes.c_size_t(size), 0))

    def allow(path: str, rights: int) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                rights &= EXECUTE | WRITE_FILE | READ_FILE
            rule = struct.pack("=Qi", rights & handled, descriptor)
            _check(libc.syscall(ADD_RULE, ruleset, 1, rule, 0))
            os.close(descriptor)

    execute = EXECUTE if programs else 0
    allow(folder, handled if programs else handled & ~(EXECUTE | SPECIAL_FILES))
    allow("/dev/null", READ_FILE | WRITE_FILE)
    for path in ("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo", *_python_files()):
        allow(path, READ_FILE | READ_DIR)
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", *readable):
        allow(path, READ_FILE | READ_DIR | execute)
    for path in sys.path:
        allow(path, READ_DIR)  # the import system lists these folders
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _check(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return abi


def _python_files() -> list[str]:
    """Return the paths of the standard library, without installed packages, and of the shared libraries next to it."""
    library = os.path.dirname(os.__file__)
    names = [name for name in os.listdir(library) if name not in ("site-packages", "dist-packages")]
    return [os.path.join(library, name) for name in names] + glob(f"{sys.base_prefix}/lib/*.so*")


# The seccomp filter: a BPF program of (code, jump if true, jump if false, value) that returns a verdict.
LOAD, AND, EQUAL, ANY_BIT, VERDICT = 0x20, 0x54, 0x15, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]


def seccomp(threads: bool) -> bool:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES or sys.maxsize < 2**32:
        raise Unavailable(f"there is no system-call filter for {sys.platform} on {machine}")
    program = filter_program(machine, os.getpid(), threads)
    raw = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    header = struct.pack("@HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))
    return True


def filter_program(machine: str, pid: int, threads: bool) -> list[Instruction]:
    """Return the BPF program: one block per system call, which returns a verdict or jumps to the next block."""
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[machine][1]), _verdict(KILL), (LOAD, 0, 0, 0)]

    def block(number: int, *body: Instruction) -> None:
        program.extend([(EQUAL, 0, len(body), number), *body])

    for number in numbers(ALLOWED, machine).values():
        block(number, _verdict(ALLOW))
    for number in numbers(PRETENDED, machine).values():
        block(number, _verdict(ERRNO))  # errno 0 means success
    for name, number in numbers(RULED, machine).items():
        block(number, *_rule(name, pid, threads))
    return [*program, _verdict(ERRNO | errno.EPERM)]


def _rule(name: str, pid: int, threads: bool) -> list[Instruction]:
    denied = _verdict(ERRNO | errno.EPERM)
    if name in ("open", "openat"):  # deny O_TRUNC with O_RDONLY, which early Landlock versions allow
        flags = _argument(1 if name == "open" else 2)
        mask = (AND, 0, 0, os.O_TRUNC | os.O_ACCMODE)
        return [flags, mask, (EQUAL, 0, 1, os.O_TRUNC), denied, _verdict(ALLOW)]
    if name == "fcntl":  # without signal owners and leases
        return _one_of(_argument(1), [*range(8), 36, 37, 38, 1030, 1031, 1032], denied)
    if name == "ioctl":  # the requests of Python's io for files and pipes
        requests = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]
        return _one_of(_argument(1), requests, _verdict(ERRNO | errno.ENOTTY))
    if name == "socketpair":  # asyncio needs one; a stream socket cannot be reconnected to another address
        family = [_argument(0), (EQUAL, 1, 0, 1), denied]
        return [*family, _argument(1), (AND, 0, 0, 0xF), (EQUAL, 0, 1, 1), _verdict(ALLOW), denied]
    if name in ("kill", "tgkill", "prlimit64"):
        return _one_of(_argument(0), [0 if name == "prlimit64" else pid], denied)
    if name == "clone" and threads:
        return [_argument(0), (ANY_BIT, 0, 1, 0x00010000), _verdict(ALLOW), denied]
    # The filter cannot see the flags of clone3. After ENOSYS, the C library falls back to clone.
    return [_verdict(ERRNO | errno.ENOSYS)] if name == "clone3" and threads else [denied]


def _one_of(load: Instruction, values: list[int], next_instruction: Instruction) -> list[Instruction]:
    allowed = [step for value in values for step in ((EQUAL, 0, 1, value), _verdict(ALLOW))]
    return [load, *allowed, next_instruction]


def _argument(index: int) -> Instruction:
    return (LOAD, 0, 0, 16 + 8 * index)  # the low 32 bits: the kernel reads these arguments as int


def _verdict(value: int) -> Instruction:
    return (VERDICT, 0, 0, value)


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
