from __future__ import annotations

import asyncio
import inspect
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_kit import Echo, call_text, rollout
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rewards.answers import without_reasoning
from TrainingFactory.rewards.rule_based import RULES, make_rule, rule_from_options
from TrainingFactory.rollout.scoring import Episode
from TrainingFactory.tools import tool
from TrainingFactory.tools.custom_tools import PythonTool, SqlTool
from TrainingFactory.types import Completion, Message, Reward, Status, Task, ToolCall, Trajectory, Turn

GSM8K = next(
    (
        path
        for root in Path(__file__).resolve().parents
        for path in [root / "shared/data/gsm8k"]
        if path.is_dir()
    ),
    None,
)


def turn(message: Message, *replies: Message) -> Turn:
    ids = list(range(10))
    return Turn([1], Completion(ids, [0.0] * len(ids), "stop"), message, list(replies))


def episode(
    text: str,
    answer: Any = "72",
    status: Status = "done",
    reasoning: str | None = None,
    before: tuple[Turn, ...] = (),
    **metadata: Any,
) -> Episode:
    task = Task("t1", "how many?", answer, metadata)
    last = turn(Message("assistant", text, reasoning=reasoning))
    environment = Echo(task)
    trajectory = Trajectory(task, "g", turns=[*before, last], status=status)
    return Episode(trajectory, environment, environment.executor)


def reward(rule: Any, *args: Any, **keywords: Any) -> Reward:
    made: Any = rule if callable(rule) else rule_from_options(rule)
    value: Any = made(episode(*args, **keywords))
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        value = asyncio.run(wait())
    assert isinstance(value, Reward)
    return value


def scored(rule: Any, *args: Any, **keywords: Any) -> float:
    return reward(rule, *args, **keywords).outcome


# What a well-known extractor takes from these texts is the right answer of each row; here it is worth nothing.
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final Answer: 5\nNo, wait.\nFinal Answer: 7", "5"),
        ("Therefore, she has 3 apples and 4 pears, total 7.", "3"),
        ("Final Answer: 48+24=72", "48"),
        ("Final Answer: 1/2", "1"),
        ("Final Answer: 1/2", "1/3"),
        ("Final Answer: .5", "5"),
        ("Final Answer: 1e3", "3"),
        ("Final Answer: 1e3", "1"),
        ("The total is 1,234", "234"),
        ("The result is 10-3", "10"),
        ("The result is 10-3", "3"),
        ("Final Answer: 50%", "5"),
        ("x" + "\n" * 50, "72"),
    ],
)
@pytest.mark.parametrize("rule", [{}, {"rule": "numeric"}, {"rule": "numeric", "extract": "last_number"}])
def test_wrong_answers_that_other_extractors_take(rule: dict[str, Any], text: str, answer: str):
    assert scored(rule, text, answer) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final Answer: 5\nNo, wait.\nFinal Answer: 7", "7"),
        ("Final Answer: 48+24=72", 72),
        ("Final Answer: 1/2", 0.5),
        ("Final Answer: .5", "1/2"),
        ("Final Answer: 1e3", "1000"),
        ("The total is 1,234", 1234),
        ("Final Answer: 50%", "0.5"),
        ("\\boxed{42}", "42"),
        ("$1,000.50", "1000.5"),
        ("**Final Answer:** 72", "72"),
        ("答案：42", "42"),
        ("答案是42", "42"),
        ("I computed 48/2 = 24.\n#### 72", "72"),
        ("first 24, then\nAnswer:\n\n72 clips", "72"),
        ("we get 24.\n<answer>\n 72 \n</answer>", "72"),
        ("It is \\boxed{\\frac{1}{2}}.", "0.5"),
        ("48 clips in April, 24 in May.\nSo the total is 72.", "72"),
        ("72\nHope that helps!", "72"),
        ("72", "She sold 48+24 = <<48+24=72>>72 clips.\n#### 72"),
        ("The answer is Paris.", "paris"),
        ("\\boxed{\\text{Paris}}", "Paris"),
        ("line one\nline 2", "Line one\nline 2"),
        ("**New York**", ["NYC", "new  york"]),
        ("True", True),
        ("Answer: 12 Angry Men", "12 Angry Men"),
    ],
)
def test_the_plain_rule_takes_right_answers_in_many_notations(text: str, answer: Any):
    assert reward({}, text, answer) == Reward(1.0, [], {"auto": 1.0})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12 Angry Men"),
        ("Answer: 72 or 48", "72"),
        ("Answer: not 72", "72"),
        ("The answer is 72 or maybe seventy-three", "72"),
        ("48, 24, 72", "72"),
        ("\\boxed{48}\nThe answer is 72 \\boxed{48}", "72"),
        ("<answer>72", "7"),
        ("1 2 3 4 5 6 7", "7"),
        ("#### Step 72\nthen add\n5 more", "72"),
        ("The answer is not Paris", "Paris"),
        ("Paris or London", "Paris"),
        ("Answer: 72π", "72"),
        ("Answer: >= 72", "72"),
        ("", "72"),
        ("   ", "72"),
        ("False", True),
        ("1", True),
    ],
)
def test_the_plain_rule_refuses_wrong_and_hedged_answers(text: str, answer: Any):
    assert scored({}, text, answer) == 0.0


