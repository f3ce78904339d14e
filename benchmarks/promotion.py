"""How often the sequential test of promotions is wrong, and how often it finds a better model: the figures of
docs/REGISTRY.md, simulated. `python -m benchmarks.promotion`"""

from __future__ import annotations

import json

import numpy as np

from TrainingFactory.promotion.sequential import find_rejection

TIMES, ALPHA = 2000, 0.05


def needed(better_by: float, flipping: float, tasks: int) -> list[int | None]:
    """Return after how many tasks each simulated promotion was made; None where it was not."""
    drawn = np.random.default_rng(0).random((TIMES, tasks))
    won = (flipping + better_by) / 2
    differences = np.where(drawn < won, 1.0, np.where(drawn < flipping, -1.0, 0.0))
    return [find_rejection(row, 0.0, ALPHA) for row in differences]


def share(found: list[int | None]) -> float:
    return sum(each is not None for each in found) / len(found)


def main() -> None:
    wrong = {tasks: [share(needed(0.0, flips, tasks)) for flips in (0.1, 0.3, 1.0)] for tasks in (100, 400)}
    for tasks, rates in wrong.items():
        print(f"equal models, {tasks} tasks: {min(rates):.1%} to {max(rates):.1%} promoted")
    print(
        "| better by | promoted with 100 tasks | with 400 | tasks it takes (median of 400) |\n|---|---|---|---|"
    )
    for better in (0.05, 0.1, 0.2):
        few, many = needed(better, 0.3, 100), needed(better, 0.3, 400)
        median = np.median([each for each in many if each is not None])
        print(f"| {better:g} | {share(few):.0%} | {share(many):.0%} | {median:.0f} |")
    print("RESULT", json.dumps({"false_promotions": max(max(rates) for rates in wrong.values())}))


if __name__ == "__main__":
    main()
