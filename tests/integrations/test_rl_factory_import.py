"""Launch scripts and tool files of RL-Factory: read without being run, translated, and trained."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kits.cli import Run
from TrainingFactory.assembly.tools import make_tools
from TrainingFactory.config import load_config
from TrainingFactory.config.loading import ConfigLoader
from TrainingFactory.integrations.rl_factory.launch_script import read_script
from TrainingFactory.integrations.rl_factory.translate import Translation

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "search_r1"
COMMAND = "python3 -m verl.trainer.main_ppo"
SCRIPT = r"""#!/bin/bash
source ./env.sh
export MODEL_PATH=/models/Qwen3-4B   # the one to train
REWARD_MODEL_PATH="${REWARD_MODEL_PATH:-/models/QwQ-32B}"
DATA='data/$raw'
NOW=$(date +%m%d)
# python3 -m verl.trainer.main_ppo data.train_files=old
CUDA_VISIBLE_DEVICES=0,1 python3 -m verl.trainer.main_ppo\
    algorithm.adv_estimator=grpo\
    data.train_files="$DATA/train.parquet" \
    data.val_files=${DATA}/test.parquet\
    data.train_batch_size=128\
    data.max_prompt_length=4096\
    data.max_response_length=512\
    actor_rollout_ref.model.path=$MODEL_PATH\
    actor_rollout_ref.actor.optim.lr=1e-6\
    actor_rollout_ref.actor.ppo_mini_batch_size=32\
    actor_rollout_ref.actor.use_kl_loss=True\
    actor_rollout_ref.actor.kl_loss_coef=0.001\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl\
    actor_rollout_ref.actor.state_masking=True\
    +actor_rollout_ref.actor.policy_loss.loss_mode=gspo\
    actor_rollout_ref.rollout.n=4\
    actor_rollout_ref.rollout.n=8\
    actor_rollout_ref.rollout.max_turns=${TURNS:-3}\
    actor_rollout_ref.rollout.mode=async\
    actor_rollout_ref.rollout.top_p=0.95\
    actor_rollout_ref.env.name=travel\
    actor_rollout_ref.env.use_process_reward=True\
    actor_rollout_ref.env.enable_thinking=False\
    actor_rollout_ref.env.config_path=/your/path/mcp_tools.pydata\
    reward_rollout.if_use_reward_rollout=True\
    reward_rollout.rollout.model_name=$REWARD_MODEL_PATH\
    reward_rollout.rollout.response_length=2048\
    reward_rollout.rollout.tensor_model_parallel_size=4\
    reward_rollout.rollout.gpu_memory_utilization=0.65\
    trainer.logger=['console','wandb']\
    trainer.project_name='GRPO search'\
    trainer.experiment_name=run_$NOW\
    trainer.n_gpus_per_node=8\
    trainer.default_local_dir=$OUT\
    trainer.save_freq=-1\
    trainer.test_freq=10\
    trainer.total_epochs=5 $@ 2>&1 | tee grpo.log
