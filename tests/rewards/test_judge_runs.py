"""A judge in real runs: one that cannot go on says so in plain words, and one that is repeated asks the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import Said, finished, judging, scored
from tests.kits.run import EXACT, rows, small, train
from tests.kits.serve import live
from TrainingFactory.apps.serving.server import make_server
from TrainingFactory.cli import main
from TrainingFactory.common.endpoints.openai import ChatEndpoint
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.model_judge import model_judge
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
sampling: {max_tokens: 6}
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
        [told] = [line for line in text.splitlines() if line.startswith("error: Stopped because no episode")]
        assert "none of 4 episodes could be scored" in told and "reward.max_unscored is 0.5" in told
        assert "I would rather not." in told and told.endswith("run: tfactory runs resume judged")
        answers["now"] = lambda prompt, number: "Score: 5"
        status, text = tfactory("runs", "resume", "judged")
        assert status == 2 and "Traceback" not in text
        assert "all rewards were equal (0.5 " in text and "2 consecutive steps" in text
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
            options = {"max_steps": 1, "seed": seed}
            train(small(tmp_path, training=options, reward=reward, sampling=EXACT), name)
        asked.append(sorted(json.dumps(body["messages"]) for body in server.asked))
    assert asked[0] == asked[1] != asked[2]
    fences = {json.loads(each)[0]["content"] for each in asked[0]}
    assert len(fences) == len(set(asked[0])) > 4  # another one for every text


class Noting(ChatEndpoint):
    """Notes what the server says that it has counted."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(
            url, "judge", api_key_env=None, options={"temperature": 0.0, "max_tokens": 24} | options
        )
        self.usage: list[dict[str, int]] = []

    async def post_body(self, body: dict[str, Any]) -> bytes:
        data = await super().post_body(body)
        self.usage.append(json.loads(data)["usage"])
        return data


def test_a_served_model_that_cannot_judge(tmp_path: Path):
    """Untrained, so that it talks nonsense: in a run every episode is dropped, with what it has said."""
    config = TrainingConfig(sampling={"slots": 8})
    with live(make_server(config, "judge")) as client:
        url = f"{str(client.base_url).rstrip('/')}/v1"
        endpoint = Noting(url, temperature=1.0, stop=["e"], seed=0)
        talking = model_judge(model=endpoint, template="{answer}", fence_seed=1, retries=0)
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
        with pytest.raises(ValueError, match=r"none of 12 .*the judge's answer (was truncated|is not)"):
            train(small(tmp_path, reward=section), "run")
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
