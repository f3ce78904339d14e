"""A reward that compares the episodes of a group: a right answer is rewarded, and a shorter way to it than others took.

    python examples/group_reward.py

Trains the built-in model for two steps; from random weights there is little to compare, it only shows the wiring.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rewards import Combined
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.types import Trajectory


def shorter(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return for each episode the share of its siblings that sampled more tokens."""
    sizes = [sum(len(turn.completion.token_ids) for turn in episode.turns) for episode in trajectories]
    return [sum(size < other for other in sizes) / max(len(sizes) - 1, 1) for size in sizes]


def main() -> None:
    reward = Combined({"right": (1.0, "environment"), "shorter": (0.2, shorter)})
    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model="builtin:tiny",
            environment="calculator",
            reward_function=reward,
            max_steps=2,
            batch_size=2,
            group_size=4,
            sampling={"max_tokens": 32},
            logging={"output_dir": folder},
        )
        report = trainer.train()
        for episode in load_trajectories(Path(report.run) / "trajectories.jsonl"):
            print(episode.group, episode.member, episode.reward.parts if episode.reward else episode.error)


if __name__ == "__main__":
    main()
