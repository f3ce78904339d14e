"""The recipe `screen`: the alignment of a tower with words, and the demonstrations."""

from __future__ import annotations

import asyncio
import io
from functools import cache
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from tests.kits.vision_models import TEXT, TOKENS, TOWER, vision_model
from TrainingFactory.apps.recipes import alignment
from TrainingFactory.apps.recipes import screen as recipe
from TrainingFactory.apps.recipes.alignment import WordTargets, align_tower
from TrainingFactory.envs.builtin.screen import ScreenAdapter, ScreenEnvironment

OPTIONS = {"columns": 2, "rows": 4, "cell": 32}
STEPS = 70


@cache
def aligned() -> tuple[Any, Any, Any, float]:
    """Return a SmolVLM with 16 tokens for a picture, its tokenizer and image processor, and the error left."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil

    tokenizer = vision_model("smolvlm").tokenizer
    text = TEXT | {"model_type": "llama", "head_dim": 32, "vocab_size": len(tokenizer)}
    config = SmolVLMConfig(
        image_token_id=tokenizer.convert_tokens_to_ids(TOKENS["smolvlm"][0]), scale_factor=2,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True, text_config=text,
        vision_config=TOWER | {"image_size": 64},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SmolVLMForConditionalGeneration(config)
        torch.nn.init.normal_(model.get_input_embeddings().weight, 0, 0.13)  # as large as those of SmolLM2
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 64}, do_image_splitting=True
    )
    with pytest.MonkeyPatch.context() as patch:  # fewer and larger steps than the recipe's
        patch.setattr(alignment, "BATCH_SIZE", 8)
        patch.setattr(alignment, "LEARNING_RATE", 3e-3)
        error = align_tower(model, tokenizer, processor, OPTIONS, STEPS)
    return model, tokenizer, processor, error


def words(screen: ScreenEnvironment) -> list[str]:
    """Return what a picture reads, by the widgets of its task."""
    colors = {widget["cell"]: widget["color"] for widget in screen.task.metadata["widgets"]}
    return [word for cell in range(8) for word in (f" {colors.get(cell, 'none')}", str(cell + 1))]


def heldout(count: int) -> list[ScreenEnvironment]:
    environment = ScreenAdapter.from_options(OPTIONS).as_environment()
    return [environment(task) for task in environment.tasks("heldout", 5, count)]


def word_embedding(text: str) -> torch.Tensor:
    model, tokenizer, _, _ = aligned()
    return torch.stack(
        [model.get_input_embeddings().weight[token].detach() for token in tokenizer.encode(text)]
    ).mean(0)


def test_targets_are_the_words_of_the_screen_in_reading_order() -> None:
    model, tokenizer, _, _ = aligned()
    [screen] = heldout(1)
    expected = torch.stack([word_embedding(word) for word in words(screen)])
    torch.testing.assert_close(WordTargets(model, tokenizer, OPTIONS)(screen), expected)


def test_an_aligned_tower_reads_screens_that_it_has_not_seen() -> None:
    model, _, processor, error = aligned()
    assert error < 0.5
    vocabulary = sorted({word for screen in heldout(20) for word in words(screen)})
    embeddings = torch.stack([word_embedding(word) for word in vocabulary])
    right = total = 0
    for screen in heldout(10):
        picture = Pillow.open(io.BytesIO(screen.screenshot().data)).convert("RGB")
        pixels = processor(images=[[picture]], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            [tokens] = model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        nearest = torch.cdist(tokens, embeddings).argmin(1)
        right += sum(vocabulary[number] == word for number, word in zip(nearest, words(screen), strict=True))
        total += len(nearest)
    assert right / total > 0.7  # numbers alone, and a guessed color: 0.56


def test_alignment_leaves_the_language_model_as_it_was() -> None:
    model, tokenizer, processor, _ = aligned()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    align_tower(model, tokenizer, processor, OPTIONS, steps=2)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed and all(name.startswith(("model.vision_model", "model.connector")) for name in changed)
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_screen_with_more_words_than_tokens_is_rejected() -> None:
    model, tokenizer, processor, _ = aligned()
    with pytest.raises(
        ValueError, match=r"3 x 4 cells has 24 words, more than the 16 tokens.*reduce environment"
    ):
        align_tower(model, tokenizer, processor, OPTIONS | {"columns": 3}, steps=1)


def test_demonstrations_name_the_cell_that_they_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "NUM_DEMONSTRATIONS", 12)
    monkeypatch.setattr(recipe, "TASK_COUNTS", {"tasks": 2, "dev": 12, "test": 2})
    prepared = asyncio.run(recipe.prepare_screen(OPTIONS))
    assert prepared.row_counts == {"sft": 12, "tasks": 2, "dev": 12, "test": 2, "sft_dev": 12}
    tasks = {task["id"]: task for task in prepared.rows["dev"]}
    for row in prepared.rows["sft_dev"]:
        [cell] = tasks[row["id"]]["metadata"]["targets"]
        color = tasks[row["id"]]["prompt"].removeprefix("Tap ").rstrip(".")
        turn = row["messages"][-1]
        assert turn["content"] == f"The cell is {color}{cell + 1}."
        assert f"{cell + 1}" in str(turn["tool_calls"][0]["function"]["arguments"])
        assert row["tools"][0]["function"]["name"] == "tap"
    assert not {row["id"] for row in prepared.rows["sft"]} & set(tasks)


@pytest.mark.parametrize(("options", "text"), [({"kinds": ["label"]}, "kinds"), ({"tap": "point"}, "tap")])
def test_screens_that_cannot_be_named_are_rejected(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"recipe screen.*environment.options.{text}"):
        asyncio.run(recipe.prepare_screen(OPTIONS | options))
