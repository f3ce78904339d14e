"""Forms of released chat templates that differ from the usual ones: types, keys, thoughts, channels, example calls."""

from __future__ import annotations

import pytest

from tests.kits.tokenizers import QWEN3, byte_tokenizer, from_wheel
from TrainingFactory.agent_api.turns.response_text import TurnReader
from TrainingFactory.models import chat_format
from TrainingFactory.models.round_trip import describe_difference
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.types import Completion, Message, ToolCall, ToolSpec, Turn

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
    text = chat.decode(
        chat.render(QUESTION, [ToolSpec("find", "F.", {"type": "object", "properties": properties})])
    )
    assert 'type:<|"|>|TURN<|"|>' in text
    assert chat._marks._salt not in text.lower()


def test_a_mark_that_the_template_cuts_does_not_reach_the_prompt() -> None:
    tokenizer = make_tiny_tokenizer()
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
    chat = chat_format(make_tiny_tokenizer())  # which normalizes to NFC
    decomposed = Message("assistant", "cafe\u0301", [ToolCall("find", {"e\u0301": 1, "f": ["e\u0301"]})])
    composed = Message("assistant", "caf\u00e9", [ToolCall("find", {"\u00e9": 1, "f": ["\u00e9"]})])
    assert chat.write(decomposed) == chat.write(composed)
    twice = Message("assistant", tool_calls=[ToolCall("find", {"e\u0301": 1, "\u00e9": 2})])
    with pytest.raises(ValueError, match="would not read back"):
        chat.write(twice)


def test_characters_that_look_the_same_are_shown_by_their_numbers() -> None:
    text = describe_difference("x", Message("assistant", "\ufb01n"), Message("assistant", "fin"))
    assert r"\ufb01" in text and "NFKC" in text


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}CALLS<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIST_IN_LINES = (  # as in Granite 3
    '{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}\n{"name": "{{ c.function.name }}",\n'
    "\"arguments\": {{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}{% endfor %}\n]{% endif %}"
)
ARGUMENTS_AS_TEXT = (  # as in InternLM 2, which prints the arguments of a call as a string
    '{% for c in m.tool_calls or [] %}<|action_start|><|plugin|>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | string }}}<|action_end|>{% endfor %}'
)


@pytest.mark.parametrize(
    ("calls", "sampled"),
    [
        (LIST_IN_LINES, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]'),
        (ARGUMENTS_AS_TEXT, '<|action_start|><|plugin|>\n{"name": "f", "arguments": {"a": 1}}<|action_end|>'),
    ],
)
def test_json_inside_tags_is_read_with_its_tags(calls: str, sampled: str) -> None:
    chat = chat_format(byte_tokenizer(CHATML.replace("CALLS", calls), ("<|im_end|>",), eos="<|im_end|>"))
    assert chat.family.name == "template"
    assert chat.parse_text(sampled) == Message("assistant", tool_calls=[ToolCall("f", {"a": 1})])
    prompt = chat.render(QUESTION, [TYPED])
    for message in (
        Message("assistant", "Text.", [ToolCall("f", {"a": "it's", "b": [None]}), ToolCall("g", {})]),
        Message("assistant", '{"name": "f", "arguments": {}}'),  # an answer in JSON is no call
    ):
        read = chat.parse(chat.write(message, prompt, [TYPED]), prompt, [TYPED])
        assert (read.content, read.tool_calls) == (message.content, message.tool_calls)


EMPTY_THOUGHT = (  # as in Gemma 4: the generation prompt ends with an empty thought, and turns show none
    "{% for m in messages %}<|turn>{{ m.role }}\n{% for c in m.tool_calls or [] %}<|tool_call>call:"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}<tool_call|>{% endfor %}{{ m.content or '' }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n<|channel>thought\n<channel|>{% endif %}"
)


