"""Image tokens: where a chat template shows images, what users cannot write, their layout, their ids on disk."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma4AudioConfig, Gemma4ForConditionalGeneration

from tests.kits.tokenizers import QWEN3, from_wheel
from tests.kits.vision_models import FAMILIES, own_inputs, picture, vision_model
from TrainingFactory.common import image_tokens
from TrainingFactory.common.image_tokens import (
    VIRTUAL,
    find_image,
    find_image_end,
    find_images,
    from_disk_ids,
    has_images,
    load_picture,
    number_image,
    renumber_images,
    to_disk_ids,
)
from TrainingFactory.models.chat import TemplateChatFormat, chat_format
from TrainingFactory.models.loading import load_model
from TrainingFactory.models.tiny import make_tiny_tokenizer, read_builtin_template
from TrainingFactory.models.tower_shape import measure_described_tower, measure_loaded_tower
from TrainingFactory.models.vision import Vision, open_vision
from TrainingFactory.types import Completion, Image, Message, PlacedImage, ToolCall, ToolSpec, Turn

LOOK = ToolSpec("look", "Look.")


def chat_of(family: str) -> TemplateChatFormat:
    loaded = vision_model(family)
    return chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids, vision=loaded.vision)


def call_turn(chat: TemplateChatFormat, ids: list[int]) -> Turn:
    message = Message("assistant", tool_calls=[ToolCall("look", {})])
    sampled = chat.write(message, ids, [LOOK])
    return Turn(ids, Completion(sampled, [0.0] * len(sampled), "stop"), message)


def shown(ids: list[int]) -> list[Image]:
    return [
        find_image(token).image for token in ids if token >= VIRTUAL and find_image(token).first_id == token
    ]


def test_images_stand_where_messages_have_them() -> None:
    chat, first, second = chat_of("qwen3_vl"), picture(0), picture(1, 32, 32)
    question = Message("user", "Left, right.", images=[PlacedImage(5, first), PlacedImage(12, second)])
    ids = chat.render([Message("system", "Look."), question], [LOOK])
    assert (
        "Left,<|vision_start|>[image 64x48]<|vision_end|> right.<|vision_start|>[image 32x32]"
        in chat.decode(ids)
    )
    assert shown(ids) == [first, second]
    assert len([token for token in ids if token >= VIRTUAL]) == 12 + 4  # 16 x 16 pixels each

    replies = [
        Message("tool", "now:", name="look", images=[PlacedImage(4, second)]),
        Message("tool", "", name="look", images=[PlacedImage(0, second), PlacedImage(0, first)]),
    ]
    added = chat.extend(call_turn(chat, ids), replies)
    assert shown(added) == [second, second, first]
    assert "now:<|vision_start|>[image 32x32]<|vision_end|>\n</tool_response>" in chat.decode(added)


def test_the_ids_are_those_of_the_released_template() -> None:
    released = Path(pytest.importorskip("trl").__file__).parent / "chat_templates" / "qwen3_vl.jinja"
    tokenizer, calls = make_tiny_tokenizer("qwen3_vl_instruct"), [{"name": "look", "arguments": {"x": "y"}}]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}]
    conversation = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "t", "tool_calls": [{"type": "function", "function": calls[0]}]},
        {"role": "tool", "content": parts},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "u"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}]
    for given in (conversation, conversation[1:3], conversation[:5]):
        for options in ({}, {"tools": tools}):
            own, expected = (
                tokenizer.apply_chat_template(
                    given, tokenize=False, add_generation_prompt=True, chat_template=text, **options
                )
                for text in (read_builtin_template("qwen3_vl_instruct"), released.read_text())
            )
            assert own == expected


@pytest.mark.parametrize("family", [key for key in FAMILIES if not key.endswith("moe")])
def test_text_never_becomes_an_image(family: str) -> None:
    loaded, chat = vision_model(family), chat_of(family)
    vision = loaded.vision
    assert vision is not None
    control = [
        vision.placeholder,
        loaded.tokenizer.decode([vision.placeholder_id]),
        "<|vision_start|>",
        "<image>",
        "<start_of_image>",
    ]
    hostile = " ".join(control)
    ids = chat.render([Message("user", hostile, images=[PlacedImage(3, picture(0))])])
    assert shown(ids) == [picture(0)]
    assert vision.placeholder_id not in ids
    text_ids = chat.render([Message("user", hostile)])
    assert not has_images(text_ids)
    assert vision.placeholder_id not in text_ids


def test_tool_results_without_a_place_for_images_show_them_afterwards() -> None:
    tokenizer = make_tiny_tokenizer("qwen3_instruct")
    text = read_builtin_template("qwen3_vl_instruct").replace(
        "'\\n<tool_response>\\n' + text",
        "'\\n<tool_response>\\n' + (message.content if message.content is string else '')",
    )
    assert text != read_builtin_template("qwen3_vl_instruct")
    tokenizer.chat_template = text
    chat = chat_format(tokenizer, vision=vision_model("qwen3_vl").vision)
    assert chat.note is not None
    assert "in a user message" in chat.note
    turn = call_turn(chat, chat.render([Message("user", "Look.")], [LOOK]))
    image = PlacedImage(4, picture(0))
    added = chat.decode(chat.extend(turn, [Message("tool", "done", name="look", images=[image])]))
    assert "<tool_response>\ndone\n</tool_response>" in added
    assert added.index("[image 64x48]") > added.index("</tool_response>")


def test_models_without_vision_name_the_option() -> None:
    chat = chat_format(make_tiny_tokenizer())
    with pytest.raises(ValueError, match=r"model\.vision=true"):
        chat.render([Message("user", "Look.", images=[PlacedImage(0, picture(0))])])
    with pytest.raises(ValueError, match="has no vision part"):
        load_model(str(Path(__file__).parents[2] / "examples" / "own_agent" / "model"), vision=True)


def test_a_template_that_shows_no_images_is_rejected() -> None:
    with pytest.raises(ValueError, match="renders no images"):
        chat_format(make_tiny_tokenizer(), vision=vision_model("qwen3_vl").vision)


def test_large_images_are_scaled_down() -> None:
    loaded = load_model("builtin:tiny-vl", image_tokens=16)
    assert loaded.vision is not None
    for width, height in ((64, 64), (640, 480), (2000, 40), (1, 1), (3000, 3)):
        assert 1 <= loaded.vision.get_layout(width, height).num_image_tokens <= 16


@pytest.mark.parametrize(("limit", "most", "notes"), [(1024, 280, 0), (200, 140, 0), (64, 70, 1)])
def test_images_of_gemma_4_are_scaled_to_a_size_that_it_knows(limit: int, most: int, notes: int) -> None:
    loaded = vision_model("gemma4")
    processor = copy.deepcopy(loaded.vision.processor)  # pyright: ignore
    processor.max_soft_tokens = 280
    vision = Vision(loaded.model.config, processor, loaded.tokenizer, limit)
    counts = [
        vision.get_layout(width, height).num_image_tokens
        for width, height in ((640, 480), (48, 64), (3000, 3))
    ]
    assert most * 0.85 < min(counts) <= max(counts) <= most
    assert len(vision.notes) == notes


@pytest.mark.parametrize(
    ("template", "after_call"),
    [
        ("gemma4_v5", 'response:look{value:<|"|>now<|"|>}<tool_response|><|image>[image 64x48]<image|>'),
        (
            "qwen3_5_nothink",
            "<tool_response>\nnow<|vision_start|>[image 64x48]<|vision_end|>\n</tool_response>",
        ),
    ],
)
def test_released_templates_show_images(template: str, after_call: str) -> None:
    base = vision_model("gemma4" if "gemma" in template else "qwen3_5")
    control = ("<|image>", "<image|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer, config = from_wheel(template, (*QWEN3, *control)), copy.deepcopy(base.model.config)
    token, processor = tokenizer.convert_tokens_to_ids, base.vision.processor  # pyright: ignore
    config.image_token_id = token("<|image|>" if "gemma" in template else "<|image_pad|>")
    config.boi_token_id, config.eoi_token_id = token(["<|image>", "<image|>"])
    vision = Vision(config, processor, tokenizer)
    chat = chat_format(tokenizer, vision=vision)
    hostile = "Is it <|image|> or <|image_pad|>?"
    ids = chat.render([Message("user", hostile, images=[PlacedImage(0, picture(1))])], [LOOK])
    assert hostile in chat.decode(ids)
    assert shown(ids) == [picture(1)] and vision.placeholder_id not in ids
    added = chat.extend(
        call_turn(chat, ids), [Message("tool", "now", name="look", images=[PlacedImage(3, picture(0))])]
    )
    assert after_call in chat.decode(added)
    assert shown(added) == [picture(0)] and chat.note is None


def test_gemma_4_is_loaded_without_its_audio_part(tmp_path: Path) -> None:
    loaded = vision_model("gemma4")
    config = copy.deepcopy(loaded.model.config)
    config.audio_config = Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 2],
        output_proj_dims=16,
    )  # fmt: skip
    whole = Gemma4ForConditionalGeneration(config).eval()
    whole.load_state_dict(loaded.model.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    processor = {"image_processor": loaded.vision.processor.to_dict()}  # pyright: ignore
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    seen = load_model(str(tmp_path), vision=True, dtype="float32", device="cpu")
    assert seen.vision is not None and "without its audio part" in seen.notes[0]
    assert not [name for name in seen.model.state_dict() if "audio" in name]
    tower = measure_loaded_tower(seen.model)
    assert tower is not None and tower == measure_described_tower(config.to_dict())
    ids = chat_of("gemma4").render([Message("user", "Look.", images=[PlacedImage(0, picture(0))])])
    inputs = own_inputs(seen, ids)
    with torch.no_grad():
        assert torch.equal(seen.model(**inputs).logits, whole(**inputs).logits)
    seen.model.save_pretrained(tmp_path / "trained")
    seen.save_preprocessors(tmp_path / "trained")
    again = load_model(str(tmp_path / "trained"), dtype="float32", device="cpu")
    assert again.vision is not None and again.notes == ()
    assert again.vision.get_image_ids(picture(0)) == seen.vision.get_image_ids(picture(0))


def test_the_builtin_weights_are_the_same_everywhere() -> None:
    model = load_model("builtin:tiny-vl").model
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(name.encode() + weight.detach().numpy().astype("<f4").tobytes())
    assert digest.hexdigest() == "b0f2e74726d45e23c294c7fdb0cf7cccdc11c0aafbacf848f0bef6676f6c570a"


def test_ids_on_disk_are_independent_of_the_process() -> None:
    first, second = number_image(picture(50), 3), number_image(picture(51), 2)
    ids = [7, *second.ids, 8, *first.ids, *second.ids, 9]
    on_disk, images = to_disk_ids(ids)
    assert on_disk == [7, -1, -1, 8, -2, -2, -2, -1, -1, 9]
    assert [(image.digest, image.num_tokens) for image in images] == [
        (second.image.digest, 2), (first.image.digest, 3)
    ]  # fmt: skip
    assert from_disk_ids(on_disk, [(second.image, 2), (first.image, 3)]) == ids
    with pytest.raises(ValueError, match="shows 1 of them"):
        from_disk_ids(on_disk[:2], [(second.image, 2)])
    with pytest.raises(ValueError, match="belongs to no image"):
        find_image(VIRTUAL + (1 << 29))
    assert find_images(ids) == [second, first]


def test_rows_are_sorted_by_digests() -> None:
    """A resumed process numbers images in another order; its packs must be the same."""
    rows = sorted(
        (number_image(picture(60 + n), 4) for n in range(6)), key=lambda tokens: tokens.image.digest
    )
    keys = renumber_images([[1, *tokens.ids, n] for n, tokens in enumerate(rows)])
    assert keys == sorted(keys)
    assert renumber_images([[1, 2], [0]]) == [[1, 2], [0]]


def test_old_pictures_leave_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_tokens, "_image_ids", image_tokens._ImageIds())
    monkeypatch.setattr(image_tokens, "MAX_MEMORY_BYTES", 1)
    first, second = (number_image(picture(seed), 3) for seed in (80, 81))
    assert find_image(first.first_id).image.data == b""
    assert load_picture(find_image(first.first_id)).data == picture(80).data
    assert number_image(picture(80), 3).first_id == first.first_id
    assert find_image(second.first_id).image.data == picture(81).data


def test_a_part_of_a_row_ends_outside_images() -> None:
    image = number_image(picture(70), 5).ids
    row = [1, 2, *image, *image, 3]
    assert [find_image_end(row, 0, end) for end in range(1, 14)] == [1, 2, 2, 2, 2, 2, 7, 7, 7, 7, 7, 12, 13]
    assert find_image_end(row, 2, 4) == 7  # a part is at least one image


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_its_own_forward(family: str) -> None:
    """Embeddings from the cache, positions by our own arithmetic and our token layout, against pixels in the model."""
    loaded, chat = vision_model(family), chat_of(family)
    vision = loaded.vision
    assert vision is not None
    places = [PlacedImage(5, picture(0)), PlacedImage(5, picture(1, 40, 70)), PlacedImage(9, picture(0))]
    ids = chat.render([Message("user", "Left, right.", images=places)])
    tokens = torch.tensor([ids]).numpy()
    inputs, images = vision.make_model_inputs(loaded.model, tokens)
    if vision.has_rope:
        images["position_ids"] = torch.from_numpy(vision.compute_rope(tokens[0])[0])[:, None]
    with torch.no_grad():
        actual = loaded.model(input_ids=torch.from_numpy(inputs), **images).logits
        expected = loaded.model(**own_inputs(loaded, ids)).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_forward_that_would_ignore_the_images_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = vision_model("smolvlm")
    monkeypatch.setattr(
        type(loaded.model), "forward", lambda self, input_ids, **kwargs: None
    )  # as before 5.18
    with pytest.raises(ValueError, match=r"Images need transformers 5\.18 or later.*pip install"):
        open_vision(loaded.model, None, loaded.tokenizer)


@pytest.mark.parametrize("kind", ["gemma3n", "gemma4_unified"])
def test_other_families_are_named(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"model type '{kind}'; .*qwen3_vl.*Set model\.vision=false"):
        open_vision(SimpleNamespace(config=SimpleNamespace(model_type=kind)), None, None)
