"""The Triton kernels of a step, run by Triton's interpreter on a CPU in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

ROWS = """
import torch
from TrainingFactory.sampling.gpu import kernels
from TrainingFactory.sampling.cache.attention import StepContext, Tiles
from TrainingFactory.sampling.cache.pages import PAGE, CachePages
from TrainingFactory.sampling.cache.store import LayerShape, PagedCache

torch.manual_seed(0)
rows, heads, shared, size, length = 4, 4, 2, 16, 64
positions = torch.tensor([3, 17, 40, 63])
cases = ((None, None, False, True), (None, None, False, False), (16, None, True, False), (33, 5.0, True, False))
for window, softcap, has_sinks, fixed in cases:
    shape = LayerShape(heads, shared, size, size, torch.float32, torch.device("cpu"), 0, window, softcap, has_sinks)
    pages = CachePages(rows, length, [window], [rows * length // PAGE], fixed=fixed)
    for slot in (2, 0, 3, 1):  # so that pages are not in the order of the slots
        pages.reserve(slot, length)
    cache = PagedCache(pages, [shape])
    layer = cache.layers[0]
    layer.keys.normal_(), layer.values.normal_()
    q, sinks = 4 * torch.randn(rows, heads, size), torch.randn(heads) if has_sinks else None
    step = StepContext(cache, num_dense=rows, positions=positions, row_tiles=Tiles(1, rows))
    got = kernels.attend(q, layer, step, size**-0.5, sinks)
    for row, position in enumerate(positions.tolist()):
        begin = 0 if window is None else max(0, position + 1 - window)
        k, v = (
            cache.gather(layer, states, slice(row, row + 1), 0, length)[0, begin : position + 1]
            .repeat_interleave(heads // shared, 1).transpose(0, 1)
            for states in (layer.keys, layer.values)
        )
        scores = (k @ q[row, :, :, None])[..., 0] * size**-0.5
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores if sinks is None else torch.cat((scores, sinks[:, None]), 1)
        expected = (scores.softmax(-1)[:, None, : k.shape[1]] @ v)[:, 0]
        assert (got[row] - expected).abs().max() < 1e-5, (window, row, (got[row] - expected).abs().max())
print("ATTENDED")
"""

ENGINE = """
import asyncio
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from tests.kits.engine import grouped_prompts, play, worst
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.gpu import kernels
from TrainingFactory.types import Weights

shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, initializer_range=0.3, max_position_embeddings=512)
torch.manual_seed(0)
if sys.argv[1] == "llama":
    model, heat = LlamaForCausalLM(LlamaConfig(**shape)), 0.7
else:
    model, heat = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)), 1.0
layers = model.model.layers
if sys.argv[1] == "lora":
    options = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, options).eval()

def sampled(engine):
    played = play(engine, grouped_prompts(1, 4, system=72), turns=1, temperature=heat)
    assert max(worst(model, turns, heat) for turns in played) < 1e-4
    return [[completion.token_ids for _, completion in turns] for turns in played]

expected = sampled(NativeEngine(model, slots=6, max_length=256, max_guesses=0))
engine, attend, groups = NativeEngine(model, slots=6, max_length=256, max_guesses=0), kernels.attend, []

def attended(q, layer, step, scale, sinks=None):
    groups.append(step.group_tiles)
    return attend(q, layer, step, scale, sinks)

kernels.attend = attended
engine._runner.use_kernels()
engine._runner.ahead = engine._planner.tiled = engine._planner.few_shapes = True
assert sampled(engine) == expected and any(groups), groups
for layer in layers:
    first, second = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
    assert second.data_ptr() == first.data_ptr() + first.nbytes  # one product
    first.data = first.data * -0.5  # replaced: nothing stale is used
expected = sampled(NativeEngine(model, slots=6, max_length=256, max_guesses=0))
asyncio.run(engine.update(Weights(1)))
assert sampled(engine) == expected
print("EQUAL")
"""

HYBRID = """
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from tests.kits.engine import grouped_prompts, play, worst
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.gpu import delta

torch.manual_seed(0)
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, initializer_range=0.2, max_position_embeddings=512,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
)).eval()
for name, weight in model.named_parameters():
    if "norm" in name:  # ones and zeros would not show a weight that is left out
        weight.data += 0.3 * torch.randn_like(weight)

def sampled(engine):
    played = play(engine, grouped_prompts(1, 4, system=72), turns=2)
    assert max(worst(model, turns) for turns in played) < 2e-4, max(worst(model, turns) for turns in played)
    return [[completion.token_ids for _, completion in turns] for turns in played]

expected = sampled(NativeEngine(model, slots=6, max_length=256, max_guesses=0))
engine, decode, rows = NativeEngine(model, slots=6, max_length=256, max_guesses=0), delta.decode, []

def decoded(layer, states, *args):
    rows.append(len(states))
    return decode(layer, states, *args)

delta.decode = decoded
engine._runner.use_kernels()
engine._planner.tiled = engine._planner.few_shapes = True
assert sampled(engine) == expected and max(rows) > 1, rows
print("EQUAL")
"""

TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton, which comes with torch for CUDA, is not installed"
)


def interpreted(program: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *args], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    return done.stdout.strip() or done.stderr[-2000:]


@TRITON
def test_rows_attend_to_their_own_keys() -> None:
    assert interpreted(ROWS) == "ATTENDED"


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "lora"])
def test_an_engine_with_all_kernels_samples_what_it_samples_without(kind: str) -> None:
    assert interpreted(ENGINE, kind) == "EQUAL"


@TRITON
@pytest.mark.slow
def test_delta_layers_decode_as_in_torch() -> None:
    assert interpreted(HYBRID) == "EQUAL"
