"""The twelve Python blocks of the HelloAgents text, each by `tfactory hello` on a tiny model and generated problems.

The blocks share names: one that uses `rl_tool` is run after the two lines that make it, and the last after the import
that it takes from an earlier block. What follows a block here only looks at what it has made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.hello import STARTED, completion, means, tool_call, without_hello, write_gsm8k
from tests.kits.judge import Said, judging
from tests.kits.seeds import Block, blocks

BLOCKS = blocks("002", "python")
TOOL = "from hello_agents.tools import RLTrainingTool\nrl_tool = RLTrainingTool()\n"
BEFORE = {
    5: TOOL,
    7: TOOL,
    8: TOOL,
    10: TOOL,
    11: TOOL,
    14: "from hello_agents.rl import create_rl_dataset\n",
}
SUM = "completions=['Final Answer: 4', 'so 5'], ground_truth=['4', '4']"
AFTER = {
    5: "print(result['dataset_size'], result['sample_keys'])",
    6: "print(response)",
    9: "print(sft_result['output_dir'], grpo_result['status'])",
    13: f"print(reward_fn({SUM}))",
    14: "print(evaluate_rewards(['4', '5'], ['4', '4'], reward_fn)['accuracy'], len(test_dataset))",
}
SAYS = {
    3: ["TRL"],
    4: ['"status": "success"', '"use_lora": true', '"dataset_size": 2'],
    5: ["2 ['question', 'prompt', 'ground_truth', 'full_answer']"],
    6: ["I have asked for it: success"],
    9: ["./output/sft success"],
    13: ["[1.0, 0.0]"],
    14: ["0.5 3"],
}
# The folders that a block leaves a model in, and by how many steps it was trained: 2 problems, in one step an epoch.
TRAINED = {4: {"sft": 3}, 6: {"sft": 3}, 7: {"sft": 3}, 8: {"grpo": 3}, 9: {"sft": 3, "grpo": 3}, 10: {"test_sft": 1},
           11: {"sft_lora": 3}, 12: {"custom": 3}}  # fmt: skip

# Block 9 trains by SFT, then by GRPO, with the tool: those of these blocks differ from it in options alone.
LATER = (7, 8, 10, 11)
CASES = [
    pytest.param(block, marks=pytest.mark.slow if block.number in LATER else (), id=str(block))
    for block in BLOCKS
]

fresh = pytest.fixture(autouse=True)(without_hello)


@STARTED
@pytest.mark.skipif(not BLOCKS, reason="the document is not beside the checkout")
@pytest.mark.parametrize("block", CASES)
def test_the_block_runs(block: Block, started: Path, tfactory: Run, monkeypatch: pytest.MonkeyPatch):
    means(started)
    monkeypatch.setenv("TFACTORY_GSM8K", "")  # put back what the command sets
    monkeypatch.delenv("LLM_API_KEY", raising=False)
    data, number = write_gsm8k(Path("gsm8k"), train=2), block.number
    Path("block.py").write_text(BEFORE.get(number, "") + block.text + "\n" + AFTER.get(number, ""))
    with judging(_fixed_call) as llm:
        monkeypatch.setenv("LLM_BASE_URL", llm.url)
        status, out, err = tfactory("hello", "block.py", f"data.tasks={data}")
    assert status == 0, err
    assert all(text in out for text in SAYS.get(number, [])), out
    for folder, steps in TRAINED.get(number, {}).items():
        made = json.loads(Path("output", folder, "training_result.json").read_text())
        assert made["steps"] == steps
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(made["files"])
        assert _moved(Path("output", folder))
    if number == 9:  # the second training goes on with what the first has made
        assert f"adapter: {Path('output/sft').resolve()}" in _config("grpo")
    assert bool(llm.asked) == (number == 6)


def _fixed_call(prompt: str, number: int) -> Said:
    """Ask for the training that the text's user wants, whatever is said; then tell how it went."""
    if number == 0:
        return tool_call({"algorithm": "sft", "model_name": "Qwen/Qwen2-0.5B-Instruct", "dataset": "gsm8k",
                          "num_epochs": 3, "output_dir": "./output/sft"})  # fmt: skip
    return completion(
        {"content": "I have asked for it: " + prompt.partition('"status": "')[2].partition('"')[0]}
    )


def _moved(folder: Path) -> bool:
    """Tell whether an adapter has learned anything: fresh ones are zero on one side."""
    from safetensors.torch import load_file

    weights: dict[str, Any] = load_file(folder / "adapter_model.safetensors")
    return any(bool(value.any()) for name, value in weights.items() if "lora_B" in name)


def _config(folder: str) -> str:
    [run] = Path("output", folder, "runs").glob("*/config.yaml")
    return run.read_text()
