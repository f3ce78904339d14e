"""The notebooks under notebooks/: run their cells in a kernel, store the outputs, and extract the code for pyright.

python -m tests.kits.notebooks              # run all in full and store their outputs: minutes
python -m tests.kits.notebooks extract DIR  # write the code of each as a Python file
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kits.docs import ROOT

NOTEBOOKS = ROOT / "notebooks"
PATIENCE = 600  # seconds without a message
PARAMETERS = "parameters"  # tag of the cell whose values a quick run replaces
LINE = re.compile(r"(?<=\n)(?=.)")


class CellFailed(Exception):
    """A cell raised; the text is its traceback."""


class Kernel:
    """Cells run one after the other in one process, as in a notebook."""

    def __init__(self, manager: Any, folder: Path) -> None:
        self.manager, self.client, self.folder = manager, manager.client(), folder
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def start(self, code: str) -> str:
        return self.client.execute(code)

    def outputs(self, cell: str) -> list[dict[str, Any]]:
        """Return the outputs of a started cell, in the form that a notebook stores."""
        stored: list[dict[str, Any]] = []
        displays: dict[str, dict[str, Any]] = {}
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "error":
                raise CellFailed("\n".join(content["traceback"]))
            if kind == "status" and content["execution_state"] == "idle":
                return stored
            if kind == "stream" and stored and stored[-1].get("name") == content["name"]:
                stored[-1]["text"] += content["text"]
            elif kind == "stream":
                stored.append({"output_type": "stream", "name": content["name"], "text": content["text"]})
            elif kind == "update_display_data":
                displays[content["transient"]["display_id"]]["data"] = content["data"]
            elif kind in ("display_data", "execute_result"):
                output = {"output_type": kind, "data": content["data"], "metadata": content["metadata"]}
                if kind == "execute_result":
                    output["execution_count"] = content["execution_count"]
                displays[content.get("transient", {}).get("display_id", "")] = output
                stored.append(output)

    def run(self, code: str) -> str:
        """Run a cell; return what it printed to stdout."""
        outputs = self.outputs(self.start(code))
        return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


@contextmanager
def kernel(folder: Path, **variables: str) -> Iterator[Kernel]:
    from jupyter_client.manager import KernelManager

    manager: Any = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    manager.start_kernel(cwd=str(folder), env=os.environ | settings)
    started = Kernel(manager, folder)
    try:
        yield started
    finally:
        started.client.stop_channels()
        manager.shutdown_kernel(now=True)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def is_parameters(cell: Mapping[str, Any]) -> bool:
    return PARAMETERS in cell["metadata"].get("tags", ())


@contextmanager
def notebook_kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel in `folder`/notebooks, beside the examples."""
    (folder / "notebooks").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    with kernel(folder / "notebooks") as started:
        yield started


def execute(path: Path, started: Kernel, parameters: str | None = None) -> list[list[dict[str, Any]]]:
    """Run a notebook; return the outputs of each code cell. `parameters` replaces the cell with that tag."""
    outputs = []
    for cell in code_cells(read(path)):
        replaced = parameters is not None and is_parameters(cell)
        code = parameters if replaced else "".join(cell["source"])
        outputs.append(started.outputs(started.start(str(code))))
    return outputs


def store(path: Path, outputs: list[list[dict[str, Any]]], folder: Path) -> None:
    """Write the outputs into the notebook, with paths relative to `folder`."""
    notebook = read(path)
    for number, (cell, stored) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
        cell["execution_count"] = number
        text = json.dumps(stored, ensure_ascii=False).replace(f"{folder}/notebooks/", "")
        cell["outputs"] = [_in_lines(output) for output in json.loads(text)]
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _in_lines(output: dict[str, Any]) -> dict[str, Any]:
    """Return the output with its texts as lists of lines, which differ line by line in a diff."""
    if "text" in output:
        return output | {"text": LINE.split(output["text"])}
    return output | {"data": {kind: LINE.split(text) for kind, text in output["data"].items()}}


def program(path: Path) -> str:
    """Return the code of a notebook as a Python file."""
    cells = ["".join(cell["source"]) for cell in code_cells(read(path))]
    # The last line of a cell is displayed, not unused.
    return "\n\n".join(["# pyright: strict, reportUnusedExpression=false", *cells]) + "\n"


def extract(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        (folder / f"{path.stem}.py").write_text(program(path), encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    if sys.argv[1:2] == ["extract"]:
        extract(Path(sys.argv[2]))
    else:
        wanted = sys.argv[1:]
        for notebook_path in sorted(NOTEBOOKS.glob("*.ipynb")):
            if wanted and notebook_path.stem not in wanted:
                continue
            with tempfile.TemporaryDirectory() as scratch, notebook_kernel(Path(scratch)) as fresh:
                store(notebook_path, execute(notebook_path, fresh), Path(scratch))
            print(f"ran {notebook_path.relative_to(ROOT)}", flush=True)
