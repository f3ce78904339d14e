"""`tfactory demo`: train the built-in model to use tools, with a live display and a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from TrainingFactory.cli import show

if TYPE_CHECKING:
    from TrainingFactory.apps.demo.report import DemoReport

INTRO_TEXT = """\
A randomly initialised Qwen3 with half a million weights learns to use tools: first SFT on generated demonstrations,
many of them wrong on purpose, then GRPO, rewarded only for correct answers. It is evaluated on held-out tasks before
and after GRPO. The demo runs offline on any CPU and takes a few minutes on two cores.
"""


def demo(*, env: str = "search", seed: int = 0, out: Path = Path("runs/demo")) -> int:
    """Train the untrained built-in model to use tools, in minutes on a CPU.

    ```
    tfactory demo
    tfactory demo --env calculator --seed 1 --out runs/sums
    tfactory demo --env screen --out runs/screen
    ```

    Args:
        env: Environment: search (two dependent lookups), calculator, or screen (the model sees pictures and taps).
        seed: Random seed for weights, tasks and sampling.
        out: Folder of the GRPO run and the report; the SFT run (warm start) is written beside it. Runs of an earlier
            demo are replaced.
    """
    from TrainingFactory.apps.demo.demo import Demo
    from TrainingFactory.cli.display import Display
    from TrainingFactory.runs.folder import RunFolder

    stages = Demo(env, seed, out)
    show.note(INTRO_TEXT)
    with Display() as display:
        for stage_name, run_stage in (("warm start", stages.warm_start), ("GRPO", stages.train)):
            display.task = stage_name
            result = run_stage(display)
            if result.state == "interrupted":
                steps = show.pluralize(result.steps, "step")
                hint = f"resume this run: {RunFolder(result.run).resume_command}; tfactory demo starts over"
                display.say(f"interrupted after {steps} of the {stage_name}; {hint}")
                return show.INTERRUPTED_STATUS
        report = stages.report()
    _print_report(report)
    return 0


def _print_report(report: DemoReport) -> None:
    from TrainingFactory.apps.demo.report import describe_ending
    from TrainingFactory.cli.display import sparkline

    for title, episode in report.trial._asdict().items():
        show.print_episode(episode, f"held-out task {episode.task.id}, {title}: {describe_ending(episode)}")
    show.print_table([("share of correct answers by step", sparkline(report.curve))])
    show.print_columns(("held-out tasks", "before", "after"), report.table)
    print()
    show.note(" ".join(filter(None, (report.learned_text, report.blind_text))))
    temperature = report.configs[1]["sampling"]["temperature"]
    show.note(f"Evaluated at temperature 1, trained at {temperature:g}, where mistakes are more frequent.")
    report_file = Path(report.folders[1], "report.html")
    show.note(f"{sum(report.seconds):.0f} s of training. Full report: {report_file}\n")
    show.note("Next commands:")
    for command, description in report.next_commands:
        show.note(f"  {command}  # {description}")
