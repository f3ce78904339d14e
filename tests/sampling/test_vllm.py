"""The real vLLM, on a CPU: one engine for all tests but the last. Each loads its own weights.

Its start takes most of a minute of processor time, so `make test-slow` runs them. `make test` checks our side of the
engine with a stand-in for vLLM in tests/cluster/test_local.py."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kits.engine import plain_logprobs
from tests.kits.learner import make_learner
from tests.kits.scale import SCALE, Shared
from TrainingFactory.cluster.local import LocalEngineLauncher
from TrainingFactory.cluster.local_child import find_segment_inodes
from TrainingFactory.cluster.places import EngineLost
from TrainingFactory.learning.checkpoints import save_checkpoint
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.publishing import Publisher
from TrainingFactory.models import load_model
from TrainingFactory.types import Completion, EngineSpec, SamplingParams, Weights

pytestmark = [SCALE, pytest.mark.slow]
LONG = 250  # tokens of a turn that is under way while something else happens
CLOSE = 1e-4
PROMPT = [random.Random(0).randrange(600) for _ in range(48)]


class Policy:
    """A learner with its publisher."""

    def __init__(self, lora: bool = False, seed: int = 0, **options: Any) -> None:
        model = load_model("builtin:tiny", dtype="float32", seed=seed).model
        self.learner: Learner = make_learner(add_lora(model, r=4, **options) if lora else model)
        self.publisher = Publisher(self.learner)
        self.version = 0

    @property
    def model(self) -> Any:
        return self.learner.model

    def change(self) -> Weights:
        """Another version of the weights, far from the one before."""
        self.version += 1
        noise = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for param in self.model.parameters():
                if param.requires_grad:
                    param.add_(torch.randn(param.shape, generator=noise), alpha=0.05)
        return self.publisher.publish(self.version)

    def gap(self, prompt: list[int], found: Completion, temperature: float = 1.0) -> float:
        return distance(found.logprobs, plain_logprobs(self.model, prompt, found.token_ids, temperature))


def distance(left: Any, right: Any) -> float:
    return max(abs(one - other) for one, other in zip(left, right, strict=True))


def until(attempt: Callable[[], Any]) -> Any:
    """Try until something happened within a turn: on a busy machine the turn may end first."""
    found = next(filter(None, (attempt() for _ in range(8))), None)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    policy = Policy()
    yield policy
    policy.publisher.close()


def test_logprobs_are_the_learners(vllm_place: Shared, policy: Policy) -> None:
    vllm_place.call("load", policy.change())
    asked = [
        SamplingParams(seed=2**64 - 1, max_tokens=24),
        SamplingParams(temperature=0.7, seed=1, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.7, top_p=0.5, seed=1, max_tokens=24),
        SamplingParams(temperature=1.3, top_k=5, seed=1, max_tokens=24),
        SamplingParams(min_p=0.3, seed=1, max_tokens=24),
    ]

    async def together() -> list[Completion]:
        return await asyncio.gather(*(vllm_place.place.call("sample", PROMPT, each) for each in asked))

    for params, found in zip(asked, vllm_place.run(together()), strict=True):
        assert len(found.token_ids) == 24 and found.finish == "length"
        assert (found.policy_version, found.versions) == (policy.version, None)
        assert policy.gap(PROMPT, found, params.temperature or 1) < CLOSE, params
        if params.temperature == 0:
            best = [plain(policy, PROMPT + found.token_ids[:n]).argmax() for n in range(24)]
            assert found.token_ids == best


@torch.no_grad()
def plain(policy: Policy, tokens: list[int]) -> torch.Tensor:
    policy.model.eval()
    return policy.model(torch.tensor([tokens])).logits[0, -1]


def test_stops_and_lengths(vllm_place: Shared, policy: Policy) -> None:
    vllm_place.call("load", policy.change())
    whole = vllm_place.call("sample", PROMPT, SamplingParams(seed=3, max_tokens=12))
    stop = next(token for token in whole.token_ids[3:] if whole.token_ids.count(token) == 1)
    cut = vllm_place.call("sample", PROMPT, SamplingParams(seed=3, max_tokens=12, stop_ids=(stop,)))
    assert cut.finish == "stop" and cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert distance(cut.logprobs, whole.logprobs[: len(cut.logprobs)]) < CLOSE
    # What the model's own config ends a turn with is a token like any other.
    end = policy.model.config.eos_token_id
    biased = policy.model.get_output_embeddings().weight
    before = biased.detach().clone()
    with torch.no_grad():
        biased[end] = 20 * plain_state(policy)
    vllm_place.call("load", policy.publisher.publish(policy.version))
    found = vllm_place.call("sample", PROMPT, SamplingParams(temperature=0, max_tokens=3))
    assert found.token_ids[0] == end and len(found.token_ids) == 3
    with torch.no_grad():
        biased.copy_(before)
    long = vllm_place.call("sample", PROMPT * 10 + [5] * 22, SamplingParams(max_tokens=100))
    assert len(long.token_ids) == 10 and long.finish == "length"  # the engine has room for 512


@torch.no_grad()
def plain_state(policy: Policy) -> torch.Tensor:
    """The direction in which the head finds the next token of the prompt most likely."""
    policy.model.eval()
    state = policy.model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    return state / state.norm()


def test_seeds_alone_and_among_others(vllm_place: Shared, policy: Policy) -> None:
    """Long seeded prompts too, more of them than fit into one forward pass: in chunks they would end the engine."""
    vllm_place.call("load", policy.change())

    def ask(number: int) -> Any:
        prompt = (PROMPT * 10)[: 20 + number * 24]
        return vllm_place.place.call("sample", prompt, SamplingParams(seed=number, max_tokens=12))

    async def together() -> list[Completion]:
        return await asyncio.gather(*map(ask, range(18)))

    every = vllm_place.run(together())
    for number in (0, 9, 17):
        assert vllm_place.run(ask(number)).token_ids == every[number].token_ids
    again = [
        vllm_place.call("sample", PROMPT, SamplingParams(seed=seed, max_tokens=12)).token_ids
        for seed in (1, 1, 2)
    ]
    assert again[0] == again[1] != again[2]


def test_weights_that_are_pushed_are_those_that_sample(vllm_place: Shared, policy: Policy) -> None:
    scores = []
    for _ in range(2):
        weights = policy.change()
        vllm_place.call("load", weights)
        scores.append(vllm_place.call("score", weights.canary[0]))
        assert distance(scores[-1], weights.canary[1]) < CLOSE  # the tied head too
        expected = plain_logprobs(policy.model, [weights.canary[0][0]], list(weights.canary[0][1:]))
        assert distance(weights.canary[1], expected) < CLOSE
    assert distance(*scores) > 0.1


@pytest.mark.parametrize("damage", ["half", "shape", "nan", "torn", "more"])
def test_weights_that_are_not_the_models(
    vllm_place: Shared, policy: Policy, tmp_path: Path, damage: str
) -> None:
    good = policy.change()
    vllm_place.call("load", good)
    tensors = load_file(Path(good.folder) / "model.safetensors")
    assert "lm_head.weight" not in tensors  # tied
    name = "model.layers.1.mlp.down_proj.weight"
    words = {
        "half": rf"{name} is missing .* \(128, 256\) in the model",
        "shape": rf"{name} is \(128, 255\) .* \(128, 256\)",
        "nan": rf"{name} has NaN",
        "torn": "cannot be read",
        "more": r"extra is \(2,\) .* missing in the model",
    }
    if damage == "half":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:, 1:].contiguous()
    elif damage == "nan":
        tensors[name][3, 4] = float("nan")
    elif damage == "more":
        tensors["extra"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    if damage == "torn":
        os.truncate(tmp_path / "model.safetensors", 10_000)
    with pytest.raises(ValueError, match=words[damage]):
        vllm_place.call("load", Weights(99, str(tmp_path)))
    found = vllm_place.call("sample", PROMPT, SamplingParams(max_tokens=8))
    assert found.policy_version == good.version and policy.gap(PROMPT, found) < CLOSE


def test_prompts_that_cannot_be(vllm_place: Shared, policy: Policy) -> None:
    vllm_place.call("load", policy.change())
    for prompt, words in (
        ([5, 1010], "token id 1010 is not in the model's vocabulary of 1010"),
        ([-1], "token id -1 is not"),
        ([], "prompt is empty"),
        ([1] * 512, "512 tokens, .*max_length=512 .*511"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm_place.call("sample", prompt, SamplingParams())
    assert policy.gap([7], vllm_place.call("sample", [7], SamplingParams(max_tokens=4))) < CLOSE


def test_weights_that_land_within_a_turn(vllm_place: Shared, policy: Policy) -> None:
    vllm_place.call("load", policy.change())

    async def everything(weights: Weights) -> list[Completion]:
        params = [SamplingParams(max_tokens=LONG, seed=seed) for seed in range(4)]
        turns = [asyncio.create_task(vllm_place.place.call("sample", PROMPT, each)) for each in params]
        await asyncio.sleep(0)  # they are sent before what follows
        await vllm_place.place.call("sample", PROMPT, SamplingParams(max_tokens=1))
        await vllm_place.place.call("load", weights)
        return await asyncio.gather(*turns)

    def attempt() -> tuple[Any, int, list[Completion]] | None:
        old, was = copy.deepcopy(policy.model), policy.version
        every = vllm_place.run(everything(policy.change()))
        return (old, was, every) if all(found.versions for found in every) else None

    old, was, every = until(attempt)
    for found in every:
        assert found.versions is not None and found.policy_version == was
        cut = found.versions.index(policy.version)
        assert 0 < cut < LONG and found.versions == [was] * cut + [policy.version] * (LONG - cut)
        before, after = (plain_logprobs(each, PROMPT, found.token_ids) for each in (old, policy.model))
        assert distance(found.logprobs[:cut], before[:cut]) < CLOSE
        assert distance(found.logprobs[cut:], after[cut:]) < CLOSE
        assert distance(before[cut:], after[cut:]) > 0.1


def test_adapters(vllm_place: Shared, policy: Policy, tmp_path: Path) -> None:
    """Versions one after the other; turns under way keep theirs; then full weights again."""
    vllm_place.call("load", policy.change())
    pure = Policy(lora=True)
    assert pure.publisher.adapter_rank == 4
    for _ in range(2):
        weights = pure.change()
        assert weights.kind == "adapter"
        vllm_place.call("load", weights)
        assert distance(vllm_place.call("score", weights.canary[0]), weights.canary[1]) < CLOSE

    async def everything(changed: Weights) -> tuple[Completion, Completion, bool]:
        call, long = vllm_place.place.call, SamplingParams(max_tokens=LONG)
        turn = asyncio.create_task(call("sample", PROMPT, long))
        await asyncio.sleep(0)  # it is sent before what follows
        await call("sample", PROMPT, SamplingParams(max_tokens=1))
        await call("load", changed)
        new = await call("sample", PROMPT, SamplingParams(max_tokens=20))
        beside = not turn.done()
        return await turn, new, beside

    def attempt() -> tuple[Any, int, Completion, Completion] | None:
        old, was = copy.deepcopy(pure.model), pure.version
        first, new, beside = vllm_place.run(everything(pure.change()))
        return (old, was, first, new) if beside else None

    old, was, first, new = until(attempt)
    assert (first.policy_version, first.versions, new.policy_version) == (was, None, pure.version)
    assert distance(first.logprobs, plain_logprobs(old, PROMPT, first.token_ids)) < CLOSE
    assert pure.gap(PROMPT, new) < CLOSE and pure.gap(PROMPT, first) > 0.1
    half = shutil.copytree(pure.publisher.publish(77).folder, tmp_path / "half")
    tensors = load_file(half / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), half / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="is missing"):
        vllm_place.call("load", Weights(77, str(half), "adapter", pure.publisher.model_folder))
    vllm_place.call("load", policy.change())
    assert policy.gap(PROMPT, vllm_place.call("sample", PROMPT, SamplingParams(max_tokens=8))) < CLOSE
    pure.publisher.close()


def test_checkpoints_load_and_engines_die(scale: None, tmp_path: Path) -> None:
    """A checkpoint is a model for vLLM as it is; a core that is killed is a place that is lost, and all of it goes."""
    loaded = load_model("builtin:tiny", dtype="float32", seed=4)
    save_checkpoint(tmp_path / "c", make_learner(loaded.model), loaded.tokenizer, {"step": 1})
    had: set[str] = set()

    async def kill(name: str, place: Any) -> list[psutil.Process]:
        family = psutil.Process(place.engine_info["pid"])
        had.update(find_segment_inodes(family.pid))
        family = [family, *family.children(recursive=True)]
        victim = next(each for each in family if name in each.name() + str(each.cmdline()))
        params = SamplingParams(max_tokens=400)
        turns = [asyncio.create_task(place.call("sample", PROMPT, params)) for _ in range(8)]
        victim.send_signal(signal.SIGKILL)
        found = await asyncio.gather(*turns, return_exceptions=True)
        assert {type(each) for each in found} == {EngineLost}, found
        with pytest.raises(EngineLost):
            await place.call("score", PROMPT)
        await place.close()
        return family

    async def everything() -> list[psutil.Process]:
        places = LocalEngineLauncher(EngineSpec("vllm", str(tmp_path / "c"), 512, slots=8, pushed=False))
        one, two = await asyncio.gather(places.launch_engine(0), places.launch_engine(1))
        found = await one.call("sample", PROMPT, SamplingParams(max_tokens=24))
        assert distance(found.logprobs, plain_logprobs(loaded.model, PROMPT, found.token_ids)) < CLOSE
        family = [*await kill("EngineCore", one), *await kill("local_child", two)]
        await places.close()
        return family

    _, alive = psutil.wait_procs(asyncio.run(everything()), timeout=30)
    assert not alive and len(had) > 2
    assert not had & {str(path.stat().st_ino) for path in Path("/dev/shm").iterdir()}
