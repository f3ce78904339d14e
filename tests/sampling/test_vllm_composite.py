"""Text parts of composite models in the real vLLM, on a CPU."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.composite import save_composite
from tests.kits.scale import IN_ONE, SCALE
from TrainingFactory.cluster.local import LocalEngineLauncher
from TrainingFactory.models import load_model
from TrainingFactory.types import EngineSpec

pytestmark = [SCALE, pytest.mark.slow]
PROMPT = [random.Random(0).randrange(600) for _ in range(24)]  # longer than the windows


# Without Qwen3.5, for which vLLM needs torchvision, and on a CPU bfloat16.
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "mistral3", "llama4"])
def test_the_text_part_scores_like_the_composite_model(scale: None, tmp_path: Path, family: str) -> None:
    whole = save_composite(tmp_path / "whole", family)
    loaded = load_model(str(tmp_path / "whole"), device="cpu", dtype="float32")
    loaded.model.save_pretrained(tmp_path / "text")
    loaded.tokenizer.save_pretrained(tmp_path / "text")
    options = {"kv_cache_memory_bytes": 2**28, "distributed_executor_backend": IN_ONE}
    spec = EngineSpec("vllm", str(tmp_path / "text"), 128, 2, dtype="float32", options=options, pushed=False)

    async def score() -> Any:
        places = LocalEngineLauncher(spec, {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"})
        place = await places.launch_engine(0)
        logprobs = await place.call("score", PROMPT)
        await places.close()
        return logprobs

    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = whole(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(asyncio.run(score())), expected, rtol=1e-4, atol=1e-4)
