"""`tfactory serve --reward`: a reward over HTTP, in the format of Gemini's reward scorer."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from TrainingFactory.apps.scoring.reward_service import RewardService
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.config import TrainingConfig

EXACT = {"type": "rule_based", "options": {"rule": "exact"}}


def request(text: str, **example: Any) -> bytes:
    contents = [{"role": "user", "parts": [{"text": "What is the capital of France?"}]}]
    body = {
        "example": {"contents": contents, "references": {"answer": "Paris"}} | example,
        "response": {"parts": [{"text": "thinking", "thought": True}, {"text": text}]},
        "metadata": {"step": 1, "tuning_job_id": 123},
    }
    return json.dumps(body).encode()


def answers(config: TrainingConfig, *bodies: bytes) -> list[Any]:
    async def run() -> list[Any]:
        service = RewardService(config)
        async with AsyncExitStack() as stack:
            await service.open(stack)
            return await asyncio.gather(*map(service.answer, bodies), return_exceptions=True)

    return asyncio.run(run())


def test_a_rule_scores_responses():
    right, wrong = answers(TrainingConfig(reward=EXACT), request("Paris"), request("London"))
    assert (right["reward"], wrong["reward"]) == (1.0, 0.0)


def test_the_only_reference_is_the_answer():
    [scored] = answers(TrainingConfig(reward=EXACT), request("Rome", references={"city": "Rome"}))
    assert scored["reward"] == 1.0


def test_the_reward_of_an_environment():
    config = TrainingConfig(environment={"environment_id": "calculator"})
    right, wrong = answers(
        config, request("7", references={"answer": "7"}), request("8", references={"answer": "7"})
    )
    assert right["reward"] == 1.0 > wrong["reward"]


def test_mistakes_are_errors_and_never_a_reward_of_zero():
    empty, broken, unscored = answers(
        TrainingConfig(reward=EXACT), request("x", contents=[]), b"{", request("x", references={})
    )
    assert all(isinstance(error, ApiError) for error in (empty, broken, unscored))
    assert "example.contents" in str(empty) and unscored.status == 500
    with pytest.raises(ValueError, match=r"reward\.type"):
        RewardService(TrainingConfig())
