"""Give a model a form for tools that its own chat template has not: tokens for the tags, and a template over its own.

A checkpoint carries both, so that what was trained from it needs no option to be loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from TrainingFactory.models import probes
from TrainingFactory.models.loading import LoadedModel
from TrainingFactory.models.templates import Template

TAGS = {"hermes": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")}


def add_tools_format(
    loaded: LoadedModel, name: str, frozen: bool = False, say: Callable[[str], None] = lambda _: None
) -> None:
    """Change tokenizer and embeddings of a model in place, and say so; where the template has tools already nothing is
    changed. `frozen`: an adapter is trained over the model, or its weights are in few bits."""
    tokenizer, ours = loaded.tokenizer, _template(name)
    own = tokenizer.chat_template
    if own and own.startswith(ours):  # a checkpoint of a model that has it
        return
    if probes.renders_tools(Template(tokenizer)):
        say(
            f"note: model.tools_format is {name}, and is not used: the chat template of {loaded.name} has tools"
        )
        return
    if frozen:
        raise ValueError(
            f"model.tools_format is {name}, which adds tokens to {loaded.name}, and an adapter does not train their "
            "embeddings: train all weights once (sft, without lora, model.adapter and model.quantization), and put the "
            "adapter on what that run has made, without model.tools_format"
        )
    there = tokenizer.get_vocab()
    new = [tag for tag in TAGS[name] if tag not in there]
    used = len(tokenizer)
    tokenizer.add_tokens(new)  # as ordinary ones: what decodes a turn shows them
    tokenizer.chat_template = ours + own
    _add_rows(loaded.model, tokenizer.convert_tokens_to_ids(new), used)
    tokens = f"the tokens {', '.join(new)} (embeddings: the mean of the others)" if new else "no new token"
    say(
        f"note: the chat template of {loaded.name} has no tools: model.tools_format={name} adds them, and {tokens}"
    )


def _template(name: str) -> str:
    return Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8")


@torch.no_grad()
def _add_rows(model: Any, tokens: list[int], used: int) -> None:
    """Make rows for new tokens, the mean of those of the `used` tokens before them; some models have spare rows."""
    size = max([model.get_input_embeddings().weight.shape[0], *(token + 1 for token in tokens)])
    model.resize_token_embeddings(size, mean_resizing=False)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for weight in {id(each.weight): each.weight for each in ends}.values():  # tied ones once
        weight[tokens] = weight[:used].float().mean(0).to(weight.dtype)
