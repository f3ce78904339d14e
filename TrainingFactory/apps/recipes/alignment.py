"""Alignment of a new vision tower with the words of a language model, before SFT through the language model.

The image tokens are regressed on the word embeddings of a caption: the colors and numbers of all cells in reading
order. A language model reads such tokens as it reads a text, so it can look up in them what it can look up in a text.
Only the tower and the connector run: a step costs a fraction of an SFT step, and all image tokens are supervised.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image as Pillow

from TrainingFactory.envs.builtin.drawing import COLORS
from TrainingFactory.envs.builtin.screen import ScreenAdapter, ScreenEnvironment
from TrainingFactory.models.vision import find_tower_parameters

BATCH_SIZE, LEARNING_RATE, WARMUP_STEPS = 16, 1e-3, 20
NO_BUTTON = "none"  # the color of a cell without a button
BUTTON_COUNTS = (1, 2, 4, None, None, None)  # on a screen, in turn; None: all cells have one


def align_tower(
    model: Any, tokenizer: Any, processor: Any, options: Mapping[str, Any], steps: int, seed: int = 0
) -> float:
    """Train the new tower and connector of a SmolVLM, and return the squared error of the last step as a share of the
    variance of the color words. `options` configures the environment `screen`."""
    targets = WordTargets(model, tokenizer, options)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        _initialize_weights(model)
    tower_weights = [weight for _, weight in find_tower_parameters(model)]
    for weight in model.parameters():
        weight.requires_grad_(False)
    for weight in tower_weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(tower_weights, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _scale_learning_rate(step, steps))
    screens, unexplained_share = _generate_screens(options, seed), math.nan
    for _ in range(steps):
        batch = [next(screens) for _ in range(BATCH_SIZE)]
        outputs = _encode_screens(model, processor, batch)
        loss = (outputs - torch.stack([targets(screen) for screen in batch])).pow(2).mean() / targets.variance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower_weights, 1.0)
        optimizer.step()
        schedule.step()
        unexplained_share = float(loss.detach())
    for weight in model.parameters():
        weight.requires_grad_(True)
    return unexplained_share


class WordTargets:
    """Target embeddings [image tokens, D] of a screen's image tokens: in reading order the color and the number of each
    cell, " red", "1", " blue", "2", ... as a text would have them."""

    def __init__(self, model: Any, tokenizer: Any, options: Mapping[str, Any]) -> None:
        vision_config, layout = model.config.vision_config, ScreenAdapter.from_options(options).options
        num_cells = layout.columns * layout.rows
        tokens_per_edge = vision_config.image_size // vision_config.patch_size // model.config.scale_factor
        if (num_tokens := tokens_per_edge**2) < 2 * num_cells:
            raise ValueError(
                f"a screen of {layout.columns} x {layout.rows} cells has {2 * num_cells} words, more than the "
                f"{num_tokens} tokens of a picture; reduce environment.options.columns or rows"
            )
        embeddings = model.get_input_embeddings().weight.detach()

        def embed(text: str) -> torch.Tensor:
            return embeddings[tokenizer(text, add_special_tokens=False)["input_ids"]].mean(0)

        self._color_embeddings = {color: embed(f" {color}") for color in (*COLORS, NO_BUTTON)}
        self._number_embeddings = [embed(str(cell + 1)) for cell in range(num_cells)]
        self._padding = [self._color_embeddings[NO_BUTTON]] * (num_tokens - 2 * num_cells)
        self.variance = torch.stack(list(self._color_embeddings.values())).var(0, correction=0).mean().item()

    def __call__(self, screen: ScreenEnvironment) -> torch.Tensor:
        colors = {widget["cell"]: widget["color"] for widget in screen.task.metadata["widgets"]}
        words = [
            word
            for cell, number in enumerate(self._number_embeddings)
            for word in (self._color_embeddings[colors.get(cell, NO_BUTTON)], number)
        ]
        return torch.stack([*words, *self._padding])


def _initialize_weights(model: Any) -> None:
    """Initialize image tokens at the scale of text embeddings, so that pixel differences do not hide positions."""
    projection = model.model.connector.modality_projection.proj.weight
    projection.normal_(0, model.get_input_embeddings().weight.std().item() / projection.shape[1] ** 0.5)
    model.model.vision_model.embeddings.position_embedding.weight.normal_(0, 0.5)


def _generate_screens(options: Mapping[str, Any], seed: int) -> Iterator[ScreenEnvironment]:
    rng = random.Random(f"alignment {seed}")
    kinds = [ScreenAdapter.from_options({**options, "widgets": n}).as_environment() for n in BUTTON_COUNTS]
    while True:
        for environment in kinds:
            [task] = environment.tasks("train", rng.getrandbits(32), 1)
            yield environment(task)


def _encode_screens(model: Any, processor: Any, screens: Sequence[ScreenEnvironment]) -> torch.Tensor:
    """Return the connector's outputs [screens, image tokens, D]."""
    pictures = [Pillow.open(io.BytesIO(screen.screenshot().data)).convert("RGB") for screen in screens]
    pixels = processor(images=[[picture] for picture in pictures], return_tensors="pt")["pixel_values"]
    outputs = model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    return outputs.reshape(len(screens), -1, outputs.shape[-1])


def _scale_learning_rate(step: int, steps: int) -> float:
    """Return the multiplier of the learning rate: a linear warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
