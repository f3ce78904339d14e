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


def interval(side: dict[str, Any], prefix: str = "") -> str:
    values = (side[f"{prefix}success{suffix}"] for suffix in ("", "_low", "_high"))
    return "{:.3f} ({:.3f} to {:.3f})".format(*values)


def test_figures_of_gemma_are_those_of_its_results() -> None:
    found = json.loads((ROOT / "docs/results/gemma3-270m.json").read_text(encoding="utf-8"))
    names = {"dev": "held-out", "test": "test"}
    for split, temperatures in found["evaluations"].items():
        for temperature, each in temperatures.items():
            assert f"| {names[split]}, {temperature} | {interval(each['sft'])} |" in PAGE.text
    evaluations = found["runs"]["grpo"]["evaluations"]
    start, *later = [f"{evaluation['eval/success']:.3f}" for evaluation in evaluations]
    assert [evaluation["step"] for evaluation in evaluations] == [0, 20, 40, 60]
    assert "{} after SFT, {} after 20 steps, {} after 40, {} after 60 |".format(start, *later) in PAGE.text


def test_figures_of_the_coder_model_are_those_of_the_results() -> None:
    def row(*cells: str) -> None:
        assert f"| {' | '.join(cells)} |" in PAGE.text

    names = [f"coder-gsm8k-seed-{seed}" for seed in range(3)] + ["coder-text2sql"]
    results = [json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8")) for name in names]
    for found in results:
        side, seed = (
            ("base", [str(found["asked"]["seed"])]) if found["asked"]["task"] == "gsm8k" else ("sft", [])
        )
        for split, temperatures in found["evaluations"].items():
            for temperature, each in temperatures.items():
                difference = "{:+.3f} ({:+.3f} to {:+.3f})".format(
                    *(each[f"difference{suffix}"] for suffix in ("", "_low", "_high"))
                )
                row(
                    f"{split}, {temperature}", *seed, interval(each[side]), interval(each["grpo"]), difference
                )
    curves = [found["runs"]["grpo"]["evaluations"] for found in results[:3]]
    for each in zip(*curves, strict=True):
        row(str(each[0]["step"]), *(interval(evaluation, "eval/") for evaluation in each))


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
