"""`tfactory demo`: what episodes look like, on any machine, offline."""

from __future__ import annotations

from TrainingFactory.cli import show
from TrainingFactory.cli.rollout import run
from TrainingFactory.config import TrainingConfig

INTRO = """\
Two-hop questions with a search tool. First an episode as it should go, written by a script; then the built-in
model. It was made just now from random numbers and has learned nothing, so expect noise. What is real is all
around it: the chat template, episodes side by side, tool calls, rewards, and every sampled token saved.
This version does not train.
"""


def demo() -> int:
    """Show episodes of the built-in model: seconds on any CPU, offline, nothing to download.

    ```
    tfactory demo
    ```
    """
    from TrainingFactory.services.assemble import make_environment, make_tasks
    from TrainingFactory.services.demo import expert_episode

    show.note(INTRO)
    config = TrainingConfig(
        environment="search", data={"count": 8, "split": "heldout"}, sampling={"max_tokens": 48}
    )
    task = make_tasks(config, make_environment(config))[0]
    show.episode(expert_episode(task), f"by a script: task {task.id}")
    return run(config, out=None, shown=2)
