"""Options of a judge that are wrong are told when it is made, with their name and value; nothing is opened for them."""

from __future__ import annotations

import asyncio
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from TrainingFactory.assembly.rewards import check_reward
from TrainingFactory.common.endpoints.budget import Budget
from TrainingFactory.common.options import make_from
from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards.judge.model_judge import model_judge

JUDGE: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "model": "big"}
NUMBER, WHOLE = "must be a valid number", "must be a valid integer"
AT_LEAST, SECTION = "must be greater than or equal to", "must be a valid dictionary"


def of_schema(about: Any, **options: Any) -> dict[str, Any]:
    """A verdict whose schema says that about the score."""
    schema = {"type": "object", "properties": {"score": about}}
    return {"verdict": "json", "verdict_options": {"schema": schema} | options}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"budget": 10}, "budget must be a valid dictionary or an instance of Budget (got 10)"),
    ({"budget": {"max_requests": "10"}}, f'budget.max_requests {NUMBER} (got "10")'),
    ({"budget": {"max_requests": -1}}, f"budget.max_requests {AT_LEAST} 0 (got -1)"),
    ({"budget": {"max_request": 10}}, "is not an option of the judge's budget; did you mean max_req"),
    ({"budget": {"max_cost": 1}}, "set input_price and output_price"),
    ({"options": 3}, f"options {SECTION} (got 3)"),
    ({"options": {"day": date(2026, 1, 1)}}, "options.day input was not a valid JSON value (got 2026-01-01)"),
    ({"options": {"temperature": float("nan")}}, "options.temperature must be a finite number (got nan)"),
    ({"options": {"api_key": "secret"}}, "options.api_key would appear in logs"),
    ({"verdict_options": {"low": "a"}}, f'verdict_options.low {NUMBER} (got "a")'),
    ({"verdict_options": {"low": 5, "high": 1}}, "low must be below high"),
    ({"verdict": "ranking", "verdict_options": {"low": 5}}, "is not an option of the verdict ranking"),
    ({"verdict": "json", "verdict_options": {"schema": True}}, f"verdict_options.schema {SECTION} (got true)"),
    ({"verdict": "json", "verdict_options": {"schema": {"type": "nothing"}}}, "verdict_options.schema is not"),
    (of_schema({"type": "number"}, key=["score"]), "verdict_options.key must be a valid string (got a list)"),
    (of_schema({"type": "number"}, key="points"), "key is 'points'"),
    (of_schema({"type": "number"}, values=3), f"verdict_options.values {SECTION} (got 3)"),
    (of_schema({"type": "string"}, values={"good": 3}), "values.good is 3; it must be between 0 and 1"),
    (of_schema({"type": "number", "minimum": 3}), "low must be below high"),
    ({"verdict": "scor"}, "did you mean score?"),
    ({"template": 3}, "template must be a valid string (got 3)"),
    ({"template": "{answer} {nosuch}"}, "unknown field nosuch"),
    ({"template": "{anser}"}, "did you mean answer?"),
    ({"template": "{rubric} {task}"}, "{conversation} or {answer}"),
    ({"template": "{first}", "verdict": "pairwise"}, "{first} and {second}"),
    ({"template": "{task}", "verdict": "ranking"}, "{candidates}"),
    ({"template": "{answer.__class__}"}, "invalid field"),
    ({"template": '{answer} {"score": 1}'}, "{{ for a"),
    ({"template": "{rubric} {answer}", "rubric": " "}, "rubric must be a text"),
    ({"template": "{answer}", "rubric": "Be kind."}, "{rubric}"),
    ({"template": "{answer}", "reference": True}, "{reference}"),
    ({"samples": 0}, f"samples {AT_LEAST} 1 (got 0)"),
    ({"vote": "max"}, "vote must be one of mean, majority, median; did you mean mean?"),
    ({"rate": 0}, "rate must be greater than 0 (got 0)"),
    ({"concurrency": 0}, f"concurrency {AT_LEAST} 1 (got 0)"),
    ({"retries": -1}, f"retries {AT_LEAST} 0 (got -1)"),
    ({"pause": -1}, f"pause {AT_LEAST} 0 (got -1)"),
    ({"timeout": 0}, "timeout must be greater than 0 (got 0)"),
    ({"base_url": 3}, "base_url must be a valid string (got 3)"),
    ({"base_url": ""}, "base_url must be a URL such as https://host/v1, not ''"),
    ({"base_url": "localhost:8000"}, "base_url must be a URL such as https://host/v1, not 'localhost:8000'"),
    ({"base_url": "http://me:secret@host/v1"}, "password"),
    ({"base_url": "https://host/v1?key=secret"}, "a query (?)"),
    ({"base_url": "http://[secret/v1"}, "base_url is not a valid URL"),
    ({"model": 3}, "model must be a valid string or an instance of JudgeModel (got 3)"),
    ({"api": "antropic"}, "did you mean anthropic?"),
    ({"api_key_env": ""}, "the name of the environment variable"),
    ({"api_key_env": "sk-secret-1"}, "not the key itself"),
    ({"api_key_env": "AIzaSySecret0123456789abcdef"}, "not the key itself"),
    ({"reference": "yes"}, 'reference must be true or false (got "yes")'),
    ({"fence_seed": "x"}, f'fence_seed {WHOLE} (got "x")'),
    ({"verdict": "pairwise", "opponents": True}, f"opponents {WHOLE} (got true)"),
    ({"verdict": "ranking", "opponents": 2}, "opponents requires verdict pairwise"),
    ({"temprature": 1}, "temprature is not an option of a model judge"),
    ({"cache": 3}, "cache must be an instance of ToolCache or a valid string or"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "says"), MISTAKES)
