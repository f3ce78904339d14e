"""What the engine samples is what a plain forward of the model says, however requests come and go."""

from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.kits.engine import KINDS, episode, grouped_prompts, play, sample_each, tiny, words, worst
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import SamplingParams, Weights


@pytest.mark.parametrize(("kind", "slots"), list(zip(KINDS, (3, 16, 16, 3), strict=True)))
def test_logprobs_equal_a_plain_forward(kind: str, slots: int) -> None:
    model = tiny(kind)
    engine = NativeEngine(model, slots=slots, max_length=256, prefill_tokens=48)
    prompts = grouped_prompts(3, 2) + [words(random.Random(i), 1 + 17 * i) for i in range(4)]
    for turns in play(engine, prompts, pause=0.01):
        assert worst(model, turns) < 1e-4
    assert engine.stats.sampled_tokens > 100


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_those_of_the_sampling_temperature(temperature: float) -> None:
    model = tiny()
    engine = NativeEngine(model, slots=4, max_length=256)
    turns = sample_each(engine, grouped_prompts(2, 2), temperature=temperature, max_tokens=12)
    assert worst(model, turns, temperature) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str) -> None:
    model = tiny(kind)
    engine = NativeEngine(model, slots=8, max_length=128)
    prompts = [words(random.Random(i), 3 + 10 * i) for i in range(3)]
    for prompt, completion in sample_each(engine, prompts, temperature=0, max_tokens=20):
        model.eval()
        ids = torch.tensor([prompt])
        wanted = model.generate(  # pyright: ignore[reportCallIssue]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert completion.token_ids == wanted[0, len(prompt) :].tolist()
        assert completion.finish == "length"
        assert worst(model, [(prompt, completion)]) < 1e-4


def test_a_group_is_prefilled_once() -> None:
    """8 prompts of 8 members under one system prompt cost one whole prompt and seven tails."""
    engine = NativeEngine(tiny(), slots=64, max_length=128)
    sample_each(engine, grouped_prompts(8, 8, system=50, question=10), max_tokens=2)
    assert engine.stats.prefilled_tokens == 60 + 7 * 10
    # all but the last token of each prompt is found by the other members, the system prompt by the tails
    assert engine.stats.shared_tokens == 56 * 59 + 7 * 50


def test_a_new_turn_only_feeds_what_is_new() -> None:
    engine = NativeEngine(tiny(), slots=4, max_length=256)
    (turns,) = play(engine, [words(random.Random(0), 40)])
    new = [40]
    for (before, completion), (after, _) in itertools.pairwise(turns):
        new.append(len(after) - len(before) - len(completion.token_ids) + 1)  # the last sampled token as well
    assert engine.stats.prefilled_tokens == sum(count for count in new if count > 1)


def test_a_closed_session_leaves_its_prefix_to_others() -> None:
    engine = NativeEngine(tiny(), slots=4, max_length=128)
    prompt = words(random.Random(0), 30)
    runs = [sample_each(engine, [prompt], max_tokens=3) for _ in range(2)]  # each in a loop of its own
    assert runs[0][0][1].token_ids == runs[1][0][1].token_ids
    assert engine.stats.prefilled_tokens == 30
    assert engine.stats.shared_tokens == 29


async def test_a_session_may_change_its_mind() -> None:
    """What is stored is compared, never trusted: a prompt that is no continuation is sampled rightly."""
    model = tiny()
    engine = NativeEngine(model, slots=2, max_length=128)
    rng = random.Random(0)
    prompts = [words(rng, 30)]
    prompts += [prompts[0][:12] + words(rng, 9), words(rng, 5), prompts[0], prompts[0][:20]]
    session = engine.session()
    turns = [(p, await session.sample(p, SamplingParams(max_tokens=5))) for p in prompts]
    assert worst(model, turns) < 1e-4


def test_stop_and_length() -> None:
    engine = NativeEngine(tiny(), slots=8, max_length=40)
    prompt = words(random.Random(0), 30)

    def sample(**params) -> tuple:
        ((_, completion),) = sample_each(engine, [prompt], **params)
        return completion.finish, completion.token_ids

    finish, tokens = sample(max_tokens=100)
    assert finish == "length" and len(tokens) == 10, "prompt and completion fill max_length"
    assert sample(max_tokens=100, stop_ids=(tokens[4],)) == ("stop", tokens[: tokens.index(tokens[4]) + 1])
    assert sample(max_tokens=3, stop_ids=(tokens[2],)) == ("stop", tokens[: tokens.index(tokens[2]) + 1])


@pytest.mark.parametrize("depth", [3, 6])
def test_nested_agents_do_not_deadlock(depth: int) -> None:
    """A parent that waits for its child gives up its slot when there is no other."""
    model = tiny()
    engine = NativeEngine(model, slots=2, max_length=256)

    async def agent(level: int) -> list:
        session, rng = engine.session(), random.Random(level)
        prompt = words(rng, 20)
        first = await session.sample(prompt, SamplingParams(max_tokens=5))
        inner = await agent(level + 1) if level < depth else []
        longer = prompt + first.token_ids + words(rng, 4)
        second = await session.sample(longer, SamplingParams(max_tokens=5))
        session.close()
        return [(prompt, first), (longer, second), *inner]

    async def everything() -> list:
        return await asyncio.wait_for(asyncio.gather(*(agent(0) for _ in range(3))), 60)

    for turns in asyncio.run(everything()):
        assert worst(model, turns) < 1e-4
    assert engine.stats.evictions > 0


async def test_unused_rows_touch_nothing() -> None:
    """Poison everything that does not belong to the session: its next turn must not notice."""
    model = tiny()
    engine = NativeEngine(model, slots=6, max_length=128)
    prompt = words(random.Random(0), 20)
    sessions = [engine.session() for _ in range(4)]
    first = await asyncio.gather(*(s.sample(prompt, SamplingParams(max_tokens=4, seed=i))
                                   for i, s in enumerate(sessions)))  # fmt: skip
    cache, slot = engine._runner.cache, sessions[3]._session_slot.slot
    assert cache is not None and slot is not None
    own_pages = engine._table.pages.tables[0].entries[slot]
    others = np.setdiff1d(np.arange(len(cache.layers[0].keys)), own_pages)
    with torch.inference_mode():
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor[torch.from_numpy(others)] = torch.nan
    longer = prompt + first[3].token_ids + [7, 8]
    again = await sessions[3].sample(longer, SamplingParams(max_tokens=6))
    assert worst(model, [(longer, again)]) < 1e-4


def test_results_do_not_depend_on_company() -> None:
    """The same request alone and in a full batch draws the same tokens."""
    model = tiny()
    prompts = grouped_prompts(4, 4)
    crowd = play(NativeEngine(model, slots=16, max_length=256), prompts)
    for i in (0, 7, 15):
        alone = asyncio.run(episode(NativeEngine(model, slots=1, max_length=256), prompts[i], i))
        assert [c.token_ids for _, c in alone] == [c.token_ids for _, c in crowd[i]]


@pytest.mark.parametrize("few_shapes", [False, True])
async def test_a_few_scattered_slots_cost_a_few_rows(few_shapes: bool) -> None:
    """Long turns in high slots, after the low ones have ended: fed alone, or with CUDA graphs moved to the front."""
    model = tiny()
    engine = NativeEngine(model, slots=32, max_length=256, max_guesses=0)
    engine._planner.few_shapes = few_shapes
    prompts = grouped_prompts(32, 1)
    lengths = [4] * 29 + [60] * 3
    runs = [engine.sample(p, SamplingParams(max_tokens=n)) for p, n in zip(prompts, lengths, strict=True)]
    turns = list(zip(prompts, await asyncio.gather(*runs), strict=True))
    assert worst(model, turns) < 1e-4
    assert engine.stats.decoded_rows < 32 * 6 + 60 * (16 if few_shapes else 3), (
        "the tail of three runs in a few rows"
    )
    assert engine._table.free.tolist() == [seat is None for seat in engine._table.session_slots]


def test_training_between_rollouts() -> None:
    """The engine shares the learner's weights: a step changes what is sampled, and leaves nothing behind."""
    model = tiny("mha")
    engine = NativeEngine(model, slots=4, max_length=128)
    prompts = grouped_prompts(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for version in range(3):
        for turns in play(engine, prompts):
            assert worst(model, turns) < 1e-4
            assert {completion.policy_version for _, completion in turns} == {version}
        assert model.training and model.config._attn_implementation == "sdpa"
        ids = torch.tensor([prompts[0]])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        asyncio.run(engine.update(Weights(version + 1)))
    assert engine.policy_version == 3
    assert not any(parameter.is_inference() for parameter in model.parameters())


async def _update_in_an_episode(engine: NativeEngine, model: nn.Module) -> tuple:
    """Two turns with an update of the weights between them, and a turn of another session across it."""
    rng = random.Random(0)
    prompt = words(rng, 30)
    session, other = engine.session(), engine.session()
    first = await session.sample(prompt, SamplingParams(max_tokens=5))
    running = asyncio.create_task(other.sample(prompt, SamplingParams(max_tokens=50)))
    while not (engine._table.running.any() or running.done()):
        await asyncio.sleep(0.001)  # a turn that has not begun when the update comes waits for it

    refresh = engine._runner.refresh

    def apply() -> None:
        assert running.done() or len(engine._table.requests) == engine._table.requests.count(None)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        refresh()

    engine._runner.refresh = apply  # between the last turn under the old weights and the first under the new
    update = asyncio.create_task(engine.update(Weights(7)))
    await asyncio.sleep(0)
    longer = prompt + first.token_ids + words(rng, 6)
    second = await session.sample(longer, SamplingParams(max_tokens=5))  # held back until the update is done
    await update
    return first, await running, (longer, second)


def test_new_weights_invalidate_what_is_stored() -> None:
    model = tiny()
    engine = NativeEngine(model, slots=4, max_length=128)
    first, running, turn = asyncio.run(_update_in_an_episode(engine, model))
    assert (first.policy_version, running.policy_version, turn[1].policy_version) == (0, 0, 7)
    assert worst(model, [turn]) < 1e-4


def test_lora_is_sampled_unmerged() -> None:
    peft = pytest.importorskip("peft")
    base = tiny()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    names = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=names, lora_dropout=0.5))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    engine = NativeEngine(model, slots=4, max_length=128)
    for turns in play(engine, grouped_prompts(2, 2)):
        assert worst(model, turns) < 1e-4
        with model.disable_adapter():
            assert worst(model, turns) > 1e-2, "the adapter makes a difference"
    after = {name.replace(".base_layer", ""): tensor for name, tensor in base.state_dict().items()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_bfloat16() -> None:
    """To the rounding of the weights; the trunk, chunks and dense rows are all in play."""
    model = tiny().bfloat16()
    engine = NativeEngine(model, slots=8, max_length=256)
    for turns in play(engine, grouped_prompts(2, 2, system=100), turns=2):
        assert worst(model, turns) < 0.3
    assert engine._runner.dtype == torch.bfloat16


def test_what_rows_have_in_common_is_read_once_and_rightly() -> None:
    """Rows that begin alike share the reading of the trunk; the next ones in the same slots may not."""
    model = tiny()
    engine = NativeEngine(model, slots=4, max_length=256)
    rng = random.Random(0)
    alike, unlike = grouped_prompts(2, 2, system=130), [words(rng, 140) for _ in range(4)]
    half = [unlike[0][:100] + words(rng, 20) for _ in range(4)]
    trunks = []
    for prompts in (alike, unlike, half, unlike):
        assert worst(model, sample_each(engine, prompts, max_tokens=6)) < 1e-4
        trunks.append(engine._runner.find_shared_prefix(np.arange(4)))
    assert trunks == [128, 0, 96, 0]
