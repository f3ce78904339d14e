"""`tfactory train`, `eval` and `runs` as users meet them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.kits.cli import ROOT, Run
from tests.kits.forks import FORKED, Command
from tests.kits.run import assert_same_run
from TrainingFactory.cli.display import Display, format_duration, sparkline
from TrainingFactory.config import load_config
from TrainingFactory.config.schema import ALGORITHMS
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.trainers.notices import list_notices, list_unused_options
from TrainingFactory.training.preflight import check_config

SMALL = """
environment: mine.py
training: {{max_steps: {steps}, batch_size: 2, group_size: 2, learning_rate: 1e-3}}
sampling: {{max_tokens: 6, deterministic: {exact}}}
data: {{count: 4, heldout_count: 4}}
logging: {{checkpoint_every: 2}}
"""
ENVIRONMENT = """
import asyncio
from TrainingFactory.envs import CalculatorEnvironment

class Mine(CalculatorEnvironment):
    async def reset(self):
        await asyncio.sleep({delay})
        return await super().reset()

    def reward(self, episode):
        return float(sum(episode.trajectory.turns[0].completion.token_ids) % 3)
"""


@pytest.fixture(autouse=True)
def files(tfactory: Run) -> None:
    """A small config and its environment, in the folder of the test."""
    Path("small.yaml").write_text(SMALL.format(steps=3, exact="false"))
    Path("mine.py").write_text(ENVIRONMENT.format(delay=0))


def test_train_show_compare_and_evaluate(tfactory: Run) -> None:
    status, _, err = tfactory("train", "small.yaml", "--name", "a", "training.eval_every=2")
    assert status == 0, err
    for text in ("run a in runs/a: 3 steps", "step 3/3", "reward", "tokens/s", "held-out", "finished; the"):
        assert text in err
    assert tfactory("train", "small.yaml", "--name", "b", "lora.enabled=true")[0] == 0
    out = tfactory("runs", "list")[1]
    assert "a" in out and "finished" in out and "3/3" in out
    out = tfactory("runs", "show", "a")[1]
    for text in ("grpo in mine.py", "seconds/update", "step-000003", "reward", "torch"):
        assert text in out
    out = tfactory("runs", "compare", "a", "b")[1]
    assert "lora.enabled" in out and "False" in out and "training.batch_size" not in out
    for model in ("a", "runs/a/checkpoints/step-000002", "runs/b"):
        status, out, err = tfactory("eval", model, "--tasks", "5", "--json")
        assert status == 0, err
        figures = json.loads(out)
        assert figures["episodes"] == 5 and figures["environment"] == "mine.py"
        assert figures["success_low"] <= figures["success"] <= figures["success_high"]
    out = tfactory("eval", "builtin:tiny", "--env", "calculator", "--tasks", "3", "--max-tokens", "4")[1]
    assert "success" in out and "95 % interval" in out and "truncated" in out
    assert "finished" in tfactory("runs", "resume", "a")[2]


def test_a_checkpoint_of_another_model(tfactory: Run) -> None:
    assert tfactory("train", "small.yaml", "--name", "a", "max_steps=2")[0] == 0
    wrong = "max_steps=4 lora.enabled=true max_tokens=4"
    assert tfactory("train", "small.yaml", "--name", "b", *wrong.split())[0] == 2
    assert tfactory("train", "small.yaml", "--name", "b", "max_steps=2", "lora.enabled=true")[0] == 0
    status = json.loads(Path("runs/b/status.json").read_text()) | {"status": "failed"}
    Path("runs/b/status.json").write_text(json.dumps(status))
    os.rename("runs/b/checkpoints", "runs/b/mine")
    os.rename("runs/a/checkpoints", "runs/b/checkpoints")
    status, _, err = tfactory("runs", "resume", "b")
    assert status == 2 and "is not a checkpoint of this model" in err and "Traceback" not in err
    assert len(Path("runs/b/metrics.jsonl").read_text().splitlines()) == 2  # nothing was cut


@FORKED
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(tfactory: Run, tmp_path: Path, number: int) -> None:
    Path("slow.yaml").write_text(SMALL.format(steps=8, exact="true").replace("every: 2", "every: 30"))
    Path("mine.py").write_text(ENVIRONMENT.format(delay=0.05))
    run = Command(tmp_path, "train", "slow.yaml", "--name", "a")
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    while run.running and (not metrics.exists() or metrics.read_text().count("\n") < 3):
        time.sleep(0.01)
    run.signal(number)
    status, _, err = run.end(120)
    assert status == 130, err
    assert "tfactory runs resume a" in err and "Traceback" not in err
    folder = RunFolder(tmp_path / "runs" / "a")
    stopped = folder.status.step
    assert folder.state == "interrupted" and stopped < 8
    assert folder.checkpoints()[-1].name == f"step-{stopped:06d}"
    if number == signal.SIGTERM:
        return
    Path("mine.py").write_text(ENVIRONMENT.format(delay=0))
    status, _, err = tfactory("runs", "resume", "a")
    assert status == 0 and f"resuming after step {stopped} of 8" in err
    assert tfactory("train", "slow.yaml", "--name", "whole")[0] == 0
    assert_same_run(tmp_path / "runs" / "whole", tmp_path / "runs" / "a")


def test_the_panel_of_a_terminal() -> None:
    console = Console(force_terminal=True, width=100, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with Display(console=console) as panel:
        panel.phase("generate")
        panel.say("a note [bold]as it is[/bold]")
        metrics = {"reward": 0.5, "tool_success": 0.9, "tokens_per_second": 1234.0, "seconds/step": 0.25}
        metrics |= {"reward_std": 0.25, "length": 31.0, "kl": 0.0125, "grad_norm": 1.5, "learning_rate": 1e-5}
        panel.step(1, 4, metrics)
        panel.step(2, 4, metrics)
    text = console.export_text()
    for part in (
        "[bold]as it is",
        "reward 0.500",
        "tools 90%",
        "1234 tokens/s",
        "0.2 s",
        "2/4",
        "std 0.250  length 31  KL 0.0125  grad norm 1.5  learning rate 1e-05",
        "▁▁",
        "0:00:0",
    ):
        assert part in text
    assert sparkline([0, 1, 2]) == "▁▅█" and sparkline([1, 1]) == "▁▁"
    assert [format_duration(s) for s in (5, 65, 3700)] == ["0:00:05", "0:01:05", "1:01:40"]


def test_the_panel_plots_the_whole_run() -> None:
    console = Console(force_terminal=True, width=100, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with Display(console=console) as panel:
        panel.phase("generate")
        panel.plot_earlier_steps(
            [{"step": 0, "eval/loss": 1.0}, *({"step": n, "loss": 9.0} for n in range(1, 150))]
        )
        for step in range(101, 201):  # the steps after 100 were cut back
            panel.step(step, 200, {"loss": 1.0})
    assert "█" * 20 + "▁" * 20 in console.export_text()
    assert sparkline([float(n) for n in range(400)])[::39] == "▁█"
    assert (
        len(sparkline([0.0] * 39)) == 39 and len(sparkline([0.0] * 41)) == len(sparkline([0.0] * 1000)) == 40
    )


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_load(path: Path) -> None:
    config = load_config(path)
    family, _, algorithm = path.stem.removesuffix("_lora").removesuffix("_ray").partition("_")
    algorithm = {"text2sql": "grpo", "folding": "grpo", "screen": "grpo"}.get(
        algorithm, algorithm
    )  # called after what they show
    has_task = family in ("smollm2", "smolvlm", "qwen25", "gemma3")  # their task comes before it
    algorithm = algorithm.rpartition("_")[2] if has_task else algorithm
    assert config.training.algorithm == algorithm
    if path.name != "smolvlm_screen_sft.yaml":  # its model is written by `tfactory data screen`
        assert family in config.model.name.lower().replace(".", "")
    assert list_unused_options(config) == []
    if path.name != "qwen3_grpo.yaml":  # that one is the form that other texts print
        assert list_notices(config) == []
        check_config(config, config.data.dataset is not None)


def test_there_is_a_config_for_every_algorithm() -> None:
    names = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert {f"{family}_{name}" for family in ("tiny", "qwen3") for name in ALGORITHMS} <= names


def test_a_reward_model_is_not_sent_to_be_evaluated(tfactory: Run) -> None:
    said = {"prompt": "Where?", "chosen": "In Oslo.", "rejected": "No idea."}
    Path("pairs.jsonl").write_text("".join(json.dumps(said | {"id": n}) + "\n" for n in range(2)))
    rows = "algorithm=reward_model data.dataset=pairs.jsonl environment= data.count= max_steps=1"
    rows += " sampling.deterministic=true"
    status, _, err = tfactory("train", "small.yaml", "--name", "rm", *rows.split())
    told = " ".join(err.split())
    assert status == 0, err
    assert "reward.type=learned reward.model=runs/rm" in told and "tfactory eval" not in told
    assert "note: training.group_size: reward_model samples no groups" in told
    assert "note: sampling.max_tokens, sampling.deterministic: reward_model samples only" in told