def test_only_the_models_own_final_text_counts():
    told = turn(Message("assistant", "", [ToolCall("echo")]), Message("tool", "Answer: 72"))
    assert scored({}, "see above", before=(told,)) == 0.0
    assert scored({}, "", before=(turn(Message("assistant", "Answer: 72")),)) == 0.0

    def say(session: int, number: int, prompt: str) -> str:
        return call_text("echo", text="Answer: ok") if number == 0 else "Answer: what the tool said"

    [[played]] = rollout(say=say, reward=make_rule())
    assert played.turns[0].tool_results[0].content == "Answer: ok" and played.reward == Reward(
        0.0, [], {"auto": 0.0}
    )
    [[played]] = rollout(reward=make_rule())
    assert played.reward == Reward(1.0, [], {"auto": 1.0})


def test_reasoning_counts_only_if_asked():
    assert scored({}, "I am sure.", reasoning="Answer: 72") == 0.0
    assert scored({"reasoning": True}, "I am sure.", reasoning="Answer: 72") == 1.0
    assert scored({"reasoning": True}, "I am", status="truncated", reasoning="Answer: 72") == 0.0
    for text in (
        "<think>Answer: 72</think>",
        "<think>Answer: 72",
        "Answer: 72</think> no idea",
        "</think>" * 9000,
    ):
        assert scored({}, text) == 0.0, text[:40]
    assert scored({}, "<think>48</think>Answer: 72<think>Answer: 5") == 1.0
    assert without_reasoning("a<think>b</think>c<think>d</think>e") == "ace"


def test_an_unfinished_episode_has_failed_and_a_broken_one_cannot_be_scored():
    statuses: tuple[Status, ...] = ("truncated", "max_turns")
    for name in sorted(RULES.keys() - {"math"}):
        rule = make_rule(name, **NEEDED.get(name, {}))
        for status in statuses:
            assert scored(rule, "72", ANSWERS.get(name, "72"), status=status, tests=["pass"]) == 0.0, name
        with pytest.raises(ValueError, match="status tool_failure"):
            scored(rule, "72", ANSWERS.get(name, "72"), status="tool_failure")


NEEDED: dict[str, dict[str, Any]] = {
    "schema": {"schema": {"type": "integer"}},
    "format": {"require": ["marked_answer"]},
    "length": {"soft": 10, "hard": 20},
    "sql_result": {"tool": "echo"},
}
ANSWERS: dict[str, Any] = {"choice": "B"}


