"""The report of a demo: as JSON for programs, and as one HTML page for people that needs nothing beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from TrainingFactory.services.reports.pages import page
from TrainingFactory.services.reports.pages import text as _t
from TrainingFactory.types import Message, Trajectory

WIDTH, HEIGHT, EDGE = 640, 240, 36  # of the curve, in pixels


@dataclass(slots=True, frozen=True)
class Figures:
    """Of some episodes. `calls` counts those with so many tool calls."""

    episodes: int
    success: float
    low: float  # 95 % interval of the success
    high: float
    tool_success: float | None  # None where no tool was called
    turns: float
    calls: dict[int, int]


@dataclass(slots=True, frozen=True)
class Trial:
    """One held-out task before and after training."""

    before: Trajectory
    after: Trajectory


@dataclass(slots=True, frozen=True)
class Report:
    environment: str
    seed: int
    before: Figures
    after: Figures
    curve: list[dict[str, Any]]  # `step` and the figures of its episodes
    trial: Trial
    seconds: float
    cpu_seconds: float  # on a busy machine these say more
    phases: dict[str, float]  # seconds
    plan: dict[str, Any]
    about: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        names = ("environment", "seed", "seconds", "cpu_seconds", "phases", "curve", "plan", "about")
        row: dict[str, Any] = {name: getattr(self, name) for name in names}
        row |= {"before": asdict(self.before), "after": asdict(self.after)}
        row["example"] = {
            "task": self.trial.after.task.id,
            "before": [list(line) for line in conversation(self.trial.before)],
            "after": [list(line) for line in conversation(self.trial.after)],
        }
        return row

    @property
    def learned(self) -> str:
        """In a sentence; the two intervals must lie apart before anything is claimed."""
        if self.after.low > self.before.high:
            return f"It learned {LEARNED[self.environment]}."
        return "It did not get clearly better this time."

    @property
    def table(self) -> list[tuple[str, str, str]]:
        """Name, before, after."""
        sides = (self.before, self.after)
        success = [f"{side.success:.1%} ({side.low:.0%} to {side.high:.0%})" for side in sides]
        tools = ["no calls" if side.tool_success is None else f"{side.tool_success:.1%}" for side in sides]
        turns = [f"{side.turns:.2f}" for side in sides]
        rows = [("success", *success), ("tool calls that worked", *tools), ("turns an episode", *turns)]
        usual = max(self.after.calls, key=lambda number: self.after.calls[number])
        shares = [f"{side.calls.get(usual, 0) / side.episodes:.1%}" for side in sides]
        rows.append((f"episodes with {_calls(usual)}", *shares))
        return [(name, before, after) for name, before, after in rows]


LEARNED = {
    "search": "to chain two lookups: first search who bought the thing, then search where the buyer lives, and only "
    "then answer",
    "calculator": "to hand the expression to the calculator as it is, and to answer with what comes back",
}
HABITS = {
    "search": "guessing a city at once or after one search, and naming the buyer instead of the buyer's city",
    "calculator": "guessing a number, calculating something else, and ignoring the calculator's reply",
}


def conversation(episode: Trajectory) -> list[tuple[str, str]]:
    """(who, what) for each message after the system's."""
    lines = [(message.role, message.content) for message in episode.prompt if message.role != "system"]
    for turn in episode.turns:
        lines += said(turn.message)
        lines += [(reply.role, reply.content) for reply in turn.replies]
    return lines


def said(message: Message) -> list[tuple[str, str]]:
    """(who, what) for a message of the model: its text, then its calls."""
    lines = [("assistant", message.content)] if message.content or not message.tool_calls else []
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        lines.append(("calls", call.error or f"{call.name} {arguments}"))
    return lines


def ending(episode: Trajectory) -> str:
    won = episode.reward is not None and episode.reward.outcome > 0
    if episode.status != "done":
        return f"wrong: it ended as {episode.status}, asked for was {episode.task.answer}"
    return "right" if won else f"wrong: the answer is {episode.task.answer}"


def next_commands(environment: str, out: str) -> list[tuple[str, str]]:
    """(command, what it does)"""
    other = "calculator" if environment == "search" else "search"
    return [
        (f"tfactory rollout {environment} --model {out}/model --split heldout", "watch the trained agent"),
        (
            f"tfactory rollout {environment} --model {out}/warm_start --split heldout",
            "and the one before GRPO",
        ),
        (f"tfactory demo --env {other} --out runs/demo-{other}", "another agent"),
        ("tfactory new env NAME", "start an environment of your own"),
    ]


# HTML


