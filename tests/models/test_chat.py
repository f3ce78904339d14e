"""The chat layer family by family: reading, writing, thinking, limits."""

from __future__ import annotations

from datetime import date
from itertools import product
from typing import Any

import pytest

from tests.kits.tokenizers import QWEN3, byte_tokenizer, deepseek, from_wheel, llama3, qwen3
from TrainingFactory.common.openai_format import spec_to_dict
from TrainingFactory.models import DeepSeekModel, Family, LlamaModel, Qwen3Model, chat_format, register_family
from TrainingFactory.models.families import FAMILIES
from TrainingFactory.models.tiny import make_tiny_tokenizer, read_builtin_template
from TrainingFactory.types import Completion, Message, ToolCall, ToolSpec, Turn

TOOL = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
SCHEMA = spec_to_dict(TOOL)
DEEP = '{"a":' * 100 + "1" + "}" * 100
FORMATS = {
    "tiny": (make_tiny_tokenizer, "qwen3"),
    "qwen3": (qwen3, "qwen3"),
    "qwen2.5": (lambda: from_wheel("qwen2_5", ("<tool_call>", "</tool_call>")), "qwen2.5"),
    "llama3": (llama3, "llama3"),
    "deepseek-v3": (deepseek, "deepseek"),
    "deepseek-r1": (lambda: deepseek("deepseek_r1_distill"), "deepseek"),
}


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turn_of(chat, message: Message) -> Turn:
    prompt, ids = chat.render([Message("user", "2 + 3?")], [TOOL]), chat.write(message)
    return Turn(prompt, Completion(ids, [0.0] * len(ids), "stop"), message)


@pytest.mark.parametrize("name", FORMATS)
def test_family_is_found_and_what_is_written_is_read(name: str) -> None:
    make, family = FORMATS[name]
    chat = chat_format(make())
    assert chat.family.name == family
    messages = [
        Message("assistant", "Five."),
        Message("assistant", tool_calls=[ToolCall("add", {"a": 2, "b": [1, {"c": "x y"}]})]),
        Message("assistant", tool_calls=[ToolCall("add", {"text": 'é "q" \\ \n'})]),
    ]
    if family != "llama3":  # whose template takes one call and no text beside it
        messages.append(Message("assistant", "Wait.", [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})]))
    for message in messages:
        ids = chat.write(message)
        assert ids[-1] in chat.stop_ids and not set(ids[:-1]) & set(chat.stop_ids)
        read = chat.parse(ids)
        assert (read.content, read.tool_calls) == (message.content, message.tool_calls)


