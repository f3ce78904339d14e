"""What a chat format, dry episodes and their rows tell before a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from TrainingFactory.models import LoadedModel, TemplateChatFormat, chat_format
from TrainingFactory.models.round_trip import same_turn
from TrainingFactory.runs.diagnosis import Diagnosis
from TrainingFactory.tools.schema import check_schema
from TrainingFactory.training.source import StepGroups, most_frequent
from TrainingFactory.types import Message, ToolCall, ToolSpec, Trajectory

PROBE = ToolSpec("probe_tool", "A probe.", {"type": "object", "properties": {"text": {"type": "string"}}})
VALUES: dict[str, Any] = {
    "string": 'two words, "quoted"\nand a line', "integer": 7, "number": 0.5, "boolean": True, "array": [],
    "object": {}, "null": None,
}  # fmt: skip


def check_format(found: Diagnosis, loaded: LoadedModel, chat: TemplateChatFormat, named: str | None) -> None:
    """Look at the family and its stop tokens, before anything is played."""
    size = loaded.model.get_input_embeddings().weight.shape[0]
    stops = ", ".join(f"{chat.decode([stop])!r} ({stop})" for stop in chat.stop_ids) or "nothing"
    found.facts["model"] = (
        f"{loaded.name}: {sum(each.numel() for each in loaded.model.parameters()):,} weights"
    )
    found.facts["chat"] = f"family {chat.family.name}; a turn ends with {stops}"
    if not any(stop < size for stop in chat.stop_ids):
        found.add("stop_unreachable", f"no token that the model has (of {size}) ends a turn: {stops}")
    if named is None:
        return
    turn = Message("assistant", tool_calls=[ToolCall(PROBE.name, {"text": "a b"})])
    native = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    try:
        read = chat.parse(native.write(turn, tools=[PROBE]), tools=[PROBE])
    except ValueError:  # the template writes no calls, so that there is nothing to differ from
        return
    if not same_turn(read, turn):
        sentence = (
            f"model.family is {named}, and does not read the calls that this model's own template writes (family "
            f"{native.family.name}); a model that has learned those would never be seen to call a tool"
        )
        found.add("family_differs", sentence, "warning")


def check_tools(found: Diagnosis, chat: TemplateChatFormat, specs: Sequence[ToolSpec]) -> None:
    """Look at schemas, and write a call of each tool and read it back."""
    for spec in specs:
        try:
            check_schema(spec)
        except ValueError as error:
            found.add("tool_schema", str(error))
            continue
        if not spec.description.strip():
            found.add("tool_schema", f"tool {spec.name} has no description", "warning")
        call = ToolCall(spec.name, _arguments(spec.parameters))
        _write(found, chat, Message("assistant", tool_calls=[call]), specs, f"tool {spec.name}")


def check_prompts(found: Diagnosis, chat: TemplateChatFormat, episodes: Sequence[Trajectory]) -> None:
    """Write the turns of the model that prompts begin with, and read them back."""
    for episode in episodes:
        for message in episode.prompt:
            if message.role == "assistant":
                _write(found, chat, message, episode.tools, f"task {episode.task.id}")


def _write(found: Diagnosis, chat: Any, turn: Message, tools: Sequence[ToolSpec], of: str) -> None:
    try:
        chat.write(turn, tools=tools)  # which reads it back
    except ValueError as error:
        found.add("calls_not_read", f"{of}: {error}")


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a value for each argument of a schema, as far as it says of which type."""
    found = {}
    for name, given in schema.get("properties", {}).items():
        given = given if isinstance(given, dict) else {}
        kinds: Any = given.get("type", "string")
        kind = str(kinds[0] if isinstance(kinds, list) and kinds else kinds)
        found[name] = given["enum"][0] if given.get("enum") else VALUES.get(kind, "x")
    return found


def check_episodes(found: Diagnosis, episodes: Sequence[Trajectory], turn_limit: int, limit: int) -> None:
    """Look at how sampled episodes ended; the limits are those of a turn and of an episode, in tokens."""
    failed = [each for each in episodes if each.status in ("error", "tool_failure")]
    if failed:
        found.add("episodes_fail", f"{len(failed)} of {len(episodes)} episodes: {most_frequent(failed)}")
    ended = ", ".join(f"{count} {status}" for status, count in Counter(e.status for e in episodes).items())
    rewards = [each.reward.outcome + sum(each.reward.steps) for each in episodes if each.reward is not None]
    told = f"rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "none could be scored"
    found.facts["dry episodes"] = f"{len(episodes)}: {ended}; {told}"
    turns = [turn for episode in episodes for turn in episode.turns]
    if turns and not any(turn.completion.finish == "stop" for turn in turns):
        told = f"none of {len(turns)} turns ended with a stop token within sampling.max_tokens ({turn_limit})"
        found.add("no_stop", told, "warning")
    longest = max((len(turn.prompt_ids) for turn in turns), default=limit)
    if longest + turn_limit > limit:
        told = f"a prompt has {longest} tokens, a turn may have {turn_limit} more, and model.max_length is {limit}"
        found.add("prompt_too_long", told, "warning" if turns else "error")


def check_mask(found: Diagnosis, batch: StepGroups) -> None:
    """Compare the trained tokens of the rows with what was sampled."""
    turns = (episode.turns for episode in batch.trajectories)
    rows = [[*row] for each in turns for _, row in groupby(each, lambda turn: turn.signals.get("proxy/row"))]
    spoken = {tuple(token for turn in row for token in turn.completion.token_ids) for row in rows}
    for number, row in enumerate(batch.rows):
        trained = tuple(token for token, used in zip(row.token_ids, row.loss_mask, strict=True) if used)
        if not trained:
            found.add("mask", f"row {number} of the step has no token to learn from")
        elif batch.sampled and trained not in spoken:
            found.add(
                "mask", f"row {number} of the step trains tokens that were not sampled, or not all of them"
            )
