"""Check every family of `families.py` and generate TrainingFactory/models/compatibility.json and docs/COMPATIBILITY.md.
Run `make compat`, or `python -m tests.kits.compat [FAMILY ...] [COLUMN ...]`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from docs.generate.compat_page import compat_page
from tests.kits.engine import words
from tests.kits.families import FAMILIES, ModelFamily
from tests.kits.learner import gradients, row_gradients, row_logprobs, sample, weighted, weighted_part
from tests.kits.scale import HOME as VLLM
from tests.kits.tokenizers import LLAMA3, QWEN3, from_wheel
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.forward import get_causal_lm, get_sharing_problem
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.compatibility import COLUMN_HEADINGS, COMPATIBILITY_FILE, Cell, read_compatibility
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Completion, Message, Sample, SamplingParams, ToolCall, ToolSpec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "COMPATIBILITY.md"
UNTESTED = "untested"
GENERIC = "the tool list is in the system message, and calls are JSON objects"
TOLERANCE = 5e-4  # of log-probs in float32
GRADIENT_TOLERANCE = 2e-3  # relative to a weight's largest gradient
FRAME = re.compile(r"^the native engine cannot sample a '\w+' model: ")
ATTENTION_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj"]
# part of a weight's name -> kind of matrix
KINDS = {
    "shared_expert": "shared experts", ".experts.": "experts", "router": "routers", ".gate.": "routers",
    ".mlp.": "dense MLPs", "feed_forward": "dense MLPs", "conv": "convolutions",
}  # fmt: skip


class WrongResultError(Exception):
    """A part accepts the model and computes something else than the model's own forward."""


def check(part: Callable[[], str]) -> Cell:
    """Return the result of a check. A ValueError is a rejection; any other error is a defect."""
    try:
        return Cell("works", part())
    except WrongResultError as error:
        return Cell("wrong", str(error))
    except Exception as error:
        sentence = (str(error) or type(error).__name__).splitlines()[0].partition(". ")[0]
        if isinstance(error, ValueError):
            return Cell("rejected", FRAME.sub("", sentence))
        return Cell("fails", f"{type(error).__name__}: {sentence}")


# -- the native engine


def engine_cell(family: ModelFamily) -> Cell:
    return check(lambda: check_engine(family))


def check_engine(family: ModelFamily) -> str:
    model = family.build()
    compare_with_forward(model, NativeEngine(model, slots=4, max_length=256))
    try:
        NativeEngine(model, slots=2, max_length=256, deterministic=True)
    except ValueError:
        return "no deterministic mode, because the batches of its experts depend on timing"
    return ""


