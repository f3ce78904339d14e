"""Episodes with their tokens coloured by their credit, as one HTML page that needs nothing beside it."""

from __future__ import annotations

from TrainingFactory.services.reports.credit_view import LEVELS, Credit
from TrainingFactory.services.reports.pages import render
from TrainingFactory.services.reports.texts import reward_text


def credit_page(credit: Credit, title: str) -> str:
    """Return the page; `title` says which episodes these are."""
    return render("credit.html.jinja", title=title, credit=credit, levels=LEVELS, reward_text=reward_text)
