"""A model that sees on a GPU: `python -m benchmarks.gpu_vision` (to try it: `--device cpu --size tiny --episodes 8`).

Random weights in bfloat16 with the shapes of Qwen3-VL or Qwen2.5-VL. An episode is two turns of 32 tokens on a screen
of 640 x 480 pixels: 8 episodes share a prompt of 160 tokens of text and a picture; then each gets a picture of its own
with a reply of 16 tokens. Measured, after a warm-up:

  encode   pictures a second through the vision part: one by one, as runs do with a frozen one, and 16 together, as
           updates do that train it; both with decoding and scaling, which `prepare_s` has alone
  sample   episodes in the native engine (`images`), the same lengths of text in the same engine (`text`), and in an
           engine of the text part alone, which has CUDA graphs and fused kernels (`text_part`)
  update   GRPO on 64 episodes with LoRA of rank 16 (`lora`), all weights of the language model (`full`), and the vision
           part's too (`tower`), with gradient checkpointing; beside it the same lengths of text

`peak_gib` is the peak of allocated memory from the start of a measurement on, with the model.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from itertools import islice
from typing import Any

import numpy as np
import torch

from TrainingFactory.assembly.learner import make_algorithm, make_learner, make_trainable
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.envs.builtin.screen import ScreenAdapter
from TrainingFactory.models import LoadedModel
from TrainingFactory.models.tiny import make_tiny_tokenizer, make_tiny_vl_model
from TrainingFactory.models.vision import Vision, open_vision
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Image, Sample, SamplingParams, Weights

# Of their config.json. Random weights stand for those of the released models.
TOWER3 = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
TOWER25 = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
ROPE3 = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
ROPE25 = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
# name -> layers, width, width of the MLP, heads, heads of keys and values
SIZES = {
    "qwen3-vl-2b": (28, 2048, 6144, 16, 8),
    "qwen3-vl-4b": (36, 2560, 9728, 32, 8),
    "qwen2.5-vl-3b": (36, 2048, 11008, 16, 2),
}
VOCABULARY, HEAD = 151936, 128
SIBLINGS, BEFORE, AFTER, REPLY, TURN = 8, 144, 16, 16, 32  # tokens, but the first
UPDATED, TOGETHER = 64, 16
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"enabled": True, "r": 16}},
    "full": {},
    "tower": {"model": {"train_tower": True}},
}


def text_shape(size: str) -> dict[str, Any]:
    layers, width, inner, heads, kv_heads = SIZES[size]
    return {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": HEAD, "tie_word_embeddings": True,
        "max_position_embeddings": 32768, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip


def make_model(size: str, device: str) -> LoadedModel:
    """Return the model with random weights and its vision."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    tokenizer = make_tiny_tokenizer("qwen3_vl_instruct")
    patch = (
        8 if size == "tiny" else TOWER25["patch_size"] if size.startswith("qwen2.5") else TOWER3["patch_size"]
    )
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 4096, "longest_edge": 1 << 24},
    )
    if size == "tiny":
        model = make_tiny_vl_model(tokenizer).to(device)
        return LoadedModel(size, model.eval(), tokenizer, (), open_vision(model, processor, tokenizer))
    token = tokenizer.convert_tokens_to_ids
    ids = {
        "image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>"),
        "tie_word_embeddings": True,
    }  # fmt: skip
    text, width = text_shape(size), {"out_hidden_size": SIZES[size][1]}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        if size.startswith("qwen2.5"):
            del text["head_dim"]
            config = Qwen2_5_VLConfig(
                text_config=text | {"rope_parameters": ROPE25}, vision_config=TOWER25 | width, **ids
            )
            model: Any = Qwen2_5_VLForConditionalGeneration(config)
        else:
            config = Qwen3VLConfig(
                text_config=text | {"rope_parameters": ROPE3}, vision_config=TOWER3 | width, **ids
            )
            model = Qwen3VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    return LoadedModel(size, model.eval(), tokenizer, (), open_vision(model, processor, tokenizer))


