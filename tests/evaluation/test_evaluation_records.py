"""What an evaluation leaves behind: its records, their figures, and the files they are in."""

from __future__ import annotations

import json
import shutil
from math import comb
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.judge import judging
from tests.kits.run import brief, go_on, train
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.evaluation import statistics
from TrainingFactory.evaluation.identity import digest_model, digest_weights, make_conditions
from TrainingFactory.evaluation.records import (
    EvaluationRecord,
    ModelIdentity,
    append_record,
    digest_task,
    digest_tasks,
    make_record,
    read_records,
)
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Completion, Message, Reward, Task, ToolResult, Trajectory, Turn

CONFIG = TrainingConfig(environment={"environment_id": "calculator"})


def played(task: str, *won: bool | None, results: tuple[bool, ...] = ()) -> list[Trajectory]:
    """Episodes of a task, one for each outcome; None is one that could not be scored."""
    turn = Turn([1], Completion([2, 3], [-1.0, -1.0], "stop"), Message("assistant", "x"))
    turn.tool_results = [ToolResult("", ok=ok) for ok in results]
    rewards = [None if each is None else Reward(float(each)) for each in won]
    return [
        Trajectory(Task(task, "?", "x"), f"0/{task}", member, turns=[turn], reward=reward)
        for member, reward in enumerate(rewards)
    ]


def record_of(*groups: list[Trajectory], name: str = "m", **more: Any) -> EvaluationRecord:
    tasks = [group[0].task for group in groups]
    return make_record(
        [each for group in groups for each in group],
        ModelIdentity(name=name, digest=f"builtin:{name}"),
        make_conditions(CONFIG, tasks, max(map(len, groups))),
        {"seconds": 1.5},
        by="eval",
        scored_by="a rule",
        **more,
    )


def test_a_record_sums_its_episodes_up() -> None:
    record = record_of(played("a", True, None, results=(True, False)), played("b", False, False))
    first = record.outcomes[0].episodes
    assert [(each.member, each.reward, each.success, each.tool_calls) for each in first] == [
        (0, 1.0, True, 2),
        (1, None, None, 2),
    ]
    assert (first[0].tool_successes, first[0].tokens, first[0].turns, first[0].status) == (1, 2, 1, "done")
    assert record.scored_episodes == {"a": [True], "b": [False, False]}
    found = record.metrics
    assert found["success"] == pytest.approx(1 / 3) and found["seconds"] == 1.5
    assert found["pass@1"] == 0.5 and found["tool_success"] == 0.5 and found["episodes/unscored"] == 1
    assert "pass@2" in found and found["pass^2"] == 0.0  # of b alone, which has two scored episodes
    assert EvaluationRecord.model_validate_json(record.model_dump_json()) == record


def test_pass_at_k_and_pass_all_are_those_of_all_choices_of_k_episodes() -> None:
    tasks = [[True, False, False, True, False], [False] * 5, [True] * 5]
    for k in range(1, 6):
        at, every = [], []
        for task in tasks:
            chosen = [[i for i in range(5) if mask >> i & 1] for mask in range(32)]
            chosen = [choice for choice in chosen if len(choice) == k]
            at.append(sum(any(task[i] for i in choice) for choice in chosen) / len(chosen))
            every.append(sum(all(task[i] for i in choice) for choice in chosen) / len(chosen))
        assert statistics.estimate_pass_at(k, tasks) == pytest.approx(sum(at) / 3)
        assert statistics.estimate_pass_all(k, tasks) == pytest.approx(sum(every) / 3)
    assert statistics.estimate_pass_at(6, tasks) is None
    assert statistics.choose_k_values(6) == [1, 2, 4, 6] and statistics.choose_k_values(1) == [1]


