"""The order in which a run takes its tasks or examples."""

from __future__ import annotations

from TrainingFactory.common.seeds import turn_seed


class Order:
    """Numbers below `size` without end: every number once an epoch, shuffled by the seed and the epoch, or without
    `shuffle` as they are. A batch ends where an epoch does."""

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.steps_per_epoch = -(-size // batch_size)
        self._epoch, self._shuffled = -1, list[int]()

    def start(self, step: int) -> int:
        """Return how many are taken before a step, if every step takes one batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch * self.size + place * self.batch_size

    def batch(self, step: int) -> list[int]:
        return self.take(self.start(step), self.batch_size)

    def take(self, start: int, count: int) -> list[int]:
        """Return the numbers after the first `start`: so many, or fewer where the epoch ends."""
        epoch, place = divmod(start, self.size)
        if not self.shuffle:
            return list(range(place, min(place + count, self.size)))
        if epoch != self._epoch:
            self._shuffled = sorted(
                range(self.size), key=lambda n: turn_seed(self.seed, epoch, f"{n}", -1, -1)
            )
            self._epoch = epoch
        return self._shuffled[place : place + count]

    def at(self, place: int) -> int:
        """Return the number at a place of the order."""
        return self.take(place, 1)[0]