def make_text_part(size: str, device: str) -> Any:
    """Return a language model of the same shape, as a run without images loads it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = text_shape(size)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        if size.startswith("qwen2.5"):
            model: Any = Qwen2ForCausalLM(
                Qwen2Config(**{key: shape[key] for key in shape if key != "head_dim"})
            )
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
    torch.set_default_dtype(torch.float32)
    return model.eval()


def screens(count: int, seed: int) -> list[Image]:
    environment = ScreenAdapter.from_options({"columns": 4, "rows": 3, "cell": 160}).as_environment()
    return [environment(task).screenshot() for task in islice(environment.tasks("train", seed, count), count)]


class Timer:
    """Seconds and peak memory of a block."""

    def __init__(self, device: str) -> None:
        self._cuda = device != "cpu"

    def __enter__(self) -> Timer:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._started
        self.peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if self._cuda else {}


def measure_encoding(loaded: LoadedModel, count: int, device: str) -> dict[str, float]:
    vision, model = loaded.vision, loaded.model
    assert isinstance(vision, Vision)
    rows = [np.array(vision.get_image_ids(image)) for image in screens(count, 1)]
    found: dict[str, float] = {"images": count, "tokens": len(rows[0])}
    for _ in range(2):  # the first warms up
        with Timer(device) as prepare:
            for row in rows:
                vision._make_inputs(model, vision_tokens(row))
        vision.clear_cache()
        with Timer(device) as alone, torch.no_grad():
            for row in rows:
                vision.make_model_inputs(model, row[None])
        with Timer(device) as together, torch.no_grad():
            for start in range(0, count, TOGETHER):
                vision.make_model_inputs(
                    model, np.concatenate(rows[start : start + TOGETHER])[None], bypass_cache=True
                )
    found |= {"prepare_s": prepare.seconds, "images_per_second": count / alone.seconds}
    return found | {"images_per_second_together": count / together.seconds, **alone.peak}


def vision_tokens(row: np.ndarray) -> Any:
    from TrainingFactory.common.image_tokens import find_image

    return find_image(int(row[0]))


class Episodes:
    """The token ids of episodes: of images if there is a vision, else text of the same lengths."""

    def __init__(
        self, count: int, vocabulary: int, image_tokens: int, vision: Vision | None, seed: int
    ) -> None:
        rng = random.Random(seed)
        groups = count // SIBLINGS
        pictures = iter(screens(groups + count, 100 + seed) if vision is not None else [])

        def text(length: int) -> list[int]:
            return [rng.randrange(vocabulary) for _ in range(length)]

        def picture() -> list[int]:
            return text(image_tokens) if vision is None else vision.get_image_ids(next(pictures))

        prompts = [text(BEFORE) + picture() + text(AFTER) for _ in range(groups)]
        self.prompts = [prompts[number // SIBLINGS] for number in range(count)]
        self.replies = [text(REPLY) + picture() for _ in range(count)]
        self.turns = [[text(TURN), text(TURN)] for _ in range(count)]  # of rows that are not sampled

    def rows(self) -> list[Sample]:
        rows = []
        for number, (prompt, reply, turns) in enumerate(
            zip(self.prompts, self.replies, self.turns, strict=True)
        ):
            ids = prompt + turns[0] + reply + turns[1]
            mask = [False] * len(prompt) + [True] * TURN + [False] * len(reply) + [True] * TURN
            zeros, logprobs = [0.0] * len(ids), [-11.0 if trained else 0.0 for trained in mask]
            advantages = [float(number % 2) - 0.5] * len(ids)
            rows.append(Sample(ids, mask, logprobs, advantages, zeros, [0] * len(ids)))
        return rows


async def play(engine: NativeEngine, episodes: Episodes) -> int:
    async def one(number: int) -> int:
        session, ids = engine.session(), episodes.prompts[number]
        first = await session.sample(ids, SamplingParams(max_tokens=TURN, seed=2 * number))
        ids = ids + first.token_ids + episodes.replies[number]
        second = await session.sample(ids, SamplingParams(max_tokens=TURN, seed=2 * number + 1))
        session.close()
        return len(first.token_ids) + len(second.token_ids)

    return sum(await asyncio.gather(*(one(number) for number in range(len(episodes.prompts)))))


def measure_sampling(
    model: Any, vision: Vision | None, image_tokens: int, count: int, device: str, has_images: bool
) -> dict[str, Any]:
    vocabulary = model.config.get_text_config().vocab_size - 300  # tokens that stand for nothing else
    rounds = [
        Episodes(count, vocabulary, image_tokens, vision if has_images else None, seed) for seed in range(2)
    ]
    length = len(rounds[0].prompts[0]) + len(rounds[0].replies[0]) + 2 * TURN
    engine = NativeEngine(model, slots=count, max_length=length, vision=vision)
    found: dict[str, Any] = {"episodes": count, "tokens_of_an_episode": length}
    for number, episodes in enumerate(rounds):  # the first warms up
        asyncio.run(engine.update(Weights(number)))  # nothing is kept from the round before
        with Timer(device) as timer:
            sampled = asyncio.run(play(engine, episodes))
        found |= {"seconds": timer.seconds, "tokens_per_second": sampled / timer.seconds, **timer.peak}
    asyncio.run(engine.close())
    return found


def measure_updates(kind: str, size: str, device: str, image_tokens: int, count: int) -> dict[str, Any]:
    loaded = make_model(size, device)
    options = KINDS[kind]
    config = TrainingConfig(
        model={"device": device, "max_length": 4096} | options.get("model", {}), lora=options.get("lora", {}),
        training={"gradient_checkpointing": True, "token_budget": 16_384},
    )  # fmt: skip
    make_trainable(config, loaded)
    algorithm = make_algorithm(config)
    learner = make_learner(config, loaded, algorithm, 8)
    found: dict[str, Any] = {"kind": kind, "episodes": count}
    vocabulary = loaded.model.config.get_text_config().vocab_size - 300
    for name, vision in (("text", None), ("images", loaded.vision)):
        rows = Episodes(count, vocabulary, image_tokens, vision, 7).rows()
        batch = make_batch(rows, config.training.token_budget, learner.sharing)
        for _ in range(2):  # the first compiles
            if loaded.vision is not None:
                loaded.vision.clear_cache()
            with Timer(device) as timer:
                learner.update(batch, algorithm.loss)
        found[name] = {
            "seconds": timer.seconds,
            "row_tokens": sum(len(row.token_ids) for row in rows),
            **timer.peak,
        }
    return found


def free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=[*SIZES, "tiny"], default="qwen3-vl-2b")
    parser.add_argument("--episodes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--kinds", choices=KINDS, nargs="*", default=list(KINDS))
    asked = parser.parse_args()
    size, device = asked.size, asked.device
    loaded = make_model(size, device)
    result: dict[str, Any] = {
        "size": size,
        "parameters": loaded.model.num_parameters(),
        "torch": torch.__version__,
    }
    result["device"] = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    result["encode"] = encoding = measure_encoding(loaded, min(64, *asked.episodes), device)
    print(json.dumps(result), flush=True)
    tokens = int(encoding["tokens"])

    def note(name: str, found: dict[str, Any]) -> None:
        result.setdefault(name, []).append(found)
        print(json.dumps({name: found}), flush=True)

    for count in asked.episodes:
        for kind in ("images", "text"):
            assert loaded.vision is not None
            loaded.vision.clear_cache()
            found = measure_sampling(loaded.model, loaded.vision, tokens, count, device, kind == "images")
            note("sample", {"kind": kind} | found)
            free(device)
    del loaded
    free(device)
    if size != "tiny":
        text_part = make_text_part(size, device)
        for count in asked.episodes:
            note(
                "sample",
                {"kind": "text_part"} | measure_sampling(text_part, None, tokens, count, device, False),
            )
            free(device)
        del text_part
    for kind in asked.kinds:
        free(device)
        note("update", measure_updates(kind, size, device, tokens, min(UPDATED, *asked.episodes)))
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
