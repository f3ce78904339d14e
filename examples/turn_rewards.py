"""Which turn was rewarded, and which was blamed: four episodes of one task, as GRPO with credit by turn sees them.

    python examples/turn_rewards.py [page.html]

The episodes follow scripts, so that everybody sees the same. `tfactory runs episodes RUN` shows those of a run.
"""

import asyncio
import sys
from pathlib import Path

from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.apps.reports.credit_view import compute_credit
from TrainingFactory.cli import credit as terminal
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.rewards import ProcessReward
from TrainingFactory.rollout.scripted import play
from TrainingFactory.types import Message, Task, Trajectory

TITLE = "Four ways to answer"


def scripts(task: Task) -> list[list[Message]]:
    """Return four scripts: both lookups and the answer; a guess after one; a guess at once; the same lookup twice."""
    first, second, answer = SearchEnvironment(task).expert()
    wrong = Message("assistant", task.metadata["buyer"])
    return [[first, second, answer], [first, wrong], [wrong], [first, first, wrong]]


def main() -> None:
    loaded = load_model("builtin:tiny", device="cpu")
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    [task] = SearchEnvironment.tasks("train", 0, 1)
    reward = ProcessReward(step_rewards={"no_repeated_call": 0.5}, pay="per_turn", cap=1.0)
    episodes: list[Trajectory] = []
    for member, script in enumerate(scripts(task)):
        episode = asyncio.run(play(SearchEnvironment(task), chat, script, reward=reward))
        episode.member = member
        episodes.append(episode)
    credit = compute_credit(episodes, GRPO(credit="turn"), loaded.tokenizer)
    terminal.print_groups(credit, credit.groups)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(credit.page(TITLE), encoding="utf-8")


if __name__ == "__main__":
    main()
