"""The doctor's checks of a chat format, of dry-run episodes and of the rows made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any

from TrainingFactory.common.image_tokens import find_images
from TrainingFactory.common.texts import pluralize
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ContextSection
from TrainingFactory.data.samples import turn_spans
from TrainingFactory.models import LoadedModel, TemplateChatFormat, chat_format
from TrainingFactory.models.round_trip import is_same_turn
from TrainingFactory.models.tower_shape import ImageUse
from TrainingFactory.runs.diagnosis import Diagnosis
from TrainingFactory.tools.schema import check_schema
from TrainingFactory.training.forecasts import forecast_rows
from TrainingFactory.training.source import StepGroups, find_frequent_error
from TrainingFactory.types import Message, ToolCall, ToolSpec, Trajectory

MAX_CHANGED_ROUTES = 0.1
PROBE_TOOL = ToolSpec(
    "probe_tool", "A probe.", {"type": "object", "properties": {"text": {"type": "string"}}}
)
EXAMPLE_VALUES: dict[str, Any] = {
    "string": 'two words, "quoted"\nand a line', "integer": 7, "number": 0.5, "boolean": True, "array": [],
    "object": {}, "null": None,
}  # fmt: skip


def check_format(
    diagnosis: Diagnosis, loaded_model: LoadedModel, chat: TemplateChatFormat, family: str | None
) -> None:
    """Check the chat family and its stop tokens; `family` is the config's `model.family`."""
    vocab_size = loaded_model.model.get_input_embeddings().weight.shape[0]
    stops = ", ".join(f"{chat.decode([stop_id])!r} ({stop_id})" for stop_id in chat.stop_ids) or "nothing"
    diagnosis.facts["model"] = (
        f"{loaded_model.name}: {sum(parameter.numel() for parameter in loaded_model.model.parameters()):,} weights"
    )
    diagnosis.facts["chat"] = f"family {chat.family.name}; a turn ends with {stops}"
    if not any(stop_id < vocab_size for stop_id in chat.stop_ids):
        diagnosis.add("stop_unreachable", f"no stop token is among the model's {vocab_size} tokens: {stops}")
    if chat.warning:
        diagnosis.add("example_call", chat.warning, "warning")
    if family is None:
        return
    turn = Message("assistant", tool_calls=[ToolCall(PROBE_TOOL.name, {"text": "a b"})])
    native_chat = chat_format(loaded_model.tokenizer, stop_ids=loaded_model.stop_ids)
    try:
        parsed_turn = chat.parse(native_chat.write(turn, tools=[PROBE_TOOL]), tools=[PROBE_TOOL])
    except ValueError:  # the template cannot write calls, so there is nothing to compare with
        return
    if not is_same_turn(parsed_turn, turn):
        problem = (
            f"model.family is {family}, which cannot parse the calls that this model's own template writes (family "
            f"{native_chat.family.name}); calls in the model's native format would be read as text"
        )
        diagnosis.add("family_differs", problem, "warning")


def check_tools(diagnosis: Diagnosis, chat: TemplateChatFormat, specs: Sequence[ToolSpec]) -> None:
    """Check each tool's schema, and that the chat format parses a rendered call of the tool back unchanged."""
    for spec in specs:
        try:
            check_schema(spec)
        except ValueError as error:
            diagnosis.add("tool_schema", str(error))
            continue
        if not spec.description.strip():
            diagnosis.add("tool_schema", f"tool {spec.name} has no description", "warning")
        call = ToolCall(spec.name, _make_example_arguments(spec.parameters))
        _check_turn(diagnosis, chat, Message("assistant", tool_calls=[call]), specs, f"tool {spec.name}")


def check_prompts(diagnosis: Diagnosis, chat: TemplateChatFormat, episodes: Sequence[Trajectory]) -> None:
    """Check that the chat format parses rendered assistant turns of prompts back unchanged."""
    for episode in episodes:
        for message in episode.prompt:
            if message.role == "assistant":
                _check_turn(diagnosis, chat, message, episode.tools, f"task {episode.task.id}")


def _check_turn(
    diagnosis: Diagnosis, chat: Any, turn: Message, tools: Sequence[ToolSpec], turn_name: str
) -> None:
    try:
        chat.write(turn, tools=tools)  # also parses it back and compares
    except ValueError as error:
        diagnosis.add("calls_not_read", f"{turn_name}: {error}")


