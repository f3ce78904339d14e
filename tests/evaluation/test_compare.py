"""Models on the same tasks: what is paired, what is proved, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.test_evaluation_records import played, record_of
from tests.kits.cli import Run
from TrainingFactory.apps.reports.comparison_page import make_comparison_page
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.evaluation.comparison import ComparedModel, StoredRecord, compare
from TrainingFactory.evaluation.records import EvaluationRecord, append_record, read_records
from TrainingFactory.types import Message, Trajectory

PARITY = """
from TrainingFactory.envs import CalculatorEnvironment

class Parity(CalculatorEnvironment):
    def reward(self, episode):
        return float(sum(episode.trajectory.turns[0].completion.token_ids) % 2)
"""


def side(name: str, *records: EvaluationRecord, file: Path = Path("evaluations.jsonl")) -> ComparedModel:
    return ComparedModel(name, [StoredRecord(file, record) for record in records], [None] * len(records))


def outcomes(name: str, won: str) -> EvaluationRecord:
    """A record with one episode a task: 1 is right, 0 wrong, - not scored."""
    values = {"1": True, "0": False, "-": None}
    return record_of(*(played(f"t{n}", values[each]) for n, each in enumerate(won)), name=name)


def test_tasks_are_paired() -> None:
    found = compare(side("a", outcomes("a", "0000000011-1")), side("b", outcomes("b", "1111111001-0")))
    assert found.num_tasks == 11 and len(found.wins) == 7 and len(found.losses) == 2
    assert found.difference.value == pytest.approx(5 / 11)
    assert found.p_value == 2 * (1 + 9 + 36) / 2**9  # by hand
    assert found.difference.low < 5 / 11 < found.difference.high
    assert [flip.task_id for flip in found.losses] == ["t8", "t11"]
    assert found.losses[0].success_rates == (1.0, 0.0)
    assert len(found.notes) == 1 and found.notes[0].startswith("skipped 1 task ")


def test_the_interval_is_that_of_differences_and_not_of_both_shares() -> None:
    ours, theirs = "01" * 50, "01" * 44 + "11" * 6  # the same tasks, six of them flipped
    change = compare(side("a", outcomes("a", ours)), side("b", outcomes("b", theirs))).difference
    # Means of 100 draws of which each is 1 with chance 0.06, by the normal approximation.
    assert (change.low, change.high) == pytest.approx((0.02, 0.11), abs=0.011)


def test_several_episodes_of_a_task_are_one_pair() -> None:
    one = record_of(played("x", True, False, False, False), played("y", True, True, True, True))
    other = record_of(played("x", True, True, True, False), played("y", True, True, True, True))
    found = compare(side("a", one), side("b", other))
    assert found.difference.value == 0.25 and found.p_value == 1.0
    [flip] = found.wins
    assert flip.success_rates == (0.25, 0.75) and flip.members == (1, 0)
    assert "only 1 of 2 tasks flipped" in found.notes[-1]


def test_entries_are_weighted() -> None:
    ours = [outcomes("a", "00"), outcomes("a", "0000")]
    theirs = [outcomes("b", "11"), outcomes("b", "0000")]
    found = compare(side("a", *ours), side("b", *theirs), [3.0, 1.0])
    assert found.difference.value == 0.75 and found.num_tasks == 6
    assert [flip.entry_index for flip in found.wins] == [0, 0]


def test_what_cannot_be_compared_is_refused_or_said() -> None:
    one, other = outcomes("a", "01"), record_of(played("elsewhere", True))
    with pytest.raises(
        ValueError, match=r"a and b have no scored task in common: eval-.* 2 tasks of calculator"
    ):
        compare(side("a", one), side("b", other))
    with pytest.raises(ValueError, match="no scored task in common"):
        compare(side("a", one), side("b", outcomes("b", "--")))
    warmer = one.conditions.model_copy(update={"sampling": {"temperature": 0.0}, "rest": "other"})
    notes = compare(side("a", one), side("b", one.model_copy(update={"conditions": warmer}))).notes
    assert "sampling.temperature is 1.0 and 0.0" in notes[0]
    assert "environment, tools or reward differ" in notes[0] and "rest" not in notes[0]


def test_a_page_shows_both_episodes_and_obeys_no_text(tmp_path: Path) -> None:
    def kept(name: str, won: bool) -> ComparedModel:
        episodes = played("x", won)
        episodes[0].prompt = [Message("user", "<script>alert(1)</script>")]
        save_trajectories(tmp_path / f"{name}.jsonl", episodes)
        record = record_of(episodes, name=name, episodes_file=f"{name}.jsonl")
        return side(name, record, file=tmp_path / "evaluations.jsonl")

    first, second = kept("<i>a</i>", False), kept("b", True)
    found = compare(first, second)
    [(flip, pair)] = found.load_episodes(found.wins)
    assert flip.task_id == "x" and [isinstance(each, Trajectory) for each in pair] == [True, True]
    page = make_comparison_page([first, second], [found])
    assert "&lt;script&gt;" in page and "<script>" not in page and "&lt;i&gt;a" in page
    assert "done, reward 0" in page and "done, reward 1" in page
    (tmp_path / "b.jsonl").unlink()
    assert "episodes were not" in make_comparison_page([first, second], [found])


def test_compare_on_the_command_line(tfactory: Run) -> None:
    Path("parity.py").write_text(PARITY)
    options = ("--env", "parity.py", "--tasks", "8", "--max-tokens", "4")
    tfactory("eval", "tiny", *options)
    status, out, err = tfactory("compare", "tiny", "tiny", *options, "training.seed=1", "--json")
    assert status == 0 and err.count("loading the model") == 2, err  # of another seed nothing was recorded
    [found] = json.loads(out)["comparisons"]
    assert found["difference"] == 0 and found["tasks"] == 8 and found["better"] == []
    status, out, err = tfactory("compare", "tiny", "tiny", *options, "--html", "page/c.html")
    assert status == 0 and "loading" not in err and "page/c.html" in err, err
    assert "0 better, 0 worse; exact McNemar p = 1" in out and Path("page/c.html").is_file()
    first, second, _ = read_records(Path("runs/evaluations.jsonl"))
    status, out, err = tfactory("compare", first.id, second.id)
    assert status == 0 and "seed is 0 and 1" in err, err
    pairs = list(zip(first.scored_episodes.values(), second.scored_episodes.values(), strict=True))
    better, worse = (sum(a < b for a, b in pairs), sum(a > b for a, b in pairs))
    assert better + worse and f"{better} better, {worse} worse" in out
    assert out.count("72*76") <= 2 and "truncated, reward" in out  # a flipped task with both episodes
    assert not list(Path("runs/rollouts").glob("*.part"))
    Path("runs").rename("other")
    status, out, err = tfactory("compare", first.id, second.id, "--runs", "other", "--json")
    assert status == 0 and len(json.loads(out)["comparisons"][0]["better"]) == better, err
    status, out, err = tfactory("compare", "tiny", "tiny", *options, "--runs", "other")
    assert status == 0 and "loading" not in err and not Path("runs").exists(), err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tiny"], "two models, runs"),
        (["tiny", "tiny"], "no environment is named"),
        (["tiny", "eval-0000000000"], "eval-0000000000 in runs"),
        (["tiny", "nothing.jsonl"], "nothing.jsonl contains no valid"),
        (["a.jsonl", "tiny", "--suite", "quick"], "single evaluation a.jsonl"),
        (["tiny", "nonsense", "--env", "calculator"], "there is no such run or model: 'nonsense'"),
        (
            ["tiny", "tiny", "--suite", "quick", "--temperature", "0"],
            "cannot set sampling.temperature with --suite",
        ),
    ],
)
def test_mistakes(tfactory: Run, arguments: list[str], text: str) -> None:
    append_record(Path("a.jsonl"), outcomes("a", "01"))
    status, _, err = tfactory("compare", *arguments)
    assert status == 2 and text in err, err
