"""A judge behind `tfactory serve`: the built-in model, untrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import finished, scored
from tests.kits.run import rows, small, train
from tests.kits.serve import live
from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards.judge.endpoints import JudgeFailure, OpenAIEndpoint
from TrainingFactory.rewards.model_judge import model_judge
from TrainingFactory.services.serving.server import make_server

pytestmark = pytest.mark.usefixtures("judge_key")


class Noting(OpenAIEndpoint):
    """Notes what the server says that it has counted."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(
            url, "judge", api_key_env=None, options={"temperature": 0.0, "max_tokens": 24} | options
        )
        self.usage: list[dict[str, int]] = []

    async def exchange(self, body: dict[str, Any]) -> bytes:
        data = await super().exchange(body)
        self.usage.append(json.loads(data)["usage"])
        return data


def judge(model: Any, **options: Any) -> Any:
    return model_judge(model=model, **{"template": "{answer}", "fence_seed": 1, "retries": 0} | options)


def test_a_served_model_that_cannot_judge(tmp_path: Path):
    """Untrained, so that it talks nonsense: in a run every episode is dropped, with what it has said."""
    config = TrainingConfig(sampling={"slots": 8})
    with live(make_server(config, "judge")) as client:
        url = f"{str(client.base_url).rstrip('/')}/v1"
        endpoint = Noting(url, temperature=1.0, stop=["e"], seed=0)
        talking = judge(endpoint)
        found = scored(talking, *(finished(f"answer {number}") for number in range(6)))
        assert {each.kind for each in found if isinstance(each, JudgeFailure)} <= {"unreadable", "cut"}
        assert len(found) == 6 and all(isinstance(each, JudgeFailure) for each in found)
        usage = talking.client.usage
        assert usage.requests == len(endpoint.usage) == 6 and not usage.estimated
        assert usage.input_tokens == sum(each["prompt_tokens"] for each in endpoint.usage) > 600
        assert usage.output_tokens == sum(each["completion_tokens"] for each in endpoint.usage) > 6
        options = {"base_url": url, "api_key_env": None, "judge_unfinished": True, "retries": 0}
        section = {
            "type": "model_judge",
            "model": "judge",
            "options": options | {"options": {"max_tokens": 4}},
        }
        with pytest.raises(
            ValueError, match=r"none of 4 .*mostly: .*the judge's answer (was cut off|is not)"
        ):
            train(small(tmp_path, reward=section), "run")
    assert [row["episodes/unscored"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [12, 12]
