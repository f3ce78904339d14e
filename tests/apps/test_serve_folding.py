"""`tfactory serve` folds conversations that exceed the limit of the run's config."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.serve import CHAT, Script, events, live, post
from TrainingFactory.apps.serving.served import ServedModel
from TrainingFactory.apps.serving.server import ChatServer
from TrainingFactory.rollout.folding import Folding
from TrainingFactory.types import Message

LONG = "long " * 30


def conversation(turns: int) -> list[dict[str, Any]]:
    rows = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the tower?"}]
    for number in range(turns):
        rows.append({"role": "assistant", "content": f"answer {number}"})
        rows.append({"role": "user", "content": f"{LONG}{number}"})
    return rows


def serving(script: Script, folding: Folding) -> ChatServer:
    sampler: Any = script
    return ChatServer("script", ServedModel(script.chat, sampler, 4, folding=folding), queue=16)


def say(prompt: str) -> str:
    return "the tower is far" if prompt.rstrip().endswith("SUM?<|im_end|>\n<|im_start|>assistant") else "here"


def test_a_long_conversation_keeps_system_prompt_task_and_last_turns() -> None:
    script = Script(say)
    with live(serving(script, Folding("window", 200, keep_turns=1))) as client:
        short = post(client, {"messages": conversation(1)})
        answer = post(client, {"messages": conversation(5)})
        chunks = events(client, {"messages": conversation(5)})
        health = client.get("/health").json()
    assert "folded" not in short and answer["folded"] == "window" and chunks[0]["folded"] == "window"
    assert health["folded"] == 2
    kept = conversation(5)[:2] + conversation(5)[-2:]
    assert script.prompts[1] == script.chat.render(kept)
    assert answer["usage"]["prompt_tokens"] == len(script.prompts[1])


def test_a_summary_is_sampled_before_the_answer() -> None:
    script = Script(say)
    folding = Folding("summary", 200, template="SUM?", summary_tokens=20)
    with live(serving(script, folding)) as client:
        answer = post(client, {"messages": conversation(4)})
    assert answer["folded"] == "summary" and answer["choices"][0]["message"]["content"] == "here"
    asked, prompt = (script.chat.decode(ids) for ids in script.prompts)
    assert "SUM?" in asked and "Where is the tower?" in prompt and "the tower is far" in prompt
    assert LONG not in prompt and "Be brief." in prompt


@pytest.mark.parametrize("wrong", [lambda messages: "nothing", lambda messages: messages[:1]])
def test_a_wrong_fold_function_fails_the_request_with_the_reason(wrong: Any) -> None:
    script = Script(say)
    with live(serving(script, Folding("own", 200, function=wrong))) as client:
        answer = client.post(CHAT, json={"messages": conversation(4)})
    assert answer.status_code == 500 and "environment.context.function" in answer.text


def test_a_fold_function_that_raises_fails_the_request_with_the_reason() -> None:
    def broken(messages: list[Message]) -> list[Message]:
        raise KeyError("nothing")

    with live(serving(Script(say), Folding("own", 200, function=broken))) as client:
        answer = client.post(CHAT, json={"messages": conversation(4)})
    assert answer.status_code == 500
    assert "environment.context.function" in answer.text and "KeyError" in answer.text


def test_a_long_first_message_cannot_be_folded() -> None:
    script = Script(say)
    messages = [{"role": "user", "content": LONG * 3}]
    with live(serving(script, Folding("window", 60))) as client:
        assert "folded" not in post(client, {"messages": messages})
    assert script.prompts == [script.chat.render([Message("user", (LONG * 3))])]
