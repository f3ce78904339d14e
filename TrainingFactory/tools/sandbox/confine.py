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

from syscalls import ALLOWED_CALLS, ARCHITECTURES, CONDITIONAL_CALLS, PRETENDED_CALLS, parse_call_numbers

libc = ctypes.CDLL(None, use_errno=True)
BYTES_PER_MIB = 2**20

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


class LayerUnavailable(Exception):
    """Raised if this machine lacks a layer of the sandbox."""


def confine(settings: dict[str, Any]) -> dict[str, Any]:
    """Sandbox this process. Return the mechanism of each restriction (None: not enforced) and the "missing" layers."""
    missing_layers: list[str] = []
    report: dict[str, Any] = {"missing": missing_layers}

    def apply_layer(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (LayerUnavailable, OSError) as error:
            missing_layers.append(f"{function.__name__}: {error}")
            return None

    folder, disk_mb = settings["folder"], settings["disk_mb"]
    set_limits(settings)
    has_netns = bool(apply_layer(namespaces, disk_mb, folder)) if sys.platform == "linux" else False
    os.chdir(folder)
    abi_version = apply_layer(landlock, folder, settings["readable"])
    drop_capabilities()
    if not settings["threads"]:
        apply_layer(no_new_processes)
    has_filter = apply_layer(seccomp, settings["threads"])
    report["files"] = f"Landlock (version {abi_version})" if abi_version else None
    layers = [name for name, is_on in (("seccomp", has_filter), ("network namespace", has_netns)) if is_on]
    report["network"] = " and ".join(layers) or None
    fallback = "RLIMIT_NPROC" if not settings["threads"] and os.getuid() != 0 else None
    report["processes"] = "seccomp" if has_filter else fallback  # root is exempt from the limit
    report["signals"] = "seccomp" if has_filter else None
    report["memory"] = f"{settings['memory_mb']} MiB of address space (RLIMIT_AS)"
    report["disk"] = f"{disk_mb} MiB in all (tmpfs)" if has_netns else f"{disk_mb} MiB a file (RLIMIT_FSIZE)"
    return report


def set_limits(settings: dict[str, Any]) -> None:
    soft_limits = {
        resource.RLIMIT_CPU: settings["cpu_seconds"],
        resource.RLIMIT_AS: settings["memory_mb"] * BYTES_PER_MIB,
        resource.RLIMIT_FSIZE: settings["disk_mb"] * BYTES_PER_MIB,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for resource_id, soft_limit in soft_limits.items():
        # For CPU time, the soft limit sends SIGXCPU one second before the hard limit kills the process.
        hard_limit = soft_limit + 1 if resource_id == resource.RLIMIT_CPU else soft_limit
        max_limit = resource.getrlimit(resource_id)[1]
        hard_limit = hard_limit if max_limit == resource.RLIM_INFINITY else min(hard_limit, max_limit)
        with contextlib.suppress(ValueError, OSError):  # macOS has no limit of the address space
            resource.setrlimit(resource_id, (min(soft_limit, hard_limit), hard_limit))


def no_new_processes() -> None:
    """Forbid new processes and threads by a limit of 0 processes for this user."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def namespaces(disk_mb: int, folder: str) -> bool:
    """Enter an empty network namespace and mount a tmpfs, which vanishes with the process, on the folder."""
    uid, gid = os.getuid(), os.getgid()
    _check_result(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NETWORK | NEW_IPC))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _check_result(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    options = f"size={disk_mb}m,nr_inodes=10000,mode=700".encode()
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _check_result(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options))
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


def landlock(folder: str, readable_paths: list[str], allow_programs: bool = False) -> int:
    """Restrict file access to the folder, and to reading Python and the system libraries. With `allow_programs`, also
    allow to run programs and to use the network. Return the ABI version."""
    if sys.platform != "linux":
        raise LayerUnavailable(f"{sys.platform} has no Landlock")
    abi_version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi_version < 1:
        raise LayerUnavailable("Landlock is missing or disabled in this kernel; it needs Linux 5.13 or later")
    all_rights = (1 << RIGHTS_BY_ABI.get(abi_version, 16)) - 1
    # files; TCP (ABI 4); abstract sockets and signals (ABI 6)
    ruleset_fields = struct.pack("=QQQ", all_rights, 0 if allow_programs else 3, 3)
    num_bytes = 8 if abi_version < 4 else 16 if abi_version < 6 else 24
    ruleset_fd = _check_result(libc.syscall(CREATE_RULESET, ruleset_fields, ctypes.c_size_t(num_bytes), 0))

    def allow(path: str, rights_mask: int) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if not os.path.isdir(path):
                rights_mask &= EXECUTE | WRITE_FILE | READ_FILE
            rule = struct.pack("=Qi", rights_mask & all_rights, path_fd)
            _check_result(libc.syscall(ADD_RULE, ruleset_fd, 1, rule, 0))
            os.close(path_fd)

    execute_right = EXECUTE if allow_programs else 0
    allow(folder, all_rights if allow_programs else all_rights & ~(EXECUTE | SPECIAL_FILES))
    allow("/dev/null", READ_FILE | WRITE_FILE)
    for path in ("/dev/zero", "/dev/urandom", "/etc/ld.so.cache", "/usr/share/zoneinfo", *_list_stdlib()):
        allow(path, READ_FILE | READ_DIR)
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", *readable_paths):
        allow(path, READ_FILE | READ_DIR | execute_right)
    for path in sys.path:
        allow(path, READ_DIR)  # the import system lists these folders
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _check_result(libc.syscall(RESTRICT_SELF, ruleset_fd, 0))
    os.close(ruleset_fd)
    return abi_version


def _list_stdlib() -> list[str]:
    """Return the paths of the standard library, without installed packages, and of the shared libraries next to it."""
    library_folder = os.path.dirname(os.__file__)
    entries = set(os.listdir(library_folder)) - {"site-packages", "dist-packages"}
    return [os.path.join(library_folder, entry) for entry in entries] + glob(f"{sys.base_prefix}/lib/*.so*")


# The seccomp filter: a BPF program of (code, jump if true, jump if false, value) that returns a verdict.
LOAD, AND, EQUAL, ANY_BIT, VERDICT = 0x20, 0x54, 0x15, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]


def seccomp(allow_threads: bool) -> bool:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES or sys.maxsize < 2**32:
        raise LayerUnavailable(f"there is no system-call filter for {sys.platform} on {machine}")
    program = make_filter_program(machine, os.getpid(), allow_threads)
    bytecode = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(bytecode, len(bytecode))
    header = struct.pack("@HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _check_result(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check_result(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))
    return True


def make_filter_program(machine: str, pid: int, allow_threads: bool) -> list[Instruction]:
    """Return the BPF program: one block per system call, which returns a verdict or jumps to the next block."""
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[machine][1]), _verdict(KILL), (LOAD, 0, 0, 0)]

    def add_block(system_call: int, *body: Instruction) -> None:
        program.extend([(EQUAL, 0, len(body), system_call), *body])

    for call_number in parse_call_numbers(ALLOWED_CALLS, machine).values():
        add_block(call_number, _verdict(ALLOW))
    for call_number in parse_call_numbers(PRETENDED_CALLS, machine).values():
        add_block(call_number, _verdict(ERRNO))  # errno 0 means success
    for name, call_number in parse_call_numbers(CONDITIONAL_CALLS, machine).items():
        add_block(call_number, *_make_rule(name, pid, allow_threads))
    return [*program, _verdict(ERRNO | errno.EPERM)]


def _make_rule(name: str, pid: int, allow_threads: bool) -> list[Instruction]:
    deny = _verdict(ERRNO | errno.EPERM)
    if name in ("open", "openat"):  # deny O_TRUNC with O_RDONLY, which early Landlock versions allow
        load_flags = _load_argument(1 if name == "open" else 2)
        apply_mask = (AND, 0, 0, os.O_TRUNC | os.O_ACCMODE)
        return [load_flags, apply_mask, (EQUAL, 0, 1, os.O_TRUNC), deny, _verdict(ALLOW)]
    if name == "fcntl":  # without signal owners and leases
        return _allow_values(_load_argument(1), [*range(8), 36, 37, 38, 1030, 1031, 1032], deny)
    if name == "ioctl":  # the requests of Python's io for files and pipes
        allowed_requests = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]
        return _allow_values(_load_argument(1), allowed_requests, _verdict(ERRNO | errno.ENOTTY))
    if name == "socketpair":  # asyncio needs one; a stream socket cannot be reconnected to another address
        family_check = [_load_argument(0), (EQUAL, 1, 0, 1), deny]
        return [*family_check, _load_argument(1), (AND, 0, 0, 0xF), (EQUAL, 0, 1, 1), _verdict(ALLOW), deny]
    if name in ("kill", "tgkill", "prlimit64"):
        return _allow_values(_load_argument(0), [0 if name == "prlimit64" else pid], deny)
    if name == "clone" and allow_threads:
        return [_load_argument(0), (ANY_BIT, 0, 1, 0x00010000), _verdict(ALLOW), deny]
    # The filter cannot see the flags of clone3. After ENOSYS, the C library falls back to clone.
    return [_verdict(ERRNO | errno.ENOSYS)] if name == "clone3" and allow_threads else [deny]


def _allow_values(load: Instruction, values: list[int], next_instruction: Instruction) -> list[Instruction]:
    comparisons = [instruction for value in values for instruction in ((EQUAL, 0, 1, value), _verdict(ALLOW))]
    return [load, *comparisons, next_instruction]


def _load_argument(index: int) -> Instruction:
    return (LOAD, 0, 0, 16 + 8 * index)  # the low 32 bits: the kernel reads these arguments as int


def _verdict(value: int) -> Instruction:
    return (VERDICT, 0, 0, value)


def _check_result(result: int) -> int:
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return result