@pytest.mark.parametrize("name", FORMATS)
def test_episode_text_is_what_the_template_writes_for_the_same_conversation(name: str) -> None:
    make, _ = FORMATS[name]
    tokenizer = make()
    chat = chat_format(tokenizer)
    call = Message("assistant", tool_calls=[ToolCall("add", {"a": 2})])
    turn = turn_of(chat, call)
    ids = turn.prompt_ids + turn.completion.token_ids + chat.extend(turn, [Message("tool", "5", name="add")])
    text = chat.decode(ids)
    assert text.startswith(chat.decode(turn.prompt_ids))
    if name.startswith("deepseek"):  # no tools in the template: ours go into the system message
        assert text.index("Adds.") < text.index("2 + 3?")
        assert text.endswith("<｜tool▁output▁begin｜>5<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")
        return
    calls = [{"function": {"name": "add", "arguments": {"a": 2}}}]
    made = [said("user", "2 + 3?"), said("assistant", "", tool_calls=calls), said("tool", "5", name="add")]
    options = {"tools": [SCHEMA], "tokenize": False, "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template(made, **options)
    # Qwen3's template takes the empty thought out of an answered turn; what was sampled stays
    assert text.replace("<think>\n\n</think>\n\n", "") == expected


def test_ids_are_the_tokenizers_own_merges_over_borders_included() -> None:
    tokenizer = make_tiny_tokenizer()
    chat = chat_format(tokenizer)
    conversation = [said("system", "Be brief."), said("user", "Where does Ada live?")]
    expected = tokenizer.apply_chat_template(conversation, tools=[SCHEMA], add_generation_prompt=True)
    assert chat.render(conversation, [SCHEMA]) == list(expected["input_ids"])


def test_our_template_is_qwen3s() -> None:
    ours, theirs = byte_tokenizer(read_builtin_template(), QWEN3), from_wheel("qwen3_instruct_2507", QWEN3)
    calls = [{"function": {"name": "add", "arguments": given}} for given in ({"a": 1}, "{}")]
    messages = [
        said("system", "S"), said("user", " U\n"), said("assistant", "A", tool_calls=calls), said("tool", "1"),
        said("tool", "2"), said("assistant", None, tool_calls=calls[:1]), said("tool", "3"), said("assistant", "B"),
        said("system", "S2"),
    ]  # fmt: skip
    schema = {"type": "function", "function": {"name": "add", "description": 'é "q"', "parameters": {}}}
    for first, header, tools in product((0, 1), (True, False), (None, [schema], [schema, schema])):
        for last in range(first + 1, len(messages) + 1):
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": header}
            assert len({t.apply_chat_template(messages[first:last], **options) for t in (ours, theirs)}) == 1


def test_thinking_on_and_off() -> None:
    on, off = chat_format(qwen3(), thinking=True), chat_format(qwen3(), thinking=False)
    question = [Message("user", "2 + 3?")]
    assert on.decode(on.render(question)).endswith("<|im_start|>assistant\n")
    assert off.decode(off.render(question)).endswith("<think>\n\n</think>\n\n")
    thought = Message("assistant", "Five.", reasoning="two and three")
    assert on.decode(on.write(thought)) == "<think>\ntwo and three\n</think>\n\nFive.<|im_end|>"
    assert on.parse(on.write(thought)) == thought
    assert off.decode(off.write(Message("assistant", "Five."))) == "Five.<|im_end|>"
    # the sampled thought stays in the history, and the next header is the same as the first
    turn = turn_of(on, Message("assistant", reasoning="hm", tool_calls=[ToolCall("add", {"a": 2})]))
    assert on.decode(on.extend(turn, [Message("tool", "5")])).endswith(
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_r1_begins_inside_its_thought() -> None:
    chat = chat_format(deepseek("deepseek_r1_distill"))
    assert chat.decode(chat.render([Message("user", "2 + 3?")])).endswith("<｜Assistant｜><think>\n")
    message = Message("assistant", "Five.", reasoning="two and three")
    assert chat.decode(chat.write(message)) == "two and three\n</think>\n\nFive.<｜end▁of▁sentence｜>"
    assert chat.parse(chat.write(message)) == message
    unfinished = chat.parse_text("I keep thinking <｜tool▁call▁begin｜>")
    assert unfinished.reasoning and not unfinished.tool_calls and not unfinished.content


def test_markers_inside_reasoning_are_no_calls() -> None:
    chat = chat_format(qwen3())
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    assert chat.parse_text(f"<think>\nmaybe {call}\n</think>\n\nFive.") == Message(
        "assistant", "Five.", reasoning=f"maybe {call}"
    )
    assert len(chat.parse_text(f"<think>\nmaybe {call}\n</think>\n\n{call}").tool_calls) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>{"name": 5}</tool_call>', "name of a tool"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "JSON object"),
        ('<tool_call>{"name": "add", "arguments": {"a": }</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "add"}', "without </tool_call>"),
        ("</tool_call>", "without <tool_call>"),
        ("<tool_call>[]</tool_call>", "list, not an object"),
        ("<tool_call></tool_call>", "not valid JSON"),
        (f'<tool_call>{{"name": "a", "arguments": {DEEP}}}</tool_call>', "too deeply"),
    ],
)
def test_a_broken_call_says_what_is_wrong(text: str, reason: str) -> None:
    calls = chat_format(make_tiny_tokenizer()).parse_text(text).tool_calls
    assert calls and reason in (calls[0].error or "")