@pytest.mark.parametrize("template", ["gemma4", "gemma4_v5", EMPTY_THOUGHT])
def test_a_call_inside_a_thought_channel_is_not_executed(template: str) -> None:
    is_own = template == EMPTY_THOUGHT
    chat = chat_format(
        byte_tokenizer(template, eos="<turn|>") if is_own else from_wheel(template, eos="<turn|>")
    )
    assert chat.family.think == ("<|channel>thought", "<channel|>")
    call = "<|tool_call>call:find{}<tool_call|>"
    closed = chat.parse_text(f"<|channel>thought\nMaybe {call}\n<channel|>Five.")
    assert closed == Message("assistant", "Five.", reasoning=f"Maybe {call}")
    later = chat.parse_text(f"First.<|channel>thought\nMaybe {call}\n<channel|>{call}")
    assert later == Message("assistant", "First.", [ToolCall("find")], reasoning=f"Maybe {call}")
    for text in (f"<|channel>thought\n{call}", f"First.<|channel>thought\n{call}"):
        assert chat.parse_text(text).tool_calls == []
    prompt = chat.render(QUESTION)
    for message in (
        Message("assistant", "Five.", reasoning="Two and three."),
        Message("assistant", "", [ToolCall("find", {"q": "a"})], reasoning="Two and three."),
    ):
        assert chat.parse(chat.write(message, prompt), prompt) == message


CHANNEL_TURNS = {
    "<|channel|>final<|message|>Five.": Message("assistant", "Five."),
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Five.": Message(
        "assistant", "Five.", reasoning="Hm."
    ),
    '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": "a"}<|call|>': Message(
        "assistant", tool_calls=[ToolCall("find", {"q": "a"})]
    ),
    " to=functions.find<|channel|>commentary json<|message|>{}<|call|>": Message(
        "assistant", tool_calls=[ToolCall("find")]
    ),
    '<|channel|>analysis<|message|>I call to=functions.find {"q": 1}<|end|><|start|>assistant<|channel|>': Message(
        "assistant", reasoning='I call to=functions.find {"q": 1}'
    ),
    "Plain text without a header.": Message("assistant", "Plain text without a header."),
}


def test_channels_are_thought_text_and_calls() -> None:
    chat = chat_format(from_wheel("gptoss", ("<|constrain|>",), eos="<|return|>"))
    assert chat.family.name == "gpt-oss"
    for text, message in CHANNEL_TURNS.items():
        assert chat.parse_text(text, [TYPED]) == message
    broken = chat.parse_text(' to=functions.find<|channel|>commentary json<|message|>{"q": <|call|>')
    assert broken.tool_calls[0].error
    preamble = Message("assistant", "I look.", [ToolCall("find", {"text": "a"})], reasoning="Hm.")
    assert "<|channel|>commentary<|message|>I look.<|end|>" in chat.decode(chat.write(preamble))
    with pytest.raises(ValueError, match="one call per turn"):
        chat.write(Message("assistant", tool_calls=[ToolCall("find"), ToolCall("find")]))


@pytest.mark.parametrize("name", ["gptoss", "muse_glimmer"])
def test_a_conversation_in_channels_is_continued(name: str) -> None:
    chat = chat_format(from_wheel(name, eos="<|return|>" if name == "gptoss" else "<|eot|>"))
    prompt = chat.render(QUESTION, [TYPED])
    for message, reply in (
        (
            Message("assistant", tool_calls=[ToolCall("find", {"flag": True})], reasoning="Hm."),
            Message("tool", "5"),
        ),
        (Message("assistant", "It is 5."), Message("user", "And <|end|>?")),
    ):
        ids = chat.write(message, prompt, [TYPED])
        read = chat.parse(ids, prompt, [TYPED])
        assert (read.content, read.tool_calls, read.reasoning) == (
            message.content, message.tool_calls, message.reasoning
        )  # fmt: skip
        added = chat.extend(Turn(prompt, Completion(ids, [0.0] * len(ids), "stop"), message), [reply])
        assert chat.decode(added).endswith("<|start|>assistant") and chat.decode(added).startswith(
            "<|start|>"
        )
        prompt = prompt + ids + added


