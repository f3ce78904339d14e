"""Turn a conversation into tokens and a sampled turn into a message, for any Hugging Face template. `render` writes the
first prompt; after that a turn's ids stay as they were sampled, and `extend` adds what the template puts between this
turn and the next one: cut out of a rendering of the template itself (`probes.py`), so no family is special-cased."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import date
from itertools import groupby
from typing import Any

from TrainingFactory.models import probes
from TrainingFactory.models.encoding import Control, TextEncoder
from TrainingFactory.models.families import FAMILIES, Family, get_family
from TrainingFactory.models.templates import Template, Transform
from TrainingFactory.openai_form import message_from_dict, spec_from_dict, spec_to_dict
from TrainingFactory.types import Message, ToolCall, ToolSpec, Turn

Texts = list[str]  # foreign text number i is what mark number i stands for
Pieces = list[str | int | Control]  # a template's own text, a mark's number, or a control token
MAX_SKELETONS = 512


class TemplateChatFormat:
    """Writes and reads for a tokenizer. Without `family`: the one whose reader understands the template's calls.
    `stop_ids` are ends of a turn known from elsewhere; `day` is what a template that prints the date prints."""

    def __init__(
        self,
        tokenizer: Any,
        family: str | None = None,
        *,
        thinking: bool | None = None,
        stop_ids: Sequence[int] = (),
        day: date | None = None,
    ) -> None:
        chosen = get_family(family) if family else None
        self._encoder = TextEncoder(tokenizer)
        options = {} if thinking is None else {"enable_thinking": thinking}
        self._template = Template(tokenizer, options, day)
        self._marks = self._template.marks
        self._style = probes.find_call_style(self._template)
        self._end = probes.end_of_turn(self._template, self._encoder.control_texts)
        self.family = chosen or self._detect() or FAMILIES["generic"]
        native = self._reads_template(self.family)
        self._template_tools = native and probes.renders_tools(self._template)
        knows_results = probes.shows_tool_results(self._template, self._style, self._end)
        self._replies_as_user = self.family.replies_as_user and not (native or (knows_results and not chosen))
        self._refusal = "" if chosen or native else self._why_no_tools()
        header = self._template.text([probes.user(self._marks[0])]).rpartition(self._marks[0])[2]
        self._opens_thinking = header.rstrip().endswith(self.family.think[0])
        self._transforms: dict[str, Transform] = {}
        self._skeletons: dict[str, Pieces] = {}
        self._last_specs: list[ToolSpec] = []
        self._last_schemas: tuple[list[dict[str, Any]], str, Texts] = ([], "", [])
        self.stop_ids = self._find_stops(tokenizer.eos_token_id, stop_ids)

    # writing

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
    ) -> list[int]:
        conversation = [as_message(message) for message in messages]
        specs = [as_spec(tool) for tool in tools]
        if not conversation:
            raise ValueError("a conversation needs at least one message")
        schemas, schemas_text, texts = self._schemas(specs) if self._template_tools else ([], "", [])
        outlines = [self._outline(message, texts) for message in self._as_user(conversation)]
        if specs and not self._template_tools:
            self._put_tools_into_system(outlines, specs, texts)
        key = json.dumps(outlines) + schemas_text
        if key not in self._skeletons:
            text = self._template.text(outlines, schemas)
            for role, content in ((outline["role"], outline["content"]) for outline in outlines):
                if role != "assistant" and content not in text:
                    raise ValueError(f"the chat template drops a {role} message of this conversation")
            self._remember(key, text)
        return self._fill(self._skeletons[key], texts)

    def extend(self, turn: Turn, replies: Sequence[Message | Mapping[str, Any]]) -> list[int]:
        sampled = turn.completion.token_ids
        if not sampled or sampled[-1] not in self.stop_ids:
            raise ValueError("this turn was cut before its stop token, so nothing can follow it")
        answers = self._as_user([as_message(reply) for reply in replies])
        texts: Texts = ["", ""]  # marks 0 and 1 stand in the part before the replies
        for reply in answers:
            texts += [
                self._as_shown(reply.role, reply.content) if reply.content else "",
                reply.name or "tool",
            ]
        ids = self._fill(self._continuation(answers), texts)
        # where a turn has no end of its own, its stop token is the first token of what follows (GLM)
        return ids[1:] if self._end is None and ids[:1] == sampled[-1:] else ids

    def write(self, message: Message | Mapping[str, Any]) -> list[int]:
        message = as_message(message)
        texts: Texts = [""]  # mark 0 is the user's
        write_calls = self.family.calls_text if message.tool_calls else None
        outline = self._outline(replace(message, tool_calls=[]) if write_calls else message, texts)
        body = probes.assistant_body(self._template, outline, self.family.think)
        if self._end and self._end in body:
            body = body[: body.rindex(self._end)]
        if write_calls:
            body += write_calls([self._shielded_call(call, texts) for call in message.tool_calls])
        end = self.stop_ids[:1] if self._end is None else [self._encoder.control_texts[self._end]]
        return [*self._fill(self._pieces(body), texts), *end]

    # reading

    def parse(self, token_ids: Sequence[int]) -> Message:
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.parse_text(self._encoder.decode(ids))

    def parse_text(self, text: str) -> Message:
        """Read an assistant's text as a message; what stands inside its reasoning is not read as a call."""
        opening, closing = self.family.think
        reasoning = None
        if self._opens_thinking or closing in text or text.lstrip().startswith(opening):
            thought, closed, rest = text.lstrip().removeprefix(opening).partition(closing)
            if not closed:
                return Message("assistant", reasoning=thought.strip())
            reasoning, text = thought.strip(), rest
        content, calls = self.family.read_calls(text)
        return Message("assistant", content.strip(), calls, reasoning=reasoning)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._encoder.decode(token_ids)

    def cut(self, text: str, max_tokens: int) -> str:
        return self._encoder.cut(text, max_tokens)

    # marks and pieces

    def _pieces(self, text: str) -> Pieces:
        pieces: Pieces = []
        for part in self._marks.split(text):
            pieces += [part] if isinstance(part, int) else self._encoder.split(part)
        return pieces

    def _fill(self, pieces: Pieces, texts: Texts) -> list[int]:
        """Return ids; what stands between two control tokens, own and foreign, is encoded as one text."""
        ids: list[int] = []
        run = ""
        for piece in pieces:
            if isinstance(piece, Control):
                ids += [*self._encoder.plain(run), piece.token]
                run = ""
            else:
                run += texts[piece] if isinstance(piece, int) else piece
        return ids + self._encoder.plain(run)

    def _remember(self, key: str, text: str) -> None:
        if len(self._skeletons) >= MAX_SKELETONS:
            self._skeletons.clear()
        self._skeletons[key] = self._pieces(text)

    def _mark(self, text: str, texts: Texts) -> str:
        texts.append(text)
        return self._marks[len(texts) - 1]

    def _as_shown(self, role: str, text: str) -> str:
        """Return the text as the template writes it (some strip it, some write it as JSON)."""
        if role not in self._transforms:
            self._transforms[role] = self._template.transform(role, probes.conversation_of(role, self._style))
        return self._transforms[role](text)

    def _shield(self, value: Any, texts: Texts) -> Any:
        """Return a copy of JSON data in which every string that could give a control token is a mark."""
        if isinstance(value, dict):
            return {self._shield(key, texts): self._shield(item, texts) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(item, texts) for item in value]
        # a half tag at its end could be completed by what the template writes behind it
        if isinstance(value, str) and (
            self._encoder.holds_control(value) or value.endswith(("<", "|", "｜", "["))
        ):
            return self._mark(json.dumps(value, ensure_ascii=False)[1:-1], texts)
        return value

    def _schemas(self, specs: list[ToolSpec]) -> tuple[list[dict[str, Any]], str, Texts]:
        """Return the tool list as the template gets it, the same as text, and the texts its marks stand for."""
        if specs != self._last_specs:  # the episodes of a batch have the same tools
            texts: Texts = []
            schemas = self._shield([spec_to_dict(spec) for spec in specs], texts)
            self._last_specs, self._last_schemas = deepcopy(specs), (schemas, json.dumps(schemas), texts)
        schemas, text, texts = self._last_schemas
        return schemas, text, list(texts)

    def _shielded_call(self, call: ToolCall, texts: Texts) -> ToolCall:
        return ToolCall(self._shield(call.name, texts), self._shield(call.arguments, texts))

    def _outline(self, message: Message, texts: Texts) -> dict[str, Any]:
        """Return the message as templates expect it, with marks in place of its texts."""
        content = self._mark(self._as_shown(message.role, message.content), texts) if message.content else ""
        outline: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            if self._style is None:
                raise ValueError("the chat template renders no tool calls, so none can be written")
            calls = [self._shielded_call(call, texts) for call in message.tool_calls]
            outline = self._style.message(calls, content)
        if message.reasoning:
            outline["reasoning_content"] = self._mark(message.reasoning.strip("\n"), texts)
        if message.role == "tool":
            outline["tool_call_id"] = f"{probes.CALL_ID}0"
            outline["name"] = self._mark(message.name or "tool", texts)
        return outline

    def _continuation(self, replies: Sequence[Message]) -> Pieces:
        key = json.dumps(["after", [(reply.role, bool(reply.content)) for reply in replies]])
        if key not in self._skeletons:
            text = probes.continuation(self._template, self._style, self._end, replies)
            shown = self._marks.split(text)
            if any(reply.content and 2 + 2 * number not in shown for number, reply in enumerate(replies)):
                raise ValueError("the chat template drops a reply to a turn of the model")
            self._remember(key, text)
        return self._skeletons[key]

    # what the template leaves out

    def _as_user(self, messages: Sequence[Message]) -> list[Message]:
        """Make the results of a turn one message of the user, where the template knows no tool messages."""
        if not self._replies_as_user:
            return list(messages)
        changed: list[Message] = []
        for results, several in groupby(messages, lambda message: message.role == "tool"):
            found = list(several)
            texts = [f"Result of {each.name or 'the tool'}:\n{each.content}" for each in found]
            changed += [Message("user", "\n\n".join(texts))] if results else found
        return changed

    def _put_tools_into_system(
        self, outlines: list[dict[str, Any]], specs: list[ToolSpec], texts: Texts
    ) -> None:
        describe, text = self.family.describe_tools, self.family.tools_text
        if self._refusal or describe is None or text is None:
            raise ValueError(self._refusal or self._why_no_tools())
        if outlines[0]["role"] != "system":
            outlines.insert(0, {"role": "system", "content": ""})
        separator = "\n\n" if outlines[0]["content"] else ""
        outlines[0]["content"] += separator + text.replace("{tools}", self._mark(describe(specs), texts))

    # probes

    def _reads_template(self, family: Family) -> bool:
        """Tell whether the family's reader understands the calls that this template writes."""
        if self._style is None:
            return False
        call = ToolCall("probe_tool", {"text": "a b"})
        try:
            body = probes.assistant_body(self._template, self._style.message([call]), family.think)
        except ValueError:
            return False
        body = body.rpartition(family.think[1])[2]
        body = body[: body.rindex(self._end)] if self._end and self._end in body else body
        return family.read_calls(body)[1] == [call]

    def _detect(self) -> Family | None:
        tokens = (None, *self._encoder.control_texts)
        here = (family for family in FAMILIES.values() if family.needs_token in tokens)
        return next(filter(self._reads_template, here), None)

    def _why_no_tools(self) -> str:
        why = f"writes tool calls in a form that family {self.family.name!r} does not read"
        return (
            f"the chat template of this model {why if self._style else 'renders no tool calls'}; family 'generic' "
            "(model.family) puts the tool list into the system message instead, and "
            "TrainingFactory.models.register_family adds a family of your own"
        )

    def _find_stops(self, eos: int | None, extra: Sequence[int]) -> tuple[int, ...]:
        vocabulary = self._encoder.control_texts
        stops = [vocabulary[self._end]] if self._end else []
        if self._end is None:  # a turn ends where the next one begins
            for reply in (Message("tool", "r"), Message("user", "r")):
                try:
                    first = self._continuation([reply])[0]
                except ValueError:
                    continue
                stops += [first.token] if isinstance(first, Control) else []
        known = [vocabulary.get(text) for text in self.family.stop_texts]
        return tuple(dict.fromkeys(stop for stop in (*stops, eos, *known, *extra) if stop is not None))


chat_format = TemplateChatFormat


def as_message(message: Message | Mapping[str, Any]) -> Message:
    """Convert OpenAI-style dicts, here at the edge."""
    return message if isinstance(message, Message) else message_from_dict(message)


def as_spec(tool: ToolSpec | Mapping[str, Any]) -> ToolSpec:
    return tool if isinstance(tool, ToolSpec) else spec_from_dict(tool)