"""


def translated(path: Path, text: str, **variables: str) -> tuple[dict[str, Any], list[str]]:
    path.write_text(text, encoding="utf-8")
    made = Translation(read_script(path, variables))
    (path.parent / "made.yaml").write_text(made.text(), encoding="utf-8")
    config = load_config(path.parent / "made.yaml")
    return config.model_dump(exclude_unset=True), made.notes


def test_a_script_becomes_a_config_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    config, notes = translated(tmp_path / "main.sh", SCRIPT, TURNS="5")
    assert config == {
        "model": {"name": "/models/Qwen3-4B", "thinking": False, "max_length": 4608},
        "training": {
            "algorithm": "grpo", "learning_rate": 1e-6, "group_size": 8, "batch_size": 128, "num_epochs": 5,
            "minibatches": 4, "eval_every": 10,
        },
        "grpo": {
            "scale_rewards": True, "kl": 0.001, "kl_estimator": "k3", "clip_high": 0.2, "ratio": "sequence",
            "normalization": "sequence",
        },
        "environment": {
            "environment_id": "travel.py", "max_turns": 5, "options": {"use_process_reward": True}
        },
        "tools": [{"name": "tools", "config": "/your/path/mcp_tools.pydata"}],
        "reward": {
            "type": "model_judge",
            "judge": {"model": "/models/QwQ-32B", "engine": "vllm", "gpus": 4},
            "options": {"options": {"max_tokens": 2048}},
        },
        "data": {"tasks": "data/$raw/train.parquet", "heldout": "data/$raw/test.parquet"},
        "sampling": {"max_tokens": 512},
        "optimization": {"async_rollout": True},
        "compute": {"num_gpus": 8},
        "logging": {"trackers": ["wandb"], "wandb": {"project": "GRPO search"}},
    }  # fmt: skip
    told = {note.split(":")[0].split("=")[0]: note for note in notes}
    assert "always so: " in told["actor_rollout_ref.actor.state_masking"]
    assert "by hand: training samples from the full softmax" in told["actor_rollout_ref.rollout.top_p"]
    assert told["trainer.experiment_name"].endswith("depends on $(...), which only the shell knows")
    assert "depends on ${OUT}" in told["trainer.default_local_dir"]
    assert "by hand: travel.py " in told["actor_rollout_ref.env.name"]
    assert "reward.judge.engine_options" in told["reward_rollout.rollout.gpu_memory_utilization"]
    assert "actor_rollout_ref.env.config_path" in told and "trainer.total_epochs" not in told


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("algorithm.adv_estimator=gae critic.optim.lr=1e-5", {"ppo": {"critic_learning_rate": 1e-5}}),
        ("algorithm.adv_estimator=rloo", {"grpo": {"advantage": "rloo"}}),
        (
            "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01",
            {"ppo": {"kl": 0.01, "kl_in": "reward"}},
        ),
        ("actor_rollout_ref.model.lora_rank=8", {"lora": {"enabled": True, "r": 8}}),
        ("algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio=0.3", {"grpo": {"clip_high": 0.3}}),
        ("actor_rollout_ref.env.name=search", {"reward": {"options": {"rule": "em", "extract": "tag"}}}),
        ("data.train_files=['a.parquet','b.parquet']", {"data": {"tasks": "a.parquet"}}),
        ("data.val_files='[a.parquet]'", {"data": {"heldout": "a.parquet"}}),
    ],
)
def test_shapes_of_overrides(tmp_path: Path, overrides: str, expected: dict[str, Any]) -> None:
    config, _ = translated(tmp_path / "main.sh", f"{COMMAND} {overrides}\n")
    for section, keys in expected.items():
        assert keys.items() <= config[section].items()


def test_environments_with_images_have_no_counterpart(tmp_path: Path) -> None:
    config, notes = translated(tmp_path / "main.sh", f"{COMMAND} actor_rollout_ref.env.name=vision\n")
    assert "environment" not in config
    [note] = [note for note in notes if note.startswith("actor_rollout_ref.env.name=vision")]
    assert "no counterpart: its tools return images" in note


def test_what_switches_something_off_has_its_comment(tmp_path: Path) -> None:
    off = {
        "actor_rollout_ref.rollout.mode=sync": "optimization.async_rollout",
        "trainer.save_freq=-1": "it is off",
        "trainer.test_freq=0": "no held-out tasks",
        "data.max_prompt_length=null": "it is off",
        "actor_rollout_ref.actor.use_kl_loss=False": "it is off",
        "actor_rollout_ref.actor.kl_loss_coef=0.01": "use_kl_loss is off",
        "actor_rollout_ref.actor.kl_loss_type=kl": "use_kl_loss is off",
        "actor_rollout_ref.model.lora_rank=0": "it is off",
        "actor_rollout_ref.env.use_process_reward=True": "get_step_reward",
        "reward_rollout.if_use_reward_rollout=False": "it is off",
        "trainer.logger=console": "steps are always printed",
    }
    config, notes = translated(tmp_path / "main.sh", f"{COMMAND} trainer.nnodes=1 {' '.join(off)}\n")
    assert config == {"training": {"algorithm": "ppo"}, "compute": {"num_gpus": 1}}
    for override, why in off.items():
        [note] = [note for note in notes if note.startswith(override.split("=")[0])]
        assert why in note
    assert len(notes) == len(off)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo hello", "main.sh: no command `python3 -m verl.trainer.main_ppo key=value ...`"),
        ("python3 -m verl.trainer.main_evaluate a.b=1", "line 1 starts verl, but no training"),
        (f"{COMMAND} a.b=1\n{COMMAND} a.b=2", r"starts 2 trainings \(lines 1, 2\)"),
        (f"{COMMAND}", "no overrides"),
        (f"{COMMAND} \\ \n  data.train_files=x", "main.sh:2: data.train_files=x belongs to no command"),
        (f"{COMMAND} a.b='open", "main.sh:1: .*: No closing quotation"),
        ("A=1234\n" + "A=$A$A\n" * 15, "main.sh:15: .*expand to more than 100000 characters"),
        ("A=${B:-" * 3000, "main.sh has 21,000 characters.* 16,000"),
        (f"{COMMAND} data.train_batch_size=many", "main.sh: training.batch_size"),
        (f"{COMMAND} trainer.save_freq=often trainer.nnodes=$N", "trainer.save_freq is 'often'"),
    ],
)
def test_a_broken_script_is_refused_in_words(tfactory: Run, text: str, error: str) -> None:
    Path("main.sh").write_text(text)
    status, out, err = tfactory("import", "rl-factory", "main.sh", "-o", "made.yaml")
    assert status == 2 and not out and not Path("made.yaml").exists()
    assert re.search(error, " ".join(err.split())), err


def test_no_override_is_dropped_without_a_word_and_no_secret_is_written(tmp_path: Path) -> None:
    overrides = (
        "actor_rollout_ref.actor.kl_loss_coef=0.5 actor_rollout_ref.actor.kl_loss_type=kl "
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 trainer.val_before_train=False "
        "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=0123456789abcdef0123"
    )
    config, notes = translated(tmp_path / "main.sh", f"{COMMAND} {overrides}\n")
    told = {note.split("=")[0].split(".")[-1]: note for note in notes}
    assert "kl" not in config.get("ppo", {}) and "use_kl_loss is off" in told["kl_loss_coef"]
    assert (
        "use_kl_loss is off" in told["kl_loss_type"]
        and "by hand: training.warmup" in told["lr_warmup_steps_ratio"]
    )
    assert "no counterpart" in told["val_before_train"] and "=***: " in told["WANDB_API_KEY"]


def test_what_their_own_config_has_is_written_out(tmp_path: Path) -> None:
    theirs = f"{COMMAND} --config-name=rl_factory_ppo_trainer actor_rollout_ref.rollout.n=4"
    config, _ = translated(tmp_path / "main.sh", f"{theirs}\n")
    assert (config["environment"]["max_turns"], config["sampling"]["temperature"]) == (2, 0.7)
    config, _ = translated(tmp_path / "main.sh", f"{theirs} actor_rollout_ref.rollout.max_turns=3\n")
    assert (config["environment"]["max_turns"], config["sampling"]["temperature"]) == (3, 0.7)


def test_nothing_in_a_script_is_run(tmp_path: Path) -> None:
    text = f"touch {tmp_path}/ran\nX=$(touch {tmp_path}/ran)\n{COMMAND} a.b=`touch {tmp_path}/ran` c.d=1\n"
    _, notes = translated(tmp_path / "main.sh", text)
    assert not (tmp_path / "ran").exists() and any("a.b: by hand" in note for note in notes)


def test_tool_files_name_servers_and_tools_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "mcp_tools.pydata"
    server = f"{{'mcpServers': {{'one': {{'command': {sys.executable!r}, 'args': ['x.py']}}}}}}"
    path.write_text(f"['code_interpreter', {server}]")
    text = f"{COMMAND} actor_rollout_ref.env.config_path={path}\n"
    config, _ = translated(tmp_path / "main.sh", text)
    assert [entry["name"] for entry in config["tools"]] == ["one", "code_interpreter"]
    made = make_tools(load_config(tmp_path / "made.yaml"))
    assert [type(each).__name__ for each in made] == ["PythonTool", "SelectedTools"]


def test_the_example_is_imported_and_trains(tfactory: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLE, "task")
    shutil.copy(EXAMPLE.parent / "search_server.py", ".")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    assert (
        tfactory("import", "rl-factory", "task/main_grpo.sh", "-o", "task/a.yaml", "MODEL_PATH=builtin:tiny")[
            0
        ]
        == 0
    )
    assert tfactory("import", "rl-factory", "task/main_grpo.sh", "-o", "task/a.yaml")[0] == 2  # it is there
    status, out, _ = tfactory("import", "rl-factory", "task/main_grpo.sh")
    assert status == 0 and yaml.load(out, ConfigLoader)["model"]["name"] == "Qwen/Qwen3-4B"
    small = ["training.max_steps=1", "training.batch_size=2", "sampling.max_tokens=6", "data.heldout_count=2"]
    status, out, err = tfactory("train", "task/a.yaml", *small, "logging.trackers=[]", "--name", "a")
    assert status == 0, err
    found = [json.loads(line) for line in Path("runs/a/trajectories.jsonl").read_text().splitlines()]
    assert len(found) == 8 and all(each["reward"]["parts"] == {"rules": 0.0} for each in found)
    assert found[0]["tools"][0]["function"]["name"] == "web_search"
