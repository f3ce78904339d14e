"""Rendering of chat templates with a mark in place of every text of a conversation. The rendering shows which text is
the template's own and where the conversation's texts go, and the template never sees untrusted text."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import TemplateSyntaxError

Transform = Callable[[str], str]

SAVED_TEMPLATE = "chat_template.jinja"  # the file that transformers writes beside a tokenizer
MAX_STEPS = 3_000_000  # template lines that one rendering may execute; a message takes about 30
# Texts that show how a template changes content: edge spaces, quotes, escapes, markup, newlines, JSON.
CANARY_TEXTS = (
    "plain",
    '  two  spaces, "quotes", \\ back\nlines, <b>tags</b> &amp; é 你\ttab \n',
    '{"a": [1, "b"], "c": null}',
)


def escape_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escape_python(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")


TRANSFORMS: tuple[Transform, ...] = (
    lambda text: text,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    escape_json,
    lambda text: escape_json(text.strip()),
    lambda text: json.dumps(text)[1:-1],
    _escape_python,
    lambda text: _escape_python(text).replace("\t", "\\t"),
)
CASE_TRANSFORMS: tuple[Transform, ...] = (str.upper, str.lower)  # of a tool's description, names and types


class Marks:
    """Numbered strings that no untrusted text can contain, because every object draws a random salt."""

    def __init__(self) -> None:
        self._salt = secrets.token_hex(8)
        self._pattern = re.compile(rf"Tf{self._salt}x(\d+)fT")
        self._any_case_pattern = re.compile(self._pattern.pattern, re.IGNORECASE)

    def __getitem__(self, index: int) -> str:
        return f"Tf{self._salt}x{index}fT"

    def restore_case(self, text: str) -> str:
        """Return the text with its marks in their original case, because Gemma 4's template upper-cases the type of a
        property."""
        return self._any_case_pattern.sub(lambda match: self[int(match[1])], text)

    def is_damaged(self, text: str) -> bool:
        """Return whether a text without whole marks contains the beginning or end of one."""
        return any(fragment in text.lower() for fragment in (f"tf{self._salt[:6]}", f"{self._salt[-6:]}x"))

    def find_numbers(self, text: str) -> set[int]:
        return set(map(int, self._pattern.findall(text)))

    def split_at_marks(self, text: str) -> list[str | int]:
        """Split the text at its marks into texts and mark numbers, in order, without empty texts."""
        parts: list[str | int] = []
        for position, part in enumerate(self._pattern.split(text)):
            if position % 2:
                parts.append(int(part))
            elif part:
                parts.append(part)
        return parts


def _render_bounded(render: Callable[[], str]) -> str:
    """Return a template's rendering; raise ValueError if it executes more than MAX_STEPS lines."""
    num_steps = 0

    def count_step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > MAX_STEPS:
            raise ValueError(f"it did not finish within {MAX_STEPS} steps")
        return count_step

    previous_trace = sys.gettrace()
    # A step limit, unlike a time limit, is reproducible and works on every thread.
    sys.settrace(lambda frame, *_: count_step if frame.f_code.co_filename == "<template>" else None)
    try:
        return render()
    finally:
        sys.settrace(previous_trace)


def read_template(file: str) -> str:
    """Return the text of the Jinja file that `model.chat_template` names; raise ValueError if it cannot be used."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(
            f"file {file!r} cannot be read: {reason}. Set chat_template to the path of a Jinja file"
        ) from error
    if not text.strip():
        raise ValueError(f"file {file!r} is empty. Write a chat template into it, or remove chat_template")
    try:
        _check_syntax(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"file {file!r} has a syntax error in line {error.lineno}: {error}. Correct it"
        ) from error
    return text


def _check_syntax(template: str) -> None:
    """Compile a template as transformers does, with its extensions; raise TemplateSyntaxError if that fails."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "m"}], tokenize=False)
    except TemplateSyntaxError:
        raise
    except Exception:  # reported by `ChatTemplate`, which renders with the model's own tokenizer
        pass


def set_chat_template(tokenizer: Any, file: str | None, adapter_folder: str | None) -> None:
    """Replace the tokenizer's chat template by the template in `file`. None: use the template saved with the adapter,
    if there is one."""
    saved_template = None if adapter_folder is None else Path(adapter_folder).expanduser() / SAVED_TEMPLATE
    if file is not None:
        tokenizer.chat_template = read_template(file)
    elif saved_template is not None and saved_template.is_file():
        tokenizer.chat_template = saved_template.read_text(encoding="utf-8")


def _convert_content(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message if isinstance(content, list) else message | {"content": make_text_parts(content or "")}


def make_text_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class ChatTemplate:
    def __init__(
        self, tokenizer: Any, options: dict[str, Any] | None = None, day: date | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use a chat model, or set chat_template")
        self._tokenizer = tokenizer
        midnight = datetime.combine(day or date.today(), datetime.min.time())
        # Some templates print the date: it stays the same for the lifetime of this object.
        self._options = {"strftime_now": midnight.strftime, **(options or {})}
        self.marks = Marks()
        self.takes_parts = False  # the template reads content only as a list of parts
        self.limits_steps = True  # count steps until the template is known to finish; that doubles the time

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), header: bool = True
    ) -> str:
        if self.takes_parts:
            messages = [_convert_content(message) for message in messages]
        render = partial(
            self._tokenizer.apply_chat_template,
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=header,
            **self._options,
        )
        try:
            rendered_text = _render_bounded(render) if self.limits_steps else render()
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template has a syntax error in line {error.lineno}: {error}"
            ) from error
        except Exception as error:  # templates are third-party code
            raise ValueError(f"the chat template cannot render this conversation: {error}") from error
        return self.marks.restore_case(rendered_text)

    def find_transform(self, place: str, render: Callable[[str], str]) -> Transform:
        """Find out how the template changes a text at the place `place`, by rendering test texts there."""
        placeholder = self.marks[0]
        placeholder_text = render(placeholder)
        if placeholder not in placeholder_text and place.startswith("tool "):
            return str  # the template does not render this part of a tool
        if placeholder not in placeholder_text:
            raise ValueError(
                f"the chat template drops or rewrites a text ({place}), so conversations with one cannot be rendered"
            )
        rendered_canaries = [render(canary) for canary in CANARY_TEXTS]
        for transform in TRANSFORMS + (CASE_TRANSFORMS if place.startswith("tool ") else ()):
            if all(
                placeholder_text.replace(placeholder, transform(canary)) == canary_text
                for canary, canary_text in zip(CANARY_TEXTS, rendered_canaries, strict=True)
            ):
                return transform
        raise ValueError(
            f"the chat template drops or rewrites a text ({place}) in an unknown way, so its tokens cannot be "
            "attributed; set model.chat_template to a template that prints it unchanged"
        )
