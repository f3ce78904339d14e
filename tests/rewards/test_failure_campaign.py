"""Judges that fail in every way, in real runs: none crashes, no row gets a zero that nobody gave, every row that is
dropped is counted and says why, and a run that cannot go on says so in plain words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import Judge, Said, judging
from tests.kits.run import Quiet, go_on, rows, small, train
from TrainingFactory.cli import main
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.types import Trajectory

pytestmark = pytest.mark.usefixtures("judge_key")
EPISODES = 12  # a step of `small`, but for the last one of an epoch


def completion(content: Any, **more: Any) -> bytes:
    choice = {"message": {"role": "assistant", "content": content} | more, "finish_reason": "stop"}
    return json.dumps({"choices": [choice]}).encode()


FAULTS: dict[str, tuple[Said, str]] = {
    "junk": ("Lovely weather today.", "not one line `Score: ...`"),
    "refuses": ("I cannot help with judging this.", "not one line `Score: ...`"),
    "refuses by the book": (completion(None, refusal="I cannot"), "the judge refused to answer"),
    "not a number": ("Score: NaN", "score is nan"),
    "out of range": ("Score: 11", "score is 11; it must be from 0 to 10"),
    "below": ("Score: -0.001", "score is -0.001"),
    "huge": ("Score: 1e999999", "score is inf"),
    "long": (f"Score: {'9' * 5000}", "it must be from 0 to 10"),
    "no choices": (b'{"choices": []}', "no chat completion"),
    "a number for a text": (completion(7), "no chat completion"),
    "nothing": (completion(None), "not one line `Score: ...`"),
    "no JSON": (b"<html>down for repairs</html>", "no chat completion"),
    "an error": ((500, b'{"error": "out of memory"}'), 'status 500: {"error": "out of memory"}'),
    "busy": (429, "status 429"),
    "cut": (b"", "could not be reached"),  # in the middle of the body, see below
    "hangs": ("", "did not answer within 1 s"),
}


class CutShort(Judge):
    """In place of an empty body it promises more bytes than it sends."""

    def serve(self, request: Any) -> None:
        real = request.send_header
        request.send_header = lambda key, value: real(key, "1000" if value == "0" else value)
        super().serve(request)


def section(url: str, **options: Any) -> dict[str, Any]:
    """An untrained model ends no episode in time: what it says is judged all the same."""
    given = {"base_url": url, "judge_unfinished": True, "retries": 0, "pause": 0.001, "timeout": 1.0}
    return {"type": "model_judge", "model": "m", "options": given | options}


def two_steps(folder: Path, reward: dict[str, Any], **training: Any) -> TrainingConfig:
    return small(folder, training={"max_steps": 2} | training, reward=reward)


def played(run: Path) -> list[Trajectory]:
    return list(load_trajectories(run / "trajectories.jsonl"))


def by_number(prompt: str, number: int) -> str:
    return f"Score: {number % 5 + 1}"


@pytest.mark.parametrize("names", [list(FAULTS)[:8], list(FAULTS)[8:]])
def test_what_cannot_be_judged_is_dropped_and_counted(tmp_path: Path, names: list[str]):
    """Every second request fails, each time in another way."""

    def say(prompt: str, number: int) -> Said:
        name = names[number // 2 % len(names)]
        if number % 2 == 0:
            return by_number(prompt, number)
        if name == "hangs":
            server.stopped.wait(20)
        return FAULTS[name][0]

    server = CutShort(say)
    try:
        report = train(two_steps(tmp_path, section(server.url)), "run")
    finally:
        server.close()
    assert report.state == "finished" and len(server.asked) == 2 * EPISODES
    assert [row["episodes/unscored"] for row in report.rows] == [EPISODES // 2] * 2
    assert all(row["grad_norm"] > 0 for row in report.rows)  # the others teach
    episodes = played(tmp_path / "run")
    reasons = [str(each.error) for each in episodes if each.reward is None]
    assert len(reasons) == EPISODES
    for name in names:
        assert sum(FAULTS[name][1] in reason for reason in reasons) >= EPISODES // len(names), name
    given = [each.reward.outcome for each in episodes if each.reward is not None]
    expected = [(number % 5 + 1) / 10 for number in range(0, 2 * EPISODES, 2)]
    assert sorted(given) == pytest.approx(sorted(expected))
    kinds = [value for row in report.rows for key, value in row.items() if key.startswith("judge/failed_")]
    assert sum(kinds) == EPISODES
    assert report.metrics["reward"] == pytest.approx(sum(given[EPISODES // 2 :]) / (EPISODES // 2))


def test_verdicts_of_the_wrong_type(tmp_path: Path):
    schema = {"type": "object", "properties": {"score": {"type": ["number", "string"]}}}
    wrong = ['{"score": "high"}', '{"score": 1', "[7]", '{"score": 2}', "7", '{"score": NaN}']

    def say(prompt: str, number: int) -> Said:
        return wrong[number // 2] if number % 2 else json.dumps({"score": number % 5 / 8 + 0.1})

    with judging(say) as server:
        options = {"verdict": "json", "verdict_options": {"schema": schema}}
        report = train(two_steps(tmp_path, section(server.url, **options), max_steps=1), "run")
    assert report.metrics["episodes/unscored"] == len(wrong) and report.metrics["reward"] > 0.1


def test_a_judge_that_recovers_loses_nothing(tmp_path: Path):
    def say(prompt: str, number: int) -> Said:
        return (429, 500, 503)[number % 3] if number < 9 else by_number(prompt, number)

    with judging(say) as server:
        report = train(two_steps(tmp_path, section(server.url, retries=9)), "run")
    assert [row["episodes/unscored"] for row in report.rows] == [0, 0]
    assert sum(row["judge/retries"] for row in report.rows) == 9 and len(server.asked) == 2 * EPISODES + 9


MORTAL = """
import http.server, json, os, sys, threading
lock, seen = threading.Lock(), []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with lock:
            seen.append(1)
            if len(seen) > 8:
                os._exit(9)
        choice = {"message": {"content": f"Score: {len(seen)}"}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_judge_that_dies_in_mid_batch_and_comes_back(tmp_path: Path):
    """A process that is gone after eight requests. The run stops, and goes on when there is a judge again."""
    watcher = Quiet()
    with subprocess.Popen([sys.executable, "-c", MORTAL], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        config = two_steps(tmp_path, section(f"http://127.0.0.1:{port}/v1", concurrency=1), max_steps=6)
        with pytest.raises(ValueError, match="stopped after 3 steps") as stopped:
            train(config, "run", watcher)
        assert process.wait(20) == 9
    text = str(stopped.value)
    assert "none of" in text and "reward.max_unscored is 0.5" in text and "could not be reached" in text
    assert "go on with: tfactory runs resume" in text and "\n" not in text
    first, *_ = rows(tmp_path / "run" / "metrics.jsonl")
    assert first["episodes/unscored"] == 4 and first["reward"] == pytest.approx(sum(range(1, 9)) / 80)
    assert [each.reward is not None for each in played(tmp_path / "run")].count(True) == 8
    with judging(by_number, port=port) as server:  # the address is that of the config
        report = go_on(tmp_path / "run")
        assert report.state == "finished" and server.asked
    assert report.metrics["episodes/unscored"] == 0


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
    for name in ("one", "two", "other"):
        with judging(by_content) as server:
            train(two_steps(tmp_path, section(server.url), seed=1 if name == "other" else 0), name)
        asked.append(sorted(json.dumps(body["messages"]) for body in server.asked))
    assert asked[0] == asked[1] != asked[2]
    fences = {json.loads(each)[0]["content"] for each in asked[0]}
    assert len(fences) == len(set(asked[0])) > EPISODES  # another one for every text
