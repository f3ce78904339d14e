"""Small tokenizers for the chat tests: bytes, plus the control tokens that a template or family needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^<>\s]{1,40}｜>|</?(?:tool_call|tool_response|think|s)>|<\|?[a-z_]+\|>|<\|[a-z_]+>"
    r"|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]"
)
QWEN3 = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>",
         "</tool_response>", "<think>", "</think>")  # fmt: skip
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
          "<|eom_id|>", "<|python_tag|>")  # fmt: skip
# Variants that differ little from a template that the quick tests use. One training variant stays among those.
SLOW_TEMPLATES = re.compile(r"(?!qwen3_training).*_training|gemma4_v[234]|lfm2_v2|lfm2_2_5_v2")


def for_templates(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for each of these templates. The tests of a template share a process, which compiles it once."""
    slow = [pytest.mark.slow]
    parameters = [
        pytest.param(
            name, marks=[pytest.mark.xdist_group(name), *(slow if SLOW_TEMPLATES.fullmatch(name) else [])]
        )
        for name in names
    ]
    return pytest.mark.parametrize("name", parameters)


def byte_tokenizer(template: str | None, control: tuple[str, ...] = (), eos: str = "<|endoftext|>") -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = sorted({*control, *CONTROL.findall(template or ""), eos})
    plain = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text not in plain) for text in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token=eos, chat_template=template
    )


def from_wheel(name: str, control: tuple[str, ...] = (), eos: str = "<|endoftext|>") -> Any:
    return byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), control, eos)


def qwen3() -> Any:
    return from_wheel("qwen3", QWEN3)


def llama3() -> Any:
    return from_wheel("llama3_1", LLAMA3, eos="<|eot_id|>")


def deepseek(name: str = "deepseekv3") -> Any:
    return from_wheel(name, ("<think>", "</think>"), eos="<｜end▁of▁sentence｜>")
