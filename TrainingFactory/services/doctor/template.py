"""Whether a model's chat format reads what it writes, for the tools and messages that it will meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from TrainingFactory.models.round_trip import same_turn
from TrainingFactory.services.doctor.diagnosis import Diagnosis
from TrainingFactory.tools.schema import check_schema
from TrainingFactory.types import Message, ToolCall, ToolSpec, Trajectory

if TYPE_CHECKING:
    from TrainingFactory.models import LoadedModel, TemplateChatFormat

PROBE = ToolSpec("probe_tool", "A probe.", {"type": "object", "properties": {"text": {"type": "string"}}})
VALUES: dict[str, Any] = {
    "string": 'two words, "quoted"\nand a line', "integer": 7, "number": 0.5, "boolean": True, "array": [],
    "object": {}, "null": None,
}  # fmt: skip


def check_format(found: Diagnosis, loaded: LoadedModel, chat: TemplateChatFormat, named: str | None) -> None:
    """Look at the family and its stop tokens, before anything is played."""
    from TrainingFactory.models import chat_format

    size = loaded.model.get_input_embeddings().weight.shape[0]
    stops = ", ".join(f"{chat.decode([stop])!r} ({stop})" for stop in chat.stop_ids)
    found.fact("model", f"{loaded.name}: {sum(each.numel() for each in loaded.model.parameters()):,} weights")
    found.fact("chat", f"family {chat.family.name}; a turn ends with {stops or 'nothing'}")
    if not chat.stop_ids or min(chat.stop_ids) >= size:
        found.add(
            "stop_unreachable", f"no token that the model has (of {size}) ends a turn: {stops or 'none'}"
        )
    turn = Message("assistant", tool_calls=[ToolCall(PROBE.name, {"text": "a b"})])
    if named is None:
        return
    native = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    try:
        read = chat.parse(native.write(turn, tools=[PROBE]), tools=[PROBE])
    except ValueError:  # the template writes no calls, so that there is nothing to differ from
        return
    if not same_turn(read, turn):
        found.add(
            "family_differs",
            f"model.family is {named}, and does not read the calls that this model's own template writes (family "
            f"{native.family.name}); a model that has learned those would never be seen to call a tool",
            severity="warning",
        )


def check_tools(found: Diagnosis, chat: TemplateChatFormat, specs: Sequence[ToolSpec]) -> None:
    """Look at schemas, and write a call of each tool and read it back."""
    for spec in specs:
        try:
            check_schema(spec)
        except ValueError as error:
            found.add("tool_schema", str(error))
            continue
        try:
            call = ToolCall(spec.name, arguments(spec.parameters))
            chat.write(Message("assistant", tool_calls=[call]), tools=specs)
        except ValueError as error:
            found.add("calls_not_read", f"tool {spec.name}: {error}")
        if not spec.description.strip():
            found.add("tool_schema", f"tool {spec.name} has no description", severity="warning")


def check_prompts(found: Diagnosis, chat: TemplateChatFormat, episodes: Sequence[Trajectory]) -> None:
    """Write the turns of the model that prompts begin with, and read them back."""
    for episode in episodes:
        for message in episode.prompt:
            if message.role == "assistant":
                try:
                    chat.write(message, tools=episode.tools)
                except ValueError as error:
                    found.add("calls_not_read", f"task {episode.task.id}: {error}")


def arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a value for each argument of a schema, as far as it says of which type."""
    found = {}
    for name, given in schema.get("properties", {}).items():
        given = given if isinstance(given, dict) else {}
        kinds: Any = given.get("type", "string")
        kind = str(kinds[0] if isinstance(kinds, list) and kinds else kinds)
        found[name] = given["enum"][0] if given.get("enum") else VALUES.get(kind, "x")
    return found
