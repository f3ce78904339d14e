"""Play: what was sampled stays token by token while a conversation grows, an edited one is written anew, and what is
kept is read by our own loading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.kits.page import Served, serving
from tests.kits.registry import made_run
from tests.kits.warm import WARM
from TrainingFactory.agent_api.turns.responses import CHUNK_TOKENS
from TrainingFactory.data.examples import load_examples
from TrainingFactory.models import load_model
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.rollout.folding import Folding
from TrainingFactory.types import Completion, Message, ToolCall
from TrainingFactory.web import playing
from TrainingFactory.web.play_local import LocalAnswer, LocalConversation

HOMES = "from tests.kits.warm import Homes as Base\n\n\nclass Homes(Base):\n    pass\n"
NAME = "Nina"


def made_runs(folder: Path) -> Path:
    """A registered model that looks homes up, and a run whose environment that is."""
    runs = folder / "runs"
    (folder / "homes.py").write_text(HOMES)
    environment = {"environment_id": str(folder / "homes.py"), "max_turns": 3}
    made_run(runs, "homes", environment=environment, sampling={"max_tokens": 24}, data={"count": 5})
    Catalogue(get_registry_path(runs)).add("agent", WARM, {"folder": "warm"})
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_runs(tmp_path_factory.mktemp("play"))


class Conversation:
    """A conversation as the worker has it, without the page."""

    def __init__(
        self, runs: Path, folder: Path, environment: str | None = "run:homes", task: int | None = 0
    ) -> None:
        self.given: dict[str, Any] = {
            "model": "agent:1",
            "environment": environment,
            "task": None,
            "runs": str(runs),
            "spending": None,
        }
        self.given |= {"id": str(folder), "stop": str(folder / "stop")}
        self.opened = self.begin()
        if task is not None:
            self.given |= {"id": str(folder / "task"), "task": self.opened["tasks"][task]["id"]}
            self.opened = self.begin()
        self.messages: list[dict[str, Any]] = self.opened["messages"]
        self.told: list[dict[str, Any]] = []

    def begin(self) -> dict[str, Any]:
        return playing.begin(self.given, lambda _: None)

    def say(self, messages: list[dict[str, Any]], seed: int = 0, **more: Any) -> dict[str, Any]:
        self.told = []
        asked = {"messages": messages, "temperature": 0.0, "max_tokens": 24, "seed": seed} | more
        # As over the pipe: what comes and goes is JSON.
        return json.loads(
            json.dumps(playing.say(json.loads(json.dumps(self.given | asked)), self.told.append))
        )


@pytest.fixture
def talk(runs: Path, tmp_path: Path) -> Conversation:
    return Conversation(runs, tmp_path)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while playing._conversations:
        asyncio.run_coroutine_threadsafe(
            playing._conversations.popitem()[1].close(), playing._get_loop()
        ).result()


def local(talk: Conversation) -> LocalConversation:
    opened = playing._conversations[talk.given["id"]]
    assert isinstance(opened, LocalConversation)
    return opened


def turns(talk: Conversation) -> list[Any]:
    return [each.turn for each in local(talk).conversations.answered_nodes]


def test_a_conversation_grows_token_by_token(talk: Conversation) -> None:
    assert [each["role"] for each in talk.messages] == ["system", "user"] and talk.opened["tools"][0][
        "type"
    ] == "function"
    first = talk.say(talk.messages)
    assert [each["role"] for each in first["messages"]] == ["assistant", "tool", "assistant"]
    assert (first["status"], first["written"], first["anew"]) == ("done", "begun", False)
    kinds = [next(iter(each)) for each in talk.told]
    assert [kind for kind in kinds if kind != "text"] == ["message", "results", "message", "results"]
    is_right = first["messages"][-1]["content"].strip() == local(talk).task.answer
    assert first["reward"] == float(is_right) and first["unscored"] is None
    [result] = first["turns"][0]["tool_results"]
    assert (result["call"], result["ok"], result["content"]) == (
        "lookup",
        True,
        first["messages"][1]["content"],
    )
    second = talk.say([*talk.messages, *first["messages"], {"role": "user", "content": "Omar?"}])
    assert (second["written"], second["anew"]) == ("extended", False)
    sampled = turns(talk)
    for before, after in pairwise(sampled):
        so_far = before.prompt_ids + before.completion.token_ids
        assert after.prompt_ids[: len(so_far)] == so_far
    ids = [
        call["id"]
        for each in [*first["messages"], *second["messages"]]
        for call in each.get("tool_calls", ())
    ]
    assert len(set(ids)) == len(ids)


def test_an_edited_turn_is_written_anew_and_its_calls_are_made(talk: Conversation) -> None:
    first = talk.say(talk.messages)
    call, reply, answer = first["messages"]
    edited = [
        *talk.messages,
        call,
        reply,
        answer | {"content": "Kyoto"},
        {"role": "user", "content": "Sure?"},
    ]
    told = talk.say(edited)
    assert (told["written"], told["anew"]) == ("rewritten", True)
    function = {"name": "lookup", "arguments": json.dumps({"name": "Nobody"})}
    told = talk.say([*talk.messages, call | {"tool_calls": [call["tool_calls"][0] | {"function": function}]}])
    assert told["messages"][0]["content"] == "unknown" and told["messages"][1]["role"] == "assistant"
    with pytest.raises(ValueError, match="calls no tool"):
        talk.say([*talk.messages, {"role": "assistant", "content": "Kyoto"}])


def test_a_conversation_over_the_fold_limit_is_announced(talk: Conversation) -> None:
    """The page does not fold."""
    messages = [{"role": "user", "content": NAME}]
    assert talk.say(messages)["unfolded"] is None
    local(talk).served_model.folding = Folding("window", 1)
    assert talk.say(messages)["unfolded"] == 1
    local(talk).served_model.folding = None


def test_seeds_and_limits_and_stopping(talk: Conversation) -> None:
    hot = {"temperature": 1.5, "max_tokens": 2 * CHUNK_TOKENS + 3}
    told = [talk.say(talk.messages, seed, **hot)["messages"][0]["content"] for seed in (1, 1, 2)]
    assert told[0] == told[1] != told[2]
    short = talk.say(talk.messages, max_tokens=CHUNK_TOKENS - 3)
    assert short["status"] == "truncated" and short["turns"][0]["tokens"] == CHUNK_TOKENS - 3
    cut = talk.say([*talk.messages, *short["messages"], {"role": "user", "content": "Go on."}])
    assert cut["written"] == "cut"  # no stop token is made up
    Path(talk.given["stop"]).touch()
    stopped = talk.say(talk.messages)
    assert (
        stopped["status"] == "stopped"
        and stopped["reward"] is None
        and stopped["turns"][0]["tokens"] == CHUNK_TOKENS
    )


def test_a_conversation_that_the_process_does_not_know_any_more_goes_on(talk: Conversation) -> None:
    first = talk.say(talk.messages)
    closed = playing._conversations.pop(talk.given["id"])
    asyncio.run_coroutine_threadsafe(closed.close(), playing._get_loop()).result()
    told = talk.say([*talk.messages, *first["messages"], {"role": "user", "content": "Omar?"}])
    assert told["written"] == "rewritten" and told["anew"] and told["status"] != "error"


def test_words_of_ones_own_without_an_environment(runs: Path, tmp_path: Path) -> None:
    plain = Conversation(runs, tmp_path, None, None)
    assert (plain.messages, plain.opened["tools"], plain.opened["tasks"]) == ([], [], [])
    told = plain.say([{"role": "user", "content": "Nina?"}])
    assert told["messages"][0]["role"] == "assistant"


# the page

CALL = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
ASKED = [{"role": "user", "content": "Where?"}]
GOOD = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Oslo", "tool_call_id": "c", "name": "search"},
    {"role": "assistant", "content": "Oslo"},
]
BAD = [*ASKED, {"role": "assistant", "content": "Rome"}]
SPEC = {
    "name": "search",
    "description": "",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


@pytest.fixture
def page(runs: Path) -> Iterator[Served]:
    with serving(runs) as served:
        assert served.page is not None

        async def ask(kind: str, job: str, given: dict[str, Any], *_: Any) -> Any:
            tools = [{"type": "function", "function": SPEC}]
            more = {"messages": [], "tasks": [], "max_length": 9, "temperature": 1.0, "max_tokens": 9}
            return {"tools": tools} | more | {"asked": [kind, job]}

        served.page.pool.ask = ask  # type: ignore[method-assign]
        yield served


def test_only_what_is_listed_can_be_played(page: Served, runs: Path) -> None:
    found = page.get("/api/play")
    assert {"builtin:tiny", "agent:1", "homes", "homes@best", "homes@step-000001"} <= {
        m["name"] for m in found["models"]
    }
    assert {"environment:search", "run:homes"} <= {each["name"] for each in found["environments"]}
    for wrong in (
        {"model": str(WARM)},
        {"model": "../homes"},
        {"model": "homes", "environment": "run:../homes"},
    ):
        assert page.send("/api/play", **wrong).status_code == 404
    assert page.send("/api/play/nothing/stop").status_code == 404


def test_kept_rows_are_read_by_our_own_loading(page: Served) -> None:
    address = f"/api/play/{page.post('/api/play', model='agent:1')['id']}/keep"
    kept = page.post(address, kind="demonstration", messages=GOOD)
    kept = page.post(address, kind="demonstration", messages=GOOD)
    [first, _] = load_examples(kept["path"], "sft").usable
    assert kept["rows"] == 2 and kept["command"].endswith("play.sft.jsonl --for sft")
    assert [tool.name for tool in first.conversations[0].tools] == ["search"]
    kept = page.post(address, kind="preference", messages=GOOD, other=BAD, dataset="mine")
    [pair] = load_examples(kept["path"], "dpo").usable
    assert [each.messages[-1].content for each in pair.conversations] == ["Oslo", "Rome"]
    assert [each.context for each in pair.conversations] == [1, 1]
    for good in (True, False):
        kept = page.post(address, kind="verdict", messages=BAD, good=good)
    labels = [each.conversations[0].reward for each in load_examples(kept["path"], "kto").usable]
    assert [each and each.outcome for each in labels] == [1.0, 0.0]


def test_what_cannot_be_learned_from_is_not_kept(page: Served, runs: Path) -> None:
    address = f"/api/play/{page.post('/api/play', model='agent:1')['id']}/keep"
    unknown = [
        *ASKED,
        GOOD[1] | {"tool_calls": [CALL | {"function": {"name": "fly", "arguments": "{}"}}]},
        *GOOD[2:],
    ]
    for wrong in (
        {"kind": "demonstration", "messages": ASKED},
        {"kind": "demonstration", "messages": unknown},
        {"kind": "preference", "messages": GOOD, "other": GOOD},
    ):
        assert page.send(address, **wrong, dataset="none").status_code == 400
    assert page.send(address, kind="verdict", messages=BAD, dataset="../x").status_code == 422
    assert not list(runs.glob("datasets/none*"))


def test_results_carry_their_images(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that sees images plays `screen`; its calls are written here, because it has learned nothing."""
    loaded = load_model("builtin:tiny-vl")
    loaded.model.save_pretrained(tmp_path / "eyes")
    loaded.save_preprocessors(tmp_path / "eyes")
    Catalogue(get_registry_path(runs)).add("eyes", tmp_path / "eyes", {"folder": "eyes"})
    environment = {
        "environment_id": "screen",
        "options": {"kinds": ["reveal"], "tap": "point"},
        "max_turns": 1,
    }
    made_run(runs, "screens", environment=environment, sampling={"max_tokens": 8}, data={"count": 2})

    async def sample(self: Any, ids: list[int], number: int, max_tokens: int | None = None) -> Completion:
        call = Message("assistant", "", [ToolCall("tap", {"x": 100, "y": 100})])
        written = self.rules.chat.write(call, ids)
        return Completion(written, [0.0] * len(written), "stop")

    monkeypatch.setattr(LocalAnswer, "_sample_completion", sample)
    talk = Conversation.__new__(Conversation)
    talk.given = {"model": "eyes:1", "environment": "run:screens", "task": None, "runs": str(runs)}
    talk.given |= {"id": str(tmp_path), "stop": str(tmp_path / "stop"), "spending": None}
    talk.given |= {"id": str(tmp_path / "task"), "task": talk.begin()["tasks"][0]["id"]}
    answer = talk.say(talk.begin()["messages"])
    [results] = [row["results"] for row in talk.told if "results" in row]
    [part] = [part for part in results[0]["content"] if part["type"] == "image_url"]
    assert part["image_url"]["url"].startswith("data:image/png;base64,") and not results[0]["images"]
    assert answer["turns"][0]["tool_results"][0]["images"][0]["src"] == part["image_url"]["url"]
