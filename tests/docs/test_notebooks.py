"""The notebooks under notebooks/: they run in a kernel, and what they display fits a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kits.docs import ROOT
from tests.kits.notebooks import NOTEBOOKS, Kernel, code_cells, execute, notebook_kernel, read

pytest.importorskip("ipykernel", reason="needs a notebook kernel: pip install ipykernel")
pytest.importorskip("jupyter_client", reason="needs a notebook kernel: pip install ipykernel")
LIMIT = 200_000  # bytes of a notebook with its outputs
QUICK = {
    "demo": "lessons = Lessons(num_drills=16, num_short_rows=16, num_dialogues=16, num_demonstrations=8)\n"
    'overrides = ["training.max_steps=2", "data.heldout_count=4", "sampling.max_tokens=8"]',
    "own_tools_and_reward": "STEPS = 2",
    "episodes_and_credit": "STEPS = 1",
}
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


def texts(outputs: list[dict[str, Any]]) -> str:
    """Return all text of a cell's outputs: streams and HTML."""
    parts = []
    for output in outputs:
        parts += [output["text"]] if "text" in output else [str(output["data"].get("text/html", ""))]
    return "".join("".join(part) for part in parts)


def check_outputs(name: str, cells: list[list[dict[str, Any]]]) -> None:
    streams = [output for outputs in cells for output in outputs if output["output_type"] == "stream"]
    assert not streams, f"{name} prints {streams[0]['text']!r}: a warning, or text instead of HTML"
    html = "".join(map(texts, cells))
    assert "<svg" in html and "<table" in html
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", html)
    assert "step" in labels and {"reward", "loss"} & set(labels)
    fixed = [width for width in re.findall(r"(?<!-)\bwidth[:=]\"?(\w+)", html) if width != "100"]
    assert not fixed, f"{name} has an element of fixed width: {fixed}"


def test_every_notebook_has_a_quick_form() -> None:
    assert QUICK.keys() == {path.stem for path in PATHS}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_runs_in_full(path: Path, tmp_path: Path) -> None:
    with notebook_kernel(tmp_path) as started:
        check_outputs(path.stem, execute(path, started))


@pytest.mark.training
@pytest.mark.xdist_group("notebook")
def test_they_run(notebook: Kernel) -> None:
    for name, parameters in QUICK.items():
        check_outputs(name, execute(NOTEBOOKS / f"{name}.ipynb", notebook, parameters))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_small_and_name_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= LIMIT
    assert not re.findall(r"(?<![\w.~<])/(?:home|root|tmp|work|Users)/", text)
    cells = code_cells(read(path))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), (
        f"Run {path.relative_to(ROOT)} again: python -m tests.kits.notebooks {path.stem}"
    )
    check_outputs(path.stem, [cell["outputs"] for cell in cells])


def test_links_between_notebooks_lead_somewhere() -> None:
    for path in PATHS:
        for target in re.findall(r"\]\(([\w.]+)\)", json.dumps(read(path)["cells"])):
            assert (NOTEBOOKS / target).is_file(), (path.name, target)
