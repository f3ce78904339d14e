"""The type of the fixture `tfactory`: runs a command and returns (status, stdout, stderr)."""

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]