def report_page(report: Report, out: str = "runs/demo") -> str:
    plan, warm = report.plan, report.plan["warm_start"]
    rounds = f"{plan['steps']} steps of {plan['tasks_per_step']} tasks, {plan['group_size']} episodes each"
    rows = "".join(f"<tr><th>{_t(a)}</th><td>{_t(b)}</td><td>{_t(c)}</td></tr>" for a, b, c in report.table)
    sides = [_episode(title, side) for title, side in _sides(report.trial)]
    after, versions = report.after, report.about.get("versions", {})
    commands = "".join(
        f"<li><code>{_t(command)}</code> {_t(what)}</li>"
        for command, what in next_commands(report.environment, out)
    )
    body = f"""
<h1>An agent and its tools, before and after training</h1>
<p>Environment <b>{_t(report.environment)}</b>, seed {report.seed}, {report.seconds:.0f} seconds on this machine
({report.cpu_seconds:.0f} of processor time).
Success on {after.episodes} held-out tasks, sampled at temperature 1, went from <b>{report.before.success:.1%}</b>
to <b>{after.success:.1%}</b>.</p>
<p>{_t(report.learned)} The warm start showed it right ways and wrong ones alike; which of them to take, GRPO found
out from nothing but whether the last answer was right.</p>
<table><tr><th></th><th>before</th><th>after</th></tr>{rows}</table>
<p class="small">Before: after the warm start. After: after GRPO. In brackets the 95 % interval.</p>
<h2>Reward while training</h2>
{curve_svg([point["success"] for point in report.curve])}
<p class="small">The share of right answers in each step's episodes, and its running mean. Training samples at
temperature {plan["temperature"]:g}, where slips are more frequent than in the trials at 1.</p>
<h2>One held-out task, before and after</h2>
<div class="sides">{"".join(sides)}</div>
<h2>Tool calls in an episode</h2>
{_calls_table(report)}
<h2>How it was done</h2>
<p>A Qwen3 of half a million random weights was warm-started on {warm["demonstrations"]} generated demonstrations,
{warm["mistakes"]:.0%} of them wrong on purpose ({_t(HABITS[report.environment])}), then trained with GRPO:
{rounds}, sampled at temperature {plan["temperature"]:g}, learning rate {plan["learning_rate"]:g}.
Seconds: {_t(_named(report.phases))}.</p>
<h2>What to type next</h2>
<ul>{commands}</ul>
<p class="small">{_t(_named(versions))}</p>"""
    return page(f"TrainingFactory demo: {report.environment}, seed {report.seed}", body)


def curve_svg(values: Sequence[float]) -> str:
    """Values between 0 and 1 by step."""

    def place(step: int, value: float) -> tuple[float, float]:
        across = step / max(1, len(values) - 1)
        return EDGE + across * (WIDTH - 2 * EDGE), HEIGHT - EDGE - value * (HEIGHT - 2 * EDGE)

    means = running_mean(values)
    line = " ".join("{:.1f},{:.1f}".format(*place(step, mean)) for step, mean in enumerate(means))
    dots = "".join(
        '<circle cx="{:.1f}" cy="{:.1f}" r="2.5"/>'.format(*place(step, value))
        for step, value in enumerate(values)
    )
    grid = ""
    for mark in (0.0, 0.5, 1.0):
        y = place(0, mark)[1]
        grid += f'<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y:.1f}" y2="{y:.1f}"/>'
        grid += f'<text x="{EDGE - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>'
    ends = ((1, 0, "start"), (len(values), len(values) - 1, "end"))
    for label, step, anchor in ends if values else ():
        x = place(step, 0)[0]
        grid += f'<text x="{x:.1f}" y="{HEIGHT - EDGE + 18}" text-anchor="{anchor}">step {label}</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="reward by step">'
        f'<g class="grid">{grid}</g><g class="dots">{dots}</g><polyline points="{line}"/></svg>'
    )


def running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    """Over each value and the ones before it."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _sides(trial: Trial) -> list[tuple[str, Trajectory]]:
    return [("Before", trial.before), ("After", trial.after)]


def _episode(title: str, episode: Trajectory) -> str:
    lines = "".join(
        f'<p class="{_t(who)}"><b>{_t(who)}</b> {_t(what or "(no text)")}</p>'
        for who, what in conversation(episode)
    )
    return f'<div><h3>{title}</h3>{lines}<p class="end">{_t(ending(episode))}</p></div>'


def _calls_table(report: Report) -> str:
    rows = ""
    for number in sorted({*report.before.calls, *report.after.calls}):
        cells = ""
        for side in (report.before, report.after):
            share = side.calls.get(number, 0) / side.episodes
            bar = f'<span class="bar" style="width:{share * 140:.0f}px"></span>'
            cells += f"<td>{bar} {share:.0%}</td>"
        rows += f"<tr><th>{_t(_calls(number))}</th>{cells}</tr>"
    return f'<table class="bars"><tr><th></th><th>before</th><th>after</th></tr>{rows}</table>'


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number or 'no'} calls"


def _named(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.0f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )
