"""Episodes as the web page and `--json` show them: an index of offsets that grows with the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.cli import Run
from TrainingFactory.apps.views import index as indexing
from TrainingFactory.apps.views.credit import make_group_view
from TrainingFactory.apps.views.episodes import contains_text, make_episode_view, read_row
from TrainingFactory.apps.views.index import EpisodeIndex, Query
from TrainingFactory.apps.views.shapes import EpisodePage
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories, trajectory_to_dict
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.types import Completion, Message, Reward, Task, ToolCall, ToolResult, Trajectory, Turn

HOSTILE = '<script>alert("1")</script> \x1b[31m \\ "token_ids": [1, 2] \u2028 \U0001f600'


def episode(place: int, text: str = "It is Oslo.") -> Trajectory:
    """Two turns: a call that every third episode sees fail, and an answer. Four members to a task, two tasks a step."""
    calls = [ToolCall("search", {"query": f"item {place}."}, "a"), ToolCall("python", {}, "b")]
    results = [
        ToolResult("n\u00fcscht", seconds=0.5, id="b", cached=True),
        ToolResult("none", place % 3 > 0, id="a"),
    ]
    replies = [Message("tool", result.content, tool_call_id=result.id) for result in results]
    first = Turn(
        [1, 2, 3], Completion([4, 5], [-0.5, -1.0], "stop"), Message("assistant", "", calls), replies, results
    )
    second = Turn([1, 2, 3, 4, 5, 6], Completion([7], [-2.0], "length", 3), Message("assistant", text))
    task = Task(f"t{place // 4 % 2}", "Where?", "Oslo", {"token_ids": [1]})
    reward = None if place % 5 == 4 else Reward(float(place % 2), [0.25, 0.5], {"exact": 1.0})
    return Trajectory(
        task, f"{place // 8}/{task.id}", place % 4, [Message("user", "Where?")], [], [first, second],
        "done" if place % 2 else "truncated", reward, "no verdict" if reward is None else None, 0.1 * place,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "a")
    found.append_trajectories(map(episode, range(40)))
    return found


def numbers(page: EpisodePage) -> list[int]:
    return [row.number for row in page.rows]


def all_of(index: EpisodeIndex, query: Query) -> list[int]:
    found: list[int] = []
    while True:
        page = index.get_page(query)
        found += numbers(page)
        if page.next is None and not page.partial:
            return found
        query = replace(query, after=page.next)


def test_a_row_says_what_the_episode_was(run: RunFolder) -> None:
    [row] = EpisodeIndex(run).get_page(Query(limit=1, after="12:12")).rows
    assert row.model_dump() == {
        "number": 13, "step": 2, "task": "t1", "group": "1/t1", "member": 0, "status": "truncated", "turns": 2,
        "reward": 0.75, "tokens": 3, "tool_calls": 2, "tool_failures": 1, "cached": 1, "error": None,
        "seconds": 0.1 * 12, "parent": None, "fork_turn": 0,
    }  # fmt: skip


def test_an_episode_of_a_forked_group_has_the_tree(tmp_path: Path) -> None:
    """Of its own group alone; a group without forks has none."""
    run = RunFolder(tmp_path / "a")
    played = [episode(place) for place in range(8)]
    played[2] = replace(played[2], parent=0, fork_turn=1)
    run.append_trajectories(played)
    index = EpisodeIndex(run)
    assert [(row.member, row.parent, row.fork_turn) for row in index.get_episode(1).tree] == [
        (0, None, 0), (1, None, 0), (2, 0, 1), (3, None, 0)
    ]  # fmt: skip
    assert index.get_episode(5).tree == []


def expected(rows: Sequence[tuple[int, Trajectory]], query: Query) -> list[int]:
    """By looking at every episode, without an index."""
    worth = {n: None if t.reward is None else t.reward.outcome + sum(t.reward.steps) for n, t in rows}
    failed = {n: {"search"} if n % 3 == 1 else set[str]() for n, _ in rows}
    kept = [
        n
        for n, t in rows
        if query.step in (None, int(t.group.partition("/")[0]) + 1)
        and query.task in (None, t.task.id)
        and query.status in (None, t.status)
        and (
            query.failed_tool is None
            or query.failed_tool in failed[n]
            or (query.failed_tool == "*" and failed[n])
        )
        and (query.least is None or ((value := worth[n]) is not None and value >= query.least))
        and (query.most is None or ((value := worth[n]) is not None and value <= query.most))
        and (
            query.text is None or query.text.lower() in json.dumps(trajectory_to_dict(t), ensure_ascii=False)
        )
    ]
    keys = {
        "place": lambda n: n,
        "reward": lambda n: (-1e9 if worth[n] is None else worth[n], n),
        "length": lambda n: (3, n),
        "seconds": lambda n: (0.1 * (n - 1), n),
    }
    return sorted(kept, key=keys[query.sort], reverse=query.down)


@pytest.mark.parametrize(
    "query",
    [
        Query(),
        Query(down=True),
        Query(step=3),
        Query(step=3, task="t1", status="done"),
        Query(failed_tool="search"),
        Query(failed_tool="*", sort="seconds", down=True),
        Query(failed_tool="python"),
        Query(least=1.5),
        Query(most=1.0, sort="reward"),
        Query(sort="reward", down=True),
        Query(sort="length"),
        Query(text="ITEM 7.", sort="reward"),
        Query(text="n\u00fcscht", step=2),
        Query(text="nowhere"),
    ],
)
def test_pages_give_what_a_look_at_every_episode_gives(run: RunFolder, query: Query) -> None:
    known = list(enumerate(load_trajectories(run.path / TRAJECTORIES), 1))
    assert all_of(EpisodeIndex(run), replace(query, limit=3)) == expected(known, query)
    whole = EpisodeIndex(run).get_page(query)
    assert whole.matched == len(whole.rows) == len(expected(known, query)) and whole.total == 40


def test_only_what_is_new_is_read(run: RunFolder) -> None:
    index, size = EpisodeIndex(run), (run.path / TRAJECTORIES).stat().st_size
    first = index.get_page(Query())
    assert (first.bytes_read, first.indexed, first.partial, first.next) == (size, size, False, None)
    assert index.get_page(Query(sort="reward")).bytes_read == 0
    run.append_trajectories([episode(40)])
    grown = index.get_page(Query(step=6))
    assert numbers(grown) == [41] and grown.bytes_read == (run.path / TRAJECTORIES).stat().st_size - size
    line = (run.path / TRAJECTORIES).read_bytes().splitlines(keepends=True)
    assert (
        index.get_page(Query(step=1, text="item")).bytes_read == sum(map(len, line[:8])) - 8
    )  # the ends of lines


def test_a_large_file_is_read_over_several_requests(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(indexing, "MAX_INDEXED_BYTES", 4000)
    monkeypatch.setattr(indexing, "MAX_SEARCHED_BYTES", 3000)
    index = EpisodeIndex(run)
    page = index.get_page(Query())
    assert page.partial and 0 < page.indexed < page.size and page.total < 40
    assert all_of(index, Query(limit=50)) == [*range(1, 41)]
    found = index.get_page(Query(text="nowhere"))
    assert found.partial and found.next and found.matched is None and found.bytes_read < 5000
    assert all_of(index, Query(text="item 33.")) == [34]
    assert EpisodeIndex(run).get_episode(40).row.task == "t1"
    assert [each.row.number for each in EpisodeIndex(run).get_group(2, "t1").members] == [13, 14, 15, 16]
    assert EpisodeIndex(run).get_page(Query(step=5), read_all=True).matched == 8


def test_a_run_that_is_rewound_is_read_anew(run: RunFolder) -> None:
    index, path = EpisodeIndex(run), run.path / TRAJECTORIES
    assert index.get_page(Query()).total == 40
    ends = [len(line) for line in path.read_bytes().splitlines(keepends=True)]
    run.rewind({TRAJECTORIES: sum(ends[:16])})
    assert numbers(index.get_page(Query(step=3))) == [] and index.get_page(Query()).total == 16
    run.append_trajectories(episode(n, "another") for n in range(16, 45))  # longer than it was
    assert index.get_page(Query()).total == 45 and len(numbers(index.get_page(Query(text="another")))) == 29
    path.unlink()
    assert index.get_page(Query()).total == 0


def test_a_part_of_an_episode_that_is_missing_hides_no_other(run: RunFolder) -> None:
    row = trajectory_to_dict(episode(1))
    del row["prompt"]
    view = make_episode_view(json.dumps(row).encode(), 1)
    assert (
        view.turns and view.task["id"] == row["task"]["id"] and "'prompt' is missing" in (view.problem or "")
    )


def test_lines_that_are_no_episodes_are_rows_that_say_so(run: RunFolder) -> None:
    good = json.dumps(trajectory_to_dict(episode(1)) | {"of_tomorrow": {"x": [1]}}).encode()
    odd = [
        b"",
        b"{",
        b"[1]",
        b'{"task": 3}',
        b"\xff\x00",
        b"[" * 10**5,
        good.replace(b'"0/t0"', b'"by hand"'),
        good,
    ]
    odd.append(good.replace(b'"member": 1', b'"member": ' + b"9" * 40))
    odd.append(good.replace(b'"outcome": 1.0', b'"outcome": NaN'))
    (run.path / TRAJECTORIES).write_bytes(b"\n".join(odd) + b"\n" + good[:50])
    index = EpisodeIndex(run)
    page = index.get_page(Query())
    assert [row.status for row in page.rows] == ["unreadable"] * 6 + ["done"] * 4 and not page.partial
    assert "'turns' is missing" in (page.rows[3].error or "")
    assert page.rows[6].step is None and page.rows[7].step == 1
    assert json.loads(page.model_dump_json())["rows"][9]["reward"] is None
    for number in range(1, 11):
        view = index.get_episode(number)
        assert (view.problem is None) == (number > 6)
        assert json.loads(view.model_dump_json())["row"]["number"] == number
    with pytest.raises(ValueError, match="no episode 11"):
        index.get_episode(11)
    assert numbers(index.get_page(Query(text="task"))) == [4]  # of a line that is no episode, all


def test_an_episode_in_full(run: RunFolder) -> None:
    view = EpisodeIndex(run).get_episode(10)
    assert [turn.tokens for turn in view.turns] == [2, 1] and view.answer == "It is Oslo."
    assert [(each["call"], each["ok"], each["cached"]) for each in view.turns[0].tool_results] == [
        ("python", True, True),
        ("search", False, False),
    ]
    assert (view.turns[1].finish, view.turns[1].policy_version) == ("length", 3)
    assert [turn.step_reward for turn in EpisodeIndex(run).get_episode(2).turns] == [0.25, 0.5]
    assert view.task["answer"] == "Oslo" and view.prompt == [{"role": "user", "content": "Where?"}]
    assert make_episode_view(episode(9), 10) == view  # of one that is in no file


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    played = [episode(1, HOSTILE), episode(2, "half a pair \ud83d"), episode(3)]
    run.append_trajectories(played)
    index = EpisodeIndex(run)
    assert json.loads(index.get_episode(1).model_dump_json())["answer"] == HOSTILE
    assert index.get_page(Query()).rows[0].tokens == 3
    assert index.get_episode(2).answer.startswith("half a pair") and index.get_episode(2).model_dump_json()
    for text, found in [
        ("<SCRIPT>", [1]),
        ('"token_ids": [1', [1]),
        ("\U0001f600", [1]),
        ("pair", [2]),
        ("new_ids", []),
    ]:
        assert numbers(index.get_page(Query(text=text))) == found, text


def test_a_text_is_found_however_json_wrote_it() -> None:
    line = json.dumps(trajectory_to_dict(episode(1, "Gr\u00fc\u00dfe/nach \\Oslo"))).encode()  # with \u00fc
    assert (
        contains_text(line, "gr\u00fc\u00dfe")
        and contains_text(line, "/nach \\oslo")
        and not contains_text(line, "logprobs")
    )
    assert read_row(line, 1)[0].tokens == 3


def test_an_index_is_written_nowhere(run: RunFolder) -> None:
    EpisodeIndex(run).get_page(Query())
    assert [path.name for path in run.path.rglob("*")] == [TRAJECTORIES]
    assert [path.name for path in run.path.parent.iterdir()] == ["a"]


def test_a_group_with_the_credit_of_its_tokens(whole: Path, tfactory: Run) -> None:
    run = RunFolder(whole)
    task = run.read_consumed_tasks()[2][0]
    found = make_group_view(run, 2, task)
    plain = EpisodeIndex(run).get_group(2, task)
    assert [each.row for each in found.members] == [each.row for each in plain.members] and len(
        found.members
    ) == 4
    played = [each for each in run.episodes(2) if each.task.id == task]
    rewards = [each.reward.outcome for each in played if each.reward is not None]
    mean = sum(rewards) / 4
    for view, trajectory, reward in zip(found.members, played, rewards, strict=True):
        assert view.credit is not None and view.credit.measure == "advantage"
        pieces = [piece for turn in view.credit.turns for piece in turn["pieces"]]
        assert [n for piece in pieces for n in piece["ids"]] == trajectory.turns[0].completion.token_ids
        values = [value for piece in pieces for value in piece["values"]]
        assert all((value > 0) == (reward > mean) for value in values if reward != mean)
    shutil.copytree(whole, "runs/whole")
    status, out, err = tfactory("runs", "episodes", "whole", "--step", "2", "--task", task, "--json")
    assert status == 0 and json.loads(out) == found.model_dump(mode="json"), err
    # A task that a step took twice: each of its groups by itself, or both.
    file, other = Path("runs/whole") / TRAJECTORIES, run.read_consumed_tasks()[2][1]
    changed = file.read_text().replace(f'"group": "1/{other}"', f'"group": "1/{task}#2"')
    file.write_text(changed.replace(f'"task": {{"id": "{other}"', f'"task": {{"id": "{task}"'))
    twice = RunFolder(Path("runs/whole"))
    assert (
        len(make_group_view(twice, 2, task).members)
        == len(EpisodeIndex(twice).get_group(2, task).members)
        == 8
    )
    for group in (f"1/{task}", f"1/{task}#2"):
        credited = make_group_view(twice, 2, task, group=group)
        plain = EpisodeIndex(twice).get_group(2, task, group)
        assert [each.row for each in credited.members] == [each.row for each in plain.members]
        assert [(each.row.group, each.row.member) for each in plain.members] == [(group, n) for n in range(4)]
    rows = json.loads(tfactory("runs", "episodes", "whole", "--json")[1])
    assert rows["matched"] == len(rows["rows"]) == rows["total"] > 30


def test_the_learners_log_probs_by_the_weights_that_sampled(whole: Path) -> None:
    run = RunFolder(whole)
    assert [path.name for path in run.checkpoints()] == ["step-000002", "step-000004"]
    for step, known in ((1, True), (2, False), (3, True)):
        found = make_group_view(run, step, run.read_consumed_tasks()[step][0], with_learner_logprobs=True)
        turns = [turn for each in found.members if each.credit is not None for turn in each.credit.turns]
        pieces = [piece for turn in turns for piece in turn["pieces"]]
        assert pieces and all(len(each["learned"]) == len(each["ids"]) * known for each in pieces)
        pairs = [pair for each in pieces for pair in zip(each["logprobs"], each["learned"], strict=known)]
        assert max((abs(ours - theirs) for ours, theirs in pairs), default=0) < 1e-4
        assert known or ("after step 1" in found.notes[-1] and "steps: 2, 4" in found.notes[-1])


def test_a_file_that_was_saved_otherwise_is_read_too(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    save_trajectories(run.path / TRAJECTORIES, [episode(1)])
    [row] = (run.path / TRAJECTORIES).read_text().splitlines()
    (run.path / TRAJECTORIES).write_text(json.dumps(json.loads(row), separators=(",", ":")) + "\n")
    assert EpisodeIndex(run).get_page(Query()).rows[0].tokens == 3
