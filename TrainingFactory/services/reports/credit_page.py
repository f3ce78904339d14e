"""Episodes with their tokens coloured by what they were paid, as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Iterator

from TrainingFactory.services.reports.credit_view import (
    Credit,
    EpisodeCredit,
    GroupCredit,
    Measure,
    Piece,
    TurnCredit,
)
from TrainingFactory.services.reports.pages import page
from TrainingFactory.services.reports.pages import text as _t
from TrainingFactory.services.reports.texts import reward_text

LEVELS = 8  # of a colour
GREEN, RED = "22 163 74", "225 48 48"


def credit_page(credit: Credit, title: str) -> str:
    """`title` says which episodes these are."""
    notes = "".join(f"<li>{_t(note)}</li>" for note in credit.notes)
    heads = "".join(f"<th>{_t(name)}</th>" for name in overview_names(credit))
    rows = "".join(_row(number, group) for number, group in enumerate(credit.groups))
    groups = "".join(_group(number, group, credit) for number, group in enumerate(credit.groups))
    body = f"""
<h1>{_t(title)}</h1>
<p>{_legend(credit)}</p>
<p class="small">Coloured is what the model wrote and was trained on; a pointer on a token shows its figures. What
others wrote (the task, the replies of tools) has no gradient and no colour.</p>
<ul class="small">{notes}</ul>
<table><tr>{heads}</tr>{rows}</table>
{groups}"""
    return page(title, body, STYLE + _colours())


def level(value: float | None, largest: float) -> int:
    """From -LEVELS to LEVELS; 0 only where there is nothing to show."""
    if not value or not largest:
        return 0
    size = max(1, min(LEVELS, round(LEVELS * abs(value) / largest)))
    return size if value > 0 else -size


def _legend(credit: Credit) -> str:
    steps = [*range(-LEVELS, 0, 2), 0, *range(2, LEVELS + 1, 2)]
    shown = "".join(
        f'<span class="{_class(step)}">{credit.largest * step / LEVELS:+.2f}</span>' for step in steps
    )
    return f"<b>{credit.measure}</b> {shown}" if credit.largest else f"No token has a {credit.measure}."


def overview_names(credit: Credit) -> list[str]:
    return ["task", "episodes", "trained", "rewards", f"largest {credit.measure}"]


def overview_row(group: GroupCredit) -> list[str]:
    """A group in a line."""
    low, high = min(group.totals, default=None), max(group.totals, default=None)
    rewards = "none" if low is None else f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return [group.task, f"{len(group.episodes)}", f"{group.trained}", rewards, f"{group.largest:.2f}"]


def _row(number: int, group: GroupCredit) -> str:
    task, *cells = overview_row(group)
    listed = "".join(f"<td>{_t(cell)}</td>" for cell in cells)
    return f'<tr><th><a href="#g{number}">{_t(task)}</a></th>{listed}</tr>'


def _group(number: int, group: GroupCredit, credit: Credit) -> str:
    first = group.episodes[0].trajectory
    prompt = "".join(
        f'<p class="other"><b>{_t(message.role)}</b> {_t(message.content)}</p>' for message in first.prompt
    )
    episodes = "".join(_episode(episode, credit) for episode in group.episodes)
    return (
        f'<h2 id="g{number}">Task {_t(group.task)}</h2><div class="prompt">{prompt}</div>'
        f'<div class="sides">{episodes}</div>'
    )


def _episode(episode: EpisodeCredit, credit: Credit) -> str:
    trajectory = episode.trajectory
    turns = "".join(_turn(number, turn, credit) for number, turn in enumerate(episode.turns, 1))
    why = f'<p class="why">{_t(episode.left_out)}</p>' if episode.left_out else ""
    return (
        f"<div><h3>Member {trajectory.member}: {_t(trajectory.status)}</h3>"
        f'<p class="paid">{_t(reward_text(trajectory.reward))}</p>{why}{turns}</div>'
    )


def _turn(number: int, turn: TurnCredit, credit: Credit) -> str:
    figures = ", ".join(turn.figures(credit.measure))
    spans = "".join(_span(piece, credit) for piece in turn.pieces)
    replies = "".join(
        f'<p class="other"><b>{_t(reply.role)}</b> {_t(reply.content or "(no text)")}</p>'
        for reply in turn.turn.replies
    )
    return f'<p class="figures">turn {number}: {_t(figures)}</p><p class="own">{spans}</p>{replies}'


def _span(piece: Piece, credit: Credit) -> str:
    """The figures of a token are in its title; the line breaks that it may hold are shown, too."""
    told = "\n".join(_told(piece, credit.measure))
    return f'<span class="{_class(level(piece.value, credit.largest))}" title="{_t(told)}">{_t(piece.text)}</span>'


def _told(piece: Piece, measure: Measure) -> Iterator[str]:
    for place, token in enumerate(piece.token_ids):
        value = f"{measure} {piece.values[place]:+.4f}" if place < len(piece.values) else "not trained"
        yield f"{piece.text!r}, token {token}, log-prob {piece.logprobs[place]:.4f}, {value}"


def _class(step: int) -> str:
    return "z" if not step else f"{'p' if step > 0 else 'n'}{abs(step)}"


def _colours() -> str:
    lines = []
    for letter, colour in (("p", GREEN), ("n", RED)):
        for step in range(1, LEVELS + 1):
            lines.append(
                f".{letter}{step} {{ background: rgb({colour} / {0.12 + 0.56 * step / LEVELS:.2f}); }}"
            )
    return "\n".join(lines) + "\n"


STYLE = """
body { max-width: 1400px; }
.sides { grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); align-items: start; }
.prompt { margin-bottom: 1rem; } .prompt p { margin: .25rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.prompt b { display: inline-block; min-width: 5.2em; font-weight: 600; }
.own { font-family: ui-monospace, monospace; font-size: .9rem; }
.other { opacity: .65; }
.figures { font-size: .85rem; font-weight: 600; border-top: 1px solid #8884; padding-top: .3rem; }
.paid { font-size: .9rem; } .why { font-style: italic; }
span[class] { border-radius: 2px; } p > span[class]:not([title]) { display: inline-block; padding: 0 .5em; }
"""
