"""Tags of tool calls that are tokens of the tokenizer but were never trained, such as <tool_call> in Qwen2.5-Coder. The
token's row of the output layer equals the rows of unused ids, so the model cannot write the token, and SFT makes other
unused tokens just as likely."""

from __future__ import annotations

import json
from typing import Any

import torch
from tokenizers import Tokenizer

from TrainingFactory.models.encoding import MARKUP_PATTERN

ROW_TOLERANCE = 0.02  # relative distance of an untrained row from the mean of the unused rows
UNUSED_PREFIX = "<|unused_"
NUM_LAST_ROWS = 32  # with the highest ids: unused if they are equal


def remove_untrained_tags(name: str, model: Any, tokenizer: Any) -> tuple[str, ...]:
    """Remove call tags from the added tokens if their output rows equal those of unused ids. Their texts are then
    encoded with normal tokens. Special tokens stay. Return notes for the log."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers have none
    output_layer = model.get_output_embeddings()
    if backend is None or output_layer is None or not output_layer.weight.is_floating_point():
        return ()
    tokenizer_state = json.loads(backend.to_str())
    tags = {
        token["content"]: token["id"]
        for token in tokenizer_state["added_tokens"]
        if not token["special"]
        and MARKUP_PATTERN.fullmatch(token["content"])
        and not token["content"].startswith(UNUSED_PREFIX)
    }
    untrained_tags = _find_untrained_tags(output_layer.weight, tags)
    if not untrained_tags:
        return ()
    _remove_tokens(tokenizer_state, untrained_tags)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(tokenizer_state))
    tag_list = ", ".join(sorted(untrained_tags))
    return (f"{name} was not trained on the tokens {tag_list}; their texts are written with normal tokens",)


def _remove_tokens(tokenizer_state: dict[str, Any], texts: set[str]) -> None:
    """Change the added tokens of a tokenizer so that these texts are no longer tokens. All ids stay the same. Tokens
    that are not in the vocabulary itself are renamed, because the library numbers the added tokens in their order."""
    removed = texts & tokenizer_state["model"]["vocab"].keys()
    added_tokens = [token for token in tokenizer_state["added_tokens"] if token["content"] not in removed]
    for token in added_tokens:
        if token["content"] in texts:
            token["content"] = f"{UNUSED_PREFIX}{token['id']}|>"
    tokenizer_state["added_tokens"] = added_tokens


@torch.no_grad()
def _find_untrained_tags(weight: torch.Tensor, token_ids: dict[str, int]) -> set[str]:
    if not token_ids or max(token_ids.values()) >= len(weight) - NUM_LAST_ROWS:
        return set()
    unused_rows = weight[-NUM_LAST_ROWS:].float()
    mean_row = unused_rows.mean(0)
    max_distance = ROW_TOLERANCE * mean_row.norm()
    if (unused_rows - mean_row).norm(dim=1).max() > max_distance:  # rows of tokens in use
        return set()
    distances = (weight[list(token_ids.values())].float() - mean_row).norm(dim=1)
    return {text for text, distance in zip(token_ids, distances, strict=True) if distance <= max_distance}