@pytest.mark.parametrize("answer", [None, "", "  ", []])
def test_a_task_without_an_answer_cannot_be_scored(answer: Any):
    valid = {"json"} if answer == [] else set()  # an empty list is a value
    for name in sorted(RULES.keys() - {"math", "schema", "format", "length"} - valid):
        for status in ("done", "truncated"):
            with pytest.raises(ValueError, match=r"task t1.*answer"):
                scored(name, "72", answer, status=status)
    [[played]] = rollout(reward=lambda one: make_rule("numeric")(one))
    assert played.reward is None and "task a: its answer 'ok' is not one number" in str(played.error)
    with pytest.raises(ValueError, match="task t1"):
        scored("numeric", "72", float("nan"))


def test_where_the_answer_is_looked_for():
    text = "First \\boxed{1}.\n<answer>2</answer>\nTotal: 3\n#### 4\nAnswer: 5\n6 apples"
    for options, answer in [
        ({"extract": "boxed"}, "1"),
        ({"extract": "tag"}, "2"),
        ({"extract": "marker", "marker": "total:"}, "3"),
        ({"extract": "marker", "marker": ["Total:", "####"]}, "4"),
        ({"extract": "marker"}, "5"),
        ({"extract": "last_line"}, "6"),
        ({"extract": "last_number"}, "6"),
        ({"marker": "Sum:"}, "6"),  # not there: the last line
        ({}, "5"),
    ]:
        for wanted in "123456":
            assert scored({"rule": "numeric", **options}, text, wanted) == float(wanted == answer), (
                options,
                wanted,
            )
    assert scored({"rule": "numeric", "extract": "whole"}, text, "6") == 0.0
    assert scored({"extract": "tag", "tag": "final"}, "<FINAL>72</FINAL>") == 1.0
    for missing in ("boxed", "tag", "marker"):
        assert scored({"extract": missing}, "72") == 0.0
    assert scored({"extract": "boxed"}, "\\boxed{72") == 0.0 and scored({}, "\\boxed{{72}}") == 1.0
    assert scored({}, "\\boxed{" * 20_000 + "72") == 0.0


def test_exact_and_normalised():
    assert scored("exact", " Paris\n", "Paris") == 1.0 and scored("exact", "paris", "Paris") == 0.0
    assert scored("exact", "Answer: Paris", "Paris") == 0.0
    assert scored({"rule": "exact", "extract": "marker"}, "Answer: Paris", "Paris") == 1.0
    assert scored("normalised", "“PARIS”.", "paris") == 1.0
    for wrong in ("Paris, Texas", "par is", "3.5", ""):
        assert scored("normalised", wrong, "35" if wrong == "3.5" else "Paris") == 0.0


def test_numeric_options():
    assert scored({"rule": "numeric", "tolerance": 0.5}, "72.4") == 1.0 and scored("numeric", "72.4") == 0.0
    assert scored({"rule": "numeric", "relative": 0.1}, "66") == 1.0
    assert scored({"rule": "numeric", "decimal_comma": True}, "3,14", "3.14") == 1.0
    assert scored({"rule": "numeric", "percent": "strict"}, "72%") == 0.0 and scored("numeric", "72%") == 1.0
    assert scored("numeric", "72 kg", "72 km") == 0.0
    assert scored({"rule": "numeric", "units": False}, "72 kg", "72 km") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "(B)",
        "b",
        "B.",
        "**B**",
        "Answer: B",
        "The answer is (B).",
        "\\boxed{B}",
        "\\boxed{\\text{B}}",
        "option B",
        "B) Rome",
        "B. Rome",
        "B: Rome",
        "(B) Rome",
        "Rome",
        "I weighed them.\nB",
        "Answer: B - Rome",
        "B, of course",
    ],
)
def test_choices(text: str):
    choices = ["A dog", "Rome", "Vitamin A", "All"]
    assert scored("choice", text, "B", choices=choices) == 1.0
    assert scored("choice", text, 1, choices=choices) == 1.0
    assert scored("choice", text, "A", choices=choices) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "A dog is best",
        "A, B",
        "A or B",
        "A/B/C/D",
        "(A)(B)(C)(D)",
        "AB",
        "not A",
        "Answer: A or B",
        "A. or C",
        "A and B",
        *("A: Rome", "A. Rome or B.", "A B C D", "", "Answer:", "E", "1", "A) x (B) y"),
    ],
)
def test_no_choice(text: str):
    assert scored({"rule": "choice", "letters": "ABCD"}, text, "A", choices=["A dog", "Rome"]) == 0.0


