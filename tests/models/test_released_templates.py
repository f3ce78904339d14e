"""Forms of released chat templates that differ from the usual ones: types, keys, thoughts, channels, example calls."""

from __future__ import annotations

import pytest

from tests.kits.tokenizers import QWEN3, from_wheel
from TrainingFactory.models import chat_format
from TrainingFactory.models.round_trip import describe_difference
from TrainingFactory.models.tiny import tiny_tokenizer
from TrainingFactory.types import Message, ToolCall, ToolSpec

QUESTION = [Message("user", "Where?")]
TYPES = {
    "flag": {"type": "boolean"},
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
}
TYPED = ToolSpec("find", "Finds.", {"type": "object", "properties": TYPES})


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6", "nemotron_3_nano", "glm4moe"])
def test_constants_in_tagged_pairs_are_read_by_the_schema(name: str) -> None:
    chat = chat_format(from_wheel(name, QWEN3))
    for arguments in (
        {"flag": True, "text": "True", "maybe": None, "either": 5},
        {"flag": False, "text": "None", "maybe": "True", "either": "False"},
        {"text": "5", "maybe": "5", "either": "5.5", "other": None},
    ):
        message = Message("assistant", tool_calls=[ToolCall("find", arguments)])
        ids = chat.write(message, tools=[TYPED])
        assert chat.parse(ids, tools=[TYPED]).tool_calls == message.tool_calls


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5"])
def test_a_type_that_the_template_writes_in_capitals_is_filled_in(name: str) -> None:
    chat = chat_format(from_wheel(name))
    properties = {"q": {"type": "|turn", "description": "What."}}
    text = chat.decode(chat.render(QUESTION, [ToolSpec("find", "F.", {"type": "object", "properties": properties})]))
    assert 'type:<|"|>|TURN<|"|>' in text
    assert chat._marks._salt not in text.lower()


def test_a_mark_that_the_template_cuts_does_not_reach_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    cut = "{% for tool in tools or [] %}{{ (tool.function.parameters.enum or ['a'])[0][:12] }}{% endfor %}"
    tokenizer.chat_template = cut + tokenizer.chat_template
    with pytest.raises(ValueError, match=r"cuts or rewrites .* model\.chat_template"):
        chat_format(tokenizer).render(QUESTION, [ToolSpec("find", "F.", {"enum": ["</think>"]})])


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5"])
def test_an_empty_key_is_an_argument(name: str) -> None:
    chat = chat_format(from_wheel(name))
    message = Message("assistant", tool_calls=[ToolCall("find", {"": "x", "b": {"": [1, {}]}})])
    assert chat.parse(chat.write(message)).tool_calls == message.tool_calls


def test_text_with_combining_accents_is_written() -> None:
    chat = chat_format(tiny_tokenizer())  # which normalizes to NFC
    decomposed = Message("assistant", "cafe\u0301", [ToolCall("find", {"e\u0301": 1, "f": ["e\u0301"]})])
    composed = Message("assistant", "caf\u00e9", [ToolCall("find", {"\u00e9": 1, "f": ["\u00e9"]})])
    assert chat.write(decomposed) == chat.write(composed)
    twice = Message("assistant", tool_calls=[ToolCall("find", {"e\u0301": 1, "\u00e9": 2})])
    with pytest.raises(ValueError, match="would not read back"):
        chat.write(twice)


def test_characters_that_look_the_same_are_shown_by_their_numbers() -> None:
    text = describe_difference("x", Message("assistant", "\ufb01n"), Message("assistant", "fin"))
    assert r"\ufb01" in text and "NFKC" in text
