from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import FakeChat
from tests.kits.run import Quiet
from TrainingFactory.assembly.rewards import check_reward
from TrainingFactory.config import load_config
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.envs.builtin.text2sql import (
    Text2SqlEnvironment,
    generate_explored_tasks,
    select_hidden_variants,
)
from TrainingFactory.envs.builtin.text2sql_data import ALL_DOMAINS, DOMAINS, QUESTIONS, RECIPE_SPLITS
from TrainingFactory.envs.builtin.text2sql_layouts import make_creation_script
from TrainingFactory.rewards.rules.tool_verified import make_verifier
from TrainingFactory.rollout.scripted import play
from TrainingFactory.trainers.notices import list_notices
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Message, Task, ToolCall, Trajectory

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny_text2sql.yaml"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.glob("tf-text2sql-*"))  # every episode has taken its databases away


def some_tasks(count: int, split: str = "train", seed: int = 1) -> list[Task]:
    return list(Text2SqlEnvironment.tasks(split, seed, count))


def rows(task: Task, query: str, variant: int = 0) -> list[Any]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(make_creation_script(task, variant))
        return connection.execute(query).fetchall()


def played(task: Task, *texts: str | Message, reward: Any = None) -> Trajectory:
    script = [Message("assistant", text) if isinstance(text, str) else text for text in texts]
    return asyncio.run(play(Text2SqlEnvironment(task), FakeChat(), script, reward=reward))


def ask(query: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall("sql", {"query": query})])


def worth(task: Task, *texts: str | Message) -> tuple[float, float]:
    """The reward, and whether it was right on the database that the model sees."""
    reward = played(task, *texts).reward
    assert reward is not None
    return reward.outcome, reward.parts["shown"]


def one_task(wanted: Callable[[Task], bool]) -> Task:
    return next(task for task in Text2SqlEnvironment.tasks("train", 3, 10_000) if wanted(task))


def test_right_queries_of_all_kinds_find_something():
    train = some_tasks(300)
    assert {task.metadata["kind"] for task in train} == set(QUESTIONS)
    assert {task.metadata["domain"] for task in train} == set(DOMAINS)
    assert max(Counter(str(task.prompt) for task in train).values()) < 40
    for task in train[:75]:
        found = rows(task, task.answer)
        assert found and found not in ([(0,)], [(None,)]), task


def test_no_hidden_database_has_the_result_that_is_shown():
    for task in some_tasks(30):
        hidden = select_hidden_variants(task)
        assert len(set(hidden)) == 2 and 0 not in hidden
        for variant in hidden:
            found = rows(task, task.answer, variant)
            assert found not in ([], [(0,)], [(None,)]) and Counter(found) != Counter(rows(task, task.answer))
    constant = Task("mine", "?", "SELECT 1", some_tasks(1)[0].metadata)  # the same everywhere
    assert len(select_hidden_variants(constant)) == 2


def test_a_slip_in_the_query_shows_on_some_database():
    slips = Counter()
    for task in some_tasks(120):
        for slip, other in (("DISTINCT ", ""), (">=", ">"), ("> (", ">= (")):
            if slip in task.answer:
                query = task.answer.replace(slip, other)
                slips[slip] += 1
                assert any(
                    Counter(rows(task, query, variant)) != Counter(rows(task, task.answer, variant))
                    for variant in (0, *select_hidden_variants(task))
                ), query
    assert min(slips.values()) > 3 and len(slips) == 3


def test_a_copied_number_pays_nothing_and_a_zero_for_nothing_does_no_harm():
    numbers = [task for task in some_tasks(30) if task.metadata["kind"] in ("count", "sum", "aggregate")]
    assert len(numbers) > 5
    for task in numbers:
        [[value]] = rows(task, task.answer)
        assert worth(task, f"SELECT {value}") == (0.0, 1.0)
        what, _, rest = task.answer.removeprefix("SELECT ").partition(" FROM ")
        assert worth(task, f"SELECT COALESCE({what}, 0) FROM {rest}") == (1.0, 1.0)


def test_the_model_sees_rows_of_its_database_and_no_other():
    task = one_task(lambda task: task.metadata["kind"] == "count")
    table = DOMAINS[task.metadata["domain"]].people
    query = f"SELECT name FROM {table} ORDER BY id"
    trajectory = played(task, ask(query), ask("SELECT * FROM missing"), ask("PRAGMA database_list"), "no")
    shown = trajectory.turns[0].replies[0].content.splitlines()
    assert shown == ["name", *(name for (name,) in rows(task, query)), "(10 rows)"]
    assert "no such table" in trajectory.turns[1].replies[0].content
    assert not trajectory.turns[2].tool_results[0].ok  # not even where the file is
    assert table in str(trajectory.prompt[1].content) and trajectory.tools[0].name == "sql"


