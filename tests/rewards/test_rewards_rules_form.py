"""Rules about form, rules that ask a tool, and the options of all rules."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import rollout
from tests.kits.rules import GSM8K, NEEDED, reward, scored, turn
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rewards.rule_based import RULES, make_rule, rule_from_options
from TrainingFactory.tools import tool
from TrainingFactory.tools.custom_tools import PythonTool, SqlTool
from TrainingFactory.types import Message, Reward, Task, ToolCall


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


def test_a_wrong_answer_earns_no_bonus():
    rule = {"rule": "length", "soft": 10, "hard": 20, "unit": "words", "only_if": {"rule": "numeric"}}
    assert reward(rule, "72") == Reward(1.0, [], {"length": 1.0, "numeric": 1.0})
    assert reward(rule, "71") == Reward(0.0, [], {"length": 1.0, "numeric": 0.0})
    [[played]] = rollout(reward=rule_from_options({**rule, "only_if": "exact"}))
    assert played.reward == Reward(1.0, [], {"length": 1.0, "exact": 1.0})


LENGTH = {"rule": "length", "soft": 5, "hard": 10}
MISTAKES: list[tuple[Any, str]] = [
    ({"rule": "numerik"}, r'rule must be one of auto, .*did you mean numeric\? \(got "numerik"\)'),
    ({"rule": "normalized"}, "did you mean normalised"),
    ({"rule": ["numeric"]}, "must be one of"),
    ({"rule": "numeric", "tolerence": 1}, "tolerence is no option of rule numeric; did you mean tolerance"),
    ({"rule": "numeric", "tolerance": -1}, r"tolerance must be greater than or equal to 0 \(got -1\)"),
    ({"rule": "numeric", "tolerance": "small"}, r'tolerance must be a valid number \(got "small"\)'),
    ({"rule": "numeric", "relative": float("nan")}, r"relative must be a finite number \(got nan\)"),
    ({"rule": "numeric", "tolerance": float("inf")}, "must be a finite number"),
    ({"rule": "numeric", "percent": "strikt"}, "percent must be one of auto, strict; did you mean strict"),
    ({"rule": "numeric", "units": "no"}, r'units must be true or false \(got "no"\)'),
    ({"extract": "box"}, "extract must be one of .*did you mean boxed"),
    ({"extract": "boxed", "marker": "Answer:"}, "set extract to marker"),
    ({"marker": ""}, r'marker must .* \(got ""\)'),
    ({"tag": "<answer>"}, r"tag .*should match pattern .*\(got "),
    ({"tag": "final", "extract": "boxed"}, "tag is set, but extract is boxed"),
    ({"tag": "final", "marker": "So:"}, "tag is set, but marker is set too"),
    (LENGTH | {"extract": "boxed"}, r"extract is no option of rule length .*it has reasoning, soft, hard"),
    (LENGTH | {"marker": "So:"}, "marker is no option of rule length"),
    (LENGTH | {"tag": "final"}, "tag is no option of rule length"),
    ({"rule": "format", "require": ["json"], "extract": "boxed"}, "extract is no option of rule format"),
    ({"rule": "choice", "letters": "abc"}, r'letters .*should match pattern .*\(got "abc"\)'),
    ({"rule": "schema"}, "schema is missing; rule schema needs it"),
    ({"rule": "format"}, "needs a pattern"),
    ({"rule": "format", "require": ["tool_calls"]}, "did you mean tool_call"),
    ({"rule": "format", "require": "json"}, r'require must be a valid list .*\(got "json"\)'),
    ({"rule": "length", "soft": 5}, "hard is missing; rule length needs it"),
    (LENGTH | {"hard": 3}, "least, soft and hard are 0, 5 and 3"),
    (LENGTH | {"unit": "token"}, "did you mean tokens"),
    (LENGTH | {"only_if": {"rule": "exakt"}}, "only_if.rule must be one of .*did you mean exact"),
    (3, "a rule is its name or a mapping"),
]


@pytest.mark.parametrize(("options", "says"), MISTAKES)
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
    with pytest.raises(ValueError, match=r"math-verify cannot read the right answer"):
        scored({"rule": "math", "timeout": 1}, "\\sqrt{3}", "\\binom{9999999}{4999999}")
    [[played]] = rollout(say=lambda *_: "ok", reward=make_rule("math"))
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
    # What is compared is not what the model sees of it.
    assert worth("SELECT n FROM t", max_rows=2)[0] == 1.0
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