def test_good_calls_beside_a_broken_one_are_kept() -> None:
    text = "".join(
        f"<tool_call>{inside}</tool_call>" for inside in ('{"name": "a"}', "oops", '{"name": "b"}')
    )
    calls = chat_format(make_tiny_tokenizer()).parse_text(text).tool_calls
    assert [(call.name, call.error is None) for call in calls] == [("a", True), ("", False), ("b", True)]


def test_llama_reads_its_three_forms() -> None:
    chat = chat_format(llama3())
    read = lambda text: chat.parse_text(text).tool_calls  # noqa: E731
    assert read('{"name": "add", "parameters": {"a": 1}}') == [ToolCall("add", {"a": 1})]
    assert read('<|python_tag|>{"name": "add", "parameters": {}}') == [ToolCall("add", {})]
    assert read('<|python_tag|>web.call(query="x, y", n=3)') == [ToolCall("web", {"query": "x, y", "n": 3})]
    assert read("<|python_tag|>print(1)") == [ToolCall("python", {"code": "print(1)"})]
    assert read("<|python_tag|>web.call(__import__('os'))")[0].error
    assert read('{"answer": 5}') == [] and read("The {name} is 5.") == []


def test_a_turn_without_its_stop_token_cannot_be_extended() -> None:
    chat = chat_format(make_tiny_tokenizer())
    turn = turn_of(chat, Message("assistant", "Five."))
    turn.completion.token_ids.pop()
    with pytest.raises(ValueError, match="stop token"):
        chat.extend(turn, [Message("user", "And now?")])


def test_the_sampled_stop_token_takes_the_place_of_the_templates() -> None:
    chat = chat_format(llama3())
    eom = chat._encoder.control_texts["<|eom_id|>"]
    turn = turn_of(chat, Message("assistant", tool_calls=[ToolCall("add", {"a": 2})]))
    expected = chat.extend(turn, [Message("tool", "5")])
    turn.completion.token_ids[-1] = eom
    assert chat.extend(turn, [Message("tool", "5")]) == expected
    assert "<|eot_id|>" not in chat.decode(expected).split("5")[0]  # no second end of the turn


def test_templates_without_tools() -> None:
    tokenizer = from_wheel("phi3")
    with pytest.raises(ValueError, match=r"renders no tool calls.*generic"):
        chat_format(tokenizer).render([Message("user", "hi")], [TOOL])
    chat = chat_format(tokenizer, "generic")
    text = chat.decode(chat.render([Message("system", "Be brief."), Message("user", "2 + 3?")], [TOOL]))
    assert text.index("Be brief.") < text.index("Adds.") < text.index("2 + 3?")
    call = Message("assistant", tool_calls=[ToolCall("add", {"a": 2}), ToolCall("add", {"a": 3})])
    turn = turn_of(chat, call)
    assert chat.parse(turn.completion.token_ids) == call
    added = chat.decode(chat.extend(turn, [Message("tool", text, name="add") for text in ("2", "3")]))
    assert added == "\n<|user|>\nResult of add:\n2\n\nResult of add:\n3<|end|>\n<|assistant|>\n"


def test_bad_input_is_answered_in_words() -> None:
    with pytest.raises(ValueError, match="did you mean qwen3"):
        chat_format(make_tiny_tokenizer(), "qwen-3")
    with pytest.raises(ValueError, match="no chat template"):
        chat_format(byte_tokenizer(None))
    with pytest.raises(ValueError, match="at least one message"):
        chat_format(make_tiny_tokenizer()).render([])
    shouting = read_builtin_template().replace(
        "'<|im_start|>' + message.role + '\\n' + text", "message.role + text | upper"
    )
    assert shouting != read_builtin_template()
    with pytest.raises(ValueError, match=r"drops or rewrites a text \(user\)"):
        chat_format(byte_tokenizer(shouting, QWEN3)).render([Message("user", "hi")])


