"""Images for vision-language models: the tokens that stand for an image, their positions, and the tower's output.

`Vision` belongs to a loaded model and holds none of its weights, so that the sampler's and the learner's copy of the
model use the same object. The chat format asks for the ids of an image (`common/image_tokens.py`). Before a forward,
`make_model_inputs` replaces them by the model's own placeholder and encodes the images; the model's own forward puts
the tower's output in their places. Positions of M-RoPE are a function of the ids.

    vision.placeholder                   what the model's chat template writes for an image
    vision.get_image_ids(image)          token ids of an image, with the tokens that a processor puts around its tiles
    vision.compute_rope(ids)             [3, N] positions of time, height and width; only if `vision.has_rope`
    vision.make_model_inputs(model, ids) ids with placeholders, and keyword arguments of the forward
    vision.save(folder)                  the image processor's file, beside a checkpoint

The tower runs once per image; its outputs are cached up to `cache_bytes`, least recently used first out.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from TrainingFactory.common.image_tokens import VIRTUAL, ImageTokens, find_image, load_picture, number_image
from TrainingFactory.models.composite import IMAGE_PROCESSOR_FILE, TRAINED_WITH_VISION_KEY
from TrainingFactory.types import Image

MAX_IMAGE_TOKENS = 1024
CACHE_BYTES = 1 << 30
IMAGE_TOKEN = -1  # an image token in a layout
TILED_TYPES = ("idefics3", "smolvlm")
QWEN_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GEMMA4_TOKEN_LIMITS = (70, 140, 280, 560, 1120)  # settings of its processor: the most tokens of an image
# Model types with images -> the texts that their processor puts around an image.
IMAGE_DELIMITERS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(QWEN_TYPES, ("", "")),
    **dict.fromkeys(TILED_TYPES, ("", "")),
    "internvl": ("<img>", "</img>"),
    "llava_onevision": ("", ""),
    "gemma3": ("\n\n<start_of_image>", "<end_of_image>\n\n"),
    "gemma4": ("", ""),  # control tokens of its config
}
# Argument of the forward that marks image tokens, in models whose image tokens may see each other.
TYPE_ARGUMENTS = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}


@dataclass(slots=True, frozen=True)
class ImageLayout:
    """The tokens of an image: control tokens, and IMAGE_TOKEN in place of each that shows a part of the picture."""

    tokens: tuple[int, ...]
    grid: tuple[int, int] | None = None  # rows and columns, for M-RoPE

    @property
    def num_image_tokens(self) -> int:
        return self.tokens.count(IMAGE_TOKEN)


class Vision:
    """Image tokens of a vision-language model. `config` is the model's config, `processor` its image processor."""

    def __init__(
        self, config: Any, processor: Any, tokenizer: Any, max_tokens: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:  # fmt: skip
        self.config, self.model_type = config, config.model_type
        self.processor, self._tokenizer = processor, tokenizer
        self.placeholder_id: int = config.image_token_id
        self.prefix, self.suffix = IMAGE_DELIMITERS[self.model_type]
        if self.model_type == "gemma4":
            edge_ids = [config.boi_token_id, config.eoi_token_id]
            self.prefix, self.suffix = tokenizer.convert_ids_to_tokens(edge_ids)
        placeholder = "<start_of_image>" if self.model_type == "gemma3" else None
        self.placeholder: str = placeholder or tokenizer.convert_ids_to_tokens(self.placeholder_id)
        self.has_rope = self.model_type in QWEN_TYPES
        text_config = config.get_text_config()
        # Tokens of an image see each other, also later ones: prefixes cannot be computed in parts. Gemma 4 has a
        # setting for that, which concerns layers with a sliding window only.
        self.sees_whole_in_windows_only = self.model_type == "gemma4"
        self.sees_whole_images = self.model_type == "gemma3" or (
            self.model_type == "gemma4" and text_config.use_bidirectional_attention == "vision"
        )
        # A placeholder that the model has sampled. Gemma 4 reads it as padding.
        self._sampled_id = text_config.pad_token_id if self.model_type == "gemma4" else self.placeholder_id
        self.is_trained = False  # the tower is trained, so that its outputs change
        self.notes: list[str] = []
        self._processor = self._limit_processor(max_tokens or MAX_IMAGE_TOKENS)
        self.get_layout = lru_cache(maxsize=4096)(self._compute_layout)
        self._cache: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._lock = threading.Lock()
        self.num_encoded_images = 0  # images that went through the tower

    def save(self, folder: str | Path) -> None:
        """Write the image processor's file, and mark the checkpoint as trained with vision."""
        self.processor.save_pretrained(folder)
        processor_file = Path(folder) / IMAGE_PROCESSOR_FILE
        options = json.loads(processor_file.read_text(encoding="utf-8")) | {TRAINED_WITH_VISION_KEY: True}
        processor_file.write_text(json.dumps(options, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    # tokens

    def get_image_ids(self, image: Image) -> list[int]:
        """Return the token ids of an image."""
        layout = self.get_layout(image.width, image.height)
        image_ids = iter(number_image(image, layout.num_image_tokens).ids)
        return [next(image_ids) if token == IMAGE_TOKEN else token for token in layout.tokens]

    def _limit_processor(self, max_tokens: int) -> Any:
        """Return an image processor that limits each image to `max_tokens` tokens, or to the model's smallest layout if
        that has more."""
        processor: Any = copy.deepcopy(self.processor)
        min_tokens = 1
        if self.model_type in QWEN_TYPES:
            token_pixels = (processor.patch_size * processor.merge_size) ** 2
            max_pixels = min(processor.size["longest_edge"], max_tokens * token_pixels)
            # A row of more tokens than `max_tokens` has no smaller layout, and the processor rejects ratios above 200.
            self._max_ratio = min(max_pixels // token_pixels, 199)
            processor.size = {
                "shortest_edge": min(processor.size["shortest_edge"], max_pixels), "longest_edge": max_pixels
            }  # fmt: skip
        elif self.model_type in TILED_TYPES:
            min_tokens, tile_pixels = self._tile_tokens, processor.max_image_size["longest_edge"]
            # Along an edge, and one of the whole.
            num_tiles = max(1, math.isqrt(max(max_tokens // min_tokens - 1, 0)))
            processor.size = {"longest_edge": min(processor.size["longest_edge"], num_tiles * tile_pixels)}
        elif self.model_type == "internvl":
            min_tokens = self._tile_tokens
            processor.max_patches = min(processor.max_patches, max(1, max_tokens // min_tokens - 1))
        elif self.model_type == "gemma3":
            min_tokens = self.config.mm_tokens_per_image
        elif self.model_type == "gemma4":
            min_tokens, soft_limit = GEMMA4_TOKEN_LIMITS[0], min(max_tokens, processor.max_soft_tokens)
            token_limits = [token_limit for token_limit in GEMMA4_TOKEN_LIMITS if token_limit <= soft_limit]
            processor.max_soft_tokens = max([min_tokens, *token_limits])
        else:  # the grid is part of the model
            min_tokens = 2 * self._tile_tokens
        if min_tokens > max_tokens:
            self.notes.append(
                f"images have at least {min_tokens} tokens in this model, more than model.image_tokens={max_tokens}"
            )
        return processor

    @property
    def _tile_tokens(self) -> int:
        vision_config = self.config.vision_config
        if self.model_type == "internvl":
            return self.config.image_seq_length
        num_patches = (vision_config.image_size // vision_config.patch_size) ** 2
        return num_patches // self.config.scale_factor**2 if self.model_type in TILED_TYPES else num_patches

    def _compute_layout(self, width: int, height: int) -> ImageLayout:
        """Compute the layout of images of this size by processing a blank image."""
        from PIL import Image as Pillow

        outputs = self._process_picture(Pillow.new("RGB", (width, height)))
        if self.model_type in QWEN_TYPES:
            _, rows, columns = outputs["image_grid_thw"][0].tolist()
            merge_size = self.processor.merge_size
            rows, columns = rows // merge_size, columns // merge_size
            return ImageLayout((IMAGE_TOKEN,) * (rows * columns), (rows, columns))
        if self.model_type in TILED_TYPES:
            return ImageLayout(self._make_tile_ids(outputs["rows"][0][0], outputs["cols"][0][0]))
        if self.model_type == "internvl":
            return ImageLayout((IMAGE_TOKEN,) * (int(outputs["num_patches"][0]) * self._tile_tokens))
        if self.model_type == "gemma3":
            return ImageLayout((IMAGE_TOKEN,) * self.config.mm_tokens_per_image)
        if self.model_type == "gemma4":
            return ImageLayout((IMAGE_TOKEN,) * int(outputs["num_soft_tokens_per_image"][0]))
        from transformers import LlavaOnevisionModel

        tile_features = torch.zeros(outputs["pixel_values"].shape[1], self._tile_tokens, 1)
        packed_features, _ = LlavaOnevisionModel.pack_image_features(
            SimpleNamespace(config=self.config), [tile_features], outputs["image_sizes"], torch.zeros(1),  # pyright: ignore
            self.config.vision_aspect_ratio,
        )  # fmt: skip
        return ImageLayout((IMAGE_TOKEN,) * len(packed_features[0]))

    def _make_tile_ids(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the tokens of an image for Idefics 3: the image's tiles row by row, with a position token before each
        of them, then the whole image."""
        get_token_id = self._tokenizer.convert_tokens_to_ids
        edge_id, image_ids = get_token_id("<fake_token_around_image>"), (IMAGE_TOKEN,) * self._tile_tokens
        newline, newlines = (
            tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("\n", "\n\n")
        )
        ids: tuple[int, ...] = ()
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                ids += (edge_id, get_token_id(f"<row_{row}_col_{column}>"), *image_ids)
            ids += newline if row < rows else newlines
        return (*ids, edge_id, get_token_id("<global-img>"), *image_ids, edge_id)

    # positions

    def compute_rope(self, ids: np.ndarray, start: int = 0) -> tuple[np.ndarray, int]:
        """Return the M-RoPE positions [3, N] of tokens from position `start` on, and the position after them."""
        positions = np.empty((3, len(ids)), np.int64)
        image_positions = np.flatnonzero(ids >= VIRTUAL)
        position = 0
        while position < len(ids):
            image_index = np.searchsorted(image_positions, position)
            end = int(image_positions[image_index]) if image_index < len(image_positions) else len(ids)
            if position < end:
                positions[:, position:end] = np.arange(start, start + end - position)
                start += end - position
                position = end
                continue
            image_tokens = find_image(int(ids[position]))
            grid = self.get_layout(image_tokens.image.width, image_tokens.image.height).grid
            assert grid is not None and ids[position] == image_tokens.first_id, "a row begins inside an image"
            rows, columns = grid
            token_offsets = np.arange(min(image_tokens.num_tokens, len(ids) - position))
            image_range = slice(position, position + len(token_offsets))
            positions[0, image_range] = start
            positions[1, image_range] = start + token_offsets // columns
            positions[2, image_range] = start + token_offsets % columns
            start += max(rows, columns)
            position += len(token_offsets)
        return positions, start

    def compute_image_ends(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the last position that each token attends to, if image tokens attend to their whole image."""
        visible_ends = positions.copy()
        for index in np.flatnonzero(ids >= VIRTUAL).tolist():
            image_tokens = find_image(int(ids[index]))
            visible_ends[index] += image_tokens.first_id + image_tokens.num_tokens - 1 - ids[index]
        return visible_ends

    # features

    def make_model_inputs(
        self, model: Any, ids: np.ndarray, bypass_cache: bool = False
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return ids [B, T] in which the model's placeholder replaces every image token, and keyword arguments of the
        model's forward that contain the encoded images. `bypass_cache`: run the tower for cached images too, with
        gradients if they are enabled."""
        is_image = ids >= VIRTUAL
        if not is_image.any():
            return ids, {}
        # The forward fills every placeholder; one that the model has sampled as text gets its own embedding.
        rows = self._encode_rows(model, ids[is_image | (ids == self.placeholder_id)], bypass_cache)
        arguments: dict[str, Any] = {"mm_encoder_outputs": {"image": self._make_outputs(rows)}}
        if self.sees_whole_images:
            is_image_tensor = torch.from_numpy(is_image.astype(np.int64)).to(rows.device)
            arguments[TYPE_ARGUMENTS[self.model_type]] = is_image_tensor
        return np.where(is_image, self.placeholder_id, ids), arguments

    def _make_outputs(self, rows: torch.Tensor) -> Any:
        """Convert rows [n, 1 + L, D] to the tower's output object: embeddings, and L levels of deepstack features."""
        embeddings = rows[:, 0]
        if self.model_type in (*QWEN_TYPES, "llava_onevision", "gemma4"):
            return SimpleNamespace(
                pooler_output=[embeddings], deepstack_features=[[level] for level in rows.unbind(1)[1:]]
            )
        return SimpleNamespace(pooler_output=embeddings[:, None])

    def _encode_rows(self, model: Any, token_ids: np.ndarray, bypass_cache: bool) -> torch.Tensor:
        """Return the tower's output [n, 1 + L, D] for n token ids, which are image tokens or placeholders."""
        runs = list(_find_runs(token_ids))
        images = {tokens.first_id: tokens for tokens, _, _ in runs if tokens is not None}
        if bypass_cache:
            encoded_images = self._encode_by_shape(model, list(images.values()))
        else:
            encoded_images = {first: self._encode_cached(model, tokens) for first, tokens in images.items()}
        placeholder = torch.zeros_like(next(iter(encoded_images.values()))[:1])
        if any(tokens is None for tokens, _, _ in runs):
            sampled_id = torch.tensor([self._sampled_id], device=placeholder.device)
            placeholder[:, 0] = model.get_input_embeddings()(sampled_id).detach()
        return torch.cat(
            [
                placeholder if tokens is None else encoded_images[tokens.first_id][begin:end]
                for tokens, begin, end in runs
            ]
        )

    def _encode_cached(self, model: Any, tokens: ImageTokens) -> torch.Tensor:
        with self._lock:
            if (rows := self._cache.get(tokens.first_id)) is not None:
                self._cache.move_to_end(tokens.first_id)
                return rows
        # Not inference tensors, because the learner uses them in graphs.
        with torch.inference_mode(False), torch.no_grad():
            (rows,) = self._run_tower(model, [tokens.num_tokens], [self._make_inputs(model, tokens)])
        with self._lock:
            if tokens.first_id not in self._cache:
                self._cache[tokens.first_id] = rows
                self._cached_bytes += rows.nbytes
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return rows

    def clear_cache(self) -> None:
        """Drop the cached outputs, because the tower has changed."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0

    def _encode_by_shape(self, model: Any, images: list[ImageTokens]) -> dict[int, torch.Tensor]:
        """Run the tower once for all images of the same shape, because kernel launches would dominate the time of small
        images run one by one."""
        images_by_shape: dict[Any, list[tuple[ImageTokens, dict[str, torch.Tensor]]]] = {}
        for tokens in images:
            inputs = self._make_inputs(model, tokens)
            shape = tokens.num_tokens, *(value.shape for value in inputs.values())
            images_by_shape.setdefault(shape, []).append((tokens, inputs))
        encoded_images: dict[int, torch.Tensor] = {}
        for group in images_by_shape.values():
            token_counts = [tokens.num_tokens for tokens, _ in group]
            inputs = [inputs for _, inputs in group]
            outputs = self._run_tower(model, token_counts, inputs)
            encoded_images |= {
                tokens.first_id: rows for (tokens, _), rows in zip(group, outputs, strict=True)
            }
        return encoded_images

    def _make_inputs(self, model: Any, tokens: ImageTokens) -> dict[str, torch.Tensor]:
        """Return the arguments of `get_image_features` for an image."""
        from PIL import Image as Pillow

        with Pillow.open(io.BytesIO(load_picture(tokens).data), formats=("PNG",)) as picture:
            inputs = self._process_picture(picture.convert("RGB"))
        parameters = inspect.signature(model.model.get_image_features).parameters
        return {
            name: value for name, value in inputs.items() if name in parameters and name != "batch_num_images"
        }

    def _run_tower(
        self, model: Any, token_counts: list[int], inputs: list[dict[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """Run the tower on images whose inputs have the same shape. Return [count, 1 + L, D] for each image. Only the
        output of an image that is encoded alone is bit-identical in every call, because rounding depends on the
        batch."""
        batch = {name: torch.cat([image_inputs[name] for image_inputs in inputs]) for name in inputs[0]}
        # Gemma 4 scales pixels before it casts them.
        dtype = torch.float32 if self.model_type == "gemma4" else model.dtype
        batch = {
            name: value.to(model.device, dtype) if value.is_floating_point() else value.to(model.device)
            for name, value in batch.items()
        }
        outputs = model.model.get_image_features(**batch, return_dict=True)
        self.num_encoded_images += len(inputs)
        levels = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]
        rows = torch.stack([_flatten_features(level) for level in levels], 1).to(model.dtype)
        assert len(rows) == sum(token_counts), "the tower's output does not have the tokens of its images"
        return rows.split(token_counts)

    def _process_picture(self, picture: Any) -> dict[str, Any]:
        if self.model_type in QWEN_TYPES:
            picture = _limit_ratio(picture, self._max_ratio)
        if self.model_type in TILED_TYPES:
            return dict(self._processor(images=[[picture]], return_row_col_info=True, return_tensors="pt"))
        return dict(self._processor(images=[picture], return_tensors="pt"))


def open_vision(model: Any, processor: Any, tokenizer: Any, max_tokens: int | None = None) -> Vision:
    """Return the `Vision` of a loaded model, and freeze the model's vision tower."""
    if (kind := model.config.model_type) not in IMAGE_DELIMITERS:
        raise ValueError(
            f"images are not supported for model type {kind!r}; the supported types are {', '.join(IMAGE_DELIMITERS)}. "
            "Set model.vision=false to use the text part alone"
        )
    if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:  # it would be ignored
        raise ValueError(
            f"Images need transformers 5.18 or later, but {transformers.__version__} is installed. "
            "Run: pip install -U 'transformers>=5.18'"
        )
    for _, weight in find_tower_parameters(model):
        weight.requires_grad_(False)
    return Vision(model.config, processor, tokenizer, max_tokens)


def _find_runs(token_ids: np.ndarray) -> Iterator[tuple[ImageTokens | None, int, int]]:
    """Yield each image in these token ids with its range of the tower's output rows; None: a placeholder."""
    position = 0
    while position < len(token_ids):
        if token_ids[position] < VIRTUAL:
            yield None, 0, 1
            position += 1
            continue
        tokens = find_image(int(token_ids[position]))
        begin = int(token_ids[position]) - tokens.first_id
        remaining_ids = token_ids[position : position + tokens.num_tokens - begin]
        run_breaks = np.flatnonzero(np.diff(remaining_ids) != 1)
        length = int(run_breaks[0]) + 1 if len(run_breaks) else len(remaining_ids)
        yield tokens, begin, begin + length
        position += length


def _limit_ratio(picture: Any, max_ratio: int) -> Any:
    """Return the picture with its longer edge squeezed to at most `max_ratio` times the shorter one."""
    width, height = picture.size
    if max(width, height) <= max_ratio * min(width, height):
        return picture
    return picture.resize((min(width, max_ratio * height), min(height, max_ratio * width)))


def _flatten_features(features: Any) -> torch.Tensor:
    """Return the features [k, D] of all images as one tensor. The tower returns them as a list, or as tiles [n, k / n,
    D]."""
    return torch.cat(list(features)) if isinstance(features, list | tuple) else features.flatten(0, 1)


def find_tower_parameters(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the weights of a vision-language model outside its language model and output layer."""
    text_model = get_language_model(model)
    text_weights = {id(weight) for weight in text_model.parameters()}
    head = model.get_output_embeddings()
    text_weights |= {id(weight) for weight in head.parameters()} if head is not None else set()
    return [(name, weight) for name, weight in model.named_parameters() if id(weight) not in text_weights]


def find_tower_modules(model: Any) -> list[str]:
    """Return the names of the modules that hold the weights of `find_tower_parameters`."""
    return sorted({name.rpartition(".")[0] for name, _ in find_tower_parameters(model)})


def get_language_model(model: Any) -> Any:
    """Return the language model inside a vision-language model."""
    inner_model: Any = model.model
    text_model = getattr(inner_model, "language_model", None)
    return inner_model.text_model if text_model is None else text_model
