"""Script that restricts the files of this process by Landlock and then becomes another program:
`python -I launch.py SETTINGS COMMAND ...`. SETTINGS is JSON with `folder` (writable) and `readable`. Without Landlock,
the program starts unrestricted."""

from __future__ import annotations

import contextlib
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from confine import Unavailable, landlock

# What programs of the system and their libraries read. Of /proc only the process itself, because /proc/PID/environ of
# the run has its secrets.
SYSTEM = [
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
PROC = "self cpuinfo filesystems loadavg meminfo stat sys uptime version".split()


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    with contextlib.suppress(Unavailable, OSError):
        landlock(
            settings["folder"],
            [*SYSTEM, *(f"/proc/{name}" for name in PROC), *settings["readable"]],
            programs=True,
        )
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
