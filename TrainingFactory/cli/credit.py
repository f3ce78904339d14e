"""Credit assignment on a terminal: tokens with positive advantage on a green background, negative on red, and the
numbers of every turn for terminals without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from TrainingFactory.apps.reports.credit_view import SHADES, Credit, EpisodeCredit, GroupCredit, TurnCredit
from TrainingFactory.cli import show
from TrainingFactory.common.texts import escape_control
from TrainingFactory.runs.episode_texts import format_content, format_reward

GREEN, RED, PALE = (64, 190, 100), (245, 95, 95), (238, 238, 238)


def print_groups(
    credit: Credit, groups: Sequence[GroupCredit], all_groups: Sequence[GroupCredit] = ()
) -> None:
    """Print `groups` in full, and an overview table of `all_groups` if these are more."""
    for group in groups:
        _print_group(credit, group)
    if len(all_groups) > len(groups):
        show.print_columns(credit.columns, [group.overview_cells for group in all_groups])
        show.note(
            f"shown: {len(groups)} of {len(all_groups)} tasks; --show N shows more, --task ID another one"
        )


def _print_group(credit: Credit, group: GroupCredit) -> None:
    console, grid = show.make_console(stderr=False), show.make_message_grid()
    console.print(Rule(Text(escape_control(f"task {group.task}")), align="left"))
    for message in group.episodes[0].trajectory.prompt:
        grid.add_row(Text(message.role, style="dim"), show.escape_text(format_content(message), "dim"))
    console.print(grid)
    for episode in group.episodes:
        console.print()
        _print_episode(credit, episode)
    console.print()


def _print_episode(credit: Credit, episode: EpisodeCredit) -> None:
    console, grid, trajectory = show.make_console(stderr=False), show.make_message_grid(), episode.trajectory
    status = (trajectory.status, show.STATUS_STYLES.get(trajectory.status, "red"))
    reward = escape_control(format_reward(trajectory.reward))
    console.print(Text.assemble((f"member {trajectory.member}", "bold"), " | ", status, f" | {reward}"))
    if episode.untrained_reason:
        console.print(Text(escape_control(episode.untrained_reason), style="italic"))
    for turn_number, turn in enumerate(episode.turns, 1):
        summary = "  ".join(turn.list_labels(credit.measure))
        grid.add_row(Text(f"turn {turn_number}", style="bold"), Text(summary, style="bold"))
        grid.add_row("", _colour_text(turn, credit))
        for reply in turn.turn.replies:
            grid.add_row(
                Text(reply.role, style="dim"), show.escape_text(format_content(reply) or "(no text)", "dim")
            )
    console.print(grid)


def _colour_text(turn: TurnCredit, credit: Credit) -> Text:
    text = Text()
    for piece in turn.pieces:
        text.append(escape_control(piece.text), _pick_credit_style(credit.get_shade(piece.value)))
    num_hidden = len(text) - show.MAX_CHARS
    return (
        text
        if num_hidden <= 0
        else Text.assemble(text[: show.MAX_CHARS], f" [... {num_hidden} more characters]")
    )


def _pick_credit_style(shade: int) -> Style | None:
    """Return black text on a background between pale and full colour, readable on dark and light terminals."""
    if not shade:
        return None
    colour = GREEN if shade > 0 else RED
    strength = abs(shade) / SHADES
    red, green, blue = (
        round(pale + (full - pale) * strength) for pale, full in zip(PALE, colour, strict=True)
    )
    return Style.parse(f"rgb(0,0,0) on rgb({red},{green},{blue})")
