"""The built-in models: a Qwen3 of half a million parameters, and a Qwen3-VL that sees images. Their tokenizer is
trained on the texts below; their weights are random numbers from a seed. Architecture, added tokens and chat template
are those of Qwen3 4B and Qwen3-VL."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from TrainingFactory.models.names import TINY_ID, TINY_VL_ID, TORCH_SEED_PREFIX
from TrainingFactory.models.words import NAMES, PLACES, SENTENCE_WORDS, THINGS

VL_PATCH_SIZE = 8  # pixels along the edge of a patch; a token shows two by two patches
SPECIAL_TOKENS = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|>
<|video_pad|>""".split()
PLAIN_TOKENS = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|>
<|file_sep|> <tool_response> </tool_response> <think> </think>""".split()
# Qwen's pre-tokenization: digits are split one by one, a word may include one leading space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
COMMON_WORDS = """a about after all also an and answer any are as at back be because been before between both but
by call can city could day do does each error find first for from get give go has have how if in into is it its
just know last like look make many more most much name new no not now number of on one only or other out over
people place question result say see she so some take tell than that the their them then there these they this time
to tool two up use user value was way we what when where which who why will with word work would year you your
search lookup query find expression calculate calculator compute equals plus minus times divided result number
string integer object text key value list true false null live lives born owns likes visits color keep keeps""".split()


def read_builtin_template(name: str = "qwen3_instruct") -> str:
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")


@cache
def _train_tokenizer() -> str:
    """Train a byte-level BPE tokenizer with fewer than 1,000 entries in which every word of `words` is one token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.normalizers import NFC

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_build_corpus(), trainer)
    tokenizer_state = json.loads(tokenizer.to_str())
    vocabulary = tokenizer_state["model"]["vocab"]
    for word in NAMES + PLACES + THINGS + SENTENCE_WORDS:
        for spelling in (word, "Ġ" + word):  # the byte-level spelling of a leading space
            vocabulary.setdefault(spelling, len(vocabulary))
    tokenizer_state["model"]["ignore_merges"] = True  # use the vocabulary's whole words directly
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_state))
    special_tokens = [AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN_TOKENS])
    return tokenizer.to_str()


def make_tiny_tokenizer(chat_template: str = "qwen3_instruct") -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train_tokenizer()),
        eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=read_builtin_template(chat_template),
        model_max_length=4096, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_builtin_tokenizer(name: str) -> Any:
    return make_tiny_tokenizer("qwen3_vl_instruct" if name == TINY_VL_ID else "qwen3_instruct")


def make_builtin_model(name: str, revision: str) -> tuple[Any, Any, Any]:
    """Return a built-in model, its tokenizer, and its image processor or None."""
    tokenizer = make_builtin_tokenizer(name)
    eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    is_vl = name == TINY_VL_ID
    model = (
        make_tiny_vl_model(tokenizer, revision)
        if is_vl
        else make_tiny_model(len(tokenizer), eos_id, pad_id, revision)
    )
    model.generation_config.eos_token_id = [eos_id, pad_id]
    return model, tokenizer, make_tiny_image_processor() if is_vl else None


def make_tiny_model(vocab_size: int, eos_token_id: int, pad_token_id: int, revision: str = "0") -> Any:
    """Return the built-in text model. `revision` is the seed of its weights. `torch:SEED` draws them with torch's
    generator, as versions before 0.2 did; those weights depend on the processor type."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    text_options = _make_text_options(vocab_size, eos_token_id, pad_token_id)
    config = Qwen3Config(**text_options, rope_parameters=rope_parameters, tie_word_embeddings=True)
    seed_text = revision.removeprefix(TORCH_SEED_PREFIX)
    seed = _parse_seed(TINY_ID, seed_text, revision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    if not revision.startswith(TORCH_SEED_PREFIX):
        _draw_weights(model, seed, config.initializer_range)
    return model


def make_tiny_vl_config(tokenizer: Any) -> Any:
    """Return the config of the built-in vision-language model: a Qwen3-VL with a text part of the built-in text model's
    shape and a vision tower of two layers."""
    from transformers import Qwen3VLConfig

    rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    text_options = _make_text_options(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    get_token_id = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config=text_options | {"rope_parameters": rope_parameters, "tie_word_embeddings": True},
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": VL_PATCH_SIZE,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        },
        image_token_id=get_token_id("<|image_pad|>"), video_token_id=get_token_id("<|video_pad|>"),
        vision_start_token_id=get_token_id("<|vision_start|>"), vision_end_token_id=get_token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip


def make_tiny_vl_model(tokenizer: Any, revision: str = "0") -> Any:
    """Return the built-in vision-language model. `revision` is the seed of its weights."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    seed = _parse_seed(TINY_VL_ID, revision, revision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(make_tiny_vl_config(tokenizer))
    _draw_weights(model, seed, 0.02)
    # Else a language model could hardly read from a random tower where something is: positions would vanish among the
    # differences of the pixels.
    for name, weight in model.model.visual.named_parameters():
        scale = 15 if "pos_embed" in name else 3 if "merger" in name and weight.dim() > 1 else 1
        weight.data.mul_(scale)
    return model


def make_tiny_image_processor() -> Any:
    """Return the image processor of the built-in vision-language model. An image token shows 16 x 16 pixels."""
    from transformers import Qwen2VLImageProcessorPil

    size_limits = {"shortest_edge": 16 * 16, "longest_edge": 512 * 512}
    return Qwen2VLImageProcessorPil(
        patch_size=VL_PATCH_SIZE, merge_size=2, temporal_patch_size=2, size=size_limits
    )


def _make_text_options(vocab_size: int, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "eos_token_id": eos_token_id, "pad_token_id": pad_token_id,
    }  # fmt: skip


def _parse_seed(name: str, seed_text: str, revision: str) -> int:
    if not seed_text.isdecimal():
        raise ValueError(f"model.revision is {revision!r}; for {name} it must be a seed, such as 0")
    return int(seed_text)


def _draw_weights(model: Any, seed: int, standard_deviation: float) -> None:
    """Fill every matrix with approximately normal numbers that are identical on every processor: each number is the
    sum of twelve 16-bit integers, scaled by one multiplication. Norms (vectors) stay at one."""
    import numpy as np
    import torch

    generator = np.random.PCG64(seed)
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() < 2:
            continue
        random_ints = generator.random_raw(3 * weight.numel()).astype("<u8").view("<u2").reshape(-1, 12)
        sums = 2 * random_ints.sum(axis=1, dtype=np.int64) - 12 * 65535  # mean 0, deviation 2 x 65536
        weight_values = (sums * (standard_deviation / (2 * 65536))).astype(np.float32)
        weight.data.copy_(torch.from_numpy(weight_values).view_as(weight))


def _build_corpus() -> list[str]:
    schema_example = (
        '{"type": "function", "function": {"name": "", "description": "", "parameters": {"type": "object", '
    )
    schema_example += '"properties": {"": {"type": "string", "description": ""}}, "required": [""]}}}'
    call_example = '<tool_call>\n{"name": "search", "arguments": {"query": ""}}\n</tool_call>'
    words = [f"{word} {word}" for word in COMMON_WORDS]
    return [read_builtin_template(), schema_example, call_example] * 40 + words * 2
