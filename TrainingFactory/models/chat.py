"""Turn conversations into tokens and sampled turns into messages, for any Hugging Face template.

History is never decoded and encoded again. `render` writes the first prompt; after that a turn's ids stay as
they were sampled, and `extend` adds what the template puts between this turn and the next one. That text is
cut out of a rendering of the template itself (`probes.py`), so no family is special-cased here; families
differ in how a completion is read (`families.py`, `forms.py`). Foreign text cannot give a control token
(`encoding.py`), and what is written as a message is read back as that message, or it is not written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import lru_cache
from itertools import groupby
from typing import Any

from TrainingFactory.common.openai_format import message_from_dict, spec_from_dict
from TrainingFactory.models import probes
from TrainingFactory.models.encoding import Control, TextEncoder, remembered
from TrainingFactory.models.families import FAMILIES, Family, get_family
from TrainingFactory.models.forms import learn_reader
from TrainingFactory.models.outlines import Outlines, Texts
from TrainingFactory.models.round_trip import NotReadBack, difference, same_turn
from TrainingFactory.models.templates import Template
from TrainingFactory.types import Message, ToolCall, ToolSpec, Turn

# Ids that a template's own text gives, and between them texts to be encoded: its own, and numbers of marks.
Pieces = list[tuple[int, ...] | list[str | int]]
MAX_SKELETONS = 512
MAX_KEY = 50_000  # characters; the outline of a longer conversation is not kept
WAYS_OUT = (
    "family 'generic' (model.family) puts the tool list into the system message instead, and "
    "TrainingFactory.models.register_family adds a family of your own"
)


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
        self.tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._ends_open = lru_cache(maxsize=4096)(self._ends_in_thought)  # prompts end alike
        options = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        self._template = Template(tokenizer, options, day)
        self._marks = self._template.marks
        mark = self._marks[0]
        self._start = self._template.text([probes.user(mark)])
        self._header = self._start.rpartition(mark)[2].rstrip()
        self._style = probes.find_call_style(self._template)
        self._end = probes.end_of_turn(self._template, self._encoder.control_texts)
        self.family = chosen or self._detect() or FAMILIES["generic"]
        # the turns of a dataset differ in their texts, and few in their outlines
        self._turn = remembered(self._written_turn)
        self._turn_pieces = remembered(self._pieces)
        native = self._reads_template(self.family)
        self._template_tools = native and probes.renders_tools(self._template)
        knows_results = probes.shows_tool_results(self._template, self._style, self._end)
        self._replies_as_user = self.family.replies_as_user and not (native or (knows_results and not chosen))
        self._opens_thinking = self._header.endswith(self.family.think[0])
        self._outlines = Outlines(self._template, self._style, self._encoder)
        self._skeletons: dict[str | tuple[Any, ...], Pieces] = {}
        self.stop_ids = self._find_stops(tokenizer.eos_token_id, stop_ids)
        self._calls_text: Callable[[Sequence[ToolCall]], str] | None = None
        # Our own form of calls is for templates that have none, or lose what stands beside a call.
        self._calls_text = None if native and not self._misread() else self.family.calls_text
        self._outlines.settle(calls_as_json=self._calls_text is not None)
        self._refusal = self._misread() if chosen or native else self._why_no_tools()
        self._template.watched = False

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
        if specs and self._refusal:
            raise ValueError(self._refusal)
        schemas, schemas_text, texts = self._outlines.schemas(specs) if self._template_tools else ([], "", [])
        outlines = [self._outlines.message(message, texts) for message in self._as_user(conversation)]
        if specs and not self._template_tools:
            self._put_tools_into_system(outlines, specs, texts)
        key = json.dumps(outlines) + schemas_text
        if (pieces := self._skeletons.get(key)) is None:
            text = self._template.text(outlines, schemas)
            shown = self._marks.numbers(text)
            for role, content in ((outline["role"], outline["content"]) for outline in outlines):
                if role != "assistant" and not shown.issuperset(self._marks.numbers(content)):
                    raise ValueError(f"the chat template drops a {role} message of this conversation")
            pieces = self._remember(key, text)
        return self._fill(pieces, texts)

    def extend(self, turn: Turn, replies: Sequence[Message | Mapping[str, Any]]) -> list[int]:
        sampled = turn.completion.token_ids
        if not sampled or sampled[-1] not in self.stop_ids:
            raise ValueError("this turn was cut before its stop token, so nothing can follow it")
        answers = self._as_user([as_message(reply) for reply in replies])
        texts: Texts = ["", ""]  # marks 0 and 1 stand in the part before the replies
        for reply in answers:
            shown = self._outlines.shown(reply.role, reply.content) if reply.content else ""
            texts += [shown, reply.name or "tool"]
        ids = self._fill(self._continuation(answers), texts)
        # where a turn has no end of its own, its stop token is the first token of what follows (GLM)
        return ids[1:] if self._end is None and ids[:1] == sampled[-1:] else ids

    def write(
        self,
        message: Message | Mapping[str, Any],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
        exact: bool = True,
    ) -> list[int]:
        message = as_message(message)
        opened = self.opens_thought(prompt_ids)
        problem: ValueError | None = None
        for compose in (self._as_template, self._in_parts):
            texts: Texts = [""]  # mark 0 is the user's
            try:
                body = compose(message, texts, opened)
            except ValueError as error:
                problem = problem or error
                continue
            ids = self._fill(self._turn_pieces(body), texts)
            end = self._encoder.control_texts[self._end] if self._end else self.stop_ids[0]
            ids += [] if ids[-1:] in ([end], [self._calls_end]) else [end]
            if not exact or same_turn(read := self.parse(ids, prompt_ids, tools), message):
                return ids
            problem = problem or NotReadBack(difference(self.family.name, message, read))
        assert problem is not None
        raise problem

    def _as_template(self, message: Message, texts: Texts, opened: bool) -> str:
        """Return a turn as the template writes it, from where the model begins to write to its end."""
        write_calls = self._calls_text if message.tool_calls else None
        outline = self._outlines.message(replace(message, tool_calls=[]) if write_calls else message, texts)
        body = self._turn(json.dumps(outline))
        if write_calls:
            body += write_calls([self._outlines.call(call, texts) for call in message.tool_calls])
        if opened == self._opens_thinking:
            return body
        if opened:
            raise ValueError("the chat template opens this turn with a thought, and the first one without")
        # the first header opens a thought, that of this turn does not
        opening, closing = self.family.think
        thought, _, rest = body.partition(closing)
        return f"{opening}\n{thought.strip()}\n{closing}{rest}" if message.reasoning else rest.lstrip("\n")

    def _written_turn(self, outline: str) -> str:
        """Return what the template writes for an outline in JSON."""
        body = probes.assistant_body(self._template, self._start, json.loads(outline), self.family.think)
        return self._cut_end(body)

    def _in_parts(self, message: Message, texts: Texts, opened: bool) -> str:
        """Return a turn as its thought, its text and its calls, each as the template writes it alone, for templates
        that drop one beside another."""
        opening, closing = self.family.think
        alone = [Message("assistant", message.content)] if message.content else []
        alone += [Message("assistant", tool_calls=message.tool_calls)] if message.tool_calls else []
        opens = self._opens_thinking
        bodies = [self._as_template(part, texts, opens) for part in alone]
        text = "\n".join(probes.after_thought(each, self.family.think, opens).strip("\n") for each in bodies)
        if not (opened or message.reasoning):
            return text
        thought = self._outlines.mark(message.reasoning.strip("\n"), texts) if message.reasoning else ""
        return f"{'' if opened else opening + chr(10)}{thought}\n{closing}\n\n{text}"

    def _cut_end(self, body: str) -> str:
        return body[: body.rindex(self._end)] if self._end and self._end in body else body

    # reading

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        quotes: Texts = []
        text = self._encoder.quoted(ids, lambda found: self._outlines.mark(found, quotes))
        message = self._read(text, self.opens_thought(prompt_ids), tools)
        return self._unquoted(message, quotes) if quotes else message

    def parse_text(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        """Read an assistant's text as a message, its tags as the model's own."""
        return self._read(text, self._opens_thinking, tools)

    def _read(self, text: str, opened: bool, tools: Sequence[ToolSpec]) -> Message:
        """Read a turn; what stands inside its reasoning is not read as a call."""
        opening, closing = self.family.think
        reasoning = None
        closes = closing in text and closing in self._encoder.control_texts
        if opened or closes or text.lstrip().startswith(opening):
            thought, closed, rest = text.lstrip().removeprefix(opening).partition(closing)
            if not closed:
                return Message("assistant", reasoning=thought.strip())
            reasoning, text = thought.strip(), rest
        content, calls = self.family.read_calls(text, tools)
        return Message("assistant", content.strip(), calls, reasoning=reasoning)

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a turn after this prompt begins inside a thought; without one, the first turn is meant."""
        if not prompt_ids:
            return self._opens_thinking
        return self._ends_open(tuple(prompt_ids[-16:]))

    def _ends_in_thought(self, last_ids: tuple[int, ...]) -> bool:
        return self.decode(last_ids).rstrip().endswith(self.family.think[0])

    def _unquoted(self, message: Message, quotes: Texts) -> Message:
        def plain(value: Any) -> Any:
            if isinstance(value, str):
                parts = self._marks.split(value)
                return "".join(quotes[part] if isinstance(part, int) else part for part in parts)
            if isinstance(value, dict):
                return {plain(key): plain(item) for key, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, list) else value

        calls = [
            ToolCall(plain(call.name), plain(call.arguments), call.id, plain(call.error))
            for call in message.tool_calls
        ]
        return Message("assistant", plain(message.content), calls, reasoning=plain(message.reasoning))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._encoder.decode(token_ids)

    def cut(self, text: str, max_tokens: int) -> str:
        return self._encoder.cut(text, max_tokens)

    # marks and pieces

    def _pieces(self, text: str) -> Pieces:
        """Cut a rendering: what stands between two control tokens, own and foreign, is encoded as one text."""
        parts, pieces = list[Any](), Pieces()
        for part in self._marks.split(text):
            parts += [part] if isinstance(part, int) else self._encoder.split(part)
        for control, found in groupby(parts, lambda part: isinstance(part, Control)):
            run = list(found)
            if control:
                pieces.append(tuple(part.token for part in run))
            else:
                own = all(isinstance(part, str) for part in run)
                pieces.append(tuple(self._encoder.plain("".join(run))) if own else run)
        return pieces

    def _fill(self, pieces: Pieces, texts: Texts) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, tuple):
                ids += piece
            else:
                run = [texts[part] if isinstance(part, int) else part for part in piece]
                ids += self._encoder.plain("".join(run))
        return ids

    def _remember(self, key: str | tuple[Any, ...], text: str) -> Pieces:
        pieces = self._pieces(text)
        if len(self._skeletons) >= MAX_SKELETONS:
            self._skeletons.clear()
        if len(key) <= MAX_KEY:
            self._skeletons[key] = pieces
        return pieces

    def _continuation(self, replies: Sequence[Message]) -> Pieces:
        key = tuple([(reply.role, bool(reply.content)) for reply in replies])
        if key not in self._skeletons:
            text = probes.continuation(self._template, self._style, self._end, replies)
            shown = self._marks.numbers(text)
            if any(reply.content and 2 + 2 * number not in shown for number, reply in enumerate(replies)):
                raise ValueError("the chat template drops a reply to a turn of the model")
            return self._remember(key, text)
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
        if describe is None or text is None:
            raise ValueError(self._why_no_tools())
        if outlines[0]["role"] != "system":
            outlines.insert(0, {"role": "system", "content": ""})
        separator = "\n\n" if outlines[0]["content"] else ""
        listed = self._outlines.mark(describe(specs), texts)
        outlines[0]["content"] += separator + text.replace("{tools}", listed)

    # probes

    def _reads_template(self, family: Family) -> bool:
        """Return whether the family's reader understands the calls that this template writes."""
        call = ToolCall("probe_tool", {"text": "a b"})
        try:
            return family.read_calls(self._calls_body(family.think)([call]), ())[1] == [call]
        except ValueError:
            return False

    def _calls_body(self, think: tuple[str, str]) -> Callable[[Sequence[ToolCall]], str]:
        def body(calls: Sequence[ToolCall]) -> str:
            if self._style is None:
                raise ValueError("the chat template renders no tool calls")
            written = probes.assistant_body(self._template, self._start, self._style.message(calls), think)
            return self._cut_end(probes.after_thought(written, think, self._header.endswith(think[0])))

        return body

    def _detect(self) -> Family | None:
        tokens = (None, *self._encoder.control_texts)
        here = (family for family in FAMILIES.values() if family.needs_token in tokens)
        return next(filter(self._reads_template, here), None) or self._learned()

    def _learned(self) -> Family | None:
        """Return a family whose reader was found from what the template writes around its calls."""
        plain = Family("template", lambda text, tools: (text, []))
        try:
            reader = learn_reader(self._calls_body(plain.think), self._marks)
        except ValueError:
            return None
        learned = replace(plain, read_calls=reader or plain.read_calls)
        return learned if self._reads_template(learned) else None

    def _misread(self) -> str:
        """Return which canary turn is read as another than was written; "" where none is."""
        tags = f"{self.family.think[1]} </tool_call> "
        call = ToolCall("probe_tool", {"text": f'{tags}"quoted"\n\\ é', "n": 5, "deep": {"x": ["y", True]}})
        spec = ToolSpec("probe_tool", "", {"type": "object", "properties": {"text": {"type": "string"}}})
        for calls in ([call], [call, ToolCall("probe_tool", {})]):
            for content, reasoning in (("", None), ("Some text.", None), ("Some text.", "A thought.")):
                try:
                    self.write(Message("assistant", content, calls, reasoning=reasoning), tools=[spec])
                except NotReadBack as error:
                    return f"{error}; {WAYS_OUT}"
                except ValueError as error:  # some templates take one call a turn
                    if len(calls) == 1:
                        return f"{error}; {WAYS_OUT}"
        return ""

    def _why_no_tools(self) -> str:
        why = f"writes tool calls in a form that family {self.family.name!r} does not read"
        why = why if self._style else "renders no tool calls"
        return f"the chat template of this model {why}; {WAYS_OUT}"

    def _find_stops(self, eos: int | None, extra: Sequence[int]) -> tuple[int, ...]:
        vocabulary = self._encoder.control_texts
        stops = [vocabulary[self._end]] if self._end else []
        if self._end is None:  # a turn ends where the next one begins
            for reply in (Message("tool", "r"), Message("user", "r")):
                try:
                    first = self._continuation([reply])[0]
                except ValueError:
                    continue
                if isinstance(first, tuple) and first[0] in self._encoder.control_ids:
                    stops.append(first[0])
        known = [vocabulary.get(text) for text in self.family.stop_texts]
        calls_end = probes.end_of_calls(self._template, self._style, vocabulary)
        self._calls_end = vocabulary.get(calls_end or "")
        found = (*stops, eos, self._calls_end, *known, *extra)
        return tuple(dict.fromkeys(stop for stop in found if stop is not None))


chat_format = TemplateChatFormat


def as_message(message: Message | Mapping[str, Any]) -> Message:
    """Convert OpenAI-style dicts, here at the edge."""
    return message if isinstance(message, Message) else message_from_dict(message)


def as_spec(tool: ToolSpec | Mapping[str, Any]) -> ToolSpec:
    return tool if isinstance(tool, ToolSpec) else spec_from_dict(tool)
