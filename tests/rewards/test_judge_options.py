"""What a judge is told, whose key it gets, whom it is shown, and what it may not be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.judge import KEY, finished, judging, scored
from TrainingFactory.rewards.judge.prompts import JudgePrompt, harmless
from TrainingFactory.rewards.model_judge import model_judge
from TrainingFactory.types import Trajectory


def key_of(**options: Any) -> str | None:
    judge = model_judge(model="big", **options)
    model: Any = judge.client.model
    return model.api_key_env


@pytest.fixture(autouse=True)
def keys(judge_key: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)


def test_a_key_goes_only_where_it_belongs(monkeypatch: pytest.MonkeyPatch):
    assert key_of(base_url="https://api.openai.com/v1") == "OPENAI_API_KEY"
    assert key_of(base_url="https://api.anthropic.com/v1", api="anthropic") == "ANTHROPIC_API_KEY"
    assert key_of(base_url="https://API.Anthropic.com/v1") == "ANTHROPIC_API_KEY"
    for address in (
        "http://api.openai.com/v1",  # in plain text
        "https://api.openai.com.example.org/v1",
        "https://example.org/api.openai.com",
        "http://10.0.0.7:8000/v1",
        "http://localhost:8000/v1",
    ):
        assert key_of(base_url=address) is None, address
        assert key_of(base_url=address, api="anthropic") is None, address
    monkeypatch.setenv("OWN_KEY", "sk-own")
    assert key_of(base_url="http://10.0.0.7:8000/v1", api_key_env="OWN_KEY") == "OWN_KEY"
    assert key_of(base_url="https://api.openai.com/v1", api_key_env=None) is None


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_server_of_ones_own_gets_no_key(api: str):
    with judging() as server:
        [reward] = scored(model_judge(base_url=server.url, model="big", api=api), finished())
    assert reward.outcome == 0.7
    sent = {name.lower() for name in server.headers[0]}
    assert not sent & {"authorization", "x-api-key"}


TOKENS = """
<s> </s> <bos> <EOS> <pad> <unk> <mask> <eot_id> <0x0A> <unused7> <sop> <|im_end|> <turn|> <｜User｜>
<｜end▁of▁sentence｜> <start_of_turn> <end_of_utterance> [INST] [/INST] [TOOL_CALLS] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS]
[gMASK] [SEP] [BOS] <<SYS>> <</SYS>> <think> </think> <tool_call> <tool_response> <fim-prefix> <image>
＜eos＞ ＜|im_end|＞ <<<END>>>
"""


@pytest.mark.parametrize("token", TOKENS.split())
def test_control_tokens_are_taken_apart(token: str):
    for around in ("{}", "x{}y", "<{}>", "[{}]", "{0}{0}"):
        text = around.format(token)
        found = harmless(text)
        assert token not in found, (text, found)
        assert found.replace(" ", "") == text  # nothing is lost
        assert harmless(found) == found


def test_markup_and_code_stay_as_they_are():
    for text in (
        "a << 2 and b >> 1, <b>bold</b>, x|y, x||y, <a href='x_y'>, <h1>, <div>, <my-tag>, </p>, <?xml?>, <!-- -->",
        "std::vector<int> v; List<Map<String, T>> m; cout << x << y; if (a<b && c>d) x[i] = y[2];",
        "[link](https://example.org) [1] [x] [a, b] array[i][j] arr[MAX - 1] [ERR 5]",
        "f(x) -> y, a <- b, x <= y >= z, 5 < 6 > 4, |x| > |y|",
    ):
        assert harmless(text) == text
    assert harmless(">>> print(1)") == "> > > print(1)"


def test_a_template_with_a_reference():
    assert JudgePrompt("{conversation} {reference}", reference=True).template == "{conversation} {reference}"
    assert JudgePrompt(reference=True).template.endswith("{reference}")


def test_what_was_done_by_calls_is_judged_where_it_is_shown():
    done = finished("", tool="the table is booked")  # a call, and an end without a word
    ended = Trajectory(done.task, "t", prompt=done.prompt, turns=done.turns[:1])  # an end by the call itself
    silent, cut = finished(""), finished("", tool="x", status="max_turns")
    with judging("Score: 9") as server:

        def rewarded(trajectory: Trajectory, **options: Any) -> float:
            [reward] = scored(model_judge(base_url=server.url, model="big", **options), trajectory)
            return reward.outcome

        for trajectory in (done, ended):
            assert rewarded(trajectory) == 0.9
            assert "calls look" in server.asked[-1]["messages"][-1]["content"]
        assert len(server.asked) == 2
        assert [rewarded(each) for each in (silent, cut)] == [0.0, 0.0]
        assert rewarded(done, template="{rubric} {answer}") == 0.0  # there is nothing to be seen in it
        assert len(server.asked) == 2
        assert rewarded(cut, judge_unfinished=True) == 0.9
