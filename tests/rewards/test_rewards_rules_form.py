"""Rules about form, rules that ask a tool, and the options of all rules."""

from __future__ import annotations

import json

import pytest

from tests.kits.rules import GSM8K, NEEDED, scored, turn
from TrainingFactory.rewards.rules.rule_based import RULES, make_rule, make_rule_from_options
from TrainingFactory.types import Message, ToolCall


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
    assert scored({"rule": "json", "partial": True}, '{"city": "Oslo", "n": 3}', right) == pytest.approx(
        1 / 3
    )
    spam = json.dumps({str(number): 0 for number in range(97)} | right)
    assert scored({"rule": "json", "partial": True}, spam, right) == pytest.approx(3 / 100)
    with pytest.raises(ValueError, match="task t1: its answer is not JSON"):
        scored("json", "1", "{broken")


def test_schema():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    rule = {"rule": "schema", "schema": schema}
    assert scored(rule, '{"n": 1}', None) == 1.0
    for wrong in ('{"n": "1"}', "{}", "[1]", "n = 1", ""):
        assert scored(rule, wrong, None) == 0.0
    for bad, says in [
        ({"type": "intger"}, "JSON schema"),
        ({"$ref": "http://x/y"}, "http://x/y"),
        (3, "JSON schema"),
    ]:
        with pytest.raises(ValueError, match=says):
            make_rule_from_options({"rule": "schema", "schema": bad})


def test_regex():
    assert scored({"rule": "regex", "pattern": r"\d+ clips"}, "72 clips", None) == 1.0
    assert scored({"rule": "regex", "pattern": r"\d+", "full": True}, "72 clips", None) == 0.0
    assert (
        scored("regex", "It is Paris", "(?i)paris") == 1.0 and scored("regex", "It is Rome", "Paris") == 0.0
    )
    with pytest.raises(ValueError, match=r"'\(' is not a valid regular expression"):
        make_rule_from_options({"rule": "regex", "pattern": "("})
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
    rule = {"rule": "length", "soft": 4, "hard": 8, "unit": "words"}
    for words, worth in [(1, 1.0), (4, 1.0), (5, 0.75), (7, 0.25), (8, 0.0), (500, 0.0)]:
        assert scored(rule, "word " * words, None) == worth
    assert scored({"rule": "length", "soft": 0, "hard": 9}, "", None) == 0.0
    before = (turn(Message("assistant", "x")),)
    assert scored({"rule": "length", "soft": 15, "hard": 25}, "x", None, before=before) == 0.5  # 20 tokens
    assert scored({"rule": "length", "soft": 1, "hard": 3, "unit": "turns"}, "x", None, before=before) == 0.5
    assert scored({"rule": "length", "soft": 3, "hard": 3, "unit": "characters"}, "four", None) == 0.0


def test_every_rule_is_made_by_name():
    for name in RULES.keys() - {"math"}:
        assert callable(make_rule(name, **NEEDED.get(name, {})))
    assert make_rule() == make_rule_from_options({}) == make_rule_from_options("auto")


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
