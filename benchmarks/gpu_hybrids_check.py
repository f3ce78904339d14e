"""Hybrids and models with images against their own forward: `python -m benchmarks.gpu_hybrids_check [FAMILY ...]`.

For a tiny float32 model of each family, on a CUDA device: sessions of three turns and a fork, in groups with common
prompts, sampled by the engine with CUDA graphs and without. One line for each family gives the largest difference of
the engine's log-probs from those of the model's own forward over each row, how many steps ran as graphs, why graphs
could not be recorded, the largest difference of the learner's gradients over a prefix tree from those of single rows,
relative to a weight's largest gradient, and the kernels of the recurrent layers. A family that fails prints its error,
and the next one follows. `--device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers

from tests.kits.families import BY_KEY
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models.recurrent import find_kernel_packages
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, Sample, SamplingParams

HYBRIDS = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "falcon_h1", "nemotron_h", "granitemoehybrid",
    "minimax", "kimi_linear",
)  # fmt: skip
IMAGES = "_images"  # marks the whole model where the text part has the same key
VISION = (
    "qwen3_vl", "qwen2_5_vl", "qwen3_5" + IMAGES, "qwen3_5_moe" + IMAGES, "smolvlm", "internvl", "llava_onevision",
    "gemma3", "gemma4", "gemma4_moe",
)  # fmt: skip
# Sizes that the attention kernel and flash-linear-attention accept.
SIZES = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_head_dim": 32}
WORDS, GROUPS, MEMBERS, TURNS = 97, 3, 4, 3
STOPS = (1, 2, 3, 4, 5)
LIMIT, GRADIENT_LIMIT = 2e-4, 2e-3  # of what float32 may differ
Turns = list[tuple[list[int], Completion]]
Gradients = dict[str, torch.Tensor]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, WORDS) for _ in range(count)]


def build(key: str, device: str) -> Any:
    family = BY_KEY[key]
    known = {name: size for name, size in SIZES.items() if name == "head_dim" or name in family.options}
    if family.options.get("head_dim", 0) is ... or key == "kimi_linear":
        known.pop("head_dim")
    known["initializer_range"] = (
        0.15  # with larger heads, the delta rule amplifies rounding in sharper models
    )
    return replace(family, options={**family.options, **known}).build().to(device)


# -- the engine


async def session_turns(engine: NativeEngine, prompt: list[int], seed: int) -> list[Turns]:
    """Sample three turns, and one of a fork after the first."""
    rng, session = random.Random(seed), engine.session()
    turns, forked = list[tuple[list[int], Completion]](), list[tuple[list[int], Completion]]()
    for turn in range(TURNS):
        params = SamplingParams(max_tokens=12 + turn, stop_ids=STOPS, seed=10 * seed + turn)
        turns.append((prompt, await session.sample(prompt, params)))
        prompt = prompt + turns[-1][1].token_ids + words(rng, rng.choice((1, 6, 30)))
    fork, branched = session.fork(), turns[0][0] + turns[0][1].token_ids + words(rng, 5)
    forked.append((branched, await fork.sample(branched, SamplingParams(max_tokens=6, seed=seed))))
    fork.close()
    session.close()
    return [turns, forked]


def play(engine: NativeEngine) -> list[Turns]:
    rng = random.Random(0)
    system = words(rng, 40)
    prompts = [system + words(rng, 9) for _ in range(GROUPS)]

    async def everything() -> list[list[Turns]]:
        members = [
            (prompt, group, member) for group, prompt in enumerate(prompts) for member in range(MEMBERS)
        ]
        return await asyncio.gather(
            *(session_turns(engine, prompt, 100 * group + member) for prompt, group, member in members)
        )

    return [turns for each in asyncio.run(everything()) for turns in each]


def difference(logits_of: Callable[[list[int]], torch.Tensor], runs: list[Turns]) -> float:
    """Return the largest difference of sampled log-probs from those of a forward over the row."""
    worst = 0.0
    for prompt, completion in (turn for turns in runs for turn in turns):
        ids = prompt + completion.token_ids
        with torch.no_grad():
            logprobs = logits_of(ids)[len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
        expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return worst


def engine_results(
    make_engine: Callable[[], NativeEngine],
    logits_of: Callable[[list[int]], torch.Tensor],
    sampled: Callable[[NativeEngine], list[Turns]],
) -> dict[str, Any]:
    """Sample twice with graphs, because a second round replays what the first one records, then without."""
    result: dict[str, Any] = {}
    engine = make_engine()
    result["graphs"] = max(difference(logits_of, sampled(engine)) for _ in range(2))
    graphs: Any = engine._runner._graphs
    result["kernels"] = engine._runner.tiled
    if graphs is not None:
        result |= {
            "recorded": graphs.recorded,
            "replayed": graphs.replayed,
            "forwards": engine.stats.forwards,
        }
        result["failure"] = graphs.failure_reason.splitlines()[0][:200] if graphs.failure_reason else ""
    engine = make_engine()
    if engine._runner._graphs is not None:
        engine._runner._graphs.failure_reason = "switched off"
    result["eager"] = difference(logits_of, sampled(engine))
    return result


# -- the learner


def tree_rows() -> list[Sample]:
    rng, rows = random.Random(3), []
    for _ in range(2):
        prompt = words(rng, 34)
        for _ in range(2):
            turn = prompt + words(rng, 15)
            for size in (9, 23):
                ids = turn + words(rng, size)
                mask = [place >= 30 and (token * 7 + place) % 5 > 0 for place, token in enumerate(ids)]
                values = [rng.gauss(0, 1) if trained else 0.0 for trained in mask]
                rows.append(Sample(ids, mask, values, values, [0.0] * len(ids), [0] * len(ids)))
    return rows


def weighted(trained: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return (trained.advantages * (trained.logprobs / 3).tanh()).sum() / trained.step_tokens, {}


def tree_gradients(learner: Learner, rows: list[Sample]) -> Gradients:
    """Return the gradients of an update, without its step."""
    gradients: Gradients = {}
    weights, real = learner._weights, learner._step_optimizers

    def keep() -> float:
        for name, master in zip(weights.names, weights.masters, strict=True):
            if master.grad is not None:
                gradients[name], master.grad = master.grad, None
        return 1.0

    learner._step_optimizers = keep  # pyright: ignore[reportAttributeAccessIssue]
    learner.update(make_batch(rows, sharing=learner.sharing, split_above=learner.split_above), weighted)
    learner._step_optimizers = real  # pyright: ignore[reportAttributeAccessIssue]
    return gradients


def row_gradients(model: Any, rows: list[Sample]) -> Gradients:
    model.eval()
    model.zero_grad()
    count = sum(sum(row.loss_mask) for row in rows)
    for row in rows:
        ids = torch.tensor(row.token_ids, device=model.device)
        places = torch.tensor([place for place, trained in enumerate(row.loss_mask) if trained])
        logprobs = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        chosen = logprobs[places - 1].gather(1, ids[places, None])[:, 0]
        advantages = torch.tensor(row.advantages, device=model.device)[places]
        ((advantages * (chosen / 3).tanh()).sum() / count).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return gradients


def gradient_difference(model: Any) -> tuple[float, bool]:
    """Return the largest difference of a gradient, and whether the learner shares prefixes."""
    rows = tree_rows()
    expected = row_gradients(model, rows)
    learner = Learner(model, OptimizerOptions(learning_rate=1e-3))
    actual = tree_gradients(learner, rows)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    worst = 0.0
    for name in actual.keys() | expected.keys():
        zeros = torch.zeros_like(actual[name] if name in actual else expected[name])
        own, other = actual.get(name, zeros), expected.get(name, zeros)
        scale = max(float(other.abs().max()), 1e-3 * largest)
        worst = max(worst, float((own - other).abs().max()) / scale)
    return worst, learner.sharing


# -- families


def check_hybrid(key: str, device: str, learner: bool) -> dict[str, Any]:
    model = build(key, device)

    def logits_of(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids], device=device), use_cache=False).logits[0]

    result = engine_results(lambda: NativeEngine(model, slots=16, max_length=512), logits_of, play)
    result["packages"] = find_kernel_packages(model)
    if learner:
        result["gradients"], result["tree"] = gradient_difference(model)
    return result


def check_vision(family: str, device: str) -> dict[str, Any]:
    from tests.kits.vision_models import own_inputs, picture, vision_model
    from TrainingFactory.models.chat import chat_format
    from TrainingFactory.types import Message, PlacedImage

    loaded = vision_model(family)
    model: Any = loaded.model.to(device)  # pyright: ignore[reportArgumentType]
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids, vision=loaded.vision)

    def ask(seed: int) -> list[int]:
        return chat.render([Message("user", "What is it?", images=[PlacedImage(11, picture(seed))])])

    def logits_of(ids: list[int]) -> torch.Tensor:
        inputs = {name: value.to(device) for name, value in own_inputs(loaded, ids).items()}
        return model(**inputs).logits[0]

    async def one(engine: NativeEngine, seed: int) -> Turns:
        session, turns, ids = engine.session(), list[tuple[list[int], Completion]](), ask(seed // 2)
        for turn in range(3):
            params = SamplingParams(max_tokens=16, seed=10 * seed + turn, stop_ids=STOPS)
            turns.append((ids, await session.sample(ids, params)))
            ids = ids + turns[-1][1].token_ids + (ask(50 + seed) if turn else words(random.Random(seed), 9))
        session.close()
        return turns

    def sampled(engine: NativeEngine) -> list[Turns]:
        async def everything() -> list[Turns]:
            return await asyncio.gather(*(one(engine, seed) for seed in range(6)))

        return asyncio.run(everything())

    def make_engine() -> NativeEngine:
        return NativeEngine(model, slots=8, max_length=1024, vision=loaded.vision)

    return engine_results(make_engine, logits_of, sampled)


def line(key: str, result: dict[str, Any], seconds: float) -> str:
    text = f"{key:17} log-probs: graphs {result['graphs']:.1e}, eager {result['eager']:.1e}; "
    if "replayed" in result:
        text += f"{result['replayed']} graph steps of {result['forwards']} forwards, {result['recorded']} recorded"
        text += f" (FAILED: {result['failure']})" if result["failure"] else ""
    text += "; attention kernel" if result["kernels"] else "; torch attention"
    if "gradients" in result:
        text += f"; gradients {result['gradients']:.1e} ({'tree' if result['tree'] else 'ROWS'})"
    if result.get("packages"):
        text += f"; {', '.join(result['packages'])}"
    return f"{text}; {seconds:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help=f"default: {' '.join((*HYBRIDS, *VISION))}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--no-learner", action="store_true", help="check the engine alone")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    wrong: list[str] = []
    results: dict[str, Any] = {}
    for key in args.families or (*HYBRIDS, *VISION):
        start = time.perf_counter()
        try:
            if key in VISION:
                result = check_vision(key.removesuffix(IMAGES), args.device)
            else:
                result = check_hybrid(key, args.device, not args.no_learner)
            print(line(key, result, time.perf_counter() - start), flush=True)
        except Exception as error:  # the other families are still of interest
            place = traceback.extract_tb(error.__traceback__)[-1]
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(f"{key:17} FAILS at {place.filename}:{place.lineno}: {result['error']}", flush=True)
        results[key] = result
        differences = [result.get(name, 0.0) for name in ("graphs", "eager")]
        exact = max(differences) < LIMIT and result.get("gradients", 0.0) < GRADIENT_LIMIT
        if "error" in result or not exact:
            wrong.append(key)
    print("RESULT " + json.dumps(results))
    if wrong:
        sys.exit(f"these families fail or differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