def test_the_interval_goes_by_tasks() -> None:
    alike = [[True] * 4] * 5 + [[False] * 4] * 5  # four episodes tell no more than one
    assert statistics.compute_effective_size(alike) == pytest.approx(10, rel=0.12)
    single = statistics.estimate_success([[True]] * 5 + [[False]] * 5)
    clustered = statistics.estimate_success(alike)
    assert (clustered.low, clustered.high) == pytest.approx((single.low, single.high), abs=0.02)
    mixed = [[True, False, True, False]] * 10  # no task differs from another: all forty count
    assert statistics.compute_effective_size(mixed) == 40
    assert statistics.estimate_success([[True] * 8] * 3).low == statistics.estimate_success([[True]] * 3).low
    # Wilson's interval of 5 in 10, as it stands in textbooks
    assert (single.low, single.high) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_the_bootstrap_agrees_with_the_exact_distribution_of_the_mean() -> None:
    values = [1.0] * 6 + [0.0] * 14  # the mean of 20 drawn with replacement is binomial
    found = statistics.bootstrap_mean([(1.0, values)])

    def quantile(level: float) -> float:
        below = 0.0
        for n in range(21):
            below += comb(20, n) * 0.3**n * 0.7 ** (20 - n)
            if below >= level:
                return n / 20
        raise AssertionError

    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == pytest.approx((quantile(0.025), quantile(0.975)))
    assert statistics.bootstrap_mean([(1.0, values)]) == found  # the same numbers every time
    both = statistics.bootstrap_mean([(3.0, [1.0] * 4), (1.0, [0.0] * 9)])
    assert (both.value, both.low, both.high) == pytest.approx((0.75, 0.75, 0.75))


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    # by hand: 2 (1 + 8) / 2^8; 2 / 2^5; no change; an even split; 2 (1 + 11 + 55) / 2^11
    [(7, 1, 18 / 256), (5, 0, 2 / 32), (0, 0, 1.0), (4, 4, 1.0), (2, 9, 134 / 2048)],
)
def test_exact_mcnemar(better: int, worse: int, p: float) -> None:
    assert statistics.compute_p_value(better, worse) == statistics.compute_p_value(worse, better) == p


def test_a_torn_line_is_no_harm(tmp_path: Path) -> None:
    path, said = tmp_path / "evaluations.jsonl", []
    first, second = record_of(played("a", True)), record_of(played("a", False))
    append_record(path, first)
    with path.open("ab") as file:
        file.write(b'{"version": 1, "id": "ev')  # killed in the middle
    assert read_records(path, said.append) == [first] and said == []
    append_record(path, second)
    assert read_records(path, said.append) == [first, second]
    assert len(said) == 1 and f"{path}, line 2" in said[0]


def test_lines_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path, said = tmp_path / "evaluations.jsonl", []
    record = record_of(played("a", True))
    newer = record.model_dump() | {"version": 9, "novelty": 1}
    lines = [json.dumps(newer), "[]", '{"version": 1}', "\udcff", json.dumps(record.model_dump())]
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape") + b"\n")
    assert read_records(path, said.append) == [record]
    assert len(said) == 4 and "line 1" in said[0] and "version 9" in said[0] and "Update" in said[0]
    assert all("not an evaluation record" in text for text in said[1:])


def test_digests_of_tasks_go_by_content_and_not_by_order() -> None:
    one, two = Task("a", "?", 1), Task("b", [Message("user", "?")], {"x": [1]}, {"column": 2})
    assert digest_tasks([one, two]) == digest_tasks([two, one]) != digest_tasks([one])
    assert len({digest_task(each) for each in (one, Task("a", "!", 1), Task("a", "?", 2), two)}) == 4


def test_conditions_tell_what_differs(tmp_path: Path) -> None:
    tasks = [Task("a", "?")]
    file = tmp_path / "mine.py"
    file.write_text("x = 1")
    there = make_conditions(TrainingConfig(environment={"environment_id": str(file)}), tasks, 1)
    assert there.environment == "mine.py"
    file.write_text("x = 2")
    again = make_conditions(TrainingConfig(environment={"environment_id": str(file)}), tasks, 1)
    assert [text.split()[0] for text in there.list_differences(again)] == ["rest"]
    warmer = TrainingConfig(
        environment={"environment_id": str(file)}, sampling={"temperature": 0.5, "slots": 2}
    )
    assert again.list_differences(make_conditions(warmer, tasks, 1)) == [
        "sampling.temperature is 1.0 and 0.5"
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"options": {"blind": True}},
        {"context": {"fold": "window", "limit": 100}},
        {"user": {"model": "openai:gpt@http://127.0.0.1:1/v1"}},
    ],
)
def test_conditions_include_the_options_of_the_environment(changed: dict[str, Any]) -> None:
    tasks = [Task("a", "?")]
    plain = make_conditions(TrainingConfig(environment={"environment_id": "screen"}), tasks, 1)
    other = make_conditions(TrainingConfig(environment={"environment_id": "screen"} | changed), tasks, 1)
    assert [text.split()[0] for text in plain.list_differences(other)] == ["rest"]


