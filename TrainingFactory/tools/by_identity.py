"""Something computed once per object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MAX_KNOWN = 1000


class ByIdentity(Generic[T]):
    """Computes `make(thing)` once and knows it by the identity of the thing: every episode has tools of its own over
    the same schemas and functions, which need not be hashable."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[Any, T]] = {}

    def __call__(self, thing: Any) -> T:
        known = self._known.get(id(thing))
        if known is None or known[0] is not thing:  # an id may be used again
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[id(thing)] = (thing, self._make(thing))
        return known[1]
