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
from TrainingFactory.envs.builtin.screen import ScreenEnvironment, Screens
from TrainingFactory.models import load_model
from TrainingFactory.models.tools_format import TAGS
from TrainingFactory.types import Message

MODEL = "smollm2-135m"
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
IMAGE_SIZE, PATCH, MERGED = 128, 16, 2  # pixels of the tile and of a patch; patches along the edge of a token
TOWER = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3}
TASKS = {"tasks": 4000, "dev": 200, "test": 1000}
SEEDS = {"tasks": 1, "dev": 2, "test": 3, "sft": 100}  # of the tasks of each part
ALIGNMENT_STEPS = 300  # about 2 minutes on a CPU core
DEMONSTRATIONS = 80
MISTAKES = 0.4  # share of the demonstrations that tap a random cell, which leaves GRPO something to improve


def write_model(
    folder: Path,
    options: Mapping[str, Any],
    text_model: str = MODEL,
    seed: int = 0,
    steps: int = ALIGNMENT_STEPS,
) -> float:
    """Write a SmolVLM whose text model has the weights of `text_model`, and whose tower and connector are aligned with
    its words in that many `steps`. Return the share of the words' variance that its image tokens leave unexplained."""
    import torch
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil

    from TrainingFactory.apps.recipes.alignment import align_tower

    _named_colors(options)
    loaded = load_model(text_model, dtype="float32", device="cpu")
    text, tokenizer = loaded.model, loaded.tokenizer
    known = text.get_input_embeddings().weight[: len(tokenizer)]
    tags = _first_pieces(tokenizer)
    tokenizer.add_tokens(
        [token for token in IMAGE_TOKENS if token not in tokenizer.get_vocab()], special_tokens=True
    )
    tokenizer.add_tokens(list(tags))  # not as special tokens, as model.tools_format adds them
    tokenizer.chat_template = Path(__file__).with_name("smolvlm.jinja").read_text(encoding="utf-8")
    config = SmolVLMConfig(
        text_config=text.config.to_dict(),
        vision_config=TOWER | {"image_size": IMAGE_SIZE, "patch_size": PATCH},
        scale_factor=MERGED, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[0]),
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = SmolVLMForConditionalGeneration(config)
        model.model.text_model.load_state_dict(text.model.state_dict())
        model.resize_token_embeddings(max(len(tokenizer), len(known)), mean_resizing=False)
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[len(known) :] = known.mean(0)
        for tag, piece in tags.items():
            embeddings.weight[tokenizer.convert_tokens_to_ids(tag)] = known[piece]
    model.generation_config.eos_token_id = list(loaded.stop_ids) or tokenizer.eos_token_id
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": IMAGE_SIZE},
        max_image_size={"longest_edge": IMAGE_SIZE},
        do_image_splitting=True,
    )
    unexplained = align_tower(model, tokenizer, processor, options, steps, seed)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)
    return unexplained


def _first_pieces(tokenizer: Any) -> dict[str, int]:
    """Return the tags of calls that are not tokens yet, with the first token of their text. A tag that begins with its
    embedding is as likely as that token; one with the mean of all embeddings takes dozens of steps to become likely."""
    vocabulary = tokenizer.get_vocab()
    return {
        tag: tokenizer(tag, add_special_tokens=False)["input_ids"][0]
        for tag in TAGS["hermes"]
        if tag not in vocabulary
    }


async def prepare_screen(options: Mapping[str, Any]) -> PreparedRows:
    """Return the demonstrations and tasks of screens with these options of the environment."""
    environment = _named_colors(options)
    rng, rows = random.Random("screen recipe"), []
    for task in environment.tasks("train", SEEDS["sft"], DEMONSTRATIONS):
        screen = environment(task)
        rows.append(await _row(screen, screen.novice(rng) if rng.random() < MISTAKES else screen.expert()))
    prepared = PreparedRows({"sft": rows})
    for part, count in TASKS.items():
        tasks = list(environment.tasks("train" if part == "tasks" else "heldout", SEEDS[part], count))
        prepared.rows[part] = [asdict(task) for task in tasks]
        if part == "dev":
            screens = [environment(task) for task in tasks]
            prepared.rows["sft_dev"] = [await _row(screen, screen.expert()) for screen in screens]
    return prepared


def _named_colors(options: Mapping[str, Any]) -> type[ScreenEnvironment]:
    """Return the environment. Raise ValueError if its tasks do not name a color, or its taps not a cell."""
    screens = Screens.from_options(options)
    for key, needed in (("kinds", ["color"]), ("tap", "cell")):
        if getattr(screens.options, key) != needed:
            raise ValueError(
                f"the recipe screen aligns colors with numbers of cells; remove environment.options.{key}, or set "
                f"environment.options.{key}={needed if isinstance(needed, str) else '[color]'}"
            )
    return screens.as_environment()


async def _row(screen: ScreenEnvironment, turns: Iterator[Message]) -> dict[str, Any]:
    """Return a demonstration that writes the named color and the number of its cell before it taps. The number follows
    the color as it does in the image tokens: a language model copies what followed a word before."""
    metadata, turn = screen.task.metadata, next(turns)
    [color] = [widget["color"] for widget in metadata["widgets"] if widget["cell"] in metadata["targets"]]
    turn = replace(turn, content=f"The cell is {color}{turn.tool_calls[0].arguments['cell']}.")
    messages = [*await screen.reset(), turn]
    return {
        "id": screen.task.id,
        "messages": [message_to_dict(message) for message in messages],
        "tools": [spec_to_dict(tool.spec) for tool in screen.tools],
    }
