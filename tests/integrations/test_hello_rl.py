"""The lower interface: rewards, datasets, the config, and the shim's names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.docs import Page
from tests.kits.hello import problems, without_hello, write_gsm8k
from TrainingFactory.integrations.hello_agents import datasets, rl
from TrainingFactory.integrations.hello_agents.rewards import create_combined_reward, make_reward
from TrainingFactory.integrations.hello_agents.rl import TrainingConfig, format_training_time
from TrainingFactory.integrations.hello_agents.tool import ACTION_DEFAULTS
from TrainingFactory.integrations.hello_agents.training import OPTION_KEYS, SPECIAL_KEYS

fresh = pytest.fixture(autouse=True)(without_hello)
math = rl.MathRewardFunction()


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("Final Answer: 72", "72", 72),
        ("Final Answer: 5\nNo. Final Answer: 7", "7", 7),
        ("**Final Answer:** 72", "72", 72),
        ("so #### 42", "42", 42),
        ("答案是：42", "42", 42),
        ("\\boxed{42}", "42", 42),
        ("Therefore, she has 3 apples and 4 pears, total 7.", "7", 7),
        ("The total is 1,234", "1,234", 1234),
        ("Final Answer: 48+24=72", "48+24=72", 72),
        ("Final Answer: 1/2", "1/2", 0.5),
        ("Final Answer: $1,000.50", "$1,000.50", 1000.5),
        ([{"role": "assistant", "content": "Final Answer: 3"}], "3", 3),
        ("no number", None, None),
    ],
)
def test_answers_are_read_as_they_are_meant(text: Any, answer: str | None, value: float | None):
    assert math.extract_answer(text) == answer
    assert math.normalize_answer(answer) == value
    if value is not None:
        assert math([text], ground_truth=[value]) == [1.0] and math([text], ground_truth=["1"]) == [0.0]


def test_rewards_have_the_textbooks_values():
    base = rl.create_accuracy_reward()
    assert rl.MathRewardFunction(0.01).compare_answers("3.14", "3.14159")
    assert not math.compare_answers("3.14", "3.15") and math.compare_answers("Yes ", "yes")
    step, long = rl.create_step_reward(base, 0.1), rl.create_length_penalty_reward(base, 200, 0.1)
    right, wrong = "Step 1: 2+2=4\nFinal Answer: 4", "a\n" * 50 + "Final Answer: 5"
    assert step([right, "4", wrong], ground_truth=["4"] * 3) == pytest.approx([1.1, 1.0, 0.0])
    assert step(["a\n" * 50 + "Final Answer: 4"], ground_truth=["4"]) == [1.5]  # at most 0.5 more
    padded = "x" * 484 + "\nFinal Answer: 4"
    assert len(padded) == 500 and long([padded, "4"], ground_truth=["4", "4"]) == pytest.approx([0.85, 1.0])
    both = create_combined_reward([{"type": "accuracy", "weight": 0.5},
                                   {"type": "length_penalty", "target_length": 200, "weight": 2.0}])  # fmt: skip
    assert both([padded], ground_truth=["4"]) == pytest.approx([0.5 + 2 * 0.85])
    assert make_reward("step", {"max_steps": 0})([right], ground_truth=["4"]) == [1.0]
    with pytest.raises(ValueError, match="ground_truth with one entry for each of 2"):
        base(["4", "4"], ground_truth=["4"])


def test_rewards_are_summed_up():
    found = rl.evaluate_rewards(["4", "5", "4"], ["4", "4", "4"], rl.create_accuracy_reward())
    assert found == {"mean_reward": pytest.approx(2 / 3), "std_reward": pytest.approx(2**0.5 / 3), "max_reward": 1.0,
                     "min_reward": 0.0, "accuracy": pytest.approx(2 / 3), "num_samples": 3}  # fmt: skip


def test_records_have_the_textbooks_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv(datasets.GSM8K_VARIABLE, str(write_gsm8k(tmp_path)))
    [row] = rl.create_sft_dataset(1)
    prompt = "Question: She has 1 and gets 2. How many?\n\nLet's solve this step by step:\n"
    assert row["prompt"] == prompt and row["text"] == prompt + row["completion"]
    assert row["completion"] == "She has 1 + 2 = <<1+2=3>>3 now.\n\nFinal Answer: 3"
    [row] = rl.create_rl_dataset(1)  # the trainer knows the model, and writes the prompt by its template
    assert row["prompt"] == prompt.strip()
    [row] = rl.create_rl_dataset(1, "test", "builtin:tiny")
    assert row["prompt"].startswith("<|im_start|>user\nQuestion: ") and row["prompt"].endswith("assistant\n")
    assert (row["ground_truth"], row["full_answer"]) == ("3", problems(1)[0]["answer"])
    assert datasets.make_sft_row({"question": "q", "answer": "7"})["completion"] == "Final Answer: 7"
    assert (
        len(rl.GSM8KDataset("train[:2]")) == 2 and rl.GSM8KDataset("test", 1, "rl")[0]["ground_truth"] == "3"
    )
    assert list(rl.format_math_dataset(problems(2))[0]) == ["prompt", "completion", "text"]
    rl.preview_dataset(rl.create_math_dataset(max_samples=2), 1)
    assert "--- 1 / 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no dataset 'math'"):
        rl.create_math_dataset("math")
    with pytest.raises(ValueError, match="row 0 of the dataset has no question"):
        rl.format_math_dataset([{"answer": "1"}])


def test_a_prompt_in_a_chat_template_is_taken_apart():
    """Trainers apply the template themselves; a second time it would be text."""
    written = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    [task] = datasets.read_tasks([{"prompt": written, "ground_truth": "4"}])
    assert task["prompt"] == "How many?"
    [task] = datasets.read_tasks(
        [{"prompt": "<|im_start|>system\nBe brief.<|im_end|>\n" + written, "ground_truth": "4"}]
    )
    assert [each["role"] for each in task["prompt"]] == ["system", "user"]
    [task] = datasets.read_tasks([{"question": "How many?", "answer": "It is\n#### 4"}])
    assert task["ground_truth"] == "4" and task["prompt"].startswith("Question: How many?")
    [row] = datasets.read_examples([{"question": "How many?", "answer": "It is\n#### 4"}])
    assert row["prompt"] == task["prompt"]  # learned and sampled under the same prompt


def test_a_config_becomes_keys_of_the_tool(capsys: Any):
    config = TrainingConfig(output_dir="x", top_p=0.5, use_fp16=False)
    keys = config.convert_keys("grpo", is_evaluated=False)
    assert (keys["num_epochs"], keys["batch_size"], keys["gradient_accumulation_steps"]) == (3, 4, 4)
    assert (keys["temperature"], keys["lora_r"], keys["dtype"], keys["warmup_ratio"]) == (
        0.7,
        16,
        "float32",
        0.1,
    )
    assert "top_p 0.5 " in capsys.readouterr().out
    plain = TrainingConfig(use_lora=False, use_bf16=True, warmup_steps=7).convert_keys(
        "sft", is_evaluated=True
    )
    assert (plain["dtype"], plain["eval_steps"], plain["warmup_steps"]) == ("bfloat16", 500, 7)
    assert not {"temperature", "lora_r", "warmup_ratio"} & plain.keys()


def test_wrappers_say_what_is_missing():
    with pytest.raises(ValueError, match="SFTTrainerWrapper has no dataset"):
        rl.SFTTrainerWrapper().train()
    with pytest.raises(ValueError, match="GRPOTrainerWrapper has no reward"):
        rl.GRPOTrainerWrapper(dataset=problems(1)).train()
    with pytest.raises(ValueError, match=r"train\(\)"):
        rl.PPOTrainerWrapper(dataset=problems(1)).save_model()
    assert rl.SFTTrainerWrapper(num_epochs=1, batch_size=2).config.per_device_train_batch_size == 2


def test_times_are_written_short():
    assert [format_training_time(s) for s in (3, 123, 3723)] == ["3s", "2m 3s", "1h 2m 3s"]


def test_a_program_finds_the_textbooks_names_and_its_own_arguments(
    tfactory: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(datasets.GSM8K_VARIABLE, "")
    Path("beside.py").write_text("value = 4\n")
    Path("program.py").write_text(
        "import sys, beside\nfrom hello_agents import SimpleAgent, ToolRegistry, HelloAgentsLLM\n"
        "from hello_agents.rl.utils import get_device_info\nfrom hello_agents.rl.trainers import BaseTrainerWrapper\n"
        "from hello_agents.tools.builtin.rl_training_tool import RLTrainingTool\n"
        "import hello_agents.rl as rl\nprint(rl.TRL_AVAILABLE, beside.value, sys.argv, __name__)\nsys.exit(3)\n"
    )
    before = list(sys.path)
    status, out, _ = tfactory("hello", "program.py", "--fast", "data.tasks=gsm", "x")
    assert (status, out) == (3, "True 4 ['program.py', '--fast', 'x'] __main__\n")
    assert sys.path == before
    Path("broken.py").write_text("from hello_agents.tools import RLTrainingTool\n\n1 / 0\n")
    status, _, err = tfactory("hello", "broken.py")
    assert (
        status == 1
        and 'File "broken.py", line 3' in err
        and "runpy" not in err
        and "ZeroDivisionError" in err
    )
    assert tfactory("hello", "nothing.py")[0] == 2


def test_the_page_prints_commands_and_keys_that_exist():
    page = Page("docs/HELLO_AGENTS.md")
    assert len(page.commands()) == 2
    for action, defaults in ACTION_DEFAULTS.items():
        [row] = [line for line in page.text.splitlines() if line.startswith(f"| `{action}` |")]
        assert [key for key in defaults if f"`{key}`" not in row and "reward" not in key] == []
    missing = [key for key in (*OPTION_KEYS, *SPECIAL_KEYS) if f"`{key}`" not in page.text]
    assert missing == []
