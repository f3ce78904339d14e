"""The recipe `screen`: a new vision tower is put before a pretrained text model, in SmolVLM's layout. The tower is
first aligned with the text model's word embeddings (alignment.py), so that the text model reads a picture as a text.
A few demonstrations teach it to look up the named button and to tap it, GRPO to do so without mistakes.

    OUT/data/model/        the checkpoint before SFT, with the aligned tower
    OUT/data/sft.jsonl     demonstrations of taps
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from TrainingFactory.apps.recipes.gsm8k import PreparedRows
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.envs.builtin.screen import ScreenAdapter, ScreenEnvironment
from TrainingFactory.models import load_model
from TrainingFactory.models.tools_format import FORMAT_TAGS
from TrainingFactory.types import Message

TEXT_MODEL = "smollm2-135m"
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
IMAGE_SIZE, PATCH_SIZE, SCALE_FACTOR = 128, 16, 2  # pixels of the tile and of a patch; patches per token edge
TOWER_SIZES = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3}
TASK_COUNTS = {"tasks": 4000, "dev": 200, "test": 1000}
TASK_SEEDS = {"tasks": 1, "dev": 2, "test": 3, "sft": 100}  # of the tasks of each part
ALIGNMENT_STEPS = 300  # about 2 minutes on a CPU core
NUM_DEMONSTRATIONS = 80
MISTAKE_SHARE = 0.4  # of the demonstrations tap a random cell, which leaves GRPO something to improve


def write_model(
    folder: Path,
    options: Mapping[str, Any],
    text_model: str = TEXT_MODEL,
    seed: int = 0,
    num_steps: int = ALIGNMENT_STEPS,
) -> float:
    """Write a SmolVLM with the weights of `text_model` and a vision tower aligned with its words for `num_steps` steps.
    Return the share of the words' variance that the image tokens leave unexplained."""
    import torch
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil

    from TrainingFactory.apps.recipes.alignment import align_tower

    _make_environment(options)
    loaded_model = load_model(text_model, dtype="float32", device="cpu")
    language_model, tokenizer = loaded_model.model, loaded_model.tokenizer
    word_embeddings = language_model.get_input_embeddings().weight[: len(tokenizer)]
    first_token_by_tag = _find_new_tags(tokenizer)
    tokenizer.add_tokens(
        [token for token in IMAGE_TOKENS if token not in tokenizer.get_vocab()], special_tokens=True
    )
    tokenizer.add_tokens(list(first_token_by_tag))  # not as special tokens, as model.tools_format adds them
    tokenizer.chat_template = Path(__file__).with_name("smolvlm.jinja").read_text(encoding="utf-8")
    config = SmolVLMConfig(
        text_config=language_model.config.to_dict(),
        vision_config=TOWER_SIZES | {"image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE},
        scale_factor=SCALE_FACTOR, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[0]),
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = SmolVLMForConditionalGeneration(config)
        model.model.text_model.load_state_dict(language_model.model.state_dict())
        model.resize_token_embeddings(max(len(tokenizer), len(word_embeddings)), mean_resizing=False)
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[len(word_embeddings) :] = word_embeddings.mean(0)
        for tag, first_token in first_token_by_tag.items():
            embeddings.weight[tokenizer.convert_tokens_to_ids(tag)] = word_embeddings[first_token]
    model.generation_config.eos_token_id = list(loaded_model.stop_ids) or tokenizer.eos_token_id
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": IMAGE_SIZE},
        max_image_size={"longest_edge": IMAGE_SIZE},
        do_image_splitting=True,
    )
    unexplained_share = align_tower(model, tokenizer, processor, options, num_steps, seed)
    for component in (model, tokenizer, processor):
        component.save_pretrained(folder)
    return unexplained_share


def _find_new_tags(tokenizer: Any) -> dict[str, int]:
    """Return the tool-call tags that are no tokens yet, with the first token of each. A tag with that token's embedding
    is likely at once; with the mean of all embeddings it takes dozens of steps to become likely."""
    vocabulary = tokenizer.get_vocab()
    return {
        tag: tokenizer(tag, add_special_tokens=False)["input_ids"][0]
        for tag in FORMAT_TAGS["hermes"]
        if tag not in vocabulary
    }


async def prepare_screen(options: Mapping[str, Any]) -> PreparedRows:
    """Return the demonstrations and tasks of the environment `screen` with these options."""
    environment = _make_environment(options)
    rng, rows = random.Random("screen recipe"), []
    for task in environment.tasks("train", TASK_SEEDS["sft"], NUM_DEMONSTRATIONS):
        screen = environment(task)
        rows.append(
            await _make_row(screen, screen.novice(rng) if rng.random() < MISTAKE_SHARE else screen.expert())
        )
    prepared_rows = PreparedRows({"sft": rows})
    for split, count in TASK_COUNTS.items():
        tasks = list(environment.tasks("train" if split == "tasks" else "heldout", TASK_SEEDS[split], count))
        prepared_rows.rows[split] = [asdict(task) for task in tasks]
        if split == "dev":
            screens = [environment(task) for task in tasks]
            prepared_rows.rows["sft_dev"] = [await _make_row(screen, screen.expert()) for screen in screens]
    return prepared_rows


def _make_environment(options: Mapping[str, Any]) -> type[ScreenEnvironment]:
    """Return the environment; raise ValueError unless its tasks name a color and its taps a cell."""
    screens = ScreenAdapter.from_options(options)
    for key, expected_value in (("kinds", ["color"]), ("tap", "cell")):
        if getattr(screens.options, key) != expected_value:
            raise ValueError(
                f"the recipe screen aligns colors with numbers of cells; remove environment.options.{key}, or set "
                f"environment.options.{key}={expected_value if isinstance(expected_value, str) else '[color]'}"
            )
    return screens.as_environment()


async def _make_row(screen: ScreenEnvironment, turns: Iterator[Message]) -> dict[str, Any]:
    """Return a demonstration that writes the named color and the number of its cell before it taps, in the order of the
    image tokens, because a language model copies what followed a word before."""
    metadata, turn = screen.task.metadata, next(turns)
    [color] = [widget["color"] for widget in metadata["widgets"] if widget["cell"] in metadata["targets"]]
    turn = replace(turn, content=f"The cell is {color}{turn.tool_calls[0].arguments['cell']}.")
    messages = [*await screen.reset(), turn]
    return {
        "id": screen.task.id,
        "messages": [message_to_dict(message) for message in messages],
        "tools": [spec_to_dict(tool.spec) for tool in screen.tools],
    }
