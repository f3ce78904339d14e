"""A judge in real runs: one that cannot go on says so in plain words, and one that is repeated asks the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import Said, judging
from tests.kits.run import rows, small, train
from TrainingFactory.cli import main
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.types import Trajectory

pytestmark = pytest.mark.usefixtures("judge_key")


def section(url: str, **options: Any) -> dict[str, Any]:
    """An untrained model ends no episode in time: what it says is judged all the same."""
    given = {"base_url": url, "judge_unfinished": True, "retries": 0, "pause": 0.001, "timeout": 1.0}
    return {"type": "model_judge", "model": "m", "options": given | options}


def played(run: Path) -> list[Trajectory]:
    return list(load_trajectories(run / "trajectories.jsonl"))


def by_number(prompt: str, number: int) -> str:
    return f"Score: {number % 5 + 1}"


SMALL = """
environment: calculator
training: {max_steps: 6, batch_size: 2, group_size: 2, learning_rate: 1e-3}
sampling: {max_tokens: 6, deterministic: true}
data: {count: 4}
"""


@pytest.fixture
def tfactory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out + err

    return run


def test_the_command_says_why_it_stops_and_how_to_go_on(tfactory: Callable[..., tuple[int, str]]):
    answers: dict[str, Callable[[str, int], Said]] = {"now": lambda prompt, number: "I would rather not."}
    with judging(lambda prompt, number: answers["now"](prompt, number)) as server:
        given = section(server.url)
        keys = ["reward.type=model_judge", "reward.model=m", f"reward.options={json.dumps(given['options'])}"]
        keys += ["reward.max_equal_steps=2"]
        status, text = tfactory("train", "small.yaml", "--name", "judged", *keys)
        assert status == 2 and "Traceback" not in text
        [told] = [line for line in text.splitlines() if line.startswith("error: stopped after 3 steps")]
        assert "none of 4 episodes could be scored" in told and "reward.max_unscored is 0.5" in told
        assert "I would rather not." in told and told.endswith("go on with: tfactory runs resume judged")
        answers["now"] = lambda prompt, number: "Score: 5"
        status, text = tfactory("runs", "resume", "judged")
        assert status == 2 and "Traceback" not in text
        assert "all rewards were equal (0.5 in the last one) for 2 steps in a row" in text
        assert "reward.max_equal_steps" in text and "runs resume judged" in text
        answers["now"] = by_number
        assert tfactory("runs", "resume", "judged")[0] == 0
    metrics = rows(Path("runs/judged/metrics.jsonl"))
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert [each.reward is None for each in played(Path("runs/judged"))].count(True) == sum(
        row["episodes/unscored"] for row in metrics
    )
    for path in Path("runs/judged").rglob("*"):
        assert not path.is_file() or b"sk-judge-9876" not in path.read_bytes(), path


def test_a_repeated_run_asks_the_same_questions(tmp_path: Path):
    """Fences too: what a deterministic judge answers is the same again, and what replays it finds it."""

    def by_content(prompt: str, number: int) -> str:
        return f"Score: {sum(prompt.encode()) % 10}"

    asked: list[list[str]] = []
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        with judging(by_content) as server:
            reward = section(server.url)
            train(small(tmp_path, training={"max_steps": 1, "seed": seed}, reward=reward), name)
        asked.append(sorted(json.dumps(body["messages"]) for body in server.asked))
    assert asked[0] == asked[1] != asked[2]
    fences = {json.loads(each)[0]["content"] for each in asked[0]}
    assert len(fences) == len(set(asked[0])) > 4  # another one for every text