def test_a_choice_needs_a_letter_as_reference():
    for answer in ("Z9", 12, True, "Rome"):
        with pytest.raises(ValueError, match="task t1: its answer"):
            scored("choice", "A", answer)


def test_contains_finds_whole_words_only():
    assert scored("contains", "It is the old town of Paris, France.", "Paris") == 1.0
    assert scored("contains", "a party", "art") == 0.0
    for wrong in ("172", "72,000", "7.72", "72.5"):
        assert scored("contains", wrong, "72") == 0.0
    assert scored("contains", "Rome and Paris", ["Oslo", "Paris"]) == 1.0
    every = {"rule": "contains", "every": True}
    assert scored(every, "Rome and Paris", ["Paris", "Rome"]) == 1.0
    assert scored(every, "Rome and Paris", ["Paris", "Oslo"]) == 0.0


def test_squad_scores():
    assert scored("em", "The Eiffel Tower!", "eiffel tower") == 1.0
    assert scored("em", "Eiffel", "eiffel tower") == 0.0
    assert scored("em", "The", "A") == 0.0 and scored("em", "...", "!") == 0.0
    assert scored("f1", "the big Eiffel Tower", "Eiffel Tower") == pytest.approx(
        0.8
    )  # 2 of 3 and 2 of 2 words
    assert scored("f1", "Tower tower tower", "Eiffel Tower") == pytest.approx(0.4)
    assert scored("f1", "yes it is", "yes") == 0.0 and scored("f1", "Yes.", "yes") == 1.0
    assert scored("f1", "London", ["Paris", "London England"]) == pytest.approx(2 / 3)
    assert scored("f1", "Rome", "Paris") == 0.0


def test_json():
    right = {"city": "Oslo", "n": 2, "tags": ["a", "b"]}
    assert scored("json", json.dumps(right), right) == 1.0
    assert scored("json", f"Here:\n```json\n{json.dumps(right)}\n```", json.dumps(right)) == 1.0
    assert scored("json", '{"n": 2.0, "city": "Oslo", "tags": ["a", "b"]}', right) == 1.0
    for wrong in (
        '{"city": "Oslo", "n": true, "tags": ["a", "b"]}',
        '{"city": "Oslo", "n": "2", "tags": ["a", "b"]}',
        '{"city": "Oslo", "n": 3, "n": 2, "tags": ["a", "b"]}',
        '{"city": "Oslo", "n": 2, "tags": ["b", "a"]}',
        '{"city": "Oslo", "n": 2, "tags": ["a", "b"], "x": 1}',
        '{"city": "Oslo", "n": NaN}',
        "[" * 100_000,
        "9" * 10_000,
        "nothing",
    ):
        assert scored("json", wrong, right) == 0.0, wrong[:60]
    assert scored("json", "1", True) == 0.0 and scored("json", "true", True) == 1.0
    loose = {"rule": "json", "extra_keys": True, "ordered": False}
    assert scored(loose, '{"city": "Oslo", "n": 2, "tags": ["b", "a"], "x": 1}', right) == 1.0
    assert scored(loose, '{"city": "Oslo", "n": 2, "tags": ["b", "b"]}', right) == 0.0
    assert scored({"rule": "json", "partial": True}, '{"city": "Oslo", "n": 3}', right) == pytest.approx(
        1 / 3
    )
    spam = json.dumps({str(number): 0 for number in range(97)} | right)
    assert scored({"rule": "json", "partial": True}, spam, right) == pytest.approx(3 / 100)
    with pytest.raises(ValueError, match="task t1: its answer is no JSON"):
        scored("json", "1", "{broken")