def test_streamed_text_of_channels_has_no_headers() -> None:
    chat = chat_format(from_wheel("gptoss", eos="<|return|>"))
    message = Message("assistant", "It is five.", reasoning="Two and three.")
    ids = chat.write(message)
    reader = TurnReader(chat, [], [])
    assert reader.parse_message(ids, reader.decode(ids)) == message
    so_far = [reader.parse_partial(reader.decode(ids[:size]), ()) for size in range(len(ids))]
    assert all(message.content.startswith(part.content) for part in so_far)
    assert all(message.reasoning.startswith(part.reasoning or "") for part in so_far)
    assert so_far[-1].content and so_far[-1].reasoning


CODER = CHATML.replace(  # as in Qwen2.5-Coder
    "CALLS",
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}",
).replace(
    "{{ tools | tojson }}",
    "{{ tools | tojson }} Return an object within <tool_call></tool_call> tags:\n<tool_call>\n"
    '{{ \'{{"name": <function-name>, "arguments": <args-json-object>}}\' }}\n</tool_call>',
)


def test_the_doubled_braces_of_an_example_are_read() -> None:
    chat = chat_format(byte_tokenizer(CODER, QWEN3))
    assert '{{"name": <function-name>' in chat.decode(chat.render(QUESTION, [TYPED]))
    assert chat.family.name == "qwen3" and chat.warning is None
    for inside in (
        '{{"name": "find", "arguments": {"q": "a } b"}}}',
        '{{"name": "find", "arguments": {"q": "a } b"}}',
        '{{"name": "find", "arguments": {"q": "a } b </tool_call>"}}}',
    ):
        call = chat.parse_text(f"Text.\n<tool_call>\n{inside}\n</tool_call>", [TYPED])
        assert call.content == "Text." and call.tool_calls[0].error is None
        assert call.tool_calls[0].arguments["q"].startswith("a } b")
    everywhere = '<tool_call>\n{{"name": "find", "arguments": {{"n": {{"m": 1}} }}}}\n</tool_call>'
    assert chat.parse_text(everywhere).tool_calls == [ToolCall("find", {"n": {"m": 1}})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "find", "arguments": {"text": "a"}}',
        '```json\n{"name": "find", "arguments": {"text": "a"}}\n```',
        '<tools>\n{"name": "find", "arguments": {"text": "a"}}\n</tools>',
        '{"name": "find", "arguments": {"text": }',
    ],
)
def test_a_call_without_tags_is_unreadable_and_not_dropped(text: str) -> None:
    chat = chat_format(byte_tokenizer(CODER, QWEN3))
    read = chat.parse_text(f"I look.\n{text}", [TYPED])
    assert read.content == "I look." and len(read.tool_calls) == 1
    assert "<tool_call>" in (read.tool_calls[0].error or "")
    others = [ToolSpec("other", "O.")]
    assert not chat.parse_text('{"name": "Ada", "arguments": {}}', others).tool_calls


def test_an_example_that_the_parser_rejects_is_reported() -> None:
    chat = chat_format(byte_tokenizer(CODER.replace('"arguments": <', '"arguments" = <'), QWEN3))
    assert chat.warning and '"arguments" = {}' in chat.warning and "model.chat_template" in chat.warning


INDENTED = CODER.replace(
    "{% if add_generation_prompt %}<|im_start|>", "{% if add_generation_prompt %}  <|im_start|>"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            INDENTED,
            r"differently from its generation prompt: .*\\n<\|im_start.* instead of .*\\n  <\|im_start",
        ),
        (CODER.replace("{% if tools %}", "{% if tools }"), r"syntax error in line 5: unexpected '}'"),
    ],
    ids=["indented", "syntax"],
)
def test_a_rejected_template_is_rejected_for_the_true_reason(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        chat_format(byte_tokenizer(template, QWEN3)).render(QUESTION, [TYPED])