def test_a_model_is_known_by_its_weights(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
        (tmp_path / folder / "learner.safetensors").write_bytes(folder.encode())
    assert digest_weights(tmp_path / "one") == digest_weights(tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").write_bytes(b"others")
    assert digest_weights(tmp_path / "one") != digest_weights(tmp_path / "two")
    digests = [
        digest_model(TrainingConfig(model=options).model)
        for options in (
            {"name": "tiny"},
            {"name": "tiny", "revision": "3"},
            {"name": str(tmp_path / "one")},
            {"name": "tiny", "adapter": str(tmp_path / "one")},
            {"name": "some/model", "revision": "v1"},
        )
    ]
    assert digests[0] == "builtin:tiny@0" and digests[1] == "builtin:tiny@3"
    assert digests[4] == "hub:some/model@v1" and len(set(digests)) == 5


def test_the_same_seeds_for_two_models(tfactory: Run) -> None:
    options = ("--env", "calculator", "--tasks", "3", "--max-tokens", "4", "--episodes", "2", "--json")
    status, out, err = tfactory("eval", "tiny", *options)
    assert status == 0, err
    found = json.loads(out)
    assert found["record"].startswith("eval-") and f"recorded as {found['record']}" in err
    assert found["pass@2"] == found["success"] == 0.0
    tfactory("eval", "tiny", 'model.revision="1"', *options)
    tfactory("eval", "tiny", *options)
    one, two, three = read_records(Path("runs/evaluations.jsonl"))
    assert one.conditions == two.conditions and one.model.digest != two.model.digest
    assert one.outcomes == three.outcomes  # the same model says the same again
    assert [each.member for each in one.outcomes[0].episodes] == [0, 1] and one.id != three.id
    assert (Path("runs") / str(one.episodes_file)).is_file()
    assert "--episodes and --group-size" in tfactory("eval", "tiny", *options, "--group-size", "2")[2]


@pytest.mark.usefixtures("judge_key")
def test_what_a_judge_has_spent_is_in_the_record(tfactory: Run) -> None:
    with judging("Score: 5") as judge:
        options = {"base_url": judge.url, "judge_unfinished": True}
        asked = ["reward.type=model_judge", "reward.model=m", f"reward.options={json.dumps(options)}"]
        status, out, err = tfactory(
            "eval", "tiny", "--env", "calculator", "--tasks", "2", "--max-tokens", "4", *asked
        )
    assert status == 0 and len(judge.asked) == 2, err
    [record] = read_records(Path("runs/evaluations.jsonl"))
    found = record.metrics
    assert (found["judge/requests"], found["judge/input_tokens"], found["judge/output_tokens"]) == (
        2,
        200,
        20,
    )
    assert "total: requests 2" in out
    assert record.scored_by == "reward.type=model_judge (m)"


def test_a_run_records_its_evaluations_and_takes_them_back_when_it_resumes(tmp_path: Path) -> None:
    config = brief(tmp_path, training={"eval_every": 2}, data={"heldout_count": 3})
    run = RunFolder(train(config, "a").run)
    records = read_records(run.path / "evaluations.jsonl")
    assert [(each.model.step, each.by, each.model.name) for each in records] == [
        (0, "training", "a@step-0"),
        (2, "training", "a@step-2"),
        (4, "training", "a@step-4"),
    ]
    logged = [row["eval/success"] for row in run.metrics() if "eval/success" in row]
    assert [each.metrics["success"] for each in records] == logged
    assert len({each.conditions.tasks for each in records}) == 1 and len(records[0].outcomes) == 3
    # One that somebody has asked for meanwhile stays when step 4 is done again.
    asked = record_of(played("a", True))
    append_record(run.path / "evaluations.jsonl", asked)
    shutil.rmtree(run.checkpoints()[-1])
    assert go_on(run.path).state == "finished"
    again = read_records(run.path / "evaluations.jsonl")
    assert again[:3] == [*records[:2], asked] and len(again) == 4
    assert again[3].outcomes == records[2].outcomes and again[3].model == records[2].model


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    for name in (".a.part", "b.jsonl", "c.jsonl", "metrics.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    episodes = played("a", True)
    for name, write in {
        "a": lambda: write_atomically(tmp_path / "a", "text"),
        "b.jsonl": lambda: append_record(tmp_path / "b.jsonl", record_of(episodes)),
        "metrics.jsonl": lambda: RunFolder(tmp_path).append("metrics.jsonl", {"step": 1}),
        "c.jsonl": lambda: save_trajectories(tmp_path / "c.jsonl", episodes),
    }.items():
        with pytest.raises(OSError, match=rf"/{name} could not be written \(No space left on device\)$"):
            write()
