"""Tool support for models whose chat template has none: tokens for the tags, and a template that wraps the model's own.

Checkpoints contain both, so a model trained this way is loaded without `model.tools_format`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from TrainingFactory.models import probes
from TrainingFactory.models.loading import LoadedModel
from TrainingFactory.models.templates import ChatTemplate

FORMAT_TAGS = {"hermes": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")}


def add_tools_format(
    loaded_model: LoadedModel, name: str, frozen: bool = False, notify: Callable[[str], None] = lambda _: None
) -> None:
    """Add tokens, embeddings and a template for tools to a model in place, and report it with `notify`. Change nothing
    if the template renders tools already. `frozen`: the model's own weights are not trained, because an adapter is
    trained or the weights are quantized."""
    tokenizer = loaded_model.tokenizer
    tools_template = _read_template(name)
    chat_template = tokenizer.chat_template
    if chat_template and chat_template.startswith(tools_template):  # a checkpoint of a model that has it
        return
    if probes.renders_tools(ChatTemplate(tokenizer)):
        notify(
            f"note: model.tools_format={name} is ignored: the chat template of {loaded_model.name} renders tools"
        )
        return
    if frozen:
        raise ValueError(
            f"model.tools_format={name} adds tokens to {loaded_model.name}, and an adapter does not train their "
            "embeddings. "
            "First train all weights once (sft, without lora, model.adapter and model.quantization); then train the "
            "adapter on the model of that run, without model.tools_format"
        )
    vocabulary = tokenizer.get_vocab()
    new_tags = [tag for tag in FORMAT_TAGS[name] if tag not in vocabulary]
    vocabulary_size = len(tokenizer)
    tokenizer.add_tokens(new_tags)  # not as special tokens, which decoding may skip
    tokenizer.chat_template = tools_template + chat_template
    _add_embedding_rows(loaded_model.model, tokenizer.convert_tokens_to_ids(new_tags), vocabulary_size)
    tags = ", ".join(new_tags)
    addition = f"the tokens {tags} (embeddings: the mean of the others)" if tags else "no new token"
    notify(
        f"note: {loaded_model.name} has no chat template for tools. model.tools_format={name} adds them, and "
        f"{addition}"
    )


def _read_template(name: str) -> str:
    return Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8")


@torch.no_grad()
def _add_embedding_rows(model: Any, token_ids: list[int], vocabulary_size: int) -> None:
    """Add embedding rows for new tokens, each the mean of the first `vocabulary_size` rows. Some models have spare
    rows to use."""
    num_rows = max([model.get_input_embeddings().weight.shape[0], *(token + 1 for token in token_ids)])
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    for weight in {id(layer.weight): layer.weight for layer in layers}.values():  # tied weights once
        weight[token_ids] = weight[:vocabulary_size].float().mean(0).to(weight.dtype)
