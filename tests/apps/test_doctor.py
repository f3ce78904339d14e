"""The doctor finds before a run what would go wrong in it, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_shapes import estimated, table
from benchmarks.long_rows import config_of, estimated_gib
from tests.kits.cli import Run
from tests.kits.docs import ROOT
from TrainingFactory.apps.doctor.checks import (
    check_episodes,
    check_format,
    check_mask,
    check_prompts,
    check_tools,
)
from TrainingFactory.apps.doctor.examination import examine, forecast
from TrainingFactory.apps.plan.memory import check_memory, compare_memory, suggest_options
from TrainingFactory.apps.plan.planning import RunPlanner
from TrainingFactory.apps.plan.shapes import find_shape
from TrainingFactory.assembly.memory import GIB, estimate_model_memory
from TrainingFactory.assembly.sampler import load, make_chat
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.tiny import read_builtin_template
from TrainingFactory.runs.diagnosis import FINDING_REMEDIES, Diagnosis
from TrainingFactory.runs.tracking import PlainLines
from TrainingFactory.training.source import StepGroups
from TrainingFactory.types import (
    Completion,
    Group,
    Message,
    Sample,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)

TOOL = ToolSpec(
    "look",
    "Look something up.",
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"enum": [3]}, "c": {"type": ["number", "null"]}},
    },
)


def names(found: Diagnosis) -> dict[str, str]:
    return {finding.name: finding.severity for finding in found.findings}


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model("builtin:tiny")


def test_the_chat_format(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, chat = Diagnosis(), chat_format(tiny.tokenizer)
    check_format(found, tiny, chat, None)
    check_tools(found, chat, [TOOL])
    assert not found.findings and "<|im_end|>" in found.facts["chat"]
    check_format(found, tiny, chat_format(tiny.tokenizer, "deepseek"), "deepseek")
    assert names(found) == {"family_differs": "warning"}
    chat.stop_ids = (10**6,)
    check_format(found, tiny, chat, None)
    assert names(found)["stop_unreachable"] == "error"


def test_an_example_call_that_is_not_read(tmp_path: Path) -> None:
    file, said, found = tmp_path / "own.jinja", list[str](), Diagnosis()
    file.write_text(read_builtin_template().replace("<args-json-object>}", "<args-json-object>"))
    config = TrainingConfig(model={"chat_template": str(file), "device": "cpu"})
    loaded_model = load(config)
    check_format(found, loaded_model, make_chat(config, loaded_model, notify=said.append), None)
    assert names(found) == {"example_call": "warning"}
    assert len(said) == 1 and said[0].startswith("warning: the chat template shows an example call")


def test_calls_that_are_not_read_back(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, found = chat_format(tiny.tokenizer), Diagnosis()
    said = Message("assistant", "", [ToolCall("look", {"a": "x"})])
    prompt = [Message("user", "?"), said, Message("tool", "y")]
    episode = Trajectory(Task("seven", "?"), "g", prompt=prompt, tools=[TOOL])
    check_prompts(found, chat, [episode])
    assert not found.findings
    monkeypatch.setattr(chat, "parse", lambda *given, **named: Message("assistant", "text"))
    check_tools(found, chat, [TOOL])
    check_prompts(found, chat, [episode])
    told = [finding.sentence for finding in found.findings if finding.name == "calls_not_read"]
    assert len(told) == 2 and told[0].startswith("tool look: ") and told[1].startswith("task seven: ")


def test_schemas_of_tools(tiny: Any) -> None:
    found = Diagnosis()
    check_tools(found, chat_format(tiny.tokenizer), [ToolSpec("a", "A.", {"type": "text"}), ToolSpec("b")])
    assert [(each.name, each.severity) for each in found.findings] == [
        ("tool_schema", "error"),
        ("tool_schema", "warning"),
    ]


def played(finish: Any = "stop", status: Any = "done", error: str | None = None) -> Trajectory:
    turn = Turn([1] * 20, Completion([2, 3], [0.0, 0.0], finish), Message("assistant", "x"))
    return Trajectory(Task("t", "?"), "g", turns=[turn], status=status, error=error)


@pytest.mark.parametrize(
    ("episodes", "limit", "expected"),
    [
        ([played(), played("length")], 30, {}),
        ([played("length")], 30, {"no_stop": "warning"}),
        ([played()], 29, {"prompt_too_long": "warning"}),
        ([Trajectory(Task("t", "?"), "g", status="truncated")], 30, {"prompt_too_long": "error"}),
        ([played(), played(status="error", error="no such city")], 30, {"episodes_fail": "error"}),
    ],
)
def test_dry_episodes(episodes: list[Trajectory], limit: int, expected: dict[str, str]) -> None:
    found = Diagnosis()
    check_episodes(found, episodes, 10, limit)
    assert names(found) == expected
    assert found.facts["dry episodes"].startswith(f"{len(episodes)}: ")


@pytest.mark.parametrize(("mask", "good"), [((0, 1, 1), True), ((0, 0, 1), False), ((0, 0, 0), False)])
def test_the_mask(mask: tuple[int, ...], good: bool) -> None:
    row = Sample([1, 2, 3], [bool(used) for used in mask], [0.0] * 3, [0.0] * 3, [0.0] * 3, [0] * 3)
    found = Diagnosis()
    check_mask(found, StepGroups(0, [Group(0, [played()], [row])], is_sampled=True))
    assert names(found) == ({} if good else {"mask": "error"})


def test_memory_is_what_the_parts_take(tiny: Any) -> None:
    config = TrainingConfig(
        training={"batch_size": 2, "group_size": 4, "token_budget": 128},
        sampling={"slots": 3},
        grpo={"kl": 0.1},
    )
    shape, count = tiny.model.config, sum(each.numel() for each in tiny.model.parameters())
    asked = estimate_model_memory(config, tiny.model, frozenset({"reference"}), 512)
    for part in ("weights", "gradients", "reference model"):
        assert asked[part] == 4 * count
    assert asked["optimizer"] == 8 * count and asked["float32 copies"] == 0  # they are float32 themselves
    heads = shape.num_key_value_heads * shape.head_dim
    assert asked["cache"] == 4 * 512 * 4 * 2 * shape.num_hidden_layers * heads
    wide = shape.num_attention_heads * shape.head_dim + shape.intermediate_size
    kept = 4 * shape.hidden_size + 3 * heads + 3 * wide  # for each token of a layer
    in_backward = 2 * shape.intermediate_size
    assert asked["activations"] == 128 * 4 * (kept * shape.num_hidden_layers + in_backward)
    found = Diagnosis()
    check_memory(found, config, asked, torch.device("cpu"))
    assert not found.findings
    check_memory(found, config, {"weights": 1e18, "cache": 1.0}, torch.device("cpu"))
    assert names(found) == {"memory": "error"} and "largest part: weights" in found.findings[0].sentence
    assert (
        found.findings[0].remedy == FINDING_REMEDIES["memory"]
    )  # weights of which all are trained stay as they are


def test_a_cache_that_the_memory_limits_is_reported() -> None:
    """The engine divides what is left of the memory into pages: fewer episodes of full length, and no error."""
    config = TrainingConfig.model_validate({"sampling": {"slots": 8}})
    diagnosis = Diagnosis()
    compare_memory(diagnosis, config, {"weights": 50.0 * GIB, "cache": 80.0 * GIB}, 100 * GIB, "cuda")
    assert "4 of 8 episodes" in diagnosis.facts["KV cache"] and not diagnosis.findings
    compare_memory(diagnosis, config, {"weights": 65.0 * GIB, "cache": 80.0 * GIB}, 100 * GIB, "cuda")
    assert [finding.name for finding in diagnosis.findings] == ["cache"]
    assert "2 of 8 episodes" in diagnosis.findings[0].sentence
    full = Diagnosis()
    compare_memory(full, config, {"weights": 85.0 * GIB, "cache": 80.0 * GIB}, 100 * GIB, "cuda")
    assert [(finding.name, finding.severity) for finding in full.findings] == [("memory", "warning")]


def test_memory_of_a_model_that_is_not_there(tfactory: Run) -> None:
    def told(*options: str) -> dict[str, Any]:
        status, out, _ = tfactory("doctor", "builtin:tiny", "model.max_length=1024", "--json", *options)
        return json.loads(out) | {"status": status}

    whole = told("--model-size", "8B", "--gpu", "h100")
    assert whole["status"] == 1 and whole["findings"][0]["name"] == "memory"
    assert "weights 15.3 GiB, float32 copies 30.5 GiB, gradients 30.5 GiB" in whole["facts"]["memory"]
    assert "8,190,427,136" in whole["facts"]["model"]
    assert "of 79.2 GiB on one H100: " in whole["facts"]["memory"]
    assert "one H100 has 79.2 GiB; largest part: " in whole["findings"][0]["sentence"]
    suggest_options = whole["findings"][0]["remedy"]
    fitting = re.search(r"about ([\d.]+) GiB, set: ([^ ]+ [^ ]+)\. ", suggest_options)
    assert fitting and fitting[2] == "training.gradient_checkpointing=true lora.enabled=true", suggest_options
    less = told("--model-size", "8B", "--gpu", "h100", *fitting[2].split())
    assert less["status"] == 0 and f"about {fitting[1]} GiB of 79.2 GiB" in less["facts"]["memory"]
    adapted = told("--model-size", "8B", "lora.enabled=true")
    assert adapted["status"] == 0 and "of 139.8 GiB on one H200: " in adapted["facts"]["memory"]
    assert "time" not in whole["facts"]  # it does not fit
    tiny = TrainingConfig(model={"max_length": 1024}, lora={"enabled": True})
    planned = RunPlanner(tiny, 1, model_size="8B").plan()["step_seconds"]
    assert adapted["facts"]["time"].startswith(f"about {planned:.3g} s a step")
    small = told("--model-size", "0.6B", "training.gradient_checkpointing=true")
    assert small["status"] == 0 and "activations 1.8 GiB" in small["facts"]["memory"]
    status, _, err = tfactory("doctor", "builtin:tiny", "--gpu", "abacus")
    assert status == 2 and "h200, h100, a100" in err


def test_the_remedy_is_for_the_largest_parts_and_leaves_out_what_is_set() -> None:
    def told(parts: dict[str, float], device: str = "cuda:0", **sections: dict[str, Any]) -> str:
        return suggest_options(TrainingConfig(**sections), parts, device).partition("first: ")[2]

    activations = {"weights": 15.0, "optimizer": 0.3, "activations": 75.0, "cache": 36.0}
    pack, cache = "training.token_budget=4096", "sampling.slots=16"
    assert told(activations) == f"training.gradient_checkpointing=true, {pack}, {cache}."
    saving = {"gradient_checkpointing": True}
    offload = "training.activation_offload=true"
    assert told(activations, training=saving) == f"{pack}, {offload}, {cache}."
    saving["activation_offload"] = True
    assert told(activations, training=saving) == f"{pack}, {cache}."
    adapted = told(activations, training=saving, lora={"enabled": True})
    assert adapted == f"{pack}, {cache}, model.quantization=4bit."
    whole = {"weights": 2.0, "float32 copies": 4.0, "gradients": 4.0, "optimizer": 8.0}
    assert told(whole) == "training.optimizer=adamw_8bit, lora.enabled=true."
    assert told(whole, training={"optimizer": "adamw_8bit"}) == "lora.enabled=true."
    assert told(whole, "cpu") == told(whole, compute={"learners": 2}) == "lora.enabled=true."


ENVIRONMENT = """
from TrainingFactory.envs import CalculatorEnvironment