def _make_example_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an example value for each argument of a schema; a string where the schema names no type."""
    arguments = {}
    for name, prop in schema.get("properties", {}).items():
        prop = prop if isinstance(prop, dict) else {}
        types: Any = prop.get("type", "string")
        type_name = str(types[0] if isinstance(types, list) and types else types)
        arguments[name] = prop["enum"][0] if prop.get("enum") else EXAMPLE_VALUES.get(type_name, "x")
    return arguments


def check_episodes(
    diagnosis: Diagnosis, episodes: Sequence[Trajectory], turn_limit: int, max_length: int
) -> None:
    """Check how sampled episodes ended. `turn_limit` and `max_length` are the maximum tokens of a turn and an
    episode."""
    failed_episodes = [episode for episode in episodes if episode.status in ("error", "tool_failure")]
    if failed_episodes:
        diagnosis.add(
            "episodes_fail",
            f"{len(failed_episodes)} of {len(episodes)} episodes: {find_frequent_error(failed_episodes)}",
        )
    status_counts = ", ".join(
        f"{count} {status}" for status, count in Counter(episode.status for episode in episodes).items()
    )
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    reward_totals = [reward.outcome + sum(reward.steps) for reward in rewards]
    reward_range = (
        f"rewards from {min(reward_totals):g} to {max(reward_totals):g}"
        if reward_totals
        else "no episode was scored"
    )
    diagnosis.facts["dry episodes"] = f"{len(episodes)}: {status_counts}; {reward_range}"
    turns = [turn for episode in episodes for turn in episode.turns]
    if turns and not any(turn.completion.finish == "stop" for turn in turns):
        text = f"none of {len(turns)} turns ended with a stop token within sampling.max_tokens ({turn_limit})"
        diagnosis.add("no_stop", text, "warning")
    max_prompt_tokens = max((len(turn.prompt_ids) for turn in turns), default=max_length)
    if max_prompt_tokens + turn_limit > max_length:
        text = (
            f"a prompt of {max_prompt_tokens} tokens plus a turn of up to {turn_limit} exceeds "
            f"model.max_length ({max_length})"
        )
        diagnosis.add("prompt_too_long", text, "warning" if turns else "error")


def describe_images(diagnosis: Diagnosis, rows: Sequence[Sequence[int]]) -> None:
    """Report the images in rows of token ids, and the number of tokens of each."""
    images_by_row = [find_images(row) for row in rows]
    images = {tokens.first_id: tokens for row in images_by_row for tokens in row}.values()
    if not images:
        diagnosis.facts["images"] = f"none in {pluralize(len(rows), 'row')} of the dry run"
        return
    largest = max(images, key=lambda tokens: tokens.num_tokens)
    min_tokens = min(tokens.num_tokens for tokens in images)
    sizes = f"{min_tokens} to {largest.num_tokens}" if min_tokens < largest.num_tokens else f"{min_tokens}"
    diagnosis.facts["images"] = (
        f"{len(images)} different ones of {sizes} tokens, the largest {largest.image.width}x{largest.image.height}; "
        f"at most {max(map(len, images_by_row))} in a row; "
        f"{ImageUse.measure_rows(rows, 0).token_share:.0%} of all tokens"
    )


def check_folding(
    diagnosis: Diagnosis,
    episodes: Sequence[Trajectory],
    context: ContextSection,
    config: TrainingConfig,
    max_length: int,
) -> None:
    """Forecast the training rows of a full-length episode from the turns of the dry run, and check the number of tokens
    left above the fold limit."""
    episodes = [episode for episode in episodes if episode.turns]
    if not episodes:
        return
    growth = [after - before for episode in episodes for before, after in pairwise(_measure_prompts(episode))]
    turn_tokens = fmean(growth) if growth else 0.0
    first_prompt_tokens = fmean(len(episode.turns[0].prompt_ids) for episode in episodes)
    num_rows = forecast_rows(context, first_prompt_tokens, turn_tokens, config.environment.max_turns)
    mean_rows = fmean(turn_spans(episode)[-1].row + 1 for episode in episodes)
    diagnosis.facts["folding"] = (
        f"{context.fold} above {context.limit} tokens: {mean_rows:.3g} rows per episode in the dry run; an episode of "
        f"{config.environment.max_turns} turns with about {turn_tokens:.0f} tokens each has about {num_rows}"
    )
    reserve = config.sampling.max_reply_tokens + (context.summary_tokens if context.fold == "summary" else 0)
    if context.limit + reserve > max_length:
        problem = (
            f"environment.context.limit={context.limit} leaves {max_length - context.limit} tokens below "
            f"model.max_length, but a last reply and a summary may take {reserve}: such episodes end as truncated"
        )
        diagnosis.add(
            "fold_room", problem, "warning", "Lower environment.context.limit or sampling.max_reply_tokens."
        )


def _measure_prompts(episode: Trajectory) -> list[int]:
    """Return the prompt lengths of the turns in an episode's first row."""
    spans = turn_spans(episode)
    return [len(turn.prompt_ids) for turn, span in zip(episode.turns, spans, strict=True) if span.row == 0]


def check_mask(diagnosis: Diagnosis, batch: StepGroups) -> None:
    """Check that every row trains at least one token, and exactly the tokens that were sampled."""
    sampled_ids: set[tuple[int, ...]] = set()
    for episode in batch.trajectories:
        turns = zip(episode.turns, turn_spans(episode), strict=True)
        for _, row in groupby(turns, lambda pair: pair[1].row):
            sampled_ids.add(tuple(token for turn, _ in row for token in turn.completion.token_ids))
    for index, row in enumerate(batch.rows):
        trained_ids = tuple(
            token for token, is_trained in zip(row.token_ids, row.loss_mask, strict=True) if is_trained
        )
        if not trained_ids:
            diagnosis.add("mask", f"row {index} of the step has no trained token")
        elif batch.is_sampled and trained_ids not in sampled_ids:
            diagnosis.add(
                "mask", f"the trained tokens of row {index} of the step differ from its sampled tokens"
            )


def check_routers(diagnosis: Diagnosis, mismatch: float) -> None:
    diagnosis.facts["routers"] = (
        f"{mismatch:.2%} of the tokens' choices of experts differ between sampling and training with the same weights"
    )
    if mismatch > MAX_CHANGED_ROUTES:
        diagnosis.add(
            "router_mismatch",
            f"{mismatch:.0%} of the tokens' choices of experts differ between sampling and training with the same "
            "weights, so that gradients reach experts that did not sample the token",
            "warning",
            "Set model.dtype=float32, or optimization.importance_cap and optimization.importance_mask, which bound the "
            "effect of such tokens.",
        )
