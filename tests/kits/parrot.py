"""A model that always writes the same: the built-in one with weights in which every token only knows its successor."""

from __future__ import annotations

import itertools
from pathlib import Path


def parrot(folder: Path, text: str = "Score: 7") -> Path:
    """Write a model into the folder that answers everything with the text, sampled greedily, and stops."""
    import torch
    from transformers import Qwen3ForCausalLM

    from TrainingFactory.models import chat_format, load_model
    from TrainingFactory.types import Message

    loaded = load_model("builtin:tiny")
    chat, tokenizer = chat_format(loaded.tokenizer), loaded.tokenizer
    words = tokenizer(text, add_special_tokens=False)["input_ids"]
    said = [chat.render([Message("user", "?")])[-1], *words, tokenizer.eos_token_id]
    assert len(set(said)) == len(said), "a token has one successor"
    config = loaded.model.config
    config.tie_word_embeddings = False
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()  # so that nothing but the last token counts
        known = model.model.embed_tokens.weight
        known.normal_(generator=torch.Generator().manual_seed(0))
        for token, follower in itertools.pairwise(said):
            model.lm_head.weight[follower] = known[token]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