def test_other_queries_with_the_same_rows_are_right():
    task = one_task(lambda task: task.metadata["kind"] == "count")
    table, city = DOMAINS[task.metadata["domain"]].people, task.answer.split("'")[1]
    assert worth(task, f"```sql\nSELECT SUM(city = '{city}') FROM {table};\n```") == (1.0, 1.0)
    assert worth(task, f"SELECT COUNT(DISTINCT id) AS n FROM {table} WHERE city LIKE '{city}'") == (1.0, 1.0)
    assert worth(task, f"It is: SELECT COUNT(*) FROM {table} WHERE city = '{city}'") == (0.0, 0.0)
    listed = one_task(lambda task: task.metadata["kind"] == "list" and len(rows(task, task.answer)) > 1)
    assert worth(listed, f"{listed.answer} DESC") == (0.0, 0.0)


def test_writing_down_what_was_seen_pays_nothing():
    task = one_task(lambda task: task.metadata["kind"] == "never")
    seen = rows(task, task.answer)
    copied = " UNION ALL ".join(f"SELECT '{name}'" for (name,) in seen)
    assert worth(task, ask(task.answer), copied) == (0.0, 1.0)
    by_own_database = make_verifier("sql_execution")  # it sees what the model sees
    reward = played(task, copied, reward=by_own_database).reward
    assert reward is not None and reward.outcome == 1.0


ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r"


@pytest.mark.parametrize(
    "said",
    ["", "DROP TABLE customers", "ATTACH ':memory:' AS x", "SELECT 1; SELECT 2", ENDLESS, "SELECT x'00'"],
)
def test_hostile_answers_are_worth_nothing(said: str):
    assert worth(some_tasks(1)[0], said) == (0.0, 0.0)


def test_a_bomb_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("TrainingFactory.envs.builtin.text2sql.QUERY_SECONDS", 0.2)
    task = one_task(lambda task: task.metadata["domain"] == "shop")
    bomb = "SELECT COUNT(*) FROM " + ", ".join(f"orders o{number}" for number in range(8))
    assert worth(task, ask(bomb), bomb) == (0.0, 0.0)


def schema(task: Task) -> str:
    return make_creation_script(task, 0).partition("INSERT")[0]


def test_splits_of_the_recipe_share_no_database():
    splits = {split: list(generate_explored_tasks(split, 40)) for split in RECIPE_SPLITS}
    domains = {split: {task.metadata["domain"] for task in tasks} for split, tasks in splits.items()}
    assert domains == {split: set(names) for split, names in RECIPE_SPLITS.items()}
    assert sum(map(len, domains.values())) == len(ALL_DOMAINS) == len(set().union(*domains.values()))
    assert len({schema(task) for task in splits["tasks"]}) > 35
    assert not any("CREATE" in str(task.prompt) for task in splits["dev"])


def test_reference_in_a_layout_gives_the_rows_of_the_domain():
    tasks = list(generate_explored_tasks("tasks", 60))
    for task in tasks:
        domain, seed = task.metadata["domain"], task.metadata["database_seed"]
        query = "SELECT " + str(task.answer).partition(") SELECT ")[2]
        plain = Task("plain", "", query, {"domain": domain, "database_seed": seed})
        for variant in (0, 3):
            assert rows(task, str(task.answer), variant) == rows(plain, query, variant)
    schemas = [schema(task) for task in tasks]
    for form in ("_code TEXT", "date TEXT", "year INTEGER", "cities", "kinds"):
        assert 0 < sum(form in text for text in schemas) < len(schemas)
    for domain in ALL_DOMAINS.values():
        assert len({kind[:3] for kind in domain.kinds}) == len(domain.kinds)


def test_unseen_database_is_explored_by_queries():
    task = next(task for task in generate_explored_tasks("dev", 99) if task.metadata["kind"] == "group")
    look = ask("SELECT sql FROM sqlite_master")
    trajectory = played(task, look, ask(str(task.answer)), str(task.answer))
    assert "CREATE TABLE" in trajectory.turns[0].replies[0].content
    assert trajectory.reward is not None and trajectory.reward.outcome == 1.0
    assert worth(task, "SELECT city, COUNT(*) FROM people GROUP BY city") == (0.0, 0.0)
    expert = played(task, *Text2SqlEnvironment(task).expert())
    assert expert.reward is not None and expert.reward.outcome == 1.0 and len(expert.turns) >= 4
    assert all(result.ok for turn in expert.turns for result in turn.tool_results)


def test_the_config_that_trains_on_it(tmp_path: Path):
    """As it stands in the repository, but small."""
    keys = ["training.max_steps=2", "training.batch_size=2", "training.group_size=3", "training.eval_every=2"]
    keys += ["data.count=4", "data.heldout_count=2", "sampling.max_tokens=12"]
    config = load_config(CONFIG, [*keys, f"logging.output_dir={tmp_path}"])
    check_reward(config)
    assert config.environment.environment_id == "text2sql" and list_notices(config) == []
    report = Training(config, name="run", watcher=Quiet()).train()
    assert report.state == "finished" and report.steps == 2
    last = report.metrics
    assert last["episodes/unscored"] == last["episodes/failed"] == 0 and last["sampled_tokens"] > 0
    assert not last["reward/right"] and not last["reward/shown"] and not last["eval/reward"]  # it cannot yet
    kept = list(load_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    assert len(kept) == 12 and {each.task.id for each in kept} <= {task.id for task in some_tasks(4, seed=7)}
