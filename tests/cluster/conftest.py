"""Fixtures that the tests of this folder share."""

from tests.kits.scale import ray_head, scale  # noqa: F401
