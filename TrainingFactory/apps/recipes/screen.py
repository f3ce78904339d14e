"""The recipe `screen`: a vision tower with random weights is put before a pretrained text model, in SmolVLM's layout.
SFT on demonstrations is to teach both to see, GRPO to tap the right button. With the settings so far, SFT does not.

    OUT/data/model/        the checkpoint before training
    OUT/data/sft.jsonl     demonstrations by stages, from screens with one button to those of the tasks
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from TrainingFactory.apps.recipes.gsm8k import PreparedRows
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.envs.builtin.screen import ScreenEnvironment, Screens
from TrainingFactory.models import load_model
from TrainingFactory.types import Message

MODEL = "smollm2-135m"
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
IMAGE_SIZE, PATCH, MERGED = 128, 16, 2  # pixels of the tile and of a patch; patches along the edge of a token
TOWER = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3}
TASKS = {"tasks": 4000, "dev": 400, "test": 1000}
SEEDS = {"tasks": 1, "dev": 2, "test": 3, "sft": 100}  # of the tasks of each part


class Stage(NamedTuple):
    """Demonstrations that follow each other."""

    rows: int
    widgets: tuple[int | None, ...]  # numbers of buttons on a screen, in turn; None: all cells have one
    mistakes: float = 0.0  # share that taps a random cell


# From one button a model learns first what places are, from a few to connect them with words. The mistakes of the last
# stage leave GRPO something to improve.
STAGES = (Stage(4096, (1, 1, 2)), Stage(4096, (1, 2, 4)), Stage(8192, (2, None)), Stage(2048, (None,), 0.55))


def write_model(folder: Path, text_model: str = MODEL, seed: int = 0) -> None:
    """Write a SmolVLM whose text model has the weights of `text_model`. Its tower and connector are random."""
    import torch
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil

    loaded = load_model(text_model, dtype="float32", device="cpu")
    text, tokenizer = loaded.model, loaded.tokenizer
    known = text.get_input_embeddings().weight[: len(tokenizer)]
    tokenizer.add_tokens(
        [token for token in IMAGE_TOKENS if token not in tokenizer.get_vocab()], special_tokens=True
    )
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
        # Tokens of images as large as those of texts, in which positions are not lost among the differences of pixels.
        core: Any = model.model
        connector = core.connector.modality_projection.proj.weight
        connector.normal_(0, known.std().item() / connector.shape[1] ** 0.5)
        core.vision_model.embeddings.position_embedding.weight.normal_(0, 0.5)
    model.generation_config.eos_token_id = list(loaded.stop_ids) or tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    SmolVLMImageProcessorPil(
        size={"longest_edge": IMAGE_SIZE},
        max_image_size={"longest_edge": IMAGE_SIZE},
        do_image_splitting=True,
    ).save_pretrained(folder)


async def prepare_screen(options: Mapping[str, Any]) -> PreparedRows:
    """Return the demonstrations and tasks of screens with these options of the environment."""
    environment = Screens.from_options(options).as_environment()
    prepared = PreparedRows({"sft": await _demonstrations(options, random.Random("screen recipe"))})
    for part, count in TASKS.items():
        tasks = list(environment.tasks("train" if part == "tasks" else "heldout", SEEDS[part], count))
        prepared.rows[part] = [asdict(task) for task in tasks]
        if part == "dev":
            screens = [environment(task) for task in tasks]
            prepared.rows["sft_dev"] = [await _row(screen, screen.expert()) for screen in screens]
    return prepared


async def _demonstrations(options: Mapping[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the rows of all stages, in order."""
    rows: list[dict[str, Any]] = []
    for stage in STAGES:
        screens = [
            Screens.from_options({**options, "widgets": widgets}).as_environment()
            for widgets in stage.widgets
        ]
        sources = [
            iter(screen.tasks("train", SEEDS["sft"] + len(rows) + n, stage.rows))
            for n, screen in enumerate(screens)
        ]
        for number in range(stage.rows):
            kind = number % len(screens)
            screen = screens[kind](next(sources[kind]))
            is_mistake = rng.random() < stage.mistakes
            rows.append(await _row(screen, screen.novice(rng) if is_mistake else screen.expert()))
    return rows


async def _row(screen: ScreenEnvironment, turns: Iterator[Message]) -> dict[str, Any]:
    messages = [*await screen.reset(), next(turns)]
    return {
        "id": screen.task.id,
        "messages": [message_to_dict(message) for message in messages],
        "tools": [spec_to_dict(tool.spec) for tool in screen.tools],
    }