def test_no_message_is_searched_for_in_the_whole_text() -> None:
    """A conversation is rendered in time that grows with its length, not with its square."""
    tokenizer, searched = make_tiny_tokenizer(), []

    class Text(str):
        def __contains__(self, part: Any) -> bool:
            searched.append(part)
            return super().__contains__(part)

    class Tokenizer:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def apply_chat_template(self, *given: Any, **options: Any) -> str:
            return Text(tokenizer.apply_chat_template(*given, **options))

    chat = chat_format(Tokenizer())
    conversation = [Message("user" if n % 2 else "assistant", f"Text {n}.") for n in range(1, 60)]
    chat.render(conversation[:2])  # what the template does to a text is found out once
    searched.clear()
    assert chat.render(conversation) == chat_format(tokenizer).render(conversation)
    assert not searched


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_does_not_end_is_refused_in_words(template: str, reason: str) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"the chat template .*{reason}"):
        chat_format(tokenizer)


def test_a_family_of_ones_own() -> None:
    def read(text: str, tools):
        return ("", [ToolCall(text[5:])]) if text.startswith("CALL ") else (text, [])

    register_family(Family("mine", read))
    try:
        assert chat_format(make_tiny_tokenizer(), "mine").parse_text("CALL add").tool_calls == [
            ToolCall("add")
        ]
    finally:
        del FAMILIES["mine"]


def test_the_date_is_fixed() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}" + read_builtin_template()
    chat = chat_format(byte_tokenizer(source, QWEN3), day=date(2024, 2, 29))
    assert chat.decode(chat.render([Message("user", "hi")])).startswith("2024-02-29<|im_start|>")


def test_cut_keeps_both_ends_and_says_so() -> None:
    chat = chat_format(make_tiny_tokenizer())
    assert chat.truncate("short", 50) == "short"
    long = " ".join(f"word{i}" for i in range(5000))
    for limit in (40, 100, 1000):
        cut = chat.truncate(long, limit)
        assert len(chat._encoder.encode_plain(cut)) <= limit and len(cut) > limit
        assert cut.startswith("word0") and cut.endswith("4999") and "[... cut from" in cut
    assert chat.truncate("x\ud83d" * 200, 50)  # half a character, as a model can write in JSON
    huge = "é" * 10_000_000
    assert len(chat._encoder.encode_plain(chat.truncate(huge, 64))) <= 64


def test_seed_names_are_faces_of_the_layer() -> None:
    face = Qwen3Model("builtin:tiny", thinking=False)
    assert face.chat.family.name == "qwen3" and face.model.config.model_type == "qwen3"
    assert (DeepSeekModel.family, LlamaModel.family) == ("deepseek", "llama3")


@pytest.mark.parametrize("name", ["tiny", "qwen2.5", "llama3"])
def test_calls_that_differ_in_their_texts_are_rendered_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = FORMATS[name][0]()
    chat, own, rendered = chat_format(tokenizer), tokenizer.apply_chat_template, list[Any]()

    def counted(*given: Any, **options: Any) -> Any:
        rendered.append(given)
        return own(*given, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    # the last two hold what templates may escape in ways of their own: each is given to the template itself
    texts = ["48/2", "two words", 'a "quoted" \\ part\nand é', "it's", "a\rb"]
    written = [chat.write(Message("assistant", tool_calls=[ToolCall("add", {"a": text})])) for text in texts]
    assert len(rendered) == 3
    for text, ids in zip(texts, written, strict=True):
        function = {"name": "add", "arguments": {"a": text}}
        made = [
            said("user", "m"),
            said("assistant", "", tool_calls=[{"type": "function", "function": function}]),
        ]
        assert chat.decode(ids).removesuffix("<|im_end|>").strip() in own(made, tokenize=False)