def test_every_option_is_checked_at_the_start(tmp_path: Path, wrong: dict[str, Any], says: str):
    cache = tmp_path / "judged.sqlite"
    given: dict[str, Any] = JUDGE | {"cache": cache} | wrong
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        make_from(model_judge, given, "a model judge")
    assert not cache.exists() and "secret" not in str(raised.value).lower()


def test_a_config_is_told_its_key(monkeypatch: pytest.MonkeyPatch):
    both = ["http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"]
    options: list[tuple[dict[str, Any], str]] = [
        ({"budget": 10}, r"reward\.options.*budget.*must be a valid dictionary"),
        ({"budget": 10, "base_url": both}, r"reward\.options.*budget.*must be a valid dictionary"),
        ({"api_key_env": "NO_KEY"}, r"reward\.options.*NO_KEY.* is not set.*api_key_env: null"),
    ]  # fmt: skip
    for wrong, says in options:
        section = {"type": "model_judge", "options": JUDGE | wrong}
        with pytest.raises(ValueError, match=says):
            check_reward(TrainingConfig.model_validate({"reward": section}))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"OPENAI_API_KEY .*api\.openai\.com is not set"):
        model_judge(model="big", base_url="https://api.openai.com/v1")


def test_two_models_are_not_taken_for_one():
    section = {"type": "model_judge", "model": "big", "options": JUDGE | {"model": "small"}}
    with pytest.raises(ValueError, match=r"reward\.model: is 'big' and reward\.options\.model is 'small'"):
        check_reward(TrainingConfig.model_validate({"reward": section}))
    check_reward(TrainingConfig.model_validate({"reward": section | {"model": "small"}}))
    check_reward(TrainingConfig.model_validate({"reward": section | {"model": None}}))


def test_a_cache_is_a_file_of_ours(tmp_path: Path):
    own = tmp_path / "rewards.py"
    own.write_text("x = 1\n")
    for cache, says in (
        (own, "the cache cannot use .*rewards.py"),
        (tmp_path, "the cache cannot use "),
    ):
        with pytest.raises(ValueError, match=says):
            model_judge(**JUDGE, cache=cache)
    assert [each.name for each in tmp_path.iterdir()] == ["rewards.py"]
    judge = model_judge(**JUDGE, cache=str(tmp_path / "judged.sqlite"), budget=Budget(max_requests=1))
    asyncio.run(judge.close())
    assert (tmp_path / "judged.sqlite").exists()
