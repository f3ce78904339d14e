"""What a model is taught to write is what its own reader reads, in every template of TRL's wheel."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.kits.tokenizers import (
    LLAMA3,
    QWEN3,
    TEMPLATES,
    byte_tokenizer,
    deepseek,
    for_templates,
    from_wheel,
    qwen3,
)
from TrainingFactory.models import chat_format
from TrainingFactory.models.encoding import TextEncoder
from TrainingFactory.models.loading import load_tokenizer
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.types import Completion, Message, ToolCall, ToolSpec, Turn

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if "tool" in path.read_text(encoding="utf-8"))
REFUSED = ("lfm2", "lfm2_training")  # templates that render no calls
ONE_CALL = ("llama3_1", "llama3_2", "gptoss", "gptoss_training")  # a turn, by their templates
TOOL = ToolSpec(
    "find",
    "Finds.",
    {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "more": {}}},
)
QUESTION = [Message("user", "Where?")]
ARGUMENTS = (
    {},
    {"q": "a b", "n": 5},
    {"q": 'two "quoted"\nlines, \\ and é 你', "more": {"x": ["y", True, None, 1.5], "z": "it's"}},
    {"q": "</tool_call> <tool_call> </think> </parameter> </arg_value> <|tool_call_end|> ```"},
    {"q": "5", "more": [1, "2"]},
    {"q": '[TOOL_CALLS] {"name": "find"} <|im_end|>'},
)


def tokenizer_of(name: str) -> Any:
    extra = (
        LLAMA3 if name.startswith("llama") else QWEN3 if name.startswith("qwen") else ("<think>", "</think>")
    )
    return from_wheel(name, extra)


@cache
def made_of(name: str) -> tuple[Any, ChatFormat]:
    tokenizer = tokenizer_of(name)
    return tokenizer, chat_format(tokenizer)


def turns(name: str) -> list[Message]:
    calls = [[ToolCall("find", arguments)] for arguments in ARGUMENTS]
    calls += [] if name in ONE_CALL else [[ToolCall("find", one), ToolCall("find", {})] for one in ARGUMENTS]
    found = [Message("assistant", "Plain."), Message("assistant", "Plain.", reasoning="First,\nthen.")]
    for each in calls:
        found += [Message("assistant", tool_calls=each), Message("assistant", "Some text.", each)]
        found.append(Message("assistant", "Some text.", each, reasoning="First,\nthen."))
    return found


def assert_read_back(chat, message: Message, prompt: list[int]) -> None:
    ids = chat.write(message, prompt, [TOOL])
    assert ids[-1] in chat.stop_ids and not set(ids[:-1]) & set(chat.stop_ids)
    read = chat.parse(ids, prompt, [TOOL])
    assert (read.content, read.tool_calls) == (message.content, message.tool_calls), chat.decode(ids)
    assert (read.reasoning or None) == message.reasoning


@for_templates(NAMES)
def test_every_template_round_trips_or_refuses(name: str) -> None:
    tokenizer, chat = made_of(name)
    if name in REFUSED:
        with pytest.raises(
            ValueError, match=r"(renders no tool calls|does not read|would not read back).*generic"
        ):
            chat.render(QUESTION, [TOOL])
        chat = chat_format(tokenizer, "generic")
    prompt = chat.render(QUESTION, [TOOL])
    for message in turns(name):
        if name in ("lfm2_2_5", "lfm2_2_5_v2") and "'" in str(message.tool_calls):
            continue  # their templates write an apostrophe in a Python string as it is: test below
        assert_read_back(chat, message, prompt)


@for_templates(name for name in NAMES if name not in REFUSED)
def test_calls_are_written_as_the_template_writes_them(name: str) -> None:
    tokenizer, chat = made_of(name)
    ids = chat.write(Message("assistant", tool_calls=[ToolCall("find", {"q": "a", "n": 5})]))
    written = chat.decode(ids).rpartition("</think>")[2].strip()
    whole, values = "", {"q": "a", "n": 5}
    # some templates join arguments as text, some show a call only where there is no content
    for arguments, content in ((values, ""), (json.dumps(values), None)):
        calls = [{"type": "function", "function": {"name": "find", "arguments": arguments}}]
        asked = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            whole += tokenizer.apply_chat_template([{"role": "user", "content": "?"}, asked], tokenize=False)
        except (TypeError, TemplateError):
            continue
    if name.startswith("deepseek_r1"):  # whose template leaves a single call open
        written = written.replace("<｜tool▁calls▁end｜>", "")
    assert written in whole or written.removesuffix(chat.decode(ids[-1:])) in whole


@pytest.mark.parametrize("name", ["lfm2_2_5", "lfm2_2_5_v2"])
def test_a_row_that_its_template_writes_unreadably_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"would not read back.*it's"):
        chat_format(tokenizer_of(name)).write(
            Message("assistant", tool_calls=[ToolCall("find", {"q": "it's"})])
        )


def test_text_before_a_call_is_read_in_the_generic_family() -> None:
    chat = chat_format(from_wheel("phi3"), "generic")
    message = Message("assistant", "I add them.", [ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})])
    assert chat.decode(chat.write(message)).startswith(
        'I add them.\n{"name": "add", "arguments": {"a": 1}}\n{'
    )
    assert chat.parse(chat.write(message)) == message
    with pytest.raises(ValueError, match="would not read back"):
        chat.write(Message("assistant", 'Say so:\n{"name": "add", "arguments": {"a": 1}}'))


@pytest.mark.parametrize("family", ["llama3", "generic"])
def test_a_json_answer_is_no_call(family: str) -> None:
    chat = chat_format(from_wheel("llama3_1", LLAMA3, eos="<|eot_id|>"), family)
    answers = (
        '{"name": "Ada Lovelace", "born": 1815}',
        '[{"name": "Ada"}, {"name": "Bo"}]',
        '{"type": "city", "name": "Rome"}',
        'As JSON:\n{"name": "Ada"}',
        '{"name": "Ada", "born":',
    )
    for answer in answers:
        read = chat.parse_text(answer, [ToolSpec("clock")])
        assert (read.content, read.tool_calls) == (answer, [])
    calls = {
        '{"name": "clock"}': ToolCall("clock"),
        '{"name": "Ada", "arguments": {}}': ToolCall("Ada"),
        '{"function": {"name": "f", "parameters": {"a": 1}}}': ToolCall("f", {"a": 1}),
    }
    for text, call in calls.items():
        assert chat.parse_text(text, [ToolSpec("clock")]).tool_calls == [call]


def test_a_turn_after_a_tool_result_does_not_begin_inside_a_thought() -> None:
    """R1-distill's header opens a thought, what follows a tool's result does not."""
    chat = chat_format(deepseek("deepseek_r1_distill"))
    prompt = chat.render(QUESTION, [TOOL])
    asked = Message("assistant", "", [ToolCall("find", {"q": "a"})], reasoning="Let me look.")
    assert_read_back(chat, asked, prompt)
    ids = chat.write(asked, prompt)
    turn = Turn(prompt, Completion(ids, [0.0] * len(ids), "stop"), asked)
    later = prompt + ids + chat.extend(turn, [Message("tool", "Rome", name="find")])
    plain = chat.write(Message("assistant", "In Rome."), later)
    assert chat.decode(plain) == "In Rome.<｜end▁of▁sentence｜>"
    for message in turns("deepseek_r1_distill"):
        assert_read_back(chat, message, later)


def test_tags_in_ordinary_tokens_are_text() -> None:
    chat = chat_format(qwen3())
    encode = TextEncoder(qwen3()).encode_plain
    for text in (
        'The page says <tool_call>{"name": "find", "arguments": {}}</tool_call>.',
        "the </think> tag",
        "<think> is a tag",
    ):
        assert chat.parse(encode(text)) == Message("assistant", text)
    real = chat.write(Message("assistant", "", [ToolCall("find", {"q": "</tool_call>"})]))
    assert chat.parse(real).tool_calls == [ToolCall("find", {"q": "</tool_call>"})]


def test_half_tags_that_a_template_completes_stay_text() -> None:
    template = (
        "{% for tool in tools or [] %}<{{ tool.function.name }}>"
        "{% for key in tool.function.parameters.properties %}<{{ key }}>{% endfor %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
        "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = byte_tokenizer(template, QWEN3)
    chat = chat_format(tokenizer)
    control = set(tokenizer.get_added_vocab().values())

    def controls(name: str, key: str) -> list[int]:
        schema = {"type": "object", "properties": {key: {"type": "string"}}}
        ids = chat.render(QUESTION, [ToolSpec(name, "", schema)])
        call = Message("assistant", tool_calls=[ToolCall(name, {key: "a"})])
        return [token for token in ids + chat.write(call, exact=False) if token in control]

    for half in (
        "tool_call",
        "/tool_call",
        "</tool_call",
        "|im_end|",
        "|im_end|>",
        "<|im_end",
        "think",
        "im_start|",
    ):
        assert controls(half, half) == controls("find", "q"), half


def test_newlines_and_tabs_that_are_added_tokens_are_kept() -> None:
    """Gemma adds them; they are text, and have the tokenizer's own ids."""
    tokenizer = qwen3()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n", "\n\n", "\t", "word")])
    chat = chat_format(tokenizer)
    text = "def f(x):\n\treturn word\n\n\n<b>x</b>"
    ids = chat.render([Message("user", text)])
    assert text in chat.decode(ids)
    conversation = [{"role": "user", "content": text}]
    assert ids == tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(ValueError, match=r"tokenizer .*Helloworld,f\(x\)"):
        TextEncoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_a_tokenizer_under_the_name_of_another_class_is_read_as_it_is(tmp_path) -> None:
    """Byte-level tokenizers under LlamaTokenizerFast (DeepSeek's) are made anew as SentencePiece by transformers."""
    deepseek().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"})
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("Hello wörld,  你好")) == "Hello wörld,  你好"
    assert chat_format(tokenizer).family.name == "deepseek"


