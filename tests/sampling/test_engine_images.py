"""The native engine with images, against the model's own forward over pixels."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.kits.replays import with_plain_kernels, with_replays
from tests.kits.vision_models import FAMILIES, own_inputs, picture, vision_model
from TrainingFactory.common.event_loop import run
from TrainingFactory.common.image_tokens import VIRTUAL
from TrainingFactory.models.chat import TemplateChatFormat, chat_format
from TrainingFactory.models.vision import open_vision
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, Image, Message, PlacedImage, SamplingParams

NEWER = ("qwen3_5", "gemma4", "gemma4_moe")
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def chat_of(family: str) -> TemplateChatFormat:
    loaded = vision_model(family)
    return chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids, vision=loaded.vision)


def engine_of(family: str, **options: Any) -> NativeEngine:
    loaded = vision_model(family)
    settings: dict[str, Any] = {"slots": 4, "max_length": 512} | options
    return NativeEngine(loaded.model, **settings, vision=loaded.vision)


def ask(chat: TemplateChatFormat, image: Image, text: str = "What is it?") -> list[int]:
    return chat.render([Message("user", text, images=[PlacedImage(len(text), image)])])


def generated(family: str, ids: list[int]) -> list[int]:
    loaded = vision_model(family)
    inputs = own_inputs(loaded, ids)
    with torch.no_grad():
        tokens = loaded.model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None)
    return tokens[0, len(ids) :].tolist()


def difference(family: str, ids: list[int], completion: Completion) -> float:
    """Return the largest difference of the engine's log-probs from those of the model's forward over pixels."""
    loaded, sampled = vision_model(family), completion.token_ids
    with torch.no_grad():
        logits = loaded.model(**own_inputs(loaded, ids + sampled)).logits[0]
    expected = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(1, torch.tensor(sampled)[:, None])[:, 0]
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


async def check(family: str, engine: NativeEngine | None = None, **options: Any) -> None:
    """Four sessions with three images of the same size, and a second turn with a further one."""
    chat, engine = chat_of(family), engine or engine_of(family, **options)
    prompts = [ask(chat, picture(seed)) for seed in (0, 1, 0, 2)]
    sessions = [engine.session() for _ in prompts]
    turns = await asyncio.gather(
        *(session.sample(ids, GREEDY) for session, ids in zip(sessions, prompts, strict=True))
    )
    assert [turn.token_ids for turn in turns] == [generated(family, ids) for ids in prompts]
    ids = prompts[0] + turns[0].token_ids + ask(chat, picture(3, 40, 70), "And now?")
    second = await sessions[0].sample(ids, GREEDY)
    assert difference(family, ids, second) < 1e-4
    for session in sessions:
        session.close()
    await engine.close()


def test_sessions_with_images_equal_generate() -> None:
    run(lambda: check("qwen3_vl"))


@pytest.mark.slow
def test_deterministic_sessions_with_images_equal_generate() -> None:
    run(lambda: check("qwen3_vl", deterministic=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_generate(family: str) -> None:
    run(lambda: check(family))
    run(
        lambda: check(family, prefill_tokens=8)
    )  # chunks end inside images, unless the family sees whole ones


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("qwen3_vl", True),
        *(
            pytest.param(family, kernels, marks=pytest.mark.slow)
            for family in FAMILIES
            for kernels in (True, False)
            if not (
                kernels and family in ("gemma3", "gemma4_moe")
            )  # the kernels do not attend to later tokens
        ),
    ],
)
def test_replayed_steps_with_images_equal_generate(family: str, kernels: bool) -> None:
    loaded = vision_model(family)
    settings: dict[str, Any] = {"max_length": 512, "vision": loaded.vision}
    engine = with_plain_kernels(loaded.model, 4, **settings) if kernels else engine_of(family)
    replays = with_replays(engine)
    run(lambda: check(family, engine))
    assert replays.replayed > 4 and replays.changed == []


def test_equal_images_are_shared_and_different_ones_are_not() -> None:
    async def play() -> list[int]:
        chat, engine, shared = chat_of("qwen3_vl"), engine_of("qwen3_vl", deterministic=True), [0]
        for seed in (0, 0, 1):
            with_session = engine.session()
            await with_session.sample(ask(chat, picture(seed), "What is it? " * 12), GREEDY)
            with_session.close()
            shared.append(engine.stats.shared_tokens)
        await engine.close()
        return [after - before for before, after in pairwise(shared)]

    first, second, third = run(play)
    assert first == 0
    # All but the last token; then only the text before the image (deterministic mode shares from multiples of 32).
    assert second > third > 0


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("gemma4", marks=pytest.mark.slow)])
def test_sessions_at_a_time_share_equal_images(family: str) -> None:
    """Recurrent layers share the state after the text before different images, and that of the whole prompt."""
    chat = chat_of(family)

    async def shared(*seeds: int) -> int:
        engine, prompts = engine_of(family), [ask(chat, picture(seed), "What is it? " * 8) for seed in seeds]
        params = SamplingParams(temperature=0, max_tokens=3)
        turns = await asyncio.gather(*(engine.sample(ids, params) for ids in prompts))
        await engine.close()
        for ids, turn in zip(prompts, turns, strict=True):
            assert difference(family, ids, turn) < 1e-4
        return engine.stats.shared_tokens

    ids = ask(chat, picture(0), "What is it? " * 8)
    before = next(place for place, token in enumerate(ids) if token >= VIRTUAL)
    # On a busy machine the first prompt may be computed before the second arrives; then they share nothing.
    attempts = (run(lambda: shared(0, 1)) for _ in range(6))
    assert next(count for count in attempts if count) == before
    assert run(lambda: shared(0, 0)) == len(ids) - 1


def test_image_tokens_of_gemma_4_see_each_other_in_windows() -> None:
    """26B-A4B and 31B; the image has twice the tokens of a window."""
    chat, params = chat_of("gemma4_moe"), SamplingParams(temperature=0, max_tokens=2)

    async def play() -> None:
        engine = engine_of("gemma4_moe", prefill_tokens=8)
        ids = ask(chat, picture(0))
        assert difference("gemma4_moe", ids, await engine.sample(ids, params)) < 1e-5
        await engine.close()

    run(play)


def test_the_tower_runs_once_per_image_within_its_budget() -> None:
    loaded, chat = vision_model("qwen3_vl"), chat_of("qwen3_vl")
    vision = open_vision(loaded.model, loaded.vision.processor, loaded.tokenizer)  # pyright: ignore

    async def play(images: list[int]) -> int:
        engine = NativeEngine(loaded.model, slots=2, max_length=256, vision=vision)
        before = vision.num_encoded_images
        for seed in images:
            await engine.sample(ask(chat, picture(seed)), GREEDY)
        await engine.close()
        return vision.num_encoded_images - before

    assert run(lambda: play([0, 1, 0, 1, 0])) == 2
    vision.clear_cache()
    vision._cache_bytes = 1  # only the last image stays
    assert run(lambda: play([0, 0, 1, 0])) == 3


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *(pytest.param(key, marks=pytest.mark.slow) for key in NEWER)],
)
def test_evicted_and_forked_sessions_see_their_images(family: str) -> None:
    async def play() -> None:
        chat, engine = chat_of(family), engine_of(family, slots=2)
        prompts = [ask(chat, picture(seed)) for seed in range(4)]
        sessions = [engine.session() for _ in prompts]
        turns = [await session.sample(ids, GREEDY) for session, ids in zip(sessions, prompts, strict=True)]
        assert engine.stats.evictions > 0
        for number, seed in ((0, 5), (1, 6)):  # evicted by now
            ids = prompts[number] + turns[number].token_ids + ask(chat, picture(seed), "And now?")
            fork = sessions[number].fork()
            for session in (sessions[number], fork):
                assert difference(family, ids, await session.sample(ids, GREEDY)) < 1e-4
        await engine.close()

    run(play)


def test_preempted_sessions_see_their_images() -> None:
    async def play() -> None:
        chat = chat_of("qwen3_vl")
        engine = engine_of("qwen3_vl", slots=3, max_length=256, cache_bytes=300_000)
        prompts = [ask(chat, picture(seed), "What is it? " * 8) for seed in range(3)]
        sessions = [engine.session() for _ in prompts]
        params = SamplingParams(temperature=0, max_tokens=60)
        turns = await asyncio.gather(
            *(session.sample(ids, params) for session, ids in zip(sessions, prompts, strict=True))
        )
        assert engine.stats.preemptions > 0
        for ids, turn in zip(prompts, turns, strict=True):
            assert difference("qwen3_vl", ids, turn) < 1e-4
        await engine.close()

    run(play)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(key, marks=pytest.mark.slow) for key in NEWER)]
)
def test_a_sampled_placeholder_is_text(family: str) -> None:
    """A model may sample the token with which its template marks images; it then shows none."""
    chat, loaded = chat_of(family), vision_model(family)
    assert loaded.vision is not None
    placeholder = loaded.vision.placeholder_id

    async def play() -> None:
        engine = engine_of(family)
        ids = [*ask(chat, picture(0)), placeholder]
        with_image = ids + ask(chat, picture(1), "And now?")
        turn = await engine.sample(with_image, GREEDY)
        await engine.close()
        engine = engine_of(family, prefill_tokens=4)  # the placeholder is alone in its chunk
        assert (await engine.sample(with_image, GREEDY)).token_ids == turn.token_ids
        await engine.close()

    run(play)


def test_unknown_images_are_rejected() -> None:
    async def play() -> None:
        engine = engine_of("qwen3_vl")
        with pytest.raises(ValueError, match="belongs to no image"):
            await engine.sample([5, (1 << 31) - 2, 6], GREEDY)
        await engine.close()

    run(play)
