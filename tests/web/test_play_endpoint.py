"""Play with a model behind an endpoint: its turns, tools, rewards and costs, what is sent back, errors, and which
endpoints the page contacts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits import teacher as kit
from tests.kits.page import Served, serving
from tests.kits.registry import made_run
from tests.kits.teacher import APIS, USED, Teacher, teaching
from tests.kits.waiting import wait_until
from TrainingFactory.cli import ui
from TrainingFactory.web import play_endpoint, playing

KEY = "sk-1234567890abcdef"
AGAIN = {"role": "user", "content": "Sure?"}


class Talk:
    """A conversation in `search` as the worker has it, without the page."""

    def __init__(
        self, model: str, folder: Path, task: str | None = "first", environment: str = "environment:search"
    ) -> None:
        self.given: dict[str, Any] = {"model": model, "environment": environment, "task": None}
        self.given |= {"id": "first", "runs": str(folder / "runs"), "stop": str(folder / "stop")}
        self.given |= {"spending": str(folder / "spent.jsonl")}
        self.opened = playing.begin(self.given, lambda _: None)
        if task is not None:
            self.given |= {"id": "second", "task": self.opened["tasks"][0]["id"]}
            self.opened = playing.begin(self.given, lambda _: None)
        self.messages: list[dict[str, Any]] = self.opened["messages"]
        self.told: list[dict[str, Any]] = []

    def say(self, *more: dict[str, Any], seed: int = 0) -> dict[str, Any]:
        """Append messages and the answer to them."""
        self.messages += more
        asked = {"messages": self.messages, "temperature": 0.5, "max_tokens": 77, "seed": seed}
        answer = json.loads(json.dumps(playing.say(self.given | asked, self.told.append)))
        self.messages = [*self.messages, *answer["messages"]]
        return answer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    end_process()


def end_process() -> None:
    """Forget what a worker process holds."""
    while playing._conversations:
        asyncio.run_coroutine_threadsafe(
            playing._conversations.popitem()[1].close(), playing._get_loop()
        ).result()
    while play_endpoint._samplers:
        sampler = play_endpoint._samplers.popitem()[1]
        asyncio.run_coroutine_threadsafe(sampler.close(), playing._get_loop()).result()


def write_options(teacher: Teacher, **options: Any) -> str:
    rows = {"model": "teacher", "base_url": teacher.url, "retries": 0} | options
    Path("teacher.yaml").write_text(json.dumps(rows))
    return "teacher.yaml"


def sent_temperature(api: str, body: dict[str, Any]) -> Any:
    return body.get("generationConfig", {}).get("temperature") if api == "gemini" else body.get("temperature")


@pytest.mark.parametrize("api", APIS)
def test_an_endpoint_plays_with_tools_and_a_reward(folder: Path, api: str) -> None:
    with teaching() as teacher:
        talk = Talk(teacher.name(api), folder)
        assert talk.opened["max_length"] is None and not teacher.requests  # nothing is contacted yet
        answer = talk.say()
        again = talk.say(AGAIN)
    roles = [message["role"] for message in answer["messages"]]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"] and answer["status"] == "done"
    assert [next(iter(told)) for told in talk.told[:6]] == ["message", "results"] * 3
    town = playing._conversations["second"].task.answer
    assert (answer["messages"][-1]["content"], answer["reward"]) == (town, 1.0) and again["reward"] == 1.0
    [result] = answer["turns"][0]["tool_results"]
    assert result["call"] == "search" and result["content"] == answer["messages"][1]["content"]
    spent = {"endpoint/input_tokens": USED[0], "endpoint/output_tokens": USED[1]}
    assert [turn["signals"] for turn in answer["turns"]] == [spent] * 3  # no price is known
    assert again["spent"]["requests"] == 4 and again["spent"]["cost"] is None
    assert (again["spent"]["input_tokens"], again["spent"]["output_tokens"]) == (4 * USED[0], 4 * USED[1])
    assert all("search" in json.dumps(body["tools"]) for body in teacher.requests)
    about, expected = talk.opened["endpoint"], None if api == "anthropic" else 0.5
    assert [sent_temperature(api, body) for body in teacher.requests] == [expected] * 4
    assert (
        ("temperature" in about["ignored"]) == (api == "anthropic") == ("API has none" in about["notes"][-1])
    )
    assert "seed" in about["ignored"] and about["key"] is None


def test_a_wrong_answer_has_no_reward(folder: Path) -> None:
    with teaching(wrong=lambda number, question: True) as teacher:
        talk = Talk(teacher.name(), folder)
        answer = talk.say()
        assert (answer["messages"][-1]["content"], answer["reward"], answer["unscored"]) == (
            "Nowhere",
            0.0,
            None,
        )
        talk.messages[-1] = talk.messages[-1] | {"content": playing._conversations["second"].task.answer}
        edited = talk.say(AGAIN)  # the searches are not repeated, so the environment is in another state
        assert edited["anew"] and edited["reward"] is None
        own = Talk(teacher.name(), folder, task=None)
        assert own.messages[0]["role"] == "system" and len(own.messages) == 1
        assert own.say({"role": "user", "content": "Ada sold apple?"})["reward"] is None


@pytest.mark.parametrize(
    ("reward", "value", "problem"),
    [
        ({"type": "function", "options": {"function": "rule.py:fourteen"}}, 14.0, None),
        ({"type": "rule_based", "options": {"rule": "f1"}}, 1.0, None),
        ({"type": "function", "options": {"function": "gone.py:fourteen"}}, None, "gone.py"),
        ({"type": "model_judge", "model": "m", "options": {"base_url": "http://127.0.0.1:1/v1"}}, None, None),
    ],
)
def test_the_reward_is_that_of_the_run(
    folder: Path, reward: dict[str, Any], value: float | None, problem: str | None
) -> None:
    right = "trajectory.answer == trajectory.task.answer"
    Path("rule.py").write_text(f"def fourteen(trajectory):\n    return 14.0 * ({right})\n")
    made_run(folder / "runs", "ruled", reward=reward, data={"count": 3})
    with teaching() as teacher:
        answer = Talk(teacher.name(), folder, environment="run:ruled").say()
    assert answer["status"] == "done" and answer["reward"] == value
    assert (answer["unscored"] is None) == (problem is None) and (problem or "") in (answer["unscored"] or "")


def test_signed_thoughts_are_sent_back_unless_their_message_is_edited(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def write(message: Any) -> dict[str, Any]:
        thought = {"type": "thinking", "thinking": "hm", "signature": f"s{len(written)}"}
        written.append(thought)
        answer = kit._write_anthropic(message)
        return answer | {"content": [thought, *answer["content"]]}

    monkeypatch.setitem(kit.WRITERS, "anthropic", write)
    with teaching() as teacher:
        talk = Talk(teacher.name("anthropic"), folder)
        talk.say()
        talk.say(AGAIN)
        talk.messages[-1] = talk.messages[-1] | {"content": "Elsewhere"}
        talk.say(AGAIN)
    signed = [
        sorted({f"s{n}" for n in range(5) if f'"s{n}"' in json.dumps(body)}) for body in teacher.requests
    ]
    assert (
        signed[3:] == [["s0", "s1", "s2"], ["s0", "s1", "s2"]]
        and talk.messages[2]["reasoning_content"] == "hm"
    )


def test_costs_and_a_budget_that_outlives_the_process(folder: Path) -> None:
    with teaching() as teacher:
        prices = {"input_price": 1.0, "output_price": 10.0}
        name = write_options(teacher, max_requests=4, **prices)
        talk = Talk(name, folder)
        first, second = talk.say(), talk.say(AGAIN)
        each = (USED[0] * 1.0 + USED[1] * 10.0) / 1e6
        assert first["turns"][0]["signals"]["endpoint/cost"] == pytest.approx(each)
        assert second["spent"]["cost"] == pytest.approx(4 * each)
        assert second["spent"]["limits"] == {"max_requests": 4}
        end_process()
        third = talk.say(AGAIN)
        assert (third["status"], third["messages"], third["reward"]) == ("error", [], None)
        assert "budget.max_requests is 4, and 4 is used; raise it" in third["error"]
        write_options(teacher, max_requests=5, **prices)
        fourth = talk.say()
        assert fourth["status"] == "done" and fourth["spent"]["requests"] == len(teacher.requests) == 5


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ((404, b"no such model"), "check its name and base_url"),
        ((401, KEY.encode()), "(key sent: TEACHER_KEY)"),
        ((200, b"<html>"), "did not return a chat completion"),
        ((503, b"busy"), "status 503"),
    ],
)
def test_an_error_of_the_endpoint_keeps_the_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: tuple[int, bytes], says: str
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    failures = [None, failure, None]
    with teaching(fails=lambda number, question: dict(enumerate(failures)).get(number)) as teacher:
        talk = Talk(write_options(teacher, api_key_env="TEACHER_KEY"), folder)
        answer = talk.say()
        assert [message["role"] for message in answer["messages"]] == ["assistant", "tool"]
        assert answer["status"] == "error" and says in answer["error"] and "\n" not in answer["error"]
        rest = talk.say()  # answers from where it failed
        assert rest["status"] == "done" and rest["reward"] == 1.0 and len(rest["turns"]) == 2
    for shown in (talk.opened, answer, rest, talk.told):
        assert KEY not in json.dumps(shown)
    assert talk.opened["endpoint"]["key"] == "TEACHER_KEY"


def test_a_missing_key_and_an_endpoint_that_is_down(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with teaching() as teacher:
        name = write_options(teacher, api_key_env="TEACHER_KEY")
        with pytest.raises(ValueError, match="TEACHER_KEY"):
            Talk(name, folder)
        assert not playing._conversations
        talk = Talk(write_options(teacher), folder)
    answer = talk.say()
    assert answer["status"] == "error" and "could not be reached" in answer["error"]


def test_a_stop_does_not_wait_for_the_endpoint(folder: Path) -> None:
    held = threading.Event()
    with teaching(fails=lambda number, question: held.wait() and None) as teacher:
        talk = Talk(teacher.name(), folder)
        thread = threading.Thread(target=lambda: talk.told.append(talk.say()))
        thread.start()
        wait_until(lambda: bool(teacher.requests))
        Path(talk.given["stop"]).touch()
        thread.join()
        held.set()
    assert (talk.told[-1]["status"], talk.told[-1]["messages"]) == ("stopped", [])


def test_options_that_fix_a_setting_hide_it(folder: Path) -> None:
    with teaching() as teacher:
        fixed = {"temperature": 0.1, "max_tokens": None, "max_completion_tokens": 9}
        about = Talk(write_options(teacher, options=fixed), folder).opened["endpoint"]
    assert about["ignored"] == ["seed", "temperature", "max tokens"]
    assert sum("the endpoint's options set it" in note for note in about["notes"]) == 2


# the page


@pytest.fixture
def page(folder: Path) -> Iterator[Served]:
    with serving(folder / "runs", endpoints=["gemini:flash"]) as served:
        yield served


def test_only_endpoints_of_the_user_are_contacted(
    page: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    with teaching() as teacher:
        write_options(teacher, api_key_env="TEACHER_KEY")
        Path("run.yaml").write_text("model: {name: builtin:tiny}\n")
        Path("broken.yaml").write_text("model: openai:m\nbase_ulr: x\n")
        Path("other").mkdir()
        Path("other/hidden.yaml").write_text(Path("teacher.yaml").read_text())
        rows = {row["name"]: row["what"] for row in page.get("/api/play")["models"]}
        assert rows == {
            "builtin:tiny": "built in, untrained",
            "gemini:flash": "endpoint, flash at generativelanguage.googleapis.com, key GEMINI_API_KEY",
            "broken.yaml": "endpoint, invalid options",
            "teacher.yaml": f"endpoint, teacher at {teacher.url.split('/')[2]}, key TEACHER_KEY",
        }
        for typed in (teacher.name(), "openai:gpt", "other/hidden.yaml", "./teacher.yaml", "run.yaml"):
            assert page.send("/api/play", model=typed).status_code == 404, typed
        assert not teacher.requests


def test_an_endpoint_is_named_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is not an endpoint"):
        ui.ui(endpoint=["gpt-9"])
    Path("t.yaml").write_text(f"model: m\nbase_url: http://127.0.0.1:1/v1\napi_key_env: {KEY}\n")
    with pytest.raises(ValueError, match="not the key itself") as error:
        ui.ui(endpoint=["t.yaml"])
    assert KEY not in str(error.value)
