"""What docs/REAL_MODELS.md prints is there: commands, their options, configs and keys."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.kits.docs import ROOT, Page
from TrainingFactory.config import load_config

PAGE = Page("docs/REAL_MODELS.md")


def test_commands_and_configs_exist() -> None:
    printed = [
        words for words in PAGE.commands() if words[0] == "tfactory"
    ]  # parsed by the command line itself
    assert len(printed) >= 8
    for path in re.findall(r"configs/\w+\.yaml", PAGE.text):
        load_config(ROOT / path)
    sft, grpo = (load_config(ROOT / f"configs/smollm2_gsm8k_{name}.yaml") for name in ("sft", "grpo"))
    assert sft.model.tools_format == "hermes" and sft.training.num_epochs == 3
    sft2, grpo2 = (load_config(ROOT / f"configs/smollm2_wordnet_{name}.yaml") for name in ("sft", "grpo"))
    assert (sft2.data.count, sft2.training.num_epochs) == (1200, 2)
    assert grpo2.training.max_steps == 40 and grpo.training.max_steps == 80
    assert grpo2.training == grpo.training.model_copy(update={"max_steps": 40})
    assert (grpo.training.batch_size, grpo.training.group_size, grpo.training.learning_rate) == (64, 16, 4e-5)


def test_figures_are_those_of_the_results() -> None:
    def told(side: dict[str, Any]) -> str:
        return f"({side['success_low']:.3f} to {side['success_high']:.3f})"

    for name in ("gsm8k-seed-0", "gsm8k-seed-1", "gsm8k-seed-2", "wordnet"):
        found = json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))
        for each in found["evaluations"]["test"].values():
            row = next(line for line in PAGE.text.splitlines() if told(each["sft"]) in line)
            assert told(each["grpo"]) in row
            assert f"{each['better']} better, {each['worse']} worse" in row
            assert f"+{each['difference']:.3f} (+{each['difference_low']:.3f}" in row


def test_curve_of_the_coder_model_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "docs/results/coder-gsm8k-seed-0.json").read_text(encoding="utf-8"))
    evaluations = results["runs"]["grpo"]["evaluations"]
    assert [evaluation["step"] for evaluation in evaluations] == [0, 10, 20, 30, 40]
    for evaluation in evaluations:
        row = next(line for line in PAGE.text.splitlines() if line.startswith(f"| {evaluation['step']} | "))
        low, high = evaluation["eval/success_low"], evaluation["eval/success_high"]
        assert f"{evaluation['eval/success']:.3f}" in row and f"({low:.3f} to {high:.3f})" in row
        assert str(evaluation["eval/episodes/called"]) in row.split("|")[3]


def test_measured_sizes_are_those_of_the_results() -> None:
    found = json.loads((ROOT / "docs/results/shapes.json").read_text(encoding="utf-8"))
    kinds = {"full": "all weights", "checkpointed": "all weights, checkpointing", "lora": "LoRA"}
    kinds |= {"checkpointed_8bit": f"{kinds['checkpointed']}, 8-bit AdamW"}
    kinds |= {"lora_checkpointed": f"{kinds['lora']}, checkpointing"}
    assert len(found["rows"]) == 9
    for row in found["rows"]:
        told = f"{row['peak_gib']:.1f} | {row['sample_s']:.2f} | {row['update_s']:.2f}"
        told += "" if row["sharing"] else ", row by row"
        assert f"| {row['size']}, {kinds[row['kind']]} | {told} |" in PAGE.text
