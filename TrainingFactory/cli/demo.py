"""`tfactory demo`: an agent learns to use its tools while one watches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from TrainingFactory.cli import show

if TYPE_CHECKING:
    from TrainingFactory.apps.demo.report import Report

INTRO = """\
A Qwen3 of half a million random weights learns to use tools: first from generated demonstrations, many of them
wrong on purpose, then with GRPO from nothing but whether its answers are right. It is tried before and after GRPO
on held-out tasks. Offline, on any CPU; a few minutes on two cores.
"""


def demo(*, env: str = "search", seed: int = 0, out: Path = Path("runs/demo")) -> int:
    """Train the built-in model to use tools, from nothing, in minutes on a CPU.

    ```
    tfactory demo
    tfactory demo --env calculator --seed 1 --out runs/sums
    ```

    Args:
        env: What to learn: search (two lookups, one after the other) or calculator.
        seed: For the weights, the tasks and the sampling.
        out: Folder of the run that is trained with GRPO, with the report in it. The run of the warm start
            is beside it. Both are replaced where they are an earlier demo's.
    """
    from TrainingFactory.apps.demo.demo import Demo
    from TrainingFactory.cli.display import Display
    from TrainingFactory.runs.folder import RunFolder

    made = Demo(env, seed, out)
    show.note(INTRO)
    with Display() as display:
        for name, run in (("warm start", made.warm_start), ("GRPO", made.train)):
            display.task = name
            done = run(display)
            if done.state == "interrupted":
                count = show.count(done.steps, "step")
                again = f"resume this run: {RunFolder(done.run).resume_command}; tfactory demo starts over"
                display.say(f"interrupted after {count} of the {name}; {again}")
                return show.INTERRUPTED
        report = made.report()
    _show(report)
    return 0


def _show(report: Report) -> None:
    from TrainingFactory.apps.demo.report import ending
    from TrainingFactory.cli.display import curve

    for title, episode in report.trial._asdict().items():
        show.episode(episode, f"held-out task {episode.task.id}, {title}: {ending(episode)}")
    show.table([("share of right answers by step", curve(report.curve))])
    show.columns(("held-out tasks", "before", "after"), report.table)
    print()
    show.note(report.learned)
    hot = report.configs[1]["sampling"]["temperature"]
    show.note(f"It is tried at temperature 1, and trained at {hot:g}, where slips are more frequent.")
    page = Path(report.folders[1], "report.html")
    show.note(f"{sum(report.seconds):.0f} s of training. The whole story: {page}\n")
    show.note("What to type next:")
    for command, what in report.next_commands:
        show.note(f"  {command}  # {what}")