class Broken(CalculatorEnvironment):
    def reward(self, episode):
        raise RuntimeError("no such column")
"""


def config(**sections: dict[str, Any]) -> TrainingConfig:
    given: dict[str, dict[str, Any]] = {
        "training": {"max_steps": 7, "batch_size": 4, "group_size": 2},
        "environment": {"environment_id": "calculator"},
        "sampling": {"max_tokens": 6},
    }
    return TrainingConfig(
        **{name: given.get(name, {}) | sections.get(name, {}) for name in {**given, **sections}}
    )


def test_a_dry_step_says_now_what_a_run_would_say_after_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = examine(config(data={"count": 8}, lora={"r": 4}, compute={"learners": 2}), PlainLines())
    assert names(found) == {
        "ignored": "note", "no_stop": "warning", "no_tool_called": "warning", "most_truncated": "warning",
        "tied_groups": "warning",
    }  # fmt: skip
    assert found.facts["dry episodes"].startswith("4: 4 truncated") and "7 steps" in found.facts["time"]
    assert not found.failed and not any(tmp_path.iterdir())


def test_rewards_that_fail_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(ENVIRONMENT, encoding="utf-8")
    found = examine(config(environment={"environment_id": str(tmp_path / "broken.py")}), PlainLines())
    [unscored] = [each for each in found.findings if each.name == "unscored"]
    assert unscored.severity == "error" and "no such column" in unscored.sentence


def test_a_device_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more")

    monkeypatch.setattr("TrainingFactory.assembly.sampler.load", load)
    for given in (config(), TrainingConfig()):
        [finding] = examine(given, PlainLines()).findings
        assert finding.name == "memory" and finding.sentence.endswith("20 GiB")


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    assert names(examine(TrainingConfig(model={"name": str(tmp_path)}), PlainLines())) == {"model": "error"}


def test_mistakes_are_told_all_at_once(tfactory: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("environment: {environment_id: calculator}\n", encoding="utf-8")
    asked = (
        "doctor",
        "c.yaml",
        "training.group_size=1",
        "logging.trackers=[mlflow]",
    )
    status, out, _ = tfactory(*asked, "--json")
    told = json.loads(out)["findings"]
    assert status == 1 and [(each["name"], each["severity"]) for each in told] == [("config", "error")] * 2
    status, out, _ = tfactory(*asked)
    assert status == 1 and "training.group_size=1" in " ".join(out.split())
    (tmp_path / "empty").mkdir()
    status, _, err = tfactory("doctor", "empty")
    assert status == 2 and "no config.json" in err
    status, out, err = tfactory("doctor", "builtin:tiny")
    assert status == 0 and "No problems found." in out and not err and "the model alone" in out


def test_every_finding_is_in_the_docs_and_tried_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "DOCTOR.md").read_text(encoding="utf-8")
    assert FINDING_REMEDIES.keys() <= {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)}
    provoked = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in provoked for name in FINDING_REMEDIES)


def test_the_estimate_is_near_what_a_gpu_was_measured_to_take() -> None:
    """`python -m benchmarks.gpu_shapes` on an H200."""
    rows = json.loads((ROOT / "docs/results/shapes.json").read_text(encoding="utf-8"))["rows"]
    assert {row["size"] for row in rows} == {"0.6B", "1.7B", "4B", "8B"}
    for row in rows:
        near = pytest.approx(row["peak_gib"], rel=0.05)
        assert estimated(row["size"], row["kind"], "cuda")["estimated_gib"] == near


@pytest.mark.parametrize(
    ("size", "kind", "peak_gib"),
    [
        ("1.7B", "checkpointed", 10.0),
        ("1.7B", "offloaded", 6.7),
        ("4B", "checkpointed", 18.2),
        ("4B", "offloaded", 13.0),
    ],
)
def test_estimate_of_long_rows(size: str, kind: str, peak_gib: float) -> None:
    """Peaks that `python -m benchmarks.long_rows` measured on an H200; docs/MIXTURES.md shows both."""
    estimate = estimated_gib(size, config_of(kind, "cuda", 32_768))
    assert estimate == pytest.approx(peak_gib, rel=0.02)
    page = (ROOT / "docs/MIXTURES.md").read_text(encoding="utf-8")
    assert f"| {estimate:.1f} GiB | {peak_gib} GiB |" in page


def test_new_gradients_are_no_activations() -> None:
    """With checkpointing they are what remains: no smaller pack makes them fewer."""
    config = TrainingConfig(training={"gradient_checkpointing": True, "token_budget": 16_384})
    memory = forecast(config, "8B", "h200").findings[0]
    assert "largest part: optimizer" in memory.sentence and "token_budget" not in memory.remedy


def test_the_benchmark_prints_estimates_beside_peaks_and_why_one_failed() -> None:
    whole, saving, eight = (
        estimated("8B", kind, "cuda") for kind in ("full", "checkpointed", "checkpointed_8bit")
    )
    states = 6 * find_shape("", "8B").params / 2**30  # 2 bytes instead of 8
    assert saving["estimated_gib"] - eight["estimated_gib"] == pytest.approx(states)
    measured = whole | {"peak_gib": 139.5, "sample_s": 12.0, "update_s": 3.0}
    head, *lines = table([measured, eight | {"failed": "  File x\nNo module"}]).splitlines()
    assert head.split() == ["size", "kind", "estimated_gib", "peak_gib", "sample_s", "update_s"]
    assert lines[0].split() == ["8B", "full", f"{whole['estimated_gib']:.2f}", "139.50", "12.00", "3.00"]
    assert (
        lines[1].endswith("-  No module") and lines[1].index("checkpointed_8bit") == head.index("kind") - 13
    )
    assert len(lines[0]) == len(head)
