"""Tiny composite models with random weights, saved like released ones: a text part, a vision part and a projector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
GEMMA_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 256,
    "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

# model_type, and a variant of it -> differences of the text part from TEXT, vision part, other keys of config.json.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (GEMMA_LAYERS, VISION, {"mm_tokens_per_image": 4}),
    "gemma4": (
        GEMMA_LAYERS
        | {"num_hidden_layers": 4, "layer_types": GEMMA_LAYERS["layer_types"] * 2, "num_kv_shared_layers": 2}
        | {"global_head_dim": 64, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": None},
        VISION | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        {},
    ),
    "qwen3_5": (
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
        | {"rope_parameters": ROTARY | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
        QWEN_VISION,
        {},
    ),
    "mistral3": (
        {"model_type": "ministral3", "sliding_window": None, "rope_parameters": YARN},
        VISION | {"model_type": "pixtral", "head_dim": 8},
        {"tie_word_embeddings": False},
    ),
    "mistral3 of Mistral Small": (
        {"model_type": "mistral", "sliding_window": None},
        VISION | {"model_type": "pixtral", "head_dim": 8},
        {"tie_word_embeddings": False},
    ),
    "llama4": (
        {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 128},
        VISION | {"vision_output_dim": 32, "projector_input_dim": 16, "projector_output_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "qwen3_vl": ({"rope_parameters": ROTARY | {"mrope_interleaved": True}}, QWEN_VISION, {}),
    "qwen2_5_vl": (
        {"hidden_size": 64, "rope_parameters": ROTARY},
        {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
        | {"fullatt_block_indexes": [0]},
        {},
    ),
    "llava": ({"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}, {}),
    "internvl": (
        {"model_type": "qwen3"},
        VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
        {"tie_word_embeddings": False},
    ),
    "smolvlm": ({"model_type": "llama"}, VISION, {"scale_factor": 1}),
    "lfm2_vl": (
        {"layer_types": ["conv", "full_attention"]},
        VISION | {"model_type": "siglip2_vision_model", "num_patches": 4},
        {},
    ),
}  # fmt: skip


def read_composite_config(family: str, **changes: Any) -> Any:
    """Return the config of a family. `changes` are keys outside of its parts."""
    from transformers import AutoConfig

    from TrainingFactory.models.tiny import make_tiny_tokenizer

    tokenizer = make_tiny_tokenizer()
    text, vision, top = FAMILIES[family]
    tokens = {
        "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id
    }  # fmt: skip
    text = TEXT | tokens | text
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = len(tokenizer)
    options = {"tie_word_embeddings": True} | top | changes
    return AutoConfig.for_model(family.split()[0], text_config=text, vision_config=vision, **options)


def save_composite(folder: Path, family: str, shards: str = "5GB", **changes: Any) -> Any:
    """Save a composite model with the tiny tokenizer, and return it. `shards`: largest size of a file."""
    from transformers import AutoModelForImageTextToText

    from TrainingFactory.models.tiny import make_tiny_tokenizer

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(read_composite_config(family, **changes)).eval()
    model.save_pretrained(folder, max_shard_size=shards)
    make_tiny_tokenizer().save_pretrained(folder)
    return model
