"""`extend` against every chat template with tool support in TRL's wheel: what it adds is what the template writes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.kits.tokenizers import LLAMA3, QWEN3, TEMPLATES, for_templates, from_wheel
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.models import chat_format
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.types import Completion, Message, ToolSpec, Turn

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if "tools" in path.read_text(encoding="utf-8"))
assert len(NAMES) > 40
# The text of a tool must come out as the template would write it, with quotes, newlines and spaces at its edges.
TEXTS = ("7", ' two "quoted"\nlines \\ ', '{"a": [1, "b"]}')
# The last turn ends with <|return|>, which the model samples, and earlier turns with <|end|>: the sampled token stays.
OTHER_END = {"gptoss": "<|end|>", "gptoss_training": "<|end|>"}
# several results are fine, several calls not
WITHOUT_READER = ("diffusion_gemma", "gemma4", "glm", "gptoss", "lfm2", "muse", "nemotron", "qwen3_")
ONE_CALL_ONLY = ("llama3_1", "llama3_2", "gptoss", "gptoss_training")
every_template = for_templates(NAMES)


@cache
def made_of(name: str) -> tuple[Any, ChatFormat]:
    extra = LLAMA3 if name.startswith("llama") else QWEN3 if name.startswith("qwen") else ()
    return (tokenizer := from_wheel(name, extra)), chat_format(tokenizer)


def call(number: int) -> dict:
    function = {"name": f"tool_{number}", "arguments": {"text": "a b"}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def replies(kind: str, text: str) -> list[Message]:
    if kind == "user":
        return [Message("user", text)]
    return [Message("tool", text, tool_call_id=f"call0000{i}", name=f"tool_{i}") for i in range(int(kind))]


def rendered(tokenizer, conversation: list[dict], header: bool) -> str | None:
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=header)
    except Exception:
        return None


@pytest.mark.parametrize("kind", ["1", "2", "user"])
@every_template
def test_extend_writes_what_the_template_writes(name: str, kind: str) -> None:
    tokenizer, chat = made_of(name)
    calls = 0 if kind == "user" else 1 if name in ONE_CALL_ONLY else int(kind)
    question = {"role": "user", "content": "What is it?"}
    turn = {"role": "assistant", "content": "Thus."}
    if calls:
        turn = {"role": "assistant", "content": "", "tool_calls": [call(i) for i in range(calls)]}
        if rendered(tokenizer, [question, turn], False) is None:  # DeepSeek wants text, and no content
            for item in turn["tool_calls"]:
                item["function"]["arguments"] = json.dumps(item["function"]["arguments"])
            turn["content"] = None
        if name.startswith("deepseek_r1"):
            turn["content"] = None
    alone = rendered(tokenizer, [question, turn], False)
    assert alone is not None, "the test itself must be able to render the turn"
    for text in TEXTS:
        answers = replies(kind, text)
        whole = rendered(tokenizer, [question, turn, *map(message_to_dict, answers)], True)
        assert whole is not None
        stop = chat.stop_ids[0]
        sampled = Turn([], Completion([stop], [0.0], "stop"), Message("assistant"))
        added = chat.decode(chat.extend(sampled, answers))
        assert whole.endswith(added)
        before = whole[: len(whole) - len(added)]
        stop_text = tokenizer.decode([stop])
        # What stands before is exactly the turn up to where the model stops: nothing is written twice or lost.
        # Compared from the turn's own text on, because some templates rewrite earlier thoughts (Qwen3), which
        # stay as sampled with us.
        own = "a b" if calls else "Thus."
        ended, turn_end = before.rpartition(own)[2], alone.rpartition(own)[2]
        if kind == "user" and name in OTHER_END:
            assert ended == OTHER_END[name] and turn_end == stop_text
        elif stop_text in turn_end:
            assert ended == turn_end[: turn_end.rindex(stop_text) + len(stop_text)]
        else:  # the turn has no end of its own (GLM: the next header is the stop), or R1's template leaves it out
            assert ended in (turn_end, turn_end + stop_text)


@every_template
def test_render_writes_what_the_template_writes(name: str) -> None:
    tokenizer, chat = made_of(name)
    parameters = {"type": "object", "properties": {"q": {"type": "string", "description": "What."}}}
    schema = spec_to_dict(ToolSpec("find", 'Finds "things" <fast>.', parameters))
    asked = (("system", "Be brief."), ("user", ' Where "is" it?\n'))
    conversation = [{"role": role, "content": text} for role, text in asked]
    assert chat.decode(chat.render(conversation)) == rendered(tokenizer, conversation, True)
    options = {"tools": [schema], "tokenize": False, "add_generation_prompt": True}
    with_tools = tokenizer.apply_chat_template(conversation, **options)
    try:
        written = chat.decode(chat.render(conversation, [schema]))
    except ValueError as error:
        assert "register_family" in str(error) or "renders no tool calls" in str(error)
        assert name.startswith(WITHOUT_READER)
        assert not name.startswith(("qwen3_instruct", "qwen3_vl", "qwen3_training"))
        return
    assert written == with_tools
