"""Environments that are written for RL-Factory: what their methods see, and what becomes of what they give."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.kits.judge import judge_at, judging
from tests.kits.run import Quiet
from TrainingFactory.assembly.environment import as_environment_factory, check_tools, make_environment
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.integrations.rl_factory import Env, MMEnv
from TrainingFactory.learning.policy import LocalPolicy
from TrainingFactory.models import chat_format
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.models.words import NAMES
from TrainingFactory.rewards.combined import Combined
from TrainingFactory.rollout import play
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.tools import tool
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.types import Message, Sample, Task, ToolCall, Trajectory

CHAT = chat_format(make_tiny_tokenizer())
ROW = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Where?"}],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Oslo"]}},
    "extra_info": {"index": 7},
}


@tool
def lookup(name: str) -> str:
    """Where somebody lives."""
    return f"<answer>Oslo</answer> says {name}"


CALL = Message("assistant", tool_calls=[ToolCall("lookup", {"name": "Ada"})])
SAID = [CALL, Message("assistant", "Oslo")]


def played(
    env: Env | type[Env], said: list[Message] = SAID, heldout: bool = False, **options: Any
) -> Trajectory:
    [task] = load_tasks([ROW])
    environment = as_environment_factory(env)(task, [lookup])
    key = EpisodeKey("eval-1" if heldout else 1, task.id, 0)
    return asyncio.run(play(environment, CHAT, said, key=key, **options))


def _rules(self: Any, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
    return [[1.0]]


def test_data_is_one_episode_in_the_shape_of_dataproto() -> None:
    seen: dict[str, Any] = {}

    class Search(Env):
        def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
            [item] = list(data)
            read = self._process_data(data_item=data[0], tokenizer=tokenizer)
            # As RL-Factory's own code takes the response out of an item.
            length = item.batch["prompts"].shape[-1]
            valid = item.batch["attention_mask"][length:].sum()
            decoded = tokenizer.decode(item.batch["responses"][:valid], skip_special_tokens=True)
            seen.update(data=data, item=item, read=read, decoded=decoded, if_val=if_val)
            return [[0.25] for _ in range(len(data))]

    found = played(Search)
    assert found.reward is not None and found.reward.outcome == 0.25 and found.reward.steps == []
    data, item, read = seen["data"], seen["item"], seen["read"]
    assert len(data) == 1 and data[0] is item and not seen["if_val"]
    assert data.non_tensor_batch["reward_model"][0]["ground_truth"]["target"] == ["Oslo"]
    assert (
        item.non_tensor_batch["reward_model"]["ground_truth"] == read["ground_truth"] == {"target": ["Oslo"]}
    )
    assert (read["data_source"], read["extra_info"]) == ("nq", {"index": 7})
    first, second = found.turns
    sampled = first.completion.token_ids + second.completion.token_ids
    assert item.batch["responses"].tolist() == sampled
    assert data.batch["responses"].shape == (1, len(sampled)) and item.batch["loss_mask"].tolist() == [
        1
    ] * len(sampled)
    assert item.batch["input_ids"].tolist() == first.prompt_ids + sampled
    # What the tool said is no answer of the model's, however the response is read.
    for text in (read["response_str"], seen["decoded"]):
        assert "lookup" in text and text.endswith("Oslo") and "<answer>" not in text and "says" not in text
    roles = [message["role"] for message in item.non_tensor_batch["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(KeyError, match=r"no 'step_mask'.*prompts, responses, input_ids"):
        data.batch["step_mask"]


def test_verified_results_steps_and_rules_make_one_reward() -> None:
    class Verified(Env):
        def __init__(self, config: Any) -> None:  # as older tutorials have it
            super().__init__(config)
            self.use_verify_tool = True

        def verify_tool(self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
            assert data_source == "nq" and extra_info == {"index": 7} and "says" not in solution_str
            by_map = self.tool_manager.tool_map["lookup"].call('{"name": "Bo"}')
            return [self.tool_manager.call_tool("lookup", {"name": "Al"}), by_map]

        def _compute_score_with_rules(self, data: Any, tokenizer: Any) -> Any:  # pyright: ignore  # without if_val, too
            truth = data[0].non_tensor_batch["reward_model"]["ground_truth"]
            assert [text.split()[-1] for text in truth["verified_results"]] == ["Al", "Bo"]
            return [[1.0]]

        def get_step_reward(self, responses: Any, format_score: float = 0.1) -> Any:
            kinds = [self.tool_manager.parse_response(response_content=text) for text in responses]
            return [math.nan if kind == "answer" else format_score * len(calls) for kind, calls in kinds]

    found = played(Verified)
    assert found.reward is not None, found.error
    assert (found.reward.outcome, found.reward.steps) == (1.0, [0.1, 0.0])
    assert found.reward.parts == {"rules": 1.0, "steps": 0.1}
    assert "verified_results" not in str(found.task)  # it belongs to the episode, not to the group's task
    measured = played(Verified, heldout=True)
    assert measured.reward is not None and measured.reward.steps == []


@pytest.mark.parametrize(
    ("gives", "reward", "error"),
    [
        ([[0.5]], (0.5, []), ""),
        ([0.5], (0.5, []), ""),
        (np.array([0.5]), (0.5, []), ""),
        ([[0.1, 0.9]], (0.9, [0.1, 0.0]), ""),
        (0.5, None, "0.5 .float.*one entry for each item"),
        ([[0.1, 0.2, 0.3]], (0.3, [0.1, 0.2]), ""),
        ([[0.1, 0.2, 0.3, 0.4]], None, "4 numbers for an episode of 2 turns"),
        ([[math.nan]], None, "finite"),
        ([], None, "one entry for each item"),
    ],
)
def test_what_rules_give(gives: Any, reward: Any, error: str) -> None:
    class Rules(Env):
        def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
            return gives

    found = played(Rules)
    if reward is None:
        assert found.reward is None
        assert re.search(error, found.error or "")
    else:
        assert found.reward is not None and (found.reward.outcome, found.reward.steps) == reward


@pytest.mark.parametrize(
    ("verify", "error"),
    [
        (
            lambda *_: time.sleep(60),
            r"verify_tool took longer than 0.05 s \(environment.options.verify_timeout\)",
        ),
        (lambda *_: 1 / 0, r"ZeroDivisionError"),
        (lambda self, *_: self.tool_manager.get_tool("gone"), "no tool 'gone'.*: lookup"),
        (lambda self, *_: self.tool_manager.functions, "no 'functions'.*call_tool, acall_tool"),
    ],
)
def test_a_failed_verification_costs_its_own_episode(verify: Callable[..., Any], error: str) -> None:
    class Failing(Env):
        verify_timeout = 0.05

        def verify_tool(self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
            return verify(self, data_source)

        def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
            return [[1.0]]

    found = played(Failing)
    assert found.status == "done" and found.reward is None
    assert re.search(error, found.error or "")


def test_a_judge_is_asked_in_the_words_of_the_environment(judge_key: None) -> None:
    class Judged(Env):
        def verify_tool(self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
            return "checked"

        def _get_single_prompt_str(
            self,
            data_source: Any,
            solution_str: str,
            ground_truth: Any,
            extra_info: Any,
            reward_tokenizer: Any,
        ) -> str:
            text = f"{data_source}: is {solution_str!r} {ground_truth['target']}? {ground_truth['verified_results']}"
            messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": text}]
            return reward_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

        def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
            return [[0.5]]

    class Read(Judged):
        def _compute_single_score_with_reward_rollout_wg(
            self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any
        ) -> float:
            return float(solution_str.split()[-1]) / 5

    with judging("Score: 4") as server:
        judge = judge_at(server.url)
        both = Combined({"judge": (1.0, judge), "rules": (2.0, "environment")})
        one, other = played(Judged, reward=both), played(Read, reward=both)
        alone = played(Read, [Message("assistant", "Oslo")], reward=judge)
    assert one.reward is not None and one.reward.outcome == pytest.approx(0.4 + 1.0)
    assert other.reward is not None and other.reward.outcome == pytest.approx(0.8 + 1.0)
    assert alone.reward is not None and alone.reward.outcome == pytest.approx(0.8)
    system, user = server.asked[0]["messages"]
    assert system == {"role": "system", "content": "Judge."} and "checked" in user["content"]
    assert "Score: NUMBER" in user["content"] and "says" not in user["content"]
    assert "Score: NUMBER" not in server.asked[1]["messages"][1]["content"]  # it reads replies itself
    [task] = load_tasks([ROW])
    with pytest.raises(ValueError, match="Judged writes prompts for a judge, but the reward has none"):
        asyncio.run(check_tools(as_environment_factory(Judged), task, CHAT))


def test_an_own_step_answers_the_turns() -> None:
    seen: list[Any] = []

    class Stepping(Env):
        def step(self, responses: Any, tokenizer: Any = None) -> Any:
            seen.append(responses)
            found = super().step(responses, tokenizer)
            if found[1] == [True] and len(seen) < 3:  # asks once more
                return ["Are you sure?"], [False], [0], [0]
            return found

        def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
            return [[float(len(seen))]]

    found = played(Stepping, [CALL, Message("assistant", "Oslo"), Message("assistant", "Yes")])
    assert found.reward is not None and (found.status, found.reward.outcome) == ("done", 3.0), found.error
    called, asked, last = found.turns
    assert seen[0] == ['<tool_call>\n{"name": "lookup", "arguments": {"name": "Ada"}}\n</tool_call>']
    assert [(reply.role, reply.name, reply.content) for reply in called.replies] == [
        ("tool", "lookup", "<answer>Oslo</answer> says Ada")
    ]
    assert [result.ok for result in called.tool_results] == [True] and called.signals["is_tool"] == 1.0
    assert [(reply.role, reply.content) for reply in asked.replies] == [("user", "Are you sure?")]
    assert not last.replies

    class Wrong(Stepping):
        def step(self, responses: Any, tokenizer: Any = None) -> Any:
            return ""

    assert "four lists: next_obs, dones" in (played(Wrong).error or "")


def test_an_own_step_may_rewrite_what_the_model_wrote() -> None:
    class Stepping(Env):
        def step(self, responses: Any, tokenizer: Any = None) -> Any:
            return super().step([text.replace("Ada", "Bo") for text in responses], tokenizer)

        _compute_score_with_rules = _rules

    found = played(Stepping)
    assert found.turns[0].replies[0].content.endswith("says Bo"), found.error


def test_an_own_compute_score_gets_rules_and_steps() -> None:
    class Scored(Env):
        use_process_reward = True

        def get_step_reward(self, responses: Any, format_score: float = 0.1) -> Any:
            return [format_score if "lookup" in text else math.nan for text in responses]

        def compute_score(self, reward_rollout_wg: Any, *args: Any, **options: Any) -> Any:
            assert reward_rollout_wg is None
            return [
                [2 * value for value in scores] for scores in super().compute_score(None, *args, **options)
            ]

        _compute_score_with_rules = _rules

    found, measured = played(Scored), played(Scored, heldout=True)
    assert found.reward is not None and measured.reward is not None, found.error
    assert (found.reward.outcome, found.reward.steps) == (2.0, pytest.approx([0.2, 0.0]))
    assert (measured.reward.outcome, measured.reward.steps) == (2.0, [])


def test_an_own_score_of_a_judge_generates_with_the_judge_of_the_config(judge_key: None) -> None:
    """As RL-Factory's own method does it: prompts in tokens to a worker group, replies in tokens back."""
    replies: list[str] = []

    class Judged(Env):
        def _get_single_prompt_str(
            self, data_source, solution_str, ground_truth, extra_info, reward_tokenizer
        ):  # type: ignore[no-untyped-def]
            said = [{"role": "system", "content": "Judge."}, {"role": "user", "content": solution_str}]
            return reward_tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)

        def _compute_score_with_reward_rollout_wg(
            self, reward_rollout_wg: Any, reward_tokenizer: Any, data: Any
        ) -> Any:
            [[prompt]] = self.get_prompt_for_reward(reward_tokenizer, data)
            batch = reward_tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
            assert reward_rollout_wg.world_size == 1
            for item in reward_rollout_wg.generate_sequences(SimpleNamespace(batch=batch)):
                replies.append(reward_tokenizer.decode(item.batch["responses"], skip_special_tokens=True))
            return [[float(replies[-1].split()[-1]) / 8]]

    class Read(Judged):
        _compute_score_with_reward_rollout_wg = Env._compute_score_with_reward_rollout_wg

        def compute_score(self, reward_rollout_wg: Any, *args: Any, **options: Any) -> Any:
            return [[1 + value for [value] in super().compute_score(reward_rollout_wg, *args, **options)]]

        def _compute_single_score_with_reward_rollout_wg(
            self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any
        ) -> float:
            return float(solution_str.split()[-1])

    with judging("Score: 4") as server:
        one, other = (played(kind, reward=judge_at(server.url)) for kind in (Judged, Read))
    assert one.reward is not None and other.reward is not None, (one.error, other.error)
    assert (one.reward.outcome, other.reward.outcome, replies) == (0.5, 5.0, ["Score: 4"])
    assert [message["role"] for message in server.asked[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({}, "Mine .* _compute_score_with_rules, get_step_reward or"),
        ({"step": lambda self: None}, r"Mine.step\(\) .*signature.*responses, tokenizer"),
        ({"compute_score": _rules}, "compute_score.*signature.*reward_rollout_wg, reward_tokenizer"),
        ({"_compute_scores_with_rules": _rules}, "did you mean _compute_score_with_rules"),
        (
            {"_compute_score_with_rules": lambda self, data: 0},
            r"rules\(data\) .*signature.*data, tokenizer",
        ),
        (
            {"verify_tool": lambda self, text: 0},
            r"verify_tool\(text\).*solution_str, ground_truth, extra_info",
        ),
        ({"use_verify_tool": True}, "use_verify_tool is on, .* verify_tool"),
        ({"use_process_reward": True}, "use_process_reward is on, .* get_step_reward"),
        ({"_compute_single_score_with_reward_rollout_wg": lambda *_: 0}, "_get_single_prompt_str"),
        ({"__init__": lambda self, a, b, c: None}, r"\(a, b, c\) .*signature.* __init__"),
        (
            {"__init__": lambda self, config: config.missing},
            "AttributeError: environment.options has no 'missing'",
        ),
        ({"__init__": lambda self, config: setattr(self, "tool_manager", 1)}, "register_family"),
        ({"__init__": lambda self, config: self.tool_manager.x}, "self.tool_manager"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_when_it_is_made(members: dict[str, Any], error: str) -> None:
    rules = {} if not members else {"_compute_score_with_rules": _rules}
    with pytest.raises(ValueError, match=error):
        as_environment_factory(type("Mine", (Env,), rules | members))


def test_options_and_images_have_their_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"environment.options.config_path .*: tools=\[\{name"):
        as_environment_factory(
            type("Mine", (Env,), {"_compute_score_with_rules": _rules}), {"config_path": "mcp.pydata"}
        )
    own = type("Mine", (Env,), {"_compute_score_with_rules": _rules})({})
    with pytest.raises(ValueError, match="pass them to the object itself"):
        GRPOTrainer(
            environment=own, tasks=[Task("a", "?")], config=TrainingConfig(environment={"options": {"a": 1}})
        )
    with pytest.raises(ValueError, match=r"Mine inherits from MMEnv.* images"):
        type("Mine", (MMEnv,), {})
    path = tmp_path / "plain.py"
    path.write_text("from TrainingFactory.envs import ToolEnvironment\nclass Plain(ToolEnvironment): ...\n")
    config = TrainingConfig(environment={"environment_id": str(path), "options": {"a": 1}})
    with pytest.raises(ValueError, match=r"environment.options \(a\) are only for"):
        make_environment(config)


FILE = """
import torch
from TrainingFactory.integrations.rl_factory import Env


class MyEnv(Env):
    def __init__(self, config, centralized_actor=None):
        super().__init__(config, centralized_actor)
        self.use_verify_tool = True
        self.unit = config.unit

    def verify_tool(self, data_source, solution_str, ground_truth, extra_info):
        return len(solution_str)

    def get_step_reward(self, responses, format_score=0.1):
        return [format_score * len(text) for text in responses]

    def _compute_score_with_rules(self, data, tokenizer, if_val=False):
        scores = []
        for i in range(len(data)):
            found = self._process_data(data_item=data[i], tokenizer=tokenizer)
            right = found["ground_truth"]["target"][0] in found["response_str"]
            scores.append([right + self.unit * (found["ground_truth"]["verified_results"] % 5)])
        return scores
"""


def gains(pair: list[Trajectory]) -> np.ndarray:
    """Each member's outcome and the steps from each turn on, less the mean of both: [2, T]."""
    longest = max(len(each.turns) for each in pair)
    found = np.zeros((2, longest))
    for member, each in enumerate(pair):
        assert each.reward is not None
        for turn in range(longest):
            found[member, turn] = each.reward.outcome + sum(each.reward.steps[turn:])
    return found - found.mean(0)


def test_two_steps_of_grpo_on_rows_of_verl(
    tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules, verification and step rewards of a file reach the rows that are trained on, by turn."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text(FILE, encoding="utf-8")
    rows = [
        ROW | {"prompt": [{"role": "user", "content": f"{name}?"}], "extra_info": {"index": number}}
        for number, name in enumerate(NAMES[:4])
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    trained: list[Sample] = []
    step = LocalPolicy.step

    async def noted(self: LocalPolicy, samples: Any, number: int) -> Any:
        trained.extend(samples)
        return await step(self, samples, number)

    monkeypatch.setattr(LocalPolicy, "step", noted)
    options = {"unit": 2.0}
    GRPOTrainer(
        model=str(warm), tools=[lookup], tasks="train.parquet", max_steps=2, batch_size=2, group_size=2,
        environment={
            "environment_id": "my_env.py:MyEnv", "options": options, "max_turns": 2,
            "system_prompt": "Look up, then answer.",
        },
        sampling={"max_tokens": 24}, learning_rate=1e-4, output_dir="runs", name="a",
        watcher=Quiet(),
    ).train()  # fmt: skip
    episodes, tokenizer = list(load_trajectories("runs/a/trajectories.jsonl")), make_tiny_tokenizer()
    assert len(episodes) == 8 and any(len(each.turns) == 2 for each in episodes)
    for episode in episodes:
        texts = [
            tokenizer.decode(turn.completion.token_ids, skip_special_tokens=True) for turn in episode.turns
        ]
        text = "\n".join(texts)
        assert episode.reward is not None, episode.error
        assert episode.reward.outcome == ("Oslo" in text) + 2.0 * (len(text) % 5)
        assert episode.reward.steps == pytest.approx([0.1 * len(each) for each in texts])
        assert episode.task.answer == ["Oslo"]
    by_ids = {tuple(row.token_ids): row for row in trained}
    checked = 0
    for start in range(0, 8, 2):
        pair = episodes[start : start + 2]
        assert pair[0].group == pair[1].group
        for each, expected in zip(pair, gains(pair), strict=True):
            row = by_ids.get((*each.turns[-1].prompt_ids, *each.turns[-1].completion.token_ids))
            for turn, value in zip(each.turns, expected, strict=False):
                if row is None:
                    assert value == pytest.approx(0)  # a group of equals teaches nothing
                    continue
                begin, count = len(turn.prompt_ids), len(turn.completion.token_ids)
                assert row.advantages[begin : begin + count] == pytest.approx([value] * count)
                checked += 1
    assert checked >= 4


def test_an_object_from_python_and_one_episode_that_fails(tmp_path: Path) -> None:
    class Own(Env):
        def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
            number = int(data.batch["responses"].sum())
            self.left = getattr(self, "left", 0) + 1
            assert self.left == 1  # what a method leaves on itself belongs to its episode
            if number % 4 == 0:
                raise RuntimeError("away")
            return [[float(number % 3)]]

    trainer = GRPOTrainer(
        environment=Own({}), tasks=[Task(str(n), "Where?", "Oslo") for n in range(4)], max_steps=1, batch_size=4,
        group_size=4, sampling={"max_tokens": 4}, output_dir=str(tmp_path), name="a",
        watcher=Quiet(), reward={"max_unscored": 1.0},
    )  # fmt: skip
    trainer.train()
    found = [json.loads(line) for line in (tmp_path / "a" / "trajectories.jsonl").read_text().splitlines()]
    failed = [each["error"] for each in found if each["reward"] is None]
    assert len(found) == 16 and 0 < len(failed) < 16
    assert all("RuntimeError" in text and "away" in text for text in failed)
