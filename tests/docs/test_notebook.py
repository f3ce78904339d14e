"""The Python programs of the start page in a real notebook kernel, where an event loop is running already."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_readme import START
from tests.kits.notebooks import PATIENCE, Kernel
from TrainingFactory.data.trajectories import load_trajectories

pytest.importorskip("ipykernel", reason="needs a notebook kernel: pip install ipykernel")
pytestmark = pytest.mark.xdist_group("notebook")


def test_an_event_loop_is_running(notebook: Kernel) -> None:
    assert notebook.run("import asyncio; asyncio.get_running_loop(); print('running')") == "running\n"


def test_the_training_program_runs(notebook: Kernel) -> None:
    code = START.block("GRPOTrainer(\n")
    assert len(code.splitlines()) <= 30
    folder, reward = notebook.run(code).split()
    run = notebook.folder / folder
    assert float(reward) >= 0 and (run / "checkpoints" / "step-000002").is_dir()
    saved = list(load_trajectories(run / "trajectories.jsonl"))
    assert len(saved) == 2 * 3 * 8 and [spec.name for spec in saved[0].tools] == ["temperature"]


def test_the_program_of_rollouts_runs(notebook: Kernel) -> None:
    assert notebook.run(START.block("Rollouts(config)")).split()[-1] == "16"


def test_interrupting_the_kernel_stops_with_a_checkpoint(notebook: Kernel, tmp_path: Path) -> None:
    """As the stop button does: the run is told, ends its step and is saved."""
    cell = notebook.start(
        "from TrainingFactory.services import GRPOTrainer\n"
        "class Told:\n"
        "    def phase(self, name): ...\n"
        "    def episode(self, trajectory): ...\n"
        "    def say(self, text): ...\n"
        "    def step(self, step, total, metrics): print('step', step, flush=True)\n"
        "trainer = GRPOTrainer(model='builtin:tiny', environment='calculator', max_steps=500, batch_size=2,\n"
        "    group_size=2, watcher=Told(), name='stopped', sampling={'max_tokens': 4},\n"
        f"    logging={{'output_dir': {str(tmp_path)!r}}})\n"
        "report = trainer.train()\n"
        "print(report.state, report.checkpoint.name == f'step-{report.steps:06d}')\n"
    )
    while True:  # until it has made a step
        message = notebook.client.get_iopub_msg(timeout=PATIENCE)
        if message["msg_type"] == "stream" and "step" in message["content"]["text"]:
            break
        assert message["msg_type"] != "error", message["content"]
    notebook.manager.interrupt_kernel()
    [printed] = [output["text"] for output in notebook.outputs(cell) if output.get("name") == "stdout"]
    assert "interrupted True" in printed
    assert notebook.run("print(1)") == "1\n"  # the kernel lives on
