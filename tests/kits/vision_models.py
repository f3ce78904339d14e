"""Vision-language models of every supported family with random weights, their tokenizers and image processors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from TrainingFactory.common.image_tokens import VIRTUAL, find_image
from TrainingFactory.common.images import image_from_pillow
from TrainingFactory.models.loading import LoadedModel, load_model
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.models.vision import open_vision
from TrainingFactory.types import Image

CHATML = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMG\
{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
TOWER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
QWEN3_5_TEXT = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_5_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32
}  # fmt: skip
GEMMA4_TEXT = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32,
    "head_dim": 32, "global_head_dim": 64, "final_logit_softcapping": 30.0,
}  # fmt: skip
# Those of E2B, and those of 26B-A4B, whose image tokens see each other.
GEMMA4_VARIANTS = {
    "gemma4": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "gemma4_moe": {
        "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}  # fmt: skip
FAMILIES = (
    "qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "idefics3", "smolvlm", "internvl", "llava_onevision", "gemma3",
    *GEMMA4_VARIANTS,
)  # fmt: skip
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TOKENS = {
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES],
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES],
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>"],
    "llava_onevision": ["<image>", "<video>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    **{key: ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|video|>"] for key in GEMMA4_VARIANTS},
}
PLACES = {
    "idefics3": "<image>", "smolvlm": "<image>", "internvl": "<IMG_CONTEXT>\n", "llava_onevision": "<image>\n",
    "gemma3": "<start_of_image>", **dict.fromkeys(GEMMA4_VARIANTS, "<|image|>"),
}  # fmt: skip
# Outputs of image processors that models do not take.
PROCESSOR_COUNTS = (
    "rows", "cols", "num_patches", "num_crops", "batch_num_images", "num_soft_tokens_per_image"
)  # fmt: skip
PINPOINTS = [[32, 64], [64, 32], [64, 64]]


def picture(seed: int, width: int = 64, height: int = 48) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    return image_from_pillow(Pillow.fromarray(pixels))


@cache
def vision_model(family: str) -> LoadedModel:
    """Return a tiny model of a family. Qwen3-VL is the built-in model."""
    if family == "qwen3_vl":
        return load_model("builtin:tiny-vl")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(TOKENS.get(family, []), special_tokens=True)
    place = PLACES.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer.chat_template = CHATML.replace("IMG", place)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, processor = _make(family, tokenizer)
    model.eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return LoadedModel(family, model, tokenizer, (), open_vision(model, processor, tokenizer))


def _make(family: str, tokenizer: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    token, text = tokenizer.convert_tokens_to_ids, TEXT | {"vocab_size": len(tokenizer)}
    llama = text | {"model_type": "llama", "head_dim": 32, "pad_token_id": tokenizer.pad_token_id}
    qwen3 = text | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        config = hf.Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": rope, "tie_word_embeddings": True},
            vision_config={
                "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 8,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "window_size": 32,
                "fullatt_block_indexes": [1],
            },
            image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
            tie_word_embeddings=True,
        )  # fmt: skip
        size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
        return hf.Qwen2_5_VLForConditionalGeneration(config), hf.Qwen2VLImageProcessorPil(
            patch_size=8, merge_size=2, temporal_patch_size=2, size=size
        )
    if family.startswith("qwen3_5"):
        return _make_qwen3_5(family, tokenizer)
    if family.startswith("gemma4"):
        return _make_gemma4(family, tokenizer)
    if family in ("idefics3", "smolvlm"):
        names = ("Idefics3", "SmolVLM") if family == "idefics3" else ("SmolVLM", "SmolVLM")
        prefix = names[0]
        config = getattr(hf, f"{prefix}Config")(
            image_token_id=token("<image>"), scale_factor=2, pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True, text_config=llama, vision_config=TOWER,
        )  # fmt: skip
        processor = getattr(hf, f"{prefix}ImageProcessorPil")(
            size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
        )
        return getattr(hf, f"{prefix}ForConditionalGeneration")(config), processor
    if family == "internvl":
        config = hf.InternVLConfig(
            image_token_id=token("<IMG_CONTEXT>"), image_seq_length=4, downsample_ratio=0.5, text_config=qwen3,
            vision_config=TOWER | {"image_size": [32, 32], "patch_size": [8, 8]}, tie_word_embeddings=True,
        )  # fmt: skip
        return hf.InternVLForConditionalGeneration(config), hf.GotOcr2ImageProcessorPil(
            size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
        )
    if family == "llava_onevision":
        config = hf.LlavaOnevisionConfig(
            image_token_id=token("<image>"), video_token_id=token("<video>"), image_grid_pinpoints=PINPOINTS,
            vision_feature_layer=-1, text_config=text | {"model_type": "qwen2", "tie_word_embeddings": True},
            vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
            tie_word_embeddings=True,
        )  # fmt: skip
        return hf.LlavaOnevisionForConditionalGeneration(config), hf.LlavaOnevisionImageProcessorPil(
            size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS
        )
    config = hf.Gemma3Config(
        mm_tokens_per_image=4, boi_token_index=token("<start_of_image>"), eoi_token_index=token("<end_of_image>"),
        image_token_index=token("<image_soft_token>"), text_config=text | {"head_dim": 32, "sliding_window": 32},
        vision_config=TOWER | {"vision_use_head": False},
    )  # fmt: skip
    gemma = hf.Gemma3ForConditionalGeneration(config)
    gemma.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, 0.1)  # zeros at first
    return gemma, hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})


def _make_qwen3_5(family: str, tokenizer: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    prefix, experts = ("Qwen3_5Moe", QWEN3_5_EXPERTS) if family == "qwen3_5_moe" else ("Qwen3_5", {})
    token = tokenizer.convert_tokens_to_ids
    config = getattr(hf, f"{prefix}Config")(
        text_config=TEXT | QWEN3_5_TEXT | experts | {"vocab_size": len(tokenizer)},
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 8,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "num_position_embeddings": 64,
        },
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip
    model = getattr(hf, f"{prefix}ForConditionalGeneration")(config)
    return model, hf.Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    )  # fmt: skip


def _make_gemma4(family: str, tokenizer: Any) -> tuple[Any, Any]:
    import transformers

    hf: Any = transformers
    token, size = tokenizer.convert_tokens_to_ids, len(tokenizer)
    words = {
        "vocab_size": size, "vocab_size_per_layer_input": size, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    config = hf.Gemma4Config(
        text_config=TEXT | GEMMA4_TEXT | words | GEMMA4_VARIANTS[family],
        vision_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        image_token_id=token("<|image|>"), boi_token_id=token("<|image>"), eoi_token_id=token("<image|>"),
        audio_token_id=token("<|audio|>"), video_token_id=token("<|video|>"),
    )  # fmt: skip
    model = hf.Gemma4ForConditionalGeneration(config)
    table = model.model.vision_tower.patch_embedder.position_embedding_table
    table.data.normal_(0, 0.1)  # ones at first
    return model, hf.Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)


def save_vision_model(family: str, folder: Path) -> str:
    """Save a model like a released one, and return its folder."""
    loaded = vision_model(family)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    assert loaded.vision is not None
    loaded.vision.processor.save_pretrained(folder)
    return str(folder)


def own_inputs(loaded: LoadedModel, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the inputs with which the model itself sees these ids: placeholders, and all pixels of their images."""
    vision = loaded.vision
    assert vision is not None
    starts = [find_image(token) for token in ids if token >= VIRTUAL and find_image(token).first_id == token]
    pictures = [Pillow.open(io.BytesIO(tokens.image.data)) for tokens in starts]
    tokens = torch.tensor([[vision.placeholder_id if token >= VIRTUAL else token for token in ids]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    is_image = (tokens == vision.placeholder_id).long()
    if not pictures:
        return inputs
    tiled = vision.model_type in ("idefics3", "smolvlm")
    processed = dict(vision.processor(images=[pictures] if tiled else pictures, return_tensors="pt"))
    for name in PROCESSOR_COUNTS:
        processed.pop(name, None)
    if vision.model_type.startswith(("qwen", "gemma4")):
        inputs["mm_token_type_ids"] = is_image.int()
    if vision.model_type == "gemma3":
        inputs["token_type_ids"] = is_image
    return inputs | processed
