"""The Python programs of the start page in a real notebook kernel, where an event loop is running already."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_readme import START
from tests.kits.docs import ROOT
from TrainingFactory.data.trajectories import load_trajectories

manager = pytest.importorskip(
    "jupyter_client.manager", reason="needs a notebook kernel: pip install ipykernel"
)
pytest.importorskip("ipykernel", reason="needs a notebook kernel: pip install ipykernel")
PATIENCE = 300  # seconds


class Notebook:
    """Cells run one after the other in one kernel."""

    def __init__(self, kernel: Any, folder: Path) -> None:
        self.kernel, self.client, self.folder = kernel, kernel.client(), folder
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def start(self, code: str) -> str:
        return self.client.execute(code)

    def finish(self, cell: str) -> str:
        """What the cell printed; fails where it raised."""
        printed = ""
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
            elif message["msg_type"] == "error":
                pytest.fail("\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed

    def run(self, code: str) -> str:
        return self.finish(self.start(code))


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("notebook")
    kernel = manager.KernelManager(kernel_name="python3")
    kernel.kernel_spec.argv[0] = sys.executable
    kernel.start_kernel(cwd=str(folder), env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    made = Notebook(kernel, folder)
    assert made.run("import asyncio; asyncio.get_running_loop(); print('running')") == "running\n"
    yield made
    made.client.stop_channels()
    kernel.shutdown_kernel(now=True)


def test_the_training_program_runs(notebook: Notebook) -> None:
    code = START.block("GRPOTrainer(\n")
    assert len(code.splitlines()) <= 30
    folder, reward = notebook.run(code).split()
    run = notebook.folder / folder
    assert float(reward) >= 0 and (run / "checkpoints" / "step-000002").is_dir()
    saved = list(load_trajectories(run / "trajectories.jsonl"))
    assert len(saved) == 2 * 3 * 8 and [spec.name for spec in saved[0].tools] == ["temperature"]


def test_the_program_of_rollouts_runs(notebook: Notebook) -> None:
    assert notebook.run(START.block("Rollouts(config)")).split()[-1] == "16"


def test_interrupting_the_kernel_stops_with_a_checkpoint(notebook: Notebook, tmp_path: Path) -> None:
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
    notebook.kernel.interrupt_kernel()
    assert "interrupted True" in notebook.finish(cell)
    assert notebook.run("print(1)") == "1\n"  # the kernel lives on
