"""`model.tools_format`: a model whose template has no tools gets a form for them, and carries it from then on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.tokenizers import byte_tokenizer, from_wheel
from tests.models.test_round_trip import ARGUMENTS, TOOL
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models import LoadedModel, chat_format, load_model
from TrainingFactory.models.tiny import make_tiny_model
from TrainingFactory.models.tools_format import FORMAT_TAGS, add_tools_format
from TrainingFactory.types import Completion, Message, ToolCall, Turn

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be kind<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": lambda: byte_tokenizer(CHATML, ("<|im_start|>",), eos="<|im_end|>"),
    "llama3": lambda: from_wheel("llama3", eos="<|eot_id|>"),
    "phi3": lambda: from_wheel("phi3"),
}


def bare(name: str = "chatml", spare: int = 0, tied: bool = True) -> LoadedModel:
    tokenizer = TEMPLATES[name]()
    model = make_tiny_model(len(tokenizer) + spare, tokenizer.eos_token_id, tokenizer.eos_token_id)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    return LoadedModel("bare", model, tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_read_as_they_were_written(name: str) -> None:
    loaded, said = bare(name), list[str]()
    own = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    add_tools_format(loaded, "hermes", notify=said.append)
    assert len(said) == 1 and "<tool_call>" in said[0]
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == own
    chat, tags = chat_format(loaded.tokenizer), loaded.tokenizer.convert_tokens_to_ids(FORMAT_TAGS["hermes"])
    assert chat.warning is None, "the template's own example call is read"
    opening, closing, reply, replied = tags
    prompt = chat.render([Message("system", "Be kind."), Message("user", "</tool_response> Where?")], [TOOL])
    assert prompt.count(replied) == 1 and '"name": "find"' in chat.decode(prompt)  # only the template's own
    turn, read, ids = Message("assistant"), Message("assistant"), list[int]()
    for arguments in ARGUMENTS:
        for calls in ([ToolCall("find", arguments)], [ToolCall("find", arguments), ToolCall("find", {})]):
            for said_first in ("", "Some text."):
                turn = Message("assistant", said_first, calls)
                ids = chat.write(turn, prompt, [TOOL])
                read = chat.parse(ids, prompt, [TOOL])
                assert (read.content, read.tool_calls) == (turn.content, turn.tool_calls)
                assert ids.count(opening) == ids.count(closing) == len(calls) and ids[-1] in chat.stop_ids
    replies = [Message("tool", "a <tool_call>"), Message("tool", "b")]
    after = chat.extend(Turn(prompt, Completion(ids, [0.0] * len(ids), "stop", 0), read), replies)
    assert (after.count(reply), after.count(replied), after.count(opening)) == (2, 2, 0)
    # What is sampled turn by turn is what a dialogue of demonstrations is written as.
    whole = [*[Message("system", "Be kind."), Message("user", "</tool_response> Where?")], turn, *replies]
    assert chat.decode(chat.render(whole, [TOOL])) == chat.decode([*prompt, *ids, *after])


@pytest.mark.parametrize(("spare", "tied"), [(0, True), (0, False), (7, True)])
def test_new_tokens_have_the_mean_of_the_others(spare: int, tied: bool) -> None:
    loaded = bare(spare=spare, tied=tied)
    used, size = len(loaded.tokenizer), len(loaded.tokenizer) + max(4, spare)
    ends = [loaded.model.get_input_embeddings, loaded.model.get_output_embeddings]
    before = [end().weight.detach().clone() for end in ends]
    add_tools_format(loaded, "hermes")
    assert loaded.model.config.vocab_size == size and len(loaded.tokenizer) == used + 4
    for end, old in zip(ends, before, strict=True):
        new = end().weight.detach()
        assert new.shape[0] == size and torch.equal(new[:used], old[:used])
        assert torch.allclose(new[used : used + 4], old[:used].mean(0).expand(4, -1), atol=1e-6)
    again = bare(spare=spare, tied=tied)
    add_tools_format(again, "hermes")
    assert torch.equal(again.model.get_input_embeddings().weight, loaded.model.get_input_embeddings().weight)


def test_a_saved_model_needs_no_option(tmp_path: Path) -> None:
    loaded, said = bare(), list[str]()
    add_tools_format(loaded, "hermes")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    prompt = [Message("user", "Where?")]
    for options in ({}, {"tools_format": "hermes"}, {"tools_format": "hermes", "adapter": None}):
        config = TrainingConfig(model={"name": str(tmp_path), "device": "cpu", **options})
        again = build_sampler.load(config, said.append)
        chat = build_sampler.make_chat(config, again)
        assert chat.render(prompt, [TOOL]) == chat_format(loaded.tokenizer).render(prompt, [TOOL])
        assert len(again.tokenizer) == len(loaded.tokenizer) and not said


def test_what_it_is_not_for(tmp_path: Path) -> None:
    said, tiny = list[str](), load_model("builtin:tiny", device="cpu")
    before = tiny.tokenizer.chat_template, len(tiny.tokenizer)
    add_tools_format(tiny, "hermes", notify=said.append)
    assert (tiny.tokenizer.chat_template, len(tiny.tokenizer)) == before
    assert len(said) == 1 and "model.tools_format=hermes is ignored" in said[0]
    loaded = bare()
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    model: dict[str, Any] = {"name": str(tmp_path), "tools_format": "hermes", "device": "cpu"}
    with pytest.raises(ValueError, match="all weights"):
        build_sampler.load(TrainingConfig(model=model, lora={"enabled": True}))
    with pytest.raises(ValueError, match=r"model\.tools_format.*hermes"):
        TrainingConfig(model=model | {"tools_format": "hermse"})
