"""Conversion of episodes to the tokens of another model. Sampled tokens are kept if both models encode the turn in the
same way."""

from __future__ import annotations

from dataclasses import replace

from TrainingFactory.protocols import ChatFormat
from TrainingFactory.types import Completion, Trajectory, Turn


class UnparsableCallError(ValueError):
    """Raised for a tool call that could not be parsed, because it cannot be rendered for another model."""


class FoldedEpisodeError(ValueError):
    """Raised for a folded episode, because its prompts exist only as token ids of one model."""


def rerender(chat: ChatFormat, trajectory: Trajectory, unfold: bool = False) -> Trajectory:
    """Convert an episode to the tokens of this model's chat template. `unfold`: return a folded episode as one
    conversation of all turns, without the summaries."""
    turns: list[Turn] = []
    prompt_ids = chat.render(trajectory.prompt, trajectory.tools)
    is_same_format = prompt_ids == trajectory.turns[0].prompt_ids and all(
        chat.parse(turn.completion.token_ids, turn.prompt_ids, trajectory.tools).content
        == turn.message.content
        for turn in trajectory.turns
    )
    is_folded = trajectory.is_folded
    if is_same_format and not (is_folded and unfold):
        return trajectory
    if is_folded and not unfold:
        raise FoldedEpisodeError("a folded episode cannot be rendered in another chat template")
    for index, original_turn in enumerate(turn for turn in trajectory.turns if not turn.summary):
        if index:
            prompt_ids = prompt_ids + chat.extend(turns[-1], turns[-1].replies)
        if is_same_format:
            turns.append(replace(original_turn, prompt_ids=prompt_ids, fold=None))
            prompt_ids = prompt_ids + original_turn.completion.token_ids
            continue
        if call_error := next((call.error for call in original_turn.message.tool_calls if call.error), None):
            raise UnparsableCallError(
                f"turn {index} cannot be rendered in another chat template: {call_error}"
            )
        token_ids = chat.write(original_turn.message, prompt_ids, trajectory.tools)
        if original_turn.completion.finish == "length":
            token_ids = token_ids[:-1] or token_ids
        completion = Completion(token_ids, [0.0] * len(token_ids), original_turn.completion.finish)
        turns.append(replace(original_turn, prompt_ids=prompt_ids, completion=completion))
        prompt_ids = prompt_ids + token_ids
    return replace(trajectory, turns=turns)
