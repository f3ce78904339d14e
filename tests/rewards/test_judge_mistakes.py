"""Options of a judge that are wrong are told when it is made, with their name and value; nothing is opened for them."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards.judge.client import Budget
from TrainingFactory.rewards.model_judge import model_judge
from TrainingFactory.services.build.rewards import check_reward

JUDGE: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1", "model": "big"}
SCHEMA = {"type": "object", "properties": {"score": {"type": "number"}}}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"budget": 10}, "budget is 10; write budget: {max_requests: 10}"),
    ({"budget": True}, "budget is True; it must be a section such as budget: {max_requests: 1000}"),
    ({"budget": "10"}, "budget is '10'; it must be a section"),
    ({"budget": {"max_requests": "10"}}, "budget.max_requests is '10'; it must be a number, 0 or more"),
    ({"budget": {"max_request": 10}}, "no option 'max_request'; did you mean max_requests?"),
    ({"options": 3}, "options is 3; it must be a section such as options: {temperature: 0}"),
    ({"options": {"day": date(2026, 1, 1)}}, "which cannot be sent as JSON"),
    ({"options": {"temperature": float("nan")}}, "which cannot be sent as JSON"),
    ({"options": {"model": "small"}}, "options.model is set by the judge itself"),
    ({"verdict_options": [1]}, "verdict_options is [1]; it must be a section such as"),
    ({"verdict_options": {"low": "a"}}, "low is 'a'"),
    ({"verdict": "json", "verdict_options": {"schema": True}}, "schema is True; it must be a section"),
    (
        {"verdict": "json", "verdict_options": {"schema": SCHEMA, "key": ["score"]}},
        "key is ['score']; it must be a text",
    ),
    (
        {"verdict": "json", "verdict_options": {"schema": SCHEMA, "values": 3}},
        "values is 3; it must be a section",
    ),
    ({"verdict": 3}, "verdict is 3; it must be one of score"),
    ({"template": 3}, "template is 3; it must be a text"),
    ({"template": "{answer} {nosuch}"}, "has the unknown field {nosuch}; it knows {rubric}"),
    ({"template": "{anser}"}, "unknown field {anser}; did you mean {answer}? It knows {rubric}"),
    ({"rubric": ["x"]}, "rubric is ['x']; it must be a text"),
    ({"samples": 1.5}, "samples is 1.5; it must be a whole number, 1 or more"),
    ({"vote": 3}, "vote is 3; it must be one of mean"),
    ({"rate": 0}, "rate is 0; it must be a number over 0"),
    ({"rate": "fast"}, "rate is 'fast'; it must be a number over 0"),
    ({"concurrency": 0}, "concurrency is 0; it must be a whole number, 1 or more"),
    ({"concurrency": 2.5}, "concurrency is 2.5; it must be a whole number, 1 or more"),
    ({"retries": -1}, "retries is -1; it must be a whole number, 0 or more"),
    ({"pause": -1}, "pause is -1; it must be a number, 0 or more"),
    ({"timeout": 0}, "timeout is 0; it must be a number over 0"),
    ({"timeout": -1}, "timeout is -1; it must be a number over 0"),
    ({"timeout": "1m"}, "timeout is '1m'; it must be a number over 0"),
    ({"base_url": 3}, "base_url is 3; it must be one address"),
    ({"base_url": ""}, "a judge needs base_url"),
    ({"base_url": "localhost:8000"}, "base_url is an address such as https://host/v1, not 'localhost:8000'"),
    ({"model": 3}, "model is 3; it must be the name that the judge has at http://127.0.0.1:9/v1"),
    ({"model": " "}, "model is ' '; it must be the name"),
    ({"api": ["openai"]}, "api is ['openai']; it must be one of openai, anthropic"),
    ({"api_key_env": 3}, "api_key_env is the name of the environment variable"),
    ({"name": 3}, "name is 3; it must be a text"),
    ({"reference": "yes"}, "reference is 'yes'; it must be true or false"),
    ({"reasoning": 1}, "reasoning is 1; it must be true or false"),
    ({"judge_unfinished": "no"}, "judge_unfinished is 'no'; it must be true or false"),
    ({"fence_seed": "x"}, "fence_seed is 'x'; it must be a whole number, or null"),
    ({"verdict": "pairwise", "opponents": True}, "opponents is True; it must be a whole number, 1 or more"),
    ({"verdict": "ranking", "opponents": 2}, "opponents is for the verdict pairwise"),
]


@pytest.mark.parametrize(("wrong", "says"), MISTAKES)
def test_every_option_is_checked_at_the_start(tmp_path: Path, wrong: dict[str, Any], says: str):
    cache = tmp_path / "judged.sqlite"
    given: dict[str, Any] = JUDGE | {"cache": cache} | wrong
    with pytest.raises(ValueError, match=re.escape(says)):
        model_judge(**given)
    assert not cache.exists()


def test_a_config_is_told_its_key(tmp_path: Path):
    def checked(**wrong: Any) -> None:
        section = {"type": "model_judge", "options": JUDGE | wrong}
        check_reward(TrainingConfig.model_validate({"reward": section}))

    with pytest.raises(
        ValueError, match=r"reward\.options.*budget is 10; write budget: \{max_requests: 10\}"
    ):
        checked(budget=10)
    both = ["http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"]
    with pytest.raises(
        ValueError, match=r"reward\.options.*budget is 10; write budget: \{max_requests: 10\}"
    ):
        checked(budget=10, base_url=both)
    with pytest.raises(ValueError, match=r"reward\.options.*cache is '.*', but there is no folder .*nowhere"):
        checked(cache=str(tmp_path / "nowhere" / "x.sqlite"), base_url=both)


def test_a_cache_is_a_file_of_ours_in_a_folder_that_is_there(tmp_path: Path):
    own = tmp_path / "rewards.py"
    own.write_text("x = 1\n")
    for cache, says in (
        (own, "the cache cannot use .*rewards.py: it is no file of ours"),
        (tmp_path, "the cache cannot use .*: it is a folder"),
        (tmp_path / "new" / "x.sqlite", "cache is '.*x.sqlite', but there is no folder .*new; make it first"),
        (3, "cache is 3; it must be the path of a file such as judged.sqlite"),
        (True, "cache is True; it must be the path"),
        ("", "cache is ''; it must be the path"),
    ):
        with pytest.raises(ValueError, match=says):
            model_judge(**JUDGE, cache=cache)  # type: ignore[arg-type]
    assert [each.name for each in tmp_path.iterdir()] == ["rewards.py"]
    judge = model_judge(**JUDGE, cache=str(tmp_path / "judged.sqlite"), budget=Budget(max_requests=1))
    judge.close()
    assert (tmp_path / "judged.sqlite").exists()