def test_schema():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    rule = {"rule": "schema", "schema": schema}
    assert scored(rule, '{"n": 1}', None) == 1.0
    for wrong in ('{"n": "1"}', "{}", "[1]", "n = 1", ""):
        assert scored(rule, wrong, None) == 0.0
    for bad, says in [
        ({"type": "intger"}, "no JSON schema"),
        ({"$ref": "http://x/y"}, "http://x/y"),
        (3, "no JSON"),
    ]:
        with pytest.raises(ValueError, match=says):
            rule_from_options({"rule": "schema", "schema": bad})


def test_regex():
    assert scored({"rule": "regex", "pattern": r"\d+ clips"}, "72 clips", None) == 1.0
    assert scored({"rule": "regex", "pattern": r"\d+", "full": True}, "72 clips", None) == 0.0
    assert (
        scored("regex", "It is Paris", "(?i)paris") == 1.0 and scored("regex", "It is Rome", "Paris") == 0.0
    )
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        rule_from_options({"rule": "regex", "pattern": "("})
    with pytest.raises(ValueError, match="task t1"):
        scored("regex", "x", "(")


def test_a_regex_that_would_run_for_ever_is_stopped_and_not_scored():
    rule = {"rule": "regex", "pattern": r"(?:x+x+)+y", "timeout": 0.05}
    with pytest.raises(ValueError, match=r"took longer than 0\.05 s"):
        scored(rule, "x" * 5000, None)


def test_format():
    calls = turn(Message("assistant", "", [ToolCall("echo")]))
    broken = turn(Message("assistant", "", [ToolCall("echo", error="no JSON")]))
    rule = {"rule": "format", "require": ["tool_call", "marked_answer"]}
    assert scored(rule, "Answer: 5", None, before=(calls,)) == 1.0
    assert scored(rule, "Answer: 5", None) == 0.0 and scored(rule, "5", None, before=(calls,)) == 0.0
    assert scored(rule, "Answer: 5", None, before=(broken,)) == 0.0
    assert scored(rule | {"partial": True}, "Answer: 5", None) == 0.5
    assert scored({"rule": "format", "require": ["readable_calls"]}, "5", None, before=(broken,)) == 0.0
    assert scored({"rule": "format", "require": ["reasoning", "json"]}, "[5]", None, reasoning="hm") == 1.0
    assert scored({"rule": "format", "require": ["reasoning"]}, "5", None, reasoning=" ") == 0.0
    pattern = {"rule": "format", "pattern": "<answer>.*</answer>"}
    assert scored(pattern, "<answer>a\nb</answer>", None) == 1.0
    assert scored(pattern, "well, <answer>5</answer>", None) == 0.0


def test_length():
    rule = {"rule": "length", "soft": 4, "hard": 8, "least": 2, "unit": "words"}
    for words, worth in [(1, 0.0), (2, 1.0), (4, 1.0), (5, 0.75), (7, 0.25), (8, 0.0), (500, 0.0)]:
        assert scored(rule, "word " * words, None) == worth
    assert scored({"rule": "length", "soft": 0, "hard": 9}, "", None) == 0.0
    before = (turn(Message("assistant", "x")),)
    assert scored({"rule": "length", "soft": 15, "hard": 25}, "x", None, before=before) == 0.5  # 20 tokens
    assert scored({"rule": "length", "soft": 1, "hard": 3, "unit": "turns"}, "x", None, before=before) == 0.5
    assert scored({"rule": "length", "soft": 3, "hard": 3, "unit": "characters"}, "four", None) == 0.0


