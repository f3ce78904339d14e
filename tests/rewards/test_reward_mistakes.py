"""Mistakes in rewards and in what a config says of them: told by file and line, all at once, in words that help."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import Echo, rollout
from tests.kits.run import Offering, Parity, go_on, small, train
from TrainingFactory.assembly.rewards import check_reward, close_reward, make_reward
from TrainingFactory.common.options import OptionError, make_from
from TrainingFactory.config import ConfigError, TrainingConfig, load_config
from TrainingFactory.evaluation.rollouts import Rollouts
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.rewards.combined import Combined
from TrainingFactory.rewards.loading import find_callable
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.types import Reward, Task

FILE = """\
import sys
from TrainingFactory.types import Reward
def deep(episode):
    return {}["missing"]
def raises(episode):
    return deep(episode)
async def later(trajectory):
    return deep(trajectory)
def together(episodes):
    return deep(episodes)
def columns(completions, **rest):
    return deep(completions)
def leaves(episode):
    sys.exit(3)
def rule(trajectory, turn):
    return deep(trajectory)
def parts(episode):
    return Reward(1.0, parts={"right": "yes"})
def wants(completions, nosuch):
    return [1.0 for _ in completions]
class Judge:
    def __call__(self, episode):
        return deep(episode)
judge = Judge()
three = 3
def asks(trajectory, turn):
    return turn == 0
def two(a, b):
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FILE)
    return path


def error_of(section: Any, **options: Any) -> str:
    reward = make_reward(TrainingConfig(reward=section))
    [[played]] = rollout(reward=reward, **options)
    asyncio.run(close_reward(reward))
    assert played.reward is None
    return str(played.error)


def function(target: str, **options: Any) -> dict[str, Any]:
    return {"type": "function", "options": {"function": target} | options}


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("raises", "raises"),
        ("later", "later"),
        ("columns", "columns"),
        ("judge", "Judge.__call__"),
    ],
)
@pytest.mark.parametrize("processes", [0, 1])
def test_an_exception_says_where_it_was_raised(file: Path, name: str, known_as: str, processes: int):
    if processes and name not in ("raises", "columns"):
        return  # the shapes are the same there, and a process takes its time
    section = function(f"{file}:{name}", processes=processes)
    told = f"the reward {known_as} (rewards.py:4) raised KeyError: 'missing'"
    assert error_of(section) == f"scoring failed: {told}"
    if not processes:
        assert error_of({"parts": {"mine": section}}) == f"scoring failed: part mine: {told}"


def test_so_do_groups_environments_and_rules_over_turns(file: Path):
    together = as_reward(find_callable(f"{file}:together"))
    for reward in (together, Combined({"a": (1.0, together)})):
        [group] = rollout(reward=reward, group_size=2)
        for played in group:
            assert str(played.error).endswith("the reward together (rewards.py:4) raised KeyError: 'missing'")
    deep = find_callable(f"{file}:deep")

    class Own(Echo):
        def reward(self, episode: Any) -> float:
            return deep(episode)

    told = "the reward Own.reward (rewards.py:4) raised KeyError: 'missing'"
    [[played]] = rollout(Own)
    assert played.error == f"scoring failed: {told}"
    [[played]] = rollout(Own, reward=Combined({"own": (1.0, "environment")}))
    assert played.error == f"scoring failed: part own: {told}"
    rules = ProcessReward(step_rewards={"mine": 1.0}, rules={"mine": find_callable(f"{file}:rule")})
    [[played]] = rollout(reward=rules)
    assert played.error == "scoring failed: the rule mine at turn 0 (rewards.py:4) raised KeyError: 'missing'"


def test_no_class_names_of_ours_in_what_users_read(file: Path):
    assert (
        error_of(function(f"{file}:leaves"))
        == "scoring failed: the reward leaves (rewards.py:14) tried to end the program"
    )
    told = error_of({"parts": {"mine": function(f"{file}:leaves", processes=1)}})
    assert "tried to end the program" in told and not any(
        name in told for name in ("Unscored", "BrokeOff", "WorkersDown", str(file.parent))
    )
    told = error_of({"type": "rule_based", "options": {"rule": "numeric"}})
    assert "its answer 'ok' is not one number" in told and "Error" not in told
    assert "as part right; " in error_of(function(f"{file}:parts"))


