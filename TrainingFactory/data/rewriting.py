"""Conversion of episodes to the tokens of another model. Sampled tokens are kept if both models encode the turn in the
same way."""

from __future__ import annotations

from dataclasses import replace

from TrainingFactory.protocols import ChatFormat
from TrainingFactory.types import Completion, Trajectory, Turn


class UnparsableCallError(ValueError):
    """Raised for a tool call that could not be parsed, because it cannot be rendered for another model."""


class FoldedEpisodeError(ValueError):
    """Raised for a folded episode, because its prompts exist only as token ids of one model, which another model cannot
    use."""


def rerender(chat: ChatFormat, trajectory: Trajectory, unfold: bool = False) -> Trajectory:
    """Return the episode in the tokens of this model's chat template, or unchanged if it already is. `unfold`: return
    a folded episode as one conversation of all turns, without the summaries."""
    turns: list[Turn] = []
    ids = chat.render(trajectory.prompt, trajectory.tools)
    is_same = ids == trajectory.turns[0].prompt_ids and all(
        chat.parse(turn.completion.token_ids, turn.prompt_ids, trajectory.tools).content
        == turn.message.content
        for turn in trajectory.turns
    )
    is_folded = trajectory.is_folded
    if is_same and not (is_folded and unfold):
        return trajectory
    if is_folded and not unfold:
        raise FoldedEpisodeError("a folded episode cannot be rendered in another chat template")
    for number, old in enumerate(turn for turn in trajectory.turns if not turn.summary):
        if number:
            ids = ids + chat.extend(turns[-1], turns[-1].replies)
        if is_same:
            turns.append(replace(old, prompt_ids=ids, fold=None))
            ids = ids + old.completion.token_ids
            continue
        if call_error := next((call.error for call in old.message.tool_calls if call.error), None):
            raise UnparsableCallError(
                f"turn {number} cannot be rendered in another chat template: {call_error}"
            )
        sampled = chat.write(old.message, ids, trajectory.tools)
        if old.completion.finish == "length":
            sampled = sampled[:-1] or sampled
        completion = Completion(sampled, [0.0] * len(sampled), old.completion.finish)
        turns.append(replace(old, prompt_ids=ids, completion=completion))
        ids = ids + sampled
    return replace(trajectory, turns=turns)