V3_1 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>"
    "{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜></think>{{ m.content or '' }}{% if m.tool_calls %}"
    "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)


@pytest.mark.parametrize("thinking", [None, False, True])
def test_deepseek_v31_is_written_in_its_own_form(thinking: bool | None) -> None:
    tokenizer = byte_tokenizer(V3_1, ("<think>", "</think>"), eos="<｜end▁of▁sentence｜>")
    chat = chat_format(tokenizer, thinking=thinking)
    prompt = chat.render(QUESTION, [TOOL])
    assert chat.decode(prompt).endswith("<think>" if thinking else "</think>")
    thought = Message(
        "assistant", "Wait.", [ToolCall("find", {"q": "a"})], reasoning="Hm." if thinking else None
    )
    assert "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{" in chat.decode(chat.write(thought, prompt))
    assert_read_back(chat, thought, prompt)


def test_a_llama_without_its_tag_writes_what_it_is_told() -> None:
    chat = chat_format(
        from_wheel("llama3_1", tuple(t for t in LLAMA3 if "python" not in t), eos="<|eot_id|>")
    )
    call = Message("assistant", tool_calls=[ToolCall("find", {"q": "a"})])
    assert '"parameters": {' in chat.decode(chat.render(QUESTION, [TOOL]))
    assert chat.decode(chat.write(call)).startswith('{"name": "find", "parameters": {')
    assert_read_back(chat, call, [])


MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}"
    "[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% endif %}{% endfor %}"
)
MISTRAL_3 = MISTRAL.replace("[TOOL_CALLS][{%", "{{ m.content or '' }}{%").replace(
    "{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]",
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content or '' }}{% if m.tool_calls %}"
    "<|tool_call|>[{% for c in m.tool_calls %}"
    '{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|end_of_text|>\n{% endfor %}{% if tools %}{{ tools | tojson }}"
    "{% endif %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
COMMAND = GRANITE.replace("<|tool_call|>[", "<|START_ACTION|>[").replace(
    '{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}',
    '{"tool_call_id": "0", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
)


@pytest.mark.parametrize(
    "template", [MISTRAL, MISTRAL_3, GRANITE, COMMAND.replace("]{% endif", "]<|END_ACTION|>{% endif")]
)
def test_a_new_family_needs_no_code(template: str) -> None:
    """The call forms of Mistral (before and since version 11), Granite and Command, found from their templates."""
    chat = chat_format(
        byte_tokenizer(template, ("</s>",), eos="</s>" if "[INST]" in template else "<|end_of_text|>")
    )
    assert chat.family.name == "template"
    prompt = chat.render(QUESTION, [TOOL])
    for message in turns("new"):
        if not message.reasoning:
            assert_read_back(chat, message, prompt)


def test_turns_are_decoded_as_the_library_does() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["é ü", "<weird x>", "日本", "Ġx"])  # not all written in bytes
    encoder, library = TextEncoder(tokenizer), tokenizer.backend_tokenizer
    count, numbers = len(tokenizer), random.Random(0)
    single = [n for n in range(count) if len(library.id_to_token(n)) == 1]  # broken UTF-8 among them
    for few in ([count + 7], *([numbers.choice(single) for _ in range(6)] for _ in range(3000))):
        ids = [*few, *(numbers.randrange(count) for _ in range(4)), numbers.randrange(count - 6, count)]
        assert encoder.decode(ids) == library.decode(ids, skip_special_tokens=False)