def test_a_bonus_is_not_paid_for_a_wrong_answer():
    rule = {"rule": "length", "soft": 10, "hard": 20, "unit": "words", "only_if": {"rule": "numeric"}}
    assert reward(rule, "72") == Reward(1.0, [], {"length": 1.0, "numeric": 1.0})
    assert reward(rule, "71") == Reward(0.0, [], {"length": 1.0, "numeric": 0.0})
    [[played]] = rollout(reward=rule_from_options({**rule, "only_if": "exact"}))
    assert played.reward == Reward(1.0, [], {"length": 1.0, "exact": 1.0})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "numerik"}, "rule is 'numerik'.*did you mean numeric"),
        ({"rule": "normalized"}, "did you mean normalised"),
        ({"rule": ["numeric"]}, "must be one of"),
        ({"rule": "numeric", "tolerence": 1}, "no option 'tolerence'; did you mean tolerance"),
        ({"rule": "numeric", "tolerance": -1}, "tolerance is -1"),
        ({"rule": "numeric", "tolerance": "small"}, "tolerance is 'small'"),
        ({"rule": "numeric", "relative": float("nan")}, "relative is nan"),
        ({"rule": "numeric", "tolerance": float("inf")}, "must be finite"),
        ({"rule": "numeric", "percent": "strikt"}, "did you mean strict"),
        ({"rule": "numeric", "units": "no"}, "units is 'no'"),
        ({"extract": "box"}, "extract is 'box'.*did you mean boxed"),
        ({"extract": "boxed", "marker": "Answer:"}, "set extract to marker"),
        ({"marker": ""}, "marker is ''"),
        ({"tag": "<answer>"}, "without < and >"),
        ({"rule": "f1", "extract": "last_number"}, "goes with numeric"),
        ({"rule": "choice", "letters": "abc"}, "letters is 'abc'"),
        ({"rule": "schema"}, "needs the option schema"),
        ({"rule": "format"}, "needs a pattern"),
        ({"rule": "format", "require": ["tool_calls"]}, "did you mean tool_call"),
        ({"rule": "format", "require": "json"}, "must be a list"),
        ({"rule": "length", "soft": 5}, "needs the option hard"),
        ({"rule": "length", "soft": 5, "hard": 3}, "hard is 3"),
        ({"rule": "length", "soft": 5, "hard": 9, "unit": "token"}, "did you mean tokens"),
        ({"rule": "length", "soft": 5, "hard": 9, "only_if": {"rule": "exakt"}}, "did you mean exact"),
        (3, "a rule is its name or a mapping"),
    ],
)
def test_wrong_options_are_named_at_the_start(options: Any, says: str):
    with pytest.raises(ValueError, match=says):
        rule_from_options(options)


def test_every_rule_is_made_by_name():
    for name in RULES.keys() - {"math"}:
        assert callable(make_rule(name, **NEEDED.get(name, {})))
    assert make_rule() == rule_from_options({}) == rule_from_options("auto")


def test_math_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        rule_from_options("math")


