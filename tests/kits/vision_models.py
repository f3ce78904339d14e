"""Vision-language models of every supported family with random weights, their tokenizers and image processors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from TrainingFactory.common.image_tokens import VIRTUAL, find_image
from TrainingFactory.common.images import image_from_pillow
from TrainingFactory.models.loading import LoadedModel, load_model
from TrainingFactory.models.tiny import tiny_tokenizer
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
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3", "smolvlm", "internvl", "llava_onevision", "gemma3")
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TOKENS = {
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES],
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES],
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>"],
    "llava_onevision": ["<image>", "<video>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
}
PLACES = {
    "idefics3": "<image>", "smolvlm": "<image>", "internvl": "<IMG_CONTEXT>\n", "llava_onevision": "<image>\n",
    "gemma3": "<start_of_image>",
}  # fmt: skip
PINPOINTS = [[32, 64], [64, 32], [64, 64]]


def picture(seed: int, width: int = 64, height: int = 48) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    return image_from_pillow(Pillow.fromarray(pixels))


@cache
def vision_model(family: str) -> LoadedModel:
    """Return a tiny model of a family. Qwen3-VL is the built-in model."""
    if family == "qwen3_vl":
        return load_model("builtin:tiny-vl")
    tokenizer = tiny_tokenizer()
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


def own_inputs(loaded: LoadedModel, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the inputs with which the model itself sees these ids: placeholders, and all pixels of their images."""
    vision = loaded.vision
    assert vision is not None
    starts = [find_image(token) for token in ids if token >= VIRTUAL and find_image(token).first == token]
    pictures = [Pillow.open(io.BytesIO(tokens.image.data)) for tokens in starts]
    tokens = torch.tensor([[vision.placeholder_id if token >= VIRTUAL else token for token in ids]])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    is_image = (tokens == vision.placeholder_id).long()
    if not pictures:
        return inputs
    tiled = vision.kind in ("idefics3", "smolvlm")
    processed = dict(vision.processor(images=[pictures] if tiled else pictures, return_tensors="pt"))
    for name in ("rows", "cols", "num_patches", "num_crops", "batch_num_images"):
        processed.pop(name, None)
    if vision.kind.startswith("qwen"):
        inputs["mm_token_type_ids"] = is_image.int()
    if vision.kind == "gemma3":
        inputs["token_type_ids"] = is_image
    return inputs | processed