def compare_with_forward(model: Any, engine: NativeEngine, episodes: int = 3) -> None:
    """Sample episodes of two turns that share a prompt, the third one not greedily, and compare every token and
    log-prob with the model's own forward over the whole episode."""
    rng = random.Random(7)
    prompt = words(rng, 40)
    questions = [prompt + words(rng, 7 + number) for number in range(episodes)]
    replies = [words(rng, 20) for _ in questions]

    async def episode(number: int) -> list[tuple[list[int], Completion]]:
        session = engine.session()
        params = SamplingParams(max_tokens=8, temperature=float(number == 2), seed=number)
        first = await session.sample(questions[number], params)
        second_prompt = questions[number] + first.token_ids + replies[number]
        second = await session.sample(second_prompt, params)
        session.close()
        return [(questions[number], first), (second_prompt, second)]

    async def play() -> list[list[tuple[list[int], Completion]]]:
        try:
            return await asyncio.gather(*map(episode, range(episodes)))
        finally:
            await engine.close()

    for number, turns in enumerate(asyncio.run(play())):
        compare_episode(model, turns, greedy=number < 2)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Run the model's forward with the attention that follows its config: PyTorch's ignores soft caps of scores."""
    config = get_causal_lm(model).config
    previous = config._attn_implementation
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"
    yield
    config._attn_implementation = previous


@torch.no_grad()
def compare_episode(model: Any, turns: list[tuple[list[int], Completion]], greedy: bool) -> None:
    last_prompt, last_completion = turns[-1]
    ids = torch.tensor(last_prompt + last_completion.token_ids)
    with own_attention(model):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)
    for number, (prompt_ids, completion) in enumerate(turns, 1):
        places = torch.arange(len(prompt_ids) - 1, len(prompt_ids) - 1 + len(completion.token_ids))
        expected = logprobs[places, ids[places + 1]]
        error = float((expected - torch.tensor(completion.logprobs)).abs().max())
        if not error < TOLERANCE:
            raise WrongResultError(
                f"the log-probs of turn {number} differ from the model's own by {error:.2g}"
            )
        if greedy and not (logprobs[places].max(-1).values - expected < TOLERANCE).all():
            raise WrongResultError(f"greedy tokens of turn {number} are not the most likely ones")


# -- the learner


def tree_rows() -> list[Sample]:
    """Two groups of episodes with common prompts, common first turns, and more tokens than any window."""
    rng = random.Random(3)
    rows = []
    for _ in range(2):
        prompt = words(rng, 34)
        for _ in range(2):
            turn = prompt + words(rng, 15)
            rows += [sample(rng, turn + words(rng, size), context=30) for size in (9, 23)]
    return rows


def learner_cell(family: ModelFamily) -> Cell:
    cell = check(lambda: check_learner(without_dropout(family.build())))
    if cell.status == "works" and cell.note:
        reason = f"rows are computed one by one, because {cell.note}"
        return Cell("falls back", f"{reason}; each row of a group computes the common prompt again")
    return cell


def check_learner(model: PreTrainedModel) -> str:
    """Compare log-probs and gradients with plain autograd over single rows. Return why prefixes are not shared."""
    learner, rows = Learner(model, OptimizerOptions(learning_rate=1e-3)), tree_rows()
    problem = None if learner.sharing else get_sharing_problem(get_causal_lm(model))
    batch = make_batch(rows, sharing=learner.sharing)
    model.eval()
    with own_attention(model):
        with torch.no_grad():
            expected = {number: row_logprobs(model, row) for number, row in enumerate(rows)}
        expected_gradients = row_gradients(model, rows, weighted_part)
    for pack in batch.packs:
        with torch.no_grad():
            own = learner.compute_logprobs(pack)[0]
        order = torch.from_numpy(pack.row).argsort(stable=True)
        error = float((own[order] - torch.cat([expected[row] for row in sorted(pack.rows)])).abs().max())
        if not error < TOLERANCE:
            raise WrongResultError(f"log-probs differ from the model's own by {error:.2g}")
    compare_gradients(gradients(learner, batch), expected_gradients)
    return problem or ""


def compare_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in sorted(actual.keys() | expected.keys()):
        # A weight without gradient in one of them, such as that of an unused expert, counts as zero.
        zeros = torch.zeros_like(actual[name] if name in actual else expected[name])
        own, other = actual.get(name, zeros), expected.get(name, zeros)
        # A gradient that is zero but for rounding, such as that of a key's bias, has no scale of its own.
        scale = max(float(other.abs().max()), 1e-3 * largest)
        error = float((own - other).abs().max()) / scale
        if not error < GRADIENT_TOLERANCE:
            raise WrongResultError(f"the gradient of {name} differs from plain autograd by {error:.1%}")


def without_dropout(model: Any) -> Any:
    """Turn dropout off, which makes gradients random."""
    for module in model.modules():
        for name in ("attention_dropout", "residual_dropout", "router_jitter_noise"):
            if hasattr(module, name):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


# -- adapters


def lora_cell(family: ModelFamily, is_sampled: bool) -> Cell:
    """Check adapters, under the engine too if it takes the family."""
    return with_fallback(lambda targets: check_lora(family.build(), targets, is_sampled))


def with_fallback(part: Callable[[str | list[str]], str]) -> Cell:
    """Check with an adapter on all linear layers, then on the projections of attention."""
    cell = check(lambda: part("all-linear"))
    if cell.status in ("works", "wrong"):
        return cell
    second = check(lambda: part(ATTENTION_LAYERS))
    if second.status != "works":
        return cell
    option = (
        f"`lora.target_modules: [{', '.join(ATTENTION_LAYERS)}]` works; the default fails with: {cell.note}"
    )
    return Cell("falls back", option)


def check_lora(base: Any, targets: str | list[str], is_sampled: bool) -> str:
    """Train an adapter, compare the engine with the model under it, and merge it. Return what it does not adapt."""
    model = add_lora(base, r=4, alpha=8, target_modules=targets)
    train_adapter(model)
    ids = torch.tensor([words(random.Random(1), 60)])
    with torch.no_grad():
        adapted = model(input_ids=ids, use_cache=False).logits
    if is_sampled:
        compare_with_forward(model, NativeEngine(model, slots=2, max_length=256), episodes=1)
    frozen = frozen_matrices(model)
    with torch.no_grad():
        merged = model.merge_and_unload()(input_ids=ids, use_cache=False).logits
    error = float((adapted - merged).abs().max())
    if not error < 5e-3:
        raise WrongResultError(f"logits of the merged model differ by {error:.2g}")
    return f"all linear layers but: {', '.join(frozen)}" if frozen and targets == "all-linear" else ""


def frozen_matrices(model: Any) -> list[str]:
    """Return the kinds of matrices in the layers that have no adapter."""
    frozen = set()
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and ".layers." in name and "lora_" not in name and ".base_layer." not in name:
            frozen.add(next((text for word, text in KINDS.items() if word in name), name.split(".")[-2]))
    return sorted(frozen)


def train_adapter(model: Any) -> None:
    learner = Learner(model, OptimizerOptions(learning_rate=1e-2))
    batch = make_batch(tree_rows(), sharing=learner.sharing)
    metrics = learner.update(batch, weighted)
    if metrics["skipped"] or not metrics["grad_norm"] > 0:
        raise WrongResultError(f"the gradient norm is {metrics['grad_norm']}")
    for name, weight in model.named_parameters():
        if "lora_B" in name and not weight.abs().max() > 0:
            raise WrongResultError(f"training does not change {name}")
    model.eval()


# -- quantized weights


def quantized_cell(family: ModelFamily, is_sampled: bool) -> Cell:
    if importlib.util.find_spec("bitsandbytes") is None:
        return Cell(UNTESTED)
    with tempfile.TemporaryDirectory() as folder:
        family.build().save_pretrained(folder)
        make_tiny_tokenizer().save_pretrained(folder)
        four, eight = (
            with_fallback(partial(check_quantized, folder, bits, is_sampled)) for bits in ("4bit", "8bit")
        )
    if four.status == "works" and eight.status in ("fails", "rejected"):
        note = f"4bit; 8bit {eight.status}: {eight.note}"
        return Cell("works", "; ".join(filter(None, [four.note, note])))
    return four


def check_quantized(folder: str, bits: str, is_sampled: bool, targets: str | list[str]) -> str:
    """Train an adapter over quantized weights; with 4 bits compare the engine with the model's own forward. With 8 bits
    the rounding of a row depends on the other rows."""
    base = load_model(folder, device="cpu", quantization=bits).model
    model = add_lora(base, r=4, alpha=8, target_modules=targets)
    train_adapter(model)
    if is_sampled and bits == "4bit":
        compare_with_forward(model, NativeEngine(model, slots=2, max_length=256), episodes=1)
    whole = any(
        ".experts." in name and weight.is_floating_point() for name, weight in base.named_parameters()
    )
    return "experts are not quantized" if whole else ""


# -- vLLM and chat templates


def vllm_architectures() -> set[str] | None:
    """Return the architectures of the installed vLLM; None if it is not installed."""
    if not VLLM.with_suffix(".installed").is_file():
        return None
    code = (
        "import json, sys\nfrom vllm.model_executor.models.registry import ModelRegistry\n"
        "print(json.dumps(list(ModelRegistry.get_supported_archs())))"
    )
    done = subprocess.run([VLLM / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def vllm_version() -> str:
    [metadata] = VLLM.glob("lib/python*/site-packages/vllm*.dist-info")
    return metadata.name.removesuffix(".dist-info").partition("-")[2]


def vllm_cell(family: ModelFamily, architectures: set[str] | None) -> Cell:
    if architectures is None:
        return Cell(UNTESTED)
    architecture = architecture_of(family)
    if architecture in architectures:
        return Cell("works")
    backend = "its Transformers backend, which is slower, is not checked here"
    return Cell("falls back", f"vLLM has no {architecture}; {backend}")


def architecture_of(family: ModelFamily) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return classes[type(family.config())].__name__


def template_cell(family: ModelFamily) -> Cell:
    """Render tools, write a call, read it back and continue after its result."""
    if family.template is None:
        return Cell("-")
    extra = (
        LLAMA3 if family.template.startswith("llama") else QWEN3 if family.template.startswith("qwen") else ()
    )
    tokenizer = from_wheel(family.template, extra)
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
    tool = ToolSpec("weather", "Look up the weather.", parameters)

    def run(name: str | None) -> str:
        chat = chat_format(tokenizer, name)
        prompt = chat.render([Message("user", "Is it raining in Oslo?")], [tool])
        call = Message("assistant", tool_calls=[ToolCall("weather", {"city": "Oslo"})])
        written = chat.write(call, prompt, [tool])
        if chat.parse(written, prompt, [tool]).tool_calls != call.tool_calls:
            raise WrongResultError("the call is read back differently")
        return "" if name or chat.family.name != "generic" else GENERIC

    cell = check(lambda: run(None))
    if cell.status == "rejected" and check(lambda: run("generic")).status == "works":
        reason = cell.note.partition(";")[0]
        return Cell("falls back", f"`model.family: generic`: {GENERIC}. Without this option: {reason}")
    return Cell("falls back", cell.note) if cell.note == GENERIC else cell


# -- the data file


def family_cells(
    family: ModelFamily, architectures: set[str] | None, columns: Sequence[str] = tuple(COLUMN_HEADINGS)
) -> dict[str, Cell]:
    """Return the results of these columns. Adapters are sampled with if the engine takes the family."""
    uses_engine = {"engine", "lora", "quantized"} & set(columns)
    engine = engine_cell(family) if uses_engine else Cell(UNTESTED)
    is_sampled = engine.status == "works"
    checks: dict[str, Callable[[], Cell]] = {
        "engine": lambda: engine,
        "learner": lambda: learner_cell(family),
        "lora": lambda: lora_cell(family, is_sampled),
        "quantized": lambda: quantized_cell(family, is_sampled),
        "vllm": lambda: vllm_cell(family, architectures),
        "template": lambda: template_cell(family),
    }
    return {name: checks[name]() if name in columns else Cell(UNTESTED) for name in COLUMN_HEADINGS}


def entry(family: ModelFamily, cells: dict[str, Cell]) -> dict[str, Any]:
    facts = {name: getattr(family, name) for name in ("key", "name", "model_type", "released", "features")}
    facts["architecture"] = architecture_of(family)
    return facts | {
        name: {"status": cells[name].status, "note": cells[name].note} for name in COLUMN_HEADINGS
    }


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("transformers", "peft", "trl")}
    if importlib.util.find_spec("bitsandbytes") is not None:
        found["bitsandbytes"] = version("bitsandbytes")
    if VLLM.with_suffix(".installed").is_file():
        found["vllm"] = vllm_version()
    return found


def regenerate(keys: Sequence[str] = (), columns: Sequence[str] = ()) -> None:
    """Check the families and write both files. Results that are not checked here keep their recorded values."""
    recorded = read_compatibility() if COMPATIBILITY_FILE.is_file() else None
    old_cells = {family.key: family.cells for family in recorded.families} if recorded else {}
    packages = (recorded.versions if recorded else {}) | versions()
    columns = columns or tuple(COLUMN_HEADINGS)
    architectures = vllm_architectures() if "vllm" in columns else None
    results = dict(old_cells)
    for family in FAMILIES:
        if keys and family.key not in keys and family.key in results:
            continue
        cells = family_cells(family, architectures, columns)
        for name, cell in cells.items():
            if cell.status == UNTESTED and family.key in old_cells:
                cells[name] = old_cells[family.key][name]
        results[family.key] = cells
        print(
            f"{family.key:18}",
            *(f"{name}: {cells[name].status}" for name in COLUMN_HEADINGS),
            sep="  ",
            flush=True,
        )
        write_results(packages, results)
    print(f"wrote {COMPATIBILITY_FILE} and {PAGE}")


def write_results(packages: dict[str, str], results: dict[str, dict[str, Cell]]) -> None:
    entries = [entry(family, results[family.key]) for family in FAMILIES if family.key in results]
    text = json.dumps({"versions": packages, "families": entries}, indent=1, ensure_ascii=False)
    text = re.sub(r'\{\s+("status": .*)\s+("note": .*)\s+\}', r"{\1 \2}", text)  # a result on one line
    COMPATIBILITY_FILE.write_text(text + "\n", encoding="utf-8")
    read_compatibility.cache_clear()
    PAGE.write_text(compat_page(read_compatibility()), encoding="utf-8")


if __name__ == "__main__":
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    selected_columns = [word for word in sys.argv[1:] if word in COLUMN_HEADINGS]
    regenerate([word for word in sys.argv[1:] if word not in COLUMN_HEADINGS], selected_columns)
