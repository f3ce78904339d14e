"""The Triton kernels of a step, run by Triton's interpreter on a CPU in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import torch
from TrainingFactory.sampling import kernels
from TrainingFactory.sampling.slots import Layer, StepContext, Tiles

torch.manual_seed(0)
rows, heads, shared, size, capacity = 4, 4, 2, 16, 64
places = torch.tensor([3, 17, 40, 63])
keys, values = torch.randn(2, rows, capacity, shared, size)
q = torch.randn(rows, heads, size)
step = StepContext(tokens=rows, positions=places, rows=Tiles(1, rows))
got = kernels.attend(q, Layer(keys, values), step, size**-0.5)
for row, place in enumerate(places.tolist()):
    k, v = (part[row, : place + 1].repeat_interleave(heads // shared, 1).transpose(0, 1) for part in (keys, values))
    weights = ((k @ q[row, :, :, None])[..., 0] * size**-0.5).softmax(-1)
    expected = (weights[:, None] @ v)[:, 0]
    assert (got[row] - expected).abs().max() < 1e-5, (row, (got[row] - expected).abs().max())
print("ATTENDED")
"""


@pytest.mark.skipif(
    find_spec("triton") is None, reason="triton, which comes with torch for CUDA, is not installed"
)
def test_rows_attend_to_their_own_keys() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "ATTENDED", done.stderr[-2000:]