def problems(path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as told:
        check_reward(load_config(path, overrides))
    return [str(problem) for problem in told.value.problems]


def test_all_mistakes_at_once_with_their_lines(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "reward:\n"
        "  parts:\n"
        "    answer:\n"
        "      type: rule_based\n"
        "      weight: x\n"
        "    form: {type: rule_based, options: {rule: numerc}}\n"
        "    steps:\n"
        "      type: process_reward\n"
        "      step_rewards:\n"
        "        corect_tool: 0.5\n"
        "        clear_resoning: 0.5\n"
        "      options:\n"
        "        outcome: {rule: f1, extrct: boxed}\n"
        "    mine:\n"
        "      type: function\n"
        "      options:\n"
        "        functon: rewards.py:score\n"
        "        timout: 3\n"
    )
    found = problems(path, "reward.parts.form.step_rewards={correct_tool: 1.0}")
    starts = [
        "5: reward.parts.answer.weight: must be",
        "6: reward.parts.form.options.rule: must be one of",
        "10: reward.parts.steps.step_rewards.corect_tool: must be one of",
        "11: reward.parts.steps.step_rewards.clear_resoning: must be one of",
        "13: reward.parts.steps.options.outcome.extrct: is not an option of rule f1; did you mean extract?",
        "17: reward.parts.mine.options.functon: ",
        "18: reward.parts.mine.options.timout: ",
    ]
    assert [text[: len(str(path)) + 1 + len(start)] for text, start in zip(found, starts, strict=False)] == [
        f"{path}:{start}" for start in starts
    ]
    assert found[len(starts) :] == [
        "command line: reward.parts.form.step_rewards: is for reward.parts.form.type=process_reward; "
        "reward.parts.form.type is rule_based"
    ]


def test_a_wrong_option_is_told_by_its_own_key(tmp_path: Path):
    [text] = problems(None, "reward.type=function", "reward.options={function: a.py, timeout: x}")
    assert text.startswith("command line: reward.options.timeout: must be a valid number (got ")
    secret = "sk-0123456789abcdef"
    [text] = problems(None, "reward.type=rule_based", f"reward.options.rule={secret}")
    assert secret not in text


def of(kind: str, **options: Any) -> dict[str, Any]:
    return {"type": kind, "options": options}


def rule(name: Any, **options: Any) -> dict[str, Any]:
    return of("rule_based", rule=name, **options)


def verified(name: str, **options: Any) -> dict[str, Any]:
    return of("tool_verified", verify=name, **options)


PROCESS = {"type": "process_reward"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (rule("numerik"), r'reward.options.rule: must be one of auto, .*did you mean numeric\? \(got "numerik"\)'),
    (rule("normalized"), "did you mean normalised"),
    (rule(["numeric"]), "options.rule: must be one of"),
    (rule(None), "options.rule: must be one of"),
    (rule("numeric", tolerence=1), "options.tolerence: is not an option of rule numeric; did you mean tolerance"),
    (rule("numeric", tolerance=-1), r"options.tolerance: must be greater than or equal to 0 \(got -1\)"),
    (rule("numeric", tolerance="small"), r'tolerance: must be a valid number \(got "small"\)'),
    (rule("numeric", relative=float("nan")), r"relative: must be a finite number \(got nan\)"),
    (rule("auto", extract="box"), "extract: must be one of .*did you mean boxed"),
    (rule("length", soft=5, hard=9, extract="boxed"), r"extract: is not an option of rule length .*soft, hard"),
    (rule("length", soft=5), "hard: is missing; rule length needs it"),
    (rule("length", soft=5, hard=3), "soft is 5 and hard is 3"),
    (rule("length", soft=5, hard=9, unit="token"), "did you mean tokens"),
    (rule("choice", letters="abc"), r'letters: .*should match pattern .*\(got "abc"\)'),
    (rule("schema"), "schema: is missing; rule schema needs it"),
    (rule("format"), "needs a pattern"),
    (rule("format", require=["tool_calls"]), "did you mean tool_call"),
    (rule("format", require="json"), r'require: must be a valid list .*\(got "json"\)'),
    (rule("code_tests", trusting=1), r"trusting: must be true or false \(got 1\)"),
    (of("tool_verified"), "reward.options.verify: is missing; it must be one of sql_execution"),
    (verified("sql_execute"), "reward.options.verify: .*did you mean sql_execution"),
    (verified("sql_execution", tols="x"), "tols: is not an option of verifier sql_execution; did you mean tool"),
    (verified("sql_execution", timeout="1"), "timeout: must be a valid number"),
    (verified("sql_execution", max_rows=0), "max_rows: must be greater than or equal to 1"),
    (verified("sql_execution", tool=None), "tool: must be a valid string"),
    (PROCESS | {"step_rewards": {"corect_tool": 1.0}}, "reward.step_rewards.corect_tool: .*did you mean correct_tool"),
    (PROCESS | {"step_rewards": {"correct_tool": "high"}}, "reward.step_rewards.correct_tool: must be a valid number"),
    (PROCESS | {"outcome_weight": "1"}, "reward.outcome_weight: must be a valid number"),
    (of("process_reward", pay="twice"), r'options.pay: must be one of once, per_turn \(got "twice"\)'),
    (of("process_reward", cap=-1), r"options.cap: must be greater than or equal to 0 \(got -1\)"),
    (of("process_reward", claw_back=1), r"options.claw_back: must be true, false or wrong \(got 1\)"),
    (of("process_reward", clawback=True), "options.clawback: .*did you mean claw_back"),
    (of("process_reward", outcome={"rule": "f2"}), "options.outcome.rule: .*did you mean f1"),
    (of("process_reward", outcome=3), "options.outcome: a rule must be a name or a mapping"),
    (function("{}:deeep"), "reward.options: .*has no function 'deeep'; did you mean deep?"),
    (function("{}:zzzzzz"), "has no function 'zzzzzz'; it has deep, raises"),
    (function("{}:two"), "the reward two takes a, b; it must take one episode"),
    (function("{}:three"), r"is 3 \(int\); it must be a function"),
    (function("{}"), "rewards.py has no function ''; it has deep, raises"),
    (function("nowhere.py:score"), "there is no file nowhere.py"),
    (function("nowhere.rewards:score"), "No module named 'nowhere'"),
    (function("score"), "'score'; write rewards.py:score or package.module:function"),
    (of("function", function=3), "options.function: must be a valid string"),
    (of("function"), "options.function: is missing"),
    (function("{}:deep", procesess=2), "options.procesess: .* option of .*; did you mean processes?"),
    (function("{}:deep", processes=-1), "options.processes: must be"),
    (function("{}:deep", timeout=0), r"options.timeout: must be greater than 0 \(got 0\)"),
    (of("environment", rule="f1"), "reward.options.rule: is an option of another"),
    ({"type": "rule_based", "step_rewards": {"correct_tool": 1.0}}, "reward.step_rewards: is for reward.type=process"),
    (of("model_judge", api_key_env=None), "reward.model: is missing"),
    ({"type": "rule_based", "parts": {"a": {"type": "environment"}}}, "reward.type: cannot be combined with"),
    ({"parts": {"a": {"typ": "rule_based"}}}, "reward.parts.a.typ: unknown key; did you mean type"),
    ({"parts": {"a": {"type": "rule"}}}, "reward.parts.a.type: must be one of.*did you mean rule_based"),
    ({"parts": {"a": {"weight": "1"}}}, "reward.parts.a.weight: must be a valid number"),
    ({"parts": {"a": rule("x")}}, "reward.parts.a.options.rule: must be"),
    ({"parts": {"a/b": {"type": "environment"}}}, "reward.parts: .*'a/b'"),
    ({"max_unscored": 2.0}, "reward.max_unscored"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "says"), MISTAKES)
def test_what_is_wrong_is_told_at_the_start(file: Path, section: dict[str, Any], says: str):
    if isinstance(name := section.get("options", {}).get("function"), str):
        section = section | {"options": section["options"] | {"function": name.format(file)}}
    with pytest.raises(ValueError, match=says):
        check_reward(TrainingConfig(reward=section))


def test_a_file_that_cannot_be_loaded(tmp_path: Path):
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(ValueError, match=r"broken.py:2: ZeroDivisionError"):
        check_reward(TrainingConfig(reward=function(f"{tmp_path / 'broken.py'}:score")))


def test_a_process_reward_is_told_its_own_options():
    for options, told in (
        ({"step_rewards": [1]}, "step_rewards must be a valid dictionary"),
        ({"outcome": 3}, "reward outcome is 3"),
        ({"step_rewards": {"x": 1.0}, "rules": {"x": 3}}, "rules.x must be callable"),
    ):
        with pytest.raises(OptionError, match=told):
            make_from(ProcessReward, options, "process_reward")


def test_where_something_was_written_is_no_part_of_a_config(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("reward: rule_based\n")
    assert load_config(path) == TrainingConfig(reward="rule_based")


def test_a_part_says_which_reward_it_is(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("reward:\n  parts:\n    answer: {type: rule_based}\n    own: {weight: 2.0}\n")
    assert problems(path, "reward.parts.anwser.weight=2") == [
        f"{path}:4: reward.parts.own.type: is missing",
        "command line: reward.parts.anwser.type: is missing",
    ]


def test_a_type_beside_parts_is_refused_where_it_was_written(tmp_path: Path):
    parts = {"own": {"type": "environment", "weight": 2.0}}
    copied = TrainingConfig(reward={"parts": parts}).reward.model_copy(update={"options": {}})
    check_reward(TrainingConfig().model_copy(update={"reward": copied}))  # which says nothing of a type
    # The config of a run has all keys written, and goes on.
    config = small(tmp_path, training={"max_steps": 2}, reward={"parts": parts})
    train(config, "run")
    assert go_on(tmp_path / "run").state == "finished"


def test_texts_that_lead_to_the_mistake(file: Path):
    with pytest.raises(ConfigError, match="reward_fuction: unknown key; did you mean reward_function"):
        GRPOTrainer(environment=Parity, reward_fuction=lambda episode: 1.0)
    for wrong in (3, [find_callable(f"{file}:raises")]):
        with pytest.raises(ValueError, match=r"reward_function is .*give one callable.*Combined\(\{name"):
            GRPOTrainer(environment=Parity, reward_function=wrong)  # type: ignore[arg-type]


def test_rules_over_turns_from_a_file(file: Path):
    section = {
        "type": "process_reward",
        "step_rewards": {"first": 0.5},
        "options": {"rules": {"first": f"{file}:asks"}},
    }
    [[played]] = rollout(reward=make_reward(TrainingConfig(reward=section)))
    assert played.reward is not None and played.reward.steps == [0.5, 0.0, 0.0]
    section["options"] = {"rules": {"first": f"{file}:ask"}}
    with pytest.raises(ConfigError, match=r"^reward\.options\.rules\.first: .*did you mean asks"):
        check_reward(TrainingConfig(reward=section))


def test_what_tasks_and_environments_lack_is_found_before_sampling(tmp_path: Path, file: Path):
    wants = function(f"{file}:wants")
    lacks = r"the reward \w+ .*nosuch, which the tasks do not have"
    for section in (wants, {"parts": {"a": wants}}, function(f"{file}:wants", processes=1)):
        with pytest.raises(ValueError, match=lacks):
            train(small(tmp_path, reward=section), "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=lacks):
        Rollouts(TrainingConfig(environment_id="calculator", output_dir=str(tmp_path), reward=wants))
    verified = {"type": "tool_verified", "options": {"verify": "sql_execution"}}
    needs = r"the reward sql_execution needs the tool 'sql', but \w+ has calculator; add it under tools"
    for section in (verified, {"type": "process_reward", "options": {"outcome": {"rule": "sql_result"}}}):
        with pytest.raises(ValueError, match=needs.replace("sql_execution", r"sql_\w+")):
            train(small(tmp_path, reward=section), "run", environment=Offering)
    assert not (tmp_path / "run").exists()
    config = TrainingConfig(
        environment_id="calculator", output_dir=str(tmp_path), reward=verified, data={"count": 1}
    )
    with pytest.raises(ValueError, match=needs):
        Rollouts(config).run()


def test_a_database_in_the_task_needs_no_tool():
    rule = make_reward(
        TrainingConfig(reward={"type": "tool_verified", "options": {"verify": "sql_execution"}})
    )
    task = Task("a", "?", metadata={"database": "shop.db"})
    rule.check_environment(Echo(task), task)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="needs the tool 'sql'"):
        rule.check_environment(Echo(task), Task("a", "?"))  # type: ignore[union-attr]


def test_columns_that_some_tasks_have_are_enough():
    def wants(completions: list[str], level: list[Any]) -> list[Reward]:
        return []

    as_reward(wants).check_tasks([Task("a", "?"), Task("b", "?", metadata={"level": 1})])
    with pytest.raises(ValueError, match="level, which the tasks do not have"):
        as_reward(wants).check_tasks([Task("a", "?")])


def test_a_function_has_half_a_minute(file: Path):
    made = check_reward(TrainingConfig(reward=function(f"{file}:raises")))
    assert getattr(made, "timeout", None) == 30.0
