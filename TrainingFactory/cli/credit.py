"""What episodes were paid, on a terminal: the model's tokens on a ground that is green where they are made likelier and
red where they are made rarer, and the figures of every turn for terminals without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.rule import Rule
from rich.style import Style
from rich.table import Table
from rich.text import Text

from TrainingFactory.cli import show
from TrainingFactory.services.reports.credit_page import LEVELS, level, overview_names, overview_row
from TrainingFactory.services.reports.credit_view import Credit, EpisodeCredit, GroupCredit, TurnCredit
from TrainingFactory.services.reports.texts import clean, reward_text

GREEN, RED, PALE = (64, 190, 100), (245, 95, 95), (238, 238, 238)


def groups(credit: Credit, shown: Sequence[GroupCredit], found: Sequence[GroupCredit] = ()) -> None:
    """Those that are `shown` in full, and where more were `found` all of them in a table."""
    for group in shown:
        _group(credit, group)
    if len(found) > len(shown):
        show.columns(overview_names(credit), [overview_row(group) for group in found])
        show.note(f"shown: {len(shown)} of {len(found)} tasks; --show N shows more, --task ID another one")


def _group(credit: Credit, group: GroupCredit) -> None:
    console = show.console(stderr=False)
    console.print(Rule(Text(clean(f"task {group.task}")), align="left"))
    grid = _grid()
    for message in group.episodes[0].trajectory.prompt:
        grid.add_row(Text(message.role, style="dim"), show.body(message.content, "dim"))
    console.print(grid)
    for episode in group.episodes:
        console.print()
        _episode(credit, episode)
    console.print()


def _episode(credit: Credit, episode: EpisodeCredit) -> None:
    console, trajectory = show.console(stderr=False), episode.trajectory
    status = (trajectory.status, show.STATUS_STYLES.get(trajectory.status, "red"))
    paid = clean(reward_text(trajectory.reward))
    console.print(Text.assemble((f"member {trajectory.member}", "bold"), " | ", status, f" | {paid}"))
    if episode.left_out:
        console.print(Text(clean(episode.left_out), style="italic"))
    grid = _grid()
    for number, turn in enumerate(episode.turns, 1):
        figures = "  ".join(turn.figures(credit.measure))
        grid.add_row(Text(f"turn {number}", style="bold"), Text(figures, style="bold"))
        grid.add_row("", _coloured(turn, credit.largest))
        for reply in turn.turn.replies:
            grid.add_row(Text(reply.role, style="dim"), show.body(reply.content or "(no text)", "dim"))
    console.print(grid)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9)
    grid.add_column(overflow="fold")
    return grid


def _coloured(turn: TurnCredit, largest: float) -> Text:
    text, length = Text(), sum(len(piece.text) for piece in turn.pieces)
    for piece in turn.pieces:
        if len(text) + len(piece.text) > show.MAX_CHARS:
            text.append(f" [... {length - len(text)} more characters]")
            break
        text.append(clean(piece.text), _style(level(piece.value, largest)))
    return text


def _style(step: int) -> Style | None:
    """Dark letters on a pale or a strong ground: to be read on a dark terminal and on a light one."""
    if not step:
        return None
    strong, share = GREEN if step > 0 else RED, abs(step) / LEVELS
    red, green, blue = (round(p + (s - p) * share) for p, s in zip(PALE, strong, strict=True))
    return Style.parse(f"rgb(0,0,0) on rgb({red},{green},{blue})")