def test_math():
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    for text, answer in [
        ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{(x+1)^2}", "x^2+2x+1"),
        ("Answer: $\\{1,2\\}$", "\\{2,1\\}"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("1,234", "1234"),
    ]:
        assert scored("math", text, answer) == 1.0, text
    for text, answer in [
        ("\\boxed{\\sqrt{3}}", "\\sqrt{2}"),
        ("\\boxed{9^{9^{9^9}}}", "\\sqrt{2}"),
        ("\\boxed{99999999!}", "\\sqrt{2}"),
        ("\\boxed{__import__('os')}", "\\sqrt{2}"),
        ("\\boxed{2\\pi}", "2"),
    ]:
        assert scored("math", text, answer) == 0.0, text
    [[played]] = rollout(say=lambda *_: "ok", reward=make_rule("math"))  # on a thread
    assert played.reward == Reward(1.0, [], {"math": 1.0})


def test_sql_results(tmp_path: Path):
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE t (n INTEGER, s TEXT); INSERT INTO t VALUES (1,'a'),(2,'b'),(2,'b');"
    )
    connection.close()

    def worth(said: str, right: str = "SELECT n FROM t", **options: Any) -> tuple[float | None, str]:
        class Shop(ToolEnvironment):
            def __init__(self, task: Task) -> None:
                super().__init__(Task(task.id, task.prompt, right), [SqlTool(path, **options)])

        def rule(one: Any) -> Any:
            one.task.answer = right
            return make_rule("sql_result")(one)

        [[played]] = rollout(Shop, lambda *_: said, reward=rule)
        return played.reward and played.reward.outcome, str(played.error)

    for how in ("table", "json"):
        assert worth("```sql\nSELECT n AS x FROM t ORDER BY n DESC\n```", format=how)[0] == 1.0
        assert worth("SELECT DISTINCT n FROM t", format=how)[0] == 0.0
    assert worth("SELECT n FROM t ORDER BY n DESC", "SELECT n FROM t ORDER BY n")[0] == 0.0
    assert worth("DROP TABLE t")[0] == 0.0 and worth("SELECT m FROM t")[0] == 0.0 and worth("1 2 2")[0] == 0.0
    assert worth("SELECT n FROM t", "SELECT nothing")[0] is None
    lost, why = worth("SELECT n FROM t", max_rows=2)
    assert lost is None and "raise its max_rows" in why
    # A query that shows more than can be compared is the model's own fault, and worth nothing.
    assert worth("SELECT a.n FROM t a, t b, t c", "SELECT DISTINCT s FROM t", max_rows=2)[0] == 0.0
    # An ORDER BY inside orders nothing.
    assert worth("SELECT 2", "SELECT max(n) FROM (SELECT n FROM t ORDER BY n)")[0] == 1.0
    [[played]] = rollout(reward=make_rule("sql_result"))
    assert played.reward is None and "has no tool 'sql'" in str(played.error)


def test_code_tests():
    class Coder(ToolEnvironment):
        def __init__(self, task: Task) -> None:
            super().__init__(task, [python])

    python = PythonTool(allow_unsafe=True)
    said = {
        "right": "```python\ndef double(n):\n    return 2 * n\n```",
        "half": "```python\ndef double(n):\n    return 4\n```",
        "leaves": "```python\nimport sys\nsys.exit(0)\n```",
        "broken": "def double(n:",
    }

    def rule(one: Any) -> Any:
        one.task.answer = ["assert double(2) == 4", "assert double(3) == 6"]
        return make_rule("code_tests", partial=True)(one)

    try:
        groups = rollout(Coder, lambda session, *_: list(said.values())[session], tuple(said), reward=rule)
    finally:
        python.close()
    found = {
        name: played.reward and played.reward.outcome for name, [played] in zip(said, groups, strict=True)
    }
    assert found == {"right": 1.0, "half": 0.5, "leaves": 0.0, "broken": 0.0}

    class Content(ToolEnvironment):
        @tool
        def python(self, code: str) -> str:
            return "well done"  # a tool for which leaving early is no failure

    [[played]] = rollout(Content, lambda *_: said["leaves"], reward=rule)
    assert played.reward == Reward(0.0, [], {"code_tests": 0.0})


@pytest.mark.skipif(GSM8K is None, reason="shared/data/gsm8k is not beside this checkout")
def test_gsm8k_solutions_score_against_themselves():
    assert GSM8K is not None
    rule = make_rule()
    for line in (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()[::20]:
        solution = json.loads(line)["answer"]
        number = int(solution.rpartition("####")[2].replace(",", ""))
        for text in (solution, f"So it is \\boxed{{{number:,}}}.", f"thus\nAnswer: ${number}.00"):
            assert scored(rule, text, solution) == 1.0, text
        for wrong in (f"Answer: {number + 1}", f"Answer: {number}1", f"#### {number}, {number + 1}"):
            assert scored(rule, wrong, solution) == 0.0, wrong
