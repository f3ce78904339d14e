"""What docs/REAL_MODELS.md prints is there: commands, their options, configs and keys."""

from __future__ import annotations

import re

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
    assert (sft2.data.count, sft2.training.num_epochs) == (1000, 2) and grpo2.training == grpo.training
    assert (grpo.training.batch_size, grpo.training.group_size, grpo.training.learning_rate) == (64, 16, 4e-5)
