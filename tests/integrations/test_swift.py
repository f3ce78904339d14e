"""ms-swift: our environments in its trainer, and its trainings as configs of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kits.cli import Run
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import ConfigLoader
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.integrations.swift import PLUGIN_FILE
from TrainingFactory.integrations.swift.importing import SwiftTranslation, read_arguments
from TrainingFactory.integrations.swift.scheduler import check_config, fill_missing_rewards, read_task

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ROOT / ".servers"
RUN = """
model: {name: acme/small, revision: v2, dtype: bfloat16}
environment: {environment_id: search, max_turns: 4}
training: {batch_size: 6, group_size: 4, learning_rate: 2.0e-5, warmup_steps: 3, max_steps: 9, schedule: cosine,
  seed: 7, weight_decay: 0.01, gradient_checkpointing: true, token_budget: 4096}
lora: {enabled: true, r: 4, alpha: 8, target_modules: [q_proj, v_proj]}
grpo: {kl: 0.02, clip_low: 0.1, clip_high: 0.3, normalization: sequence, scale_rewards: true, ratio: sequence}
sampling: {temperature: 0.8, max_tokens: 33}
data: {count: 4}
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def exported(tmp_path: Path, tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run.yaml", RUN)
    status, out, err = tfactory("swift", "export", "run.yaml", "-o", "out", "data.seed=3")
    assert status == 0 and "sh out/run.sh" in out, err
    assert "no counterpart in ms-swift: training.token_budget" in err
    return tmp_path / "out"


def test_export_writes_rows_arguments_and_script(exported: Path, tfactory: Run) -> None:
    arguments = yaml.safe_load((exported / "args.yaml").read_text())
    assert "# training.token_budget has no counterpart" in (exported / "args.yaml").read_text()
    expected = {
        "rlhf_type": "grpo", "model": "acme/small", "model_revision": "v2", "torch_dtype": "bfloat16",
        "num_generations": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "learning_rate": 2e-5, "warmup_steps": 3,
        "max_steps": 9, "lr_scheduler_type": "cosine", "seed": 7, "weight_decay": 0.01, "beta": 0.02,
        "gradient_checkpointing": True, "tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"], "epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "grpo",
        "scale_rewards": "group", "importance_sampling_level": "sequence", "temperature": 0.8,
        "max_completion_length": 33, "max_turns": 4, "use_vllm": False, "multi_turn_scheduler": "training_factory",
        "reward_funcs": "training_factory", "remove_unused_columns": False, "num_train_epochs": 1,
        "output_dir": str(exported / "output"), "dataset": str(exported / "rows.jsonl"), "logging_steps": 1,
    }  # fmt: skip
    assert arguments == expected
    tasks = list(SearchEnvironment.tasks("train", 3, 4))
    rows = [json.loads(line) for line in (exported / "rows.jsonl").read_text().splitlines()]
    assert [read_task(row) for row in rows] == tasks
    assert rows[0]["messages"] == [
        {"role": "system", "content": "Search, then answer with one word."},
        {"role": "user", "content": tasks[0].prompt},
    ]
    assert [tool["function"]["name"] for tool in json.loads(rows[0]["tools"])] == ["search"]
    assert load_config(exported / "config.yaml").data.seed == 3
    script = (exported / "run.sh").read_text()
    assert "python -m TrainingFactory.integrations.swift" in script and os.access(
        exported / "run.sh", os.X_OK
    )
    assert tfactory("swift", "plugin")[1].strip() == str(PLUGIN_FILE)
    assert "exists already" in tfactory("swift", "export", "run.yaml", "-o", "out")[2]


def test_an_exported_config_is_imported_again(exported: Path, tfactory: Run) -> None:
    original = load_config(exported / "config.yaml")
    for source in ("args.yaml", "run.sh"):
        status, _, err = tfactory("import", "swift", exported / source, "-o", "back.yaml", "--force")
        assert status == 0, err
        back = load_config("back.yaml")
        for section in ("training", "grpo", "lora", "sampling"):
            for key in getattr(original, section).model_fields_set - {"token_budget"}:
                assert getattr(getattr(back, section), key) == getattr(getattr(original, section), key), key
        assert (
            back.model.name == "acme/small"
            and back.model.revision == "v2"
            and back.data.tasks == str(exported / "rows.jsonl")
        )
    assert "# --multi_turn_scheduler training_factory: by hand" in Path("back.yaml").read_text()


