"""Script that restricts the files of this process by Landlock and then becomes another program:
`python -I launch.py SETTINGS COMMAND ...`. SETTINGS is JSON with `folder` (writable) and `readable`. Without Landlock,
the program starts unrestricted, and the first line on stderr says so."""

from __future__ import annotations

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from confine import LayerUnavailable, landlock

# What programs of the system and their libraries read. Of /proc only the process itself, because /proc/PID/environ of
# the run has its secrets.
SYSTEM_PATHS = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib32",
    "/etc",
    "/opt",
    "/sys",
    "/run/systemd/resolve",
    "/dev/random",
    "/dev/zero",
]
WARNING_PREFIX = "unrestricted:"
PROC_FILES = "self cpuinfo filesystems loadavg meminfo stat sys uptime version".split()


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    readable_paths = [*SYSTEM_PATHS, *(f"/proc/{name}" for name in PROC_FILES), *settings["readable"]]
    try:
        landlock(settings["folder"], readable_paths, allow_programs=True)
    except (LayerUnavailable, OSError) as error:
        print(f"{WARNING_PREFIX} {error}", file=sys.stderr, flush=True)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
