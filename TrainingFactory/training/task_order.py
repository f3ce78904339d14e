"""Shuffled order of a run's tasks or examples."""

from __future__ import annotations

from TrainingFactory.common.seeds import derive_seed


class TaskOrder:
    """Endless order of the indices of tasks or examples, 0 to `size` - 1. Each epoch has every index once, shuffled by
    seed and epoch, or ascending if not `shuffle`. The last batch of an epoch may be smaller."""

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.steps_per_epoch = -(-size // batch_size)
        self._epoch, self._indices = -1, list[int]()

    def get_start_position(self, step: int) -> int:
        """Return how many indices are taken before a step, if every step takes one batch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch * self.size + position * self.batch_size

    def take_batch(self, step: int) -> list[int]:
        return self.take(self.get_start_position(step), self.batch_size)

    def take(self, first_position: int, num_indices: int) -> list[int]:
        """Return `num_indices` indices from `first_position` of the order on, or fewer at the end of an epoch."""
        epoch, position = divmod(first_position, self.size)
        if not self.shuffle:
            return list(range(position, min(position + num_indices, self.size)))
        if epoch != self._epoch:
            seeds = [derive_seed(self.seed, epoch, f"{index}", -1, -1) for index in range(self.size)]
            self._indices, self._epoch = sorted(range(self.size), key=lambda index: seeds[index]), epoch
        return self._indices[position : position + num_indices]

    def get_task_index(self, position: int) -> int:
        """Return the index at a position of the order."""
        return self.take(position, 1)[0]
