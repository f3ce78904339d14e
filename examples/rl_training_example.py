"""SFT, then GRPO from the model that SFT has made: the complete program of the HelloAgents text.

python examples/rl_training_example.py                          # the built-in model, in seconds
python examples/rl_training_example.py Qwen/Qwen3-0.6B gsm8k      # as in the text, with model and data of the hub
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import TrainingFactory.integrations.hello_agents.shim  # noqa: F401  # pyright: ignore  # makes `hello_agents` ours

from hello_agents.tools import RLTrainingTool  # isort: skip  # pyright: ignore


def problems() -> list[dict[str, str]]:
    """Return rows of GSM8K's form."""
    sums = [(a, b) for a in range(2, 6) for b in range(1, 3)]
    return [
        {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in sums
    ]


def main(model: str = "builtin:tiny", dataset: str = "sums") -> None:
    rl_tool = cast(Any, RLTrainingTool)(language="en")
    rl_tool.register_dataset("sums", problems())
    small = {"max_steps": 2, "max_new_tokens": 16, "num_generations": 4} if model == "builtin:tiny" else {}
    train = {"action": "train", "dataset": dataset, "num_epochs": 1, "batch_size": 2, "max_samples": 8}

    print("Step 1: SFT")
    keys = {key: value for key, value in small.items() if key == "max_steps"}
    sft: str = rl_tool.run(
        train | keys | {"algorithm": "sft", "model_name": model, "output_dir": "./output/sft"}
    )
    print(sft)

    print("Step 2: GRPO from the model of step 1")
    grpo: str = rl_tool.run(
        train | small | {"algorithm": "grpo", "model_name": "./output/sft", "output_dir": "./output/grpo"}
    )
    print(grpo)
    if json.loads(grpo)["status"] != "success":
        sys.exit(1)
    print(f"The model is in {Path(json.loads(grpo)['output_dir']).resolve()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
