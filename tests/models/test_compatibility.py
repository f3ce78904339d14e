"""Compatibility of model families: checks give the recorded results, and the page and the command show them."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from docs.generate.compat_page import compat_page
from tests.kits import compat
from tests.kits.cli import Run
from tests.kits.families import BY_KEY, FAMILIES, ModelFamily
from TrainingFactory.learning import learner as learner_module
from TrainingFactory.models.compatibility import COLUMN_HEADINGS, Cell, find_families, read_compatibility
from TrainingFactory.sampling import NativeEngine

QUICK = ("gpt_oss", "exaone4", "lfm2")
RECORDED = {family.key: family for family in read_compatibility().families}
SUPPORTED = (
    "mistral", "mistral_window", "ministral", "ministral3", "gemma2", "gemma3", "gemma4", "gemma4_moe", "gpt_oss",
    "olmo3", "cohere2", "exaone4", "deepseek_v3",
)  # fmt: skip
STATUSES = {"works", "falls back", "rejected", "-"}


def recorded(key: str) -> dict[str, Cell]:
    if version("transformers") != read_compatibility().versions["transformers"]:
        pytest.skip("the results were recorded with another version of transformers")
    return RECORDED[key].cells


@pytest.mark.parametrize("key", QUICK)
def test_a_family_gives_its_recorded_results(key: str) -> None:
    columns = ("engine", "learner", "lora", "template")
    cells = compat.family_cells(BY_KEY[key], None, columns)
    assert {name: cells[name] for name in columns} == {name: recorded(key)[name] for name in columns}, (
        "run make compat"
    )


@pytest.fixture(scope="module")
def architectures() -> set[str] | None:
    return compat.vllm_architectures()


@pytest.mark.slow
@pytest.mark.parametrize("key", BY_KEY)
def test_every_check_gives_its_recorded_result(key: str, architectures: set[str] | None) -> None:
    cells = compat.family_cells(BY_KEY[key], architectures)
    checked = {name: cell for name, cell in cells.items() if cell.status != compat.UNTESTED}
    assert checked == {name: recorded(key)[name] for name in checked}, "run make compat"


def test_every_family_is_recorded_and_none_fails_or_gives_wrong_results() -> None:
    assert list(RECORDED) == [family.key for family in FAMILIES]
    cells = [cell for family in RECORDED.values() for cell in family.cells.values()]
    assert {cell.status for cell in cells} <= STATUSES
    assert all(cell.note for cell in cells if cell.status not in ("works", "-"))


@pytest.mark.parametrize("key", SUPPORTED)
def test_families_with_windows_sinks_soft_caps_and_latent_attention_are_supported(key: str) -> None:
    cells = RECORDED[key].cells
    assert {name: cells[name].status for name in ("engine", "learner", "lora")} == {
        "engine": "works", "learner": "works", "lora": "works",
    }  # fmt: skip


def test_the_page_shows_the_recorded_results() -> None:
    assert compat.PAGE.read_text(encoding="utf-8") == compat_page(read_compatibility()), "run make compat"


def without_window(family: ModelFamily) -> PreTrainedModel:
    """The same weights without the window."""
    return family.build(sliding_window=None)


def test_the_engine_check_notices_an_ignored_window() -> None:
    family = BY_KEY["mistral_window"]
    engine = NativeEngine(without_window(family), slots=4, max_length=256)
    with pytest.raises(compat.WrongResultError, match="turn 1 differ"):
        compat.compare_with_forward(family.build(), engine)


def test_the_learner_check_notices_an_ignored_window(monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_KEY["mistral_window"]
    other = without_window(family)
    own_states = learner_module.Learner.compute_states
    monkeypatch.setattr(
        learner_module.Learner, "compute_states", lambda self, pack, model=None: own_states(self, pack, other)
    )
    cell = compat.learner_cell(family)
    assert cell.status == "wrong" and "log-probs differ" in cell.note


def test_the_gradient_check_notices_one_wrong_weight() -> None:
    expected = {"a": torch.ones(3), "b": torch.zeros(2)}
    compat.compare_gradients({"a": torch.ones(3) * 1.0001}, expected)
    with pytest.raises(compat.WrongResultError, match="gradient of b"):
        compat.compare_gradients({"a": torch.ones(3), "b": torch.full((2,), 0.01)}, expected)


# -- the command


def test_the_command_lists_every_family(tfactory: Run) -> None:
    status, out, err = tfactory("models", "--compat")
    assert status == 0 and "docs/COMPATIBILITY.md" in err
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(RECORDED)
    assert all(heading.split()[0] in out.splitlines()[0] for heading in COLUMN_HEADINGS.values())


@pytest.mark.parametrize("name", ["lfm2", "Lfm2ForCausalLM", "LiquidAI/LFM2-1.2B", "LFM2"])
def test_the_command_explains_a_family(name: str, tfactory: Run) -> None:
    status, out, _ = tfactory("models", "--compat", name)
    assert status == 0 and "convolutions" in out and RECORDED["lfm2"].released in out


def test_a_model_folder_is_found_by_its_config(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [family.key for family in find_families(str(tmp_path))] == ["gemma3"]


def test_an_unknown_family_is_an_error_with_the_nearest_one(tfactory: Run) -> None:
    status, _, err = tfactory("models", "--compat", "gemma33")
    assert status == 2 and "'gemma33'" in err and "gemma3" in err.replace("gemma33", "")