def test_ms_swift_plays_the_environment(exported: Path) -> None:
    """The real package's driver, scheduler and reward classes, in a process of its own."""
    if not (SERVERS / "swift" / "swift").is_dir():
        pytest.skip("ms-swift is not installed: make servers")
    env = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SERVERS / 'swift'}", "HOME": str(exported), "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TF_CONFIG": str(exported / "config.yaml"),
    }  # fmt: skip
    command = [
        sys.executable,
        str(Path(__file__).with_name("swift_episodes.py")),
        str(exported / "rows.jsonl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=exported)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    result = json.loads(next(line for line in lines if line.startswith("{")))
    tasks = list(SearchEnvironment.tasks("train", 3, 4))
    assert [prompt[-1]["content"] for prompt in result["prompts"][:4]] == [task.prompt for task in tasks]
    # the reference solution, a wrong answer, a turn that was cut off, calls up to the limit, and an unscored episode
    infos = result["infos"]
    assert result["rewards"] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [info["total_reward"] for info in infos] == [1.0, 0.0, 0.0, 0.0, None]
    assert [info["tf_status"] for info in infos] == ["done", "done", "truncated", "max_turns", "done"]
    assert [info["tool_calls"] for info in infos] == [2, 0, 0, 4, 2]
    assert [info["num_turns"] for info in infos] == [3, 1, 1, 4, 3]
    assert "has no answer" in infos[4]["tf_error"] and "has no reward" in done.stderr
    assert result["roles"][0] == ["system", "user", *["assistant", "tool_response"] * 2, "assistant"]
    facts = {text for _, text in tasks[0].metadata["facts"]}
    assert set(result["replies"]) <= facts and len(result["replies"]) == 2
    assert result["trained"] == result["sampled"]
    assert result["added_paths"] == []
    assert result["control_texts"] == 1 and "message contains <|im_start|>" in done.stderr
    assert (
        lines[-1]
        == "TrainingFactory: 5 episodes, 3 done, 1 truncated, 1 unscored, 1 max_turns, 1 control texts"
    )


@pytest.mark.slow
def test_ms_swift_learns(tmp_path: Path) -> None:
    python = SERVERS / "swift-env" / "bin" / "python"
    if not (SERVERS / "swift-env.installed").is_file():
        pytest.skip("ms-swift with its dependencies is not installed: make agents")
    from benchmarks.swift_grpo import train, warm_start

    result = train(python, warm_start(tmp_path), tmp_path, 24)  # as in docs/SWIFT.md
    rewards = result["rewards"]
    assert len(rewards) == 24 and result["episodes"].startswith("1536 episodes")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


def test_unscored_episodes_get_no_advantage() -> None:
    infos: list[dict[str, Any]] = [{"total_reward": value} for value in (1.0, None, 0.5, None, 0.0)]
    assert fill_missing_rewards(infos, ["a", "a", "a", "b", "c"]) == [1.0, 0.75, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="--multi_turn_scheduler training_factory"):
        fill_missing_rewards([{"num_turns": 1}], ["a"])
    with pytest.raises(ValueError, match=r"no column 'tf_task'.*tfactory swift export"):
        read_task({"solution": "1"})


SCRIPT = r"""#!/bin/bash
export MODEL=${MODEL:-Qwen/Qwen3-4B}
# swift rlhf --model old
NPROC_PER_NODE=2 swift rlhf \
    --rlhf_type grpo --model $MODEL \
    --train_type full --torch_dtype bfloat16 \
    --dataset 'AI-MO/NuminaMath-TIR#5000' other.jsonl \
    --learning_rate 1e-6 --num_train_epochs 2 --max_completion_length 2048 \
    --num_generations 16 --per_device_train_batch_size 8 --gradient_accumulation_steps=4 \
    --beta 0.001 --epsilon_high 0.3 --loss_type bnpo --scale_rewards batch --max_length 8192 \
    --reward_funcs accuracy format --reward_weights 1 0.5 --vllm_gpu_memory_utilization 0.5 --use_vllm true \
    --warmup_ratio 0.05 --hub_token hf_aBcDeFgHiJ1234567890abcdef \
    --output_dir $HOME_OF/output --new_option 3 2>&1 | tee log
"""


def translated(path: Path, **variables: str) -> tuple[TrainingConfig, str]:
    text = SwiftTranslation(path, *read_arguments(path, variables)).text()
    return TrainingConfig(**yaml.load(text, ConfigLoader)), text


def test_a_script_is_imported(tmp_path: Path) -> None:
    config, text = translated(written(tmp_path / "run.sh", SCRIPT))
    assert config.model.name == "Qwen/Qwen3-4B" and config.model.dtype == "bfloat16"
    training = config.training
    assert (training.algorithm, training.batch_size, training.group_size) == ("grpo", 2, 16)
    assert (training.learning_rate, training.num_epochs, training.schedule) == (1e-6, 2, "cosine")
    assert (
        training.weight_decay == 0.1 and training.seed == 42 and not config.lora.enabled
    )  # ms-swift's defaults
    assert (config.data.tasks, config.data.count) == ("AI-MO/NuminaMath-TIR", 5000)
    assert (config.grpo.kl, config.grpo.clip_low, config.grpo.clip_high) == (0.001, 0.2, 0.3)
    assert config.grpo.normalization == "token"
    assert (config.sampling.max_tokens, config.sampling.temperature, config.sampling.engine) == (
        2048,
        0.9,
        "vllm",
    )
    for line in (
        "--dataset ['other.jsonl']: by hand", "--reward_funcs ['accuracy', 'format']: by hand",
        "--scale_rewards batch: no counterpart: grpo.scale_rewards supports group, none",
        "--max_length 8192: by hand: model.max_length", "--reward_weights ['1', '0.5']: by hand",
        "--warmup_ratio 0.05: by hand", "--vllm_gpu_memory_utilization 0.5: not needed", "--hub_token ***",
        "--output_dir: by hand: it depends on ${HOME_OF}", "--new_option 3: no counterpart",
        "32 completions of 16 each",
    ):  # fmt: skip
        assert line in text
    assert "hf_aBcD" not in text
    assert translated(tmp_path / "run.sh", MODEL="mine")[0].model.name == "mine"


def test_other_algorithms_and_output_folders_are_imported(tmp_path: Path) -> None:
    sft, text = translated(
        written(tmp_path / "a.yaml", "model: m\ndataset: [a.jsonl]\nlora_rank: 16\nbeta: 0.1\n")
    )
    assert (sft.training.algorithm, sft.data.dataset, sft.data.tasks) == ("sft", "a.jsonl", None)
    assert sft.lora.enabled and (sft.lora.r, sft.lora.alpha, sft.lora.dropout) == (16, 32, 0.05)
    assert sft.training.learning_rate == 1e-4 and "--beta 0.1: not needed" in text
    dpo = translated(
        written(tmp_path / "dpo.sh", "swift rlhf --model m --dataset p.jsonl --beta 0.2 --tuner_type full")
    )[0]
    assert (dpo.training.algorithm, dpo.dpo.beta, dpo.training.learning_rate) == ("dpo", 0.2, 1e-5)
    everything = {
        "rlhf_type": "kto", "model": "m", "dataset": ["k.jsonl"], "tuner_type": "full", "eval_steps": None,
        "packing": False,
        "galore_rank": 128, "max_steps": -1, "num_train_epochs": 1.0, "num_generations": 8, "save_steps": 50.0,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "ddp_timeout": 18000000,
    }  # fmt: skip
    folder = tmp_path / "output" / "v0-1"
    folder.mkdir(parents=True)
    written(folder / "args.json", json.dumps(everything))
    for path in (folder, folder.parent):
        kto, text = translated(path)
        assert (kto.training.algorithm, kto.training.batch_size, kto.training.num_epochs) == ("kto", 16, 1)
        assert kto.logging.checkpoint_every == 50 and kto.training.max_steps is None
        assert "mostly defaults of ms-swift: galore_rank" in text and "ddp_timeout" not in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", "echo hello", "has no training command"),
        ("run.sh", "swift sft --model a\nswift sft --model b", "has 2 training commands"),
        ("run.sh", "swift rlhf --rlhf_type gkd --model m", "rlhf_type gkd has no counterpart"),
        (
            "run.sh",
            "swift sft --per_device_train_batch_size auto",
            "size is 'auto'; it must be a",
        ),
        ("run.sh", "swift sft --model 'a", "invalid shell command"),
        ("args.yaml", "- a", "must be a mapping"),
        ("args.json", "{", "cannot be read"),
    ],
)
def test_mistakes_in_imports(tmp_path: Path, tfactory: Run, name: str, text: str, message: str) -> None:
    status, _, err = tfactory("import", "swift", written(tmp_path / name, text))
    assert status == 2 and message in err and "Traceback" not in err


def test_mistakes_in_exports(tmp_path: Path, tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run.yaml", "environment: search\ndata: {count: 2}\n")
    status, _, err = tfactory("swift", "export", "run.yaml", "training.algorithm=sft", "-o", "o")
    assert status == 2 and "Only grpo" in err
    assert "ms-swift cannot load builtin:tiny" in tfactory("swift", "export", "run.yaml", "-o", "o")[2]
    with pytest.raises(ValueError, match=r"environment\.context does not work in ms-swift"):
        check_config(TrainingConfig(**{"environment": {"context": {"fold": "window", "limit": 100}}}))
    assert "no args.json" in tfactory("import", "swift", tmp_path)[2]
    assert not (tmp_path / "o").exists()
