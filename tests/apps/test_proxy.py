"""Programs that play at an endpoint: what they sample is kept token for token, and every end has a name."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.proxy import PROGRAM, REWARD, TALK, Talker, begin, ended, line, play, proxied
from tests.kits.run import Quiet
from tests.kits.serve import CHAT, WEATHER, events, joined, tiny_chat
from tests.kits.waiting import wait_until
from TrainingFactory.agent_api.conversations import Conversations
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.cli import show
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.samples import to_samples
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import (
    Completion,
    Message,
    Reward,
    SamplingParams,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
)

ASKED = Message("user", "Where is the tower?")
TOOL = ToolSpec("weather", "Of a city.")


def answered(conversations: Conversations, messages: list[Message], answer: Message, tools: Any = ()) -> Any:
    """Let a request be answered by these words; return how it was begun."""
    begun = conversations.make_node(messages, list(tools))
    ids = tiny_chat().write(answer, begun.turn.prompt_ids, list(tools))
    conversations.add_answer(begun, Completion(ids, [-0.5] * len(ids), "stop"), answer, None)  # type: ignore[arg-type]
    return begun


def test_a_request_that_continues_an_answer_keeps_its_tokens_and_all_others_say_why() -> None:
    chat = tiny_chat()
    kept = Conversations(chat)
    call = Message("assistant", tool_calls=[ToolCall("weather", {"city": "Rome", "days": 1}, "a")])
    result = Message("tool", "rain", tool_call_id="a", name="weather")
    first = answered(kept, [ASKED], call, [TOOL])
    second = answered(kept, [ASKED, call, result], Message("assistant", "Rain."), [TOOL])
    assert (first.prompt_reason, second.prompt_reason) == ("begun", "extended")
    turn = kept.answered_nodes[0].turn
    assert second.turn.prompt_ids == turn.prompt_ids + turn.completion.token_ids + chat.extend(turn, [result])

    def why(messages: list[Message], tools: Any = (TOOL,)) -> str:
        return kept.make_node(messages, list(tools)).prompt_reason

    def called(arguments: dict[str, Any]) -> list[Message]:
        return [ASKED, Message("assistant", tool_calls=[ToolCall("weather", arguments, "a")]), result]

    thought = Message("assistant", "Rain.", reasoning="made up")
    assert why([ASKED, call, result, Message("assistant", "Rain."), ASKED]) == "extended"
    assert why(called({"city": "Rome", "days": 1})) == "extended"
    assert why([ASKED, dataclasses.replace(call, name="boss"), result]) == "extended"
    assert why([dataclasses.replace(ASKED, name="boss"), call, result]) == "rewritten"
    assert (
        why(called({"days": 1, "city": "Rome"})) == why(called({"city": "Rome", "days": 1.0})) == "arguments"
    )
    assert why([ASKED, call, result], tools=()) == "tools"
    assert why([ASKED, call, Message("tool", "sun", tool_call_id="a", name="weather")]) == "extended"
    assert why([ASKED, call, result, Message("assistant", "Sun."), ASKED]) == "rewritten"
    assert why([ASKED, call, result, thought, ASKED]) == "rewritten"
    assert why([Message("user", "Else?")]) == why([ASKED]) == "begun"
    kept.answered_nodes[1].turn.completion.finish = "length"
    assert why([ASKED, call, result, Message("assistant", "Rain."), ASKED]) == "cut"


SYSTEM = Message("system", "Find places.")
LONG = Message("assistant", "The tower stands in the old town of Prague.")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([SYSTEM, ASKED, Message("user", "So far: rain.")], "rewritten"),
        ([SYSTEM, Message("user", f"{ASKED.content} So far: rain.")], "rewritten"),
        ([SYSTEM, Message("user", f"Summary: {LONG.content} Go on.")], "rewritten"),
        ([SYSTEM, Message("user", "Where is the river?")], "begun"),
        ([SYSTEM, ASKED], "begun"),
        (
            [Message("system", "Judge an answer."), Message("user", f"{ASKED.content} {LONG.content}")],
            "begun",
        ),
    ],
)
def test_a_summary_of_an_earlier_conversation_counts_as_rewritten(messages: list[Message], why: str) -> None:
    kept = Conversations(tiny_chat())
    answered(kept, [SYSTEM, ASKED], Message("assistant", "Rain."))
    answered(kept, [SYSTEM, ASKED, Message("assistant", "Rain."), Message("user", "Sure?")], LONG)
    assert kept.make_node(messages, []).prompt_reason == why


def test_rows_of_a_tree_train_every_sampled_token_once_and_end_with_the_last_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept, more = Conversations(tiny_chat()), Message("user", "And then?")
    one, two = Message("assistant", "One."), Message("assistant", "Two.")
    for asked, answer in (
        ([ASKED], one), ([more], two), ([ASKED, one, more], two), ([ASKED, one, ASKED], one),
        ([more, two, ASKED], Message("assistant", "The end.")),
    ):  # fmt: skip
        answered(kept, asked, answer)
    order = kept.number_rows()
    assert [each.turn.signals["proxy/row"] for each in order] == [1, 1, 2, 3, 3]
    assert order[-1].turn.message.content == "The end."
    assert order[0].turn.replies == order[1].replies == [more]
    trajectory = Trajectory(Task("t", "?"), "g", turns=[each.turn for each in order], reward=Reward(1.0))
    trajectory.tools = [ToolSpec("t", parameters={"properties": None})]
    show.print_episode(trajectory, "an episode")
    shown = [
        text.split()[0] for text in capsys.readouterr().out.splitlines() if text.startswith(("ass", "row"))
    ]
    assert shown == ["assistant", "assistant", "row", "assistant", "row", "assistant", "assistant"]
    rows = to_samples(trajectory, [1.0] * 5)
    sampled = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
    assert len(rows) == 3 and sum(sum(row.loss_mask) for row in rows) == sampled
    assert len({row.episode for row in rows}) == 1
    for row in rows:
        assert row.logprobs == [-0.5 if trained else 0.0 for trained in row.loss_mask]


def test_an_episode_of_three_rows_counts_once_in_the_baseline() -> None:
    def episode(rows: int, reward: float) -> Trajectory:
        kept = Conversations(tiny_chat())
        for number in range(rows):
            answered(kept, [Message("user", f"{number}?")], Message("assistant", "One."))
        turns = [each.turn for each in kept.number_rows()]
        return Trajectory(Task("t", "?"), "g", turns=turns, reward=Reward(reward))

    rows = GRPO(advantage="group").samples([episode(3, 1.0), episode(1, 0.0)])
    values = [
        {value for value, used in zip(row.advantages, row.loss_mask, strict=True) if used} for row in rows
    ]
    assert values == [{0.5}, {0.5}, {0.5}, {-0.5}]  # not 0.25 and -0.75, as four episodes would have


def test_streams_calls_and_choices_become_rows_of_the_file(tmp_path: Path) -> None:
    said = iter([Message("assistant", tool_calls=[ToolCall("weather", {"city": "Rome"})]), *["Rain."] * 4])
    sampler = Talker(lambda _: next(said))
    with proxied(sampler, tmp_path / "out.jsonl") as client, begin(client, task={"prompt": "?"}) as mine:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Now?"}], "tools": [WEATHER]}
        whole = joined(events(mine, body))
        calls = [
            {key: value for key, value in call.items() if key != "index"} for call in whole["tool_calls"]
        ]
        body["messages"] += [{"role": "assistant", "content": None, "tool_calls": calls}]
        body["messages"] += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"}]
        answer = mine.post(CHAT, json=body | {"logprobs": True, "n": 2, "model": "gpt", "seed": 1}).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["Rain."] * 2
        assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.25
        assert mine.post(REWARD, json={"reward": 0.5, "parts": {"speed": 2.0}}).json() == {"reward": 0.5}
        wait_until(lambda: client.post(CHAT, json=body, headers=dict(mine.headers)).status_code == 401)
        health = client.get("/health").json()
    assert {"extended": 2, "turns": 3, "rows": 2, "ignored": 1}.items() <= health.items()
    [trajectory] = ended(tmp_path / "out.jsonl")
    assert trajectory.reward == Reward(0.5, parts={"speed": 2.0}) and trajectory.status == "done"
    first, *others = trajectory.turns
    for turn in others:
        so_far = first.prompt_ids + first.completion.token_ids
        assert turn.prompt_ids[: len(so_far)] == so_far
    assert sampler.opened == sampler.closed == 2  # a branch has a session of its own


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"response_format": {"type": "json_object"}}, "invalid_value"),
        ({"tool_choice": "required"}, "invalid_value"),
        ({"messages": []}, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "context_length_exceeded"),
        ({"n": 3}, "max_turns"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_name(tmp_path: Path, change: Any, code: str) -> None:
    with proxied(Talker(lambda _: "Rome."), tmp_path / "out", max_turns=2) as client, begin(client) as mine:
        missing = mine.post("/v1/embeddings", json={}).json()["error"]["message"]
        assert (
            missing.startswith("POST /v1/embeddings: Not Found;") and "POST /v1/chat/completions, " in missing
        )
        refused = mine.post(CHAT, json={"messages": [{"role": "user", "content": "?"}]} | change)
        assert refused.status_code in (400, 403) and refused.json()["error"]["code"] == code


def test_a_key_opens_its_own_episode_and_nothing_else(tmp_path: Path) -> None:
    sampler, body = Talker(lambda _: "Rome."), {"messages": [{"role": "user", "content": "?"}]}
    with proxied(sampler, tmp_path / "out", token="the-token-of-all") as client:
        assert client.post("/v1/episodes", json={}).status_code == 401
        client.headers["authorization"] = "Bearer the-token-of-all"
        mine, other = begin(client, key="chosen-by-myself-1"), begin(client)
        assert client.post("/v1/episodes", json={"key": "chosen-by-myself-1"}).status_code == 409
        assert client.post("/v1/episodes", json={"key": "short"}).status_code == 400
        for key in ("", "Bearer", "Bearer nobody", "Bearer the-token-of-all", "Basic chosen-by-myself-1"):
            assert client.post(CHAT, json=body, headers={"authorization": key}).status_code == 401
        assert client.post(CHAT, json=body, headers={"host": "evil.example"}).status_code == 403
        assert not sampler.prompts
        by_header = {"x-tfactory-episode": "chosen-by-myself-1"}
        assert other.post(CHAT, json=body, headers=by_header).status_code == 200
        mine.post(REWARD, json={"reward": 1.0})
        assert other.post(REWARD, json={"reward": "1"}).status_code == 400
    mine.close()
    other.close()
    first, second = ended(tmp_path / "out")
    assert (len(first.turns), first.reward) == (1, Reward(1.0))
    assert "before a reward" in (second.error or "") and not second.turns


def test_requests_for_another_model_than_the_trained_one_are_not_recorded(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "?"}]}
    sampler = Talker(lambda _: "Rome.")
    with proxied(sampler, tmp_path / "out", trained_model="policy") as client, begin(client) as mine:
        for model in ("policy", "small"):
            assert mine.post(CHAT, json=body | {"model": model}).status_code == 200
        assert client.get("/health").json()["side"] == 1
        mine.post(REWARD, json={"reward": 1.0})
    [episode] = ended(tmp_path / "out")
    assert len(episode.turns) == 1


def test_a_client_that_hangs_up_is_counted_and_its_turn_is_thrown_away(tmp_path: Path) -> None:
    sampler, body = Talker(lambda _: "Rome."), {"messages": [{"role": "user", "content": "wait"}]}
    with proxied(sampler, tmp_path / "out") as client, begin(client) as mine:
        with mine.stream("POST", CHAT, json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()  # who drops it hangs up
            next(lines)
            wait_until(lambda: sampler.waiting == 1)
        wait_until(lambda: sampler.waiting == 0)
        sampler.gate.set()
        assert mine.post(CHAT, json=body).status_code == 200
        mine.post(REWARD, json={"reward": 1})
    [trajectory] = ended(tmp_path / "out")
    assert len(trajectory.turns) == 1 and trajectory.reward == Reward(1.0)


def test_turns_and_context_have_limits_that_a_program_sees(tmp_path: Path) -> None:
    code = TALK + (
        "try:\n    ask([say('c')])\nexcept urllib.error.HTTPError as error:\n"
        "    assert json.load(error)['error']['code'] == 'max_turns'\n"
    ) + line(reward=0)  # fmt: skip
    [trajectory], counts, _ = play(tmp_path, code, max_turns=2)
    assert (trajectory.status, trajectory.reward) == ("max_turns", Reward(0.0))
    assert counts["proxy/refused"] == 1.0
    [cut], _, _ = play(tmp_path, "ask([say('a')])\n" + line(reward=1), params=SamplingParams(max_tokens=1))
    assert (cut.status, cut.reward) == ("truncated", Reward(1.0))


def test_a_reward_of_ours_scores_what_the_program_said_last(tmp_path: Path) -> None:
    def right(episode: Any) -> float:
        return float(episode.trajectory.answer == episode.task.answer)

    [trajectory], _, _ = play(tmp_path, TALK, reward=right)
    assert trajectory.reward == Reward(1.0)


def test_calls_side_by_side_have_the_same_seeds_in_every_run(tmp_path: Path) -> None:
    code = (
        "from threading import Thread\n"
        "both = [Thread(target=ask, args=([say(text)],)) for text in sys.argv[1:] or 'ab']\n"
        "[each.start() for each in both]; [each.join() for each in both]\n" + line(reward=1)
    )
    first, second = Seen(), Seen()
    play(tmp_path, code, sampler=first)
    play(tmp_path, code.replace("'ab'", "'ba'"), sampler=second)
    assert first.seeds == second.seeds and len(set(first.seeds.values())) == 2
    both, alone = Seen(), Seen()  # of the same prompt the one with another setting keeps its seed, too
    play(tmp_path, "ask([say('a')], top_p=0.5); ask([say('a')])\n" + line(reward=1), sampler=both)
    play(tmp_path, "ask([say('a')])\n" + line(reward=1), sampler=alone)
    assert both.seeds == alone.seeds


class Seen(Talker):
    """Remembers the seed of each prompt."""

    def __init__(self) -> None:
        super().__init__(lambda _: "Rome")
        self.seeds: dict[str, int] = {}

    def session(self) -> Any:
        session = super().session()
        sample = session.sample

        async def noted(prompt: Any, params: SamplingParams) -> Completion:
            self.seeds[self.chat.decode(prompt)] = params.seed
            return await sample(prompt, params)

        session.sample = noted  # type: ignore[method-assign]
        return session


def test_a_run_trains_evaluates_and_samples_ahead_by_a_command(tmp_path: Path) -> None:
    code = TALK + 'print(json.dumps({"reward": len(first["content"] or "") % 3}))\n'
    (tmp_path / "agent.py").write_text(PROGRAM + code)
    rows = [json.dumps({"prompt": f"{number}?"}) + "\n" for number in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(rows))
    sections: dict[str, dict[str, Any]] = {
        "environment": {
            "command": shlex.join([sys.executable, "-S", str(tmp_path / "agent.py")]),
            "max_turns": 3,
        },
        "data": {
            "tasks": str(tmp_path / "tasks.jsonl"),
            "heldout": str(tmp_path / "tasks.jsonl"),
            "heldout_count": 2,
        },
        "training": {"max_steps": 2, "batch_size": 2, "group_size": 3, "eval_every": 2},
        "sampling": {"max_tokens": 30},
        "optimization": {"async_rollout": True},
        "logging": {"output_dir": str(tmp_path)},
    }
    report = Training(TrainingConfig(**sections), name="run", watcher=Quiet()).train()
    rows = [row for row in report.rows if "reward" in row]
    assert report.state == "finished" and len(rows) == 2
    assert sum(row["proxy/turns"] for row in rows) <= 24 and all(row["episodes/failed"] == 0 for row in rows)
    assert any("eval/proxy/turns" in row for row in report.rows)
    episodes = ended(tmp_path / "run" / "trajectories.jsonl")
    for first, second in (each.turns for each in episodes if len(each.turns) == 2):
        so_far = first.prompt_ids + first.completion.token_ids
        went_on = second.prompt_ids[: len(so_far)] == so_far
        assert went_on == (first.completion.finish == "stop")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["environment.command=no-such-program x"],
            "the program 'no-such-program' of environment.command",
        ),
        (["environment.command=python", "tools=[{name: calculator}]"], "combined with tools"),
        (["environment.command=python", "environment_id=search"], "combined with environment_id"),
        (["environment.command=python", "environment.options={env: [NOT_THERE]}"], "NOT_THERE"),
        (["environment.command=python", "environment.options={cmd: x}"], "cmd"),
        (["environment.command=python"], "data.tasks=FILE.jsonl"),
        (["environment.command=python 'x"], "environment.command=python 'x: No closing quotation"),
    ],
)
def test_a_wrong_command_is_said_before_anything_is_loaded(
    tfactory: Run, options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    status, _, err = tfactory("rollout", *options)
    assert status == 2 and text in " ".join(err.split())


def test_the_proxy_opens_to_other_machines_with_a_token_only(tfactory: Run) -> None:
    Path("config.yaml").write_text("model: {name: builtin:tiny}\n")
    status, _, err = tfactory("proxy", "config.yaml", "--host", "0.0.0.0")
    assert status == 2 and "--api-key-env" in err
