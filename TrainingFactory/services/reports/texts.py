"""Texts of models, tools and files, made safe to show; rewards in words."""

from __future__ import annotations

from TrainingFactory.types import Reward

# Marks that reorder the text around them: what is shown must be what is there.
REORDERING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """The text with everything that a terminal would obey written out, an escape as \\x1b."""
    return "".join(
        character
        if character in "\n\t" or (character.isprintable() and character not in REORDERING)
        else character.encode("unicode_escape").decode()
        for character in text
    )


def reward_text(reward: Reward | None) -> str:
    """What an episode was paid: in all, of that for its steps in order where it was paid for any, and the parts."""
    if reward is None:
        return "not scored"
    text = f"reward {reward.outcome + sum(reward.steps):g}"
    if any(reward.steps):
        steps = " ".join(f"{value:+g}" for value in reward.steps)
        text += f" (outcome {reward.outcome:g}, steps {steps})"
    return text + "".join(f", {name} {value:g}" for name, value in reward.parts.items())
