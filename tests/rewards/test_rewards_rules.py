"""Rules about what is said: which text is the answer, what it is worth, and what is only nearly right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.rollout import call_text, rollout
from tests.kits.rules import NEEDED, reward, scored, turn
from TrainingFactory.rewards.rules.answers import without_reasoning
from TrainingFactory.rewards.rules.rule_based import RULES, make_rule
from TrainingFactory.rewards.rules.text import normalise_text
from TrainingFactory.types import Message, Reward, Status, ToolCall

# What a well-known extractor takes from these texts is the right answer of each row; here it is worth nothing.
TAKEN_BY_OTHERS = [
    *(("Final Answer: 5\nNo, wait.\nFinal Answer: 7", "5"), ("The total is 1,234", "234")),
    *(("Therefore, she has 3 apples and 4 pears, total 7.", "3"), ("Final Answer: 48+24=72", "48")),
    *(("Final Answer: 1/2", "1"), ("Final Answer: 1/2", "1/3"), ("Final Answer: .5", "5")),
    *(("Final Answer: 1e3", "3"), ("Final Answer: 1e3", "1"), ("Final Answer: 50%", "5")),
    *(("The result is 10-3", "10"), ("The result is 10-3", "3"), ("x" + "\n" * 50, "72")),
]


@pytest.mark.parametrize(("text", "answer"), TAKEN_BY_OTHERS)
@pytest.mark.parametrize("rule", [{}, {"rule": "numeric"}, {"rule": "numeric", "extract": "last_number"}])
def test_wrong_answers_that_other_extractors_take(rule: dict[str, Any], text: str, answer: str):
    assert scored(rule, text, answer) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final Answer: 5\nNo, wait.\nFinal Answer: 7", "7"),
        ("Final Answer: 1/2", 0.5),
        ("\\boxed{42}", "42"),
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
        *((f"Answer: {text}", "72") for text in ("72 or 48", "not 72", "72π", ">= 72")),
        *((text, "72") for text in ("48, 24, 72", "The answer is 72 or maybe seventy-three", "", "   ")),
        *(
            (text, "72")
            for text in ("\\boxed{48}\nThe answer is 72 \\boxed{48}", "#### Step 72\nthen add\n5 more")
        ),
        *(("12", "12 Angry Men"), ("<answer>72", "7"), ("1 2 3 4 5 6 7", "7")),
        *(("The answer is not Paris", "Paris"), ("Paris or London", "Paris"), ("False", True), ("1", True)),
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


def test_reasoning_does_not_count():
    assert scored({}, "I am sure.", reasoning="Answer: 72") == 0.0
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
    text = "First \\boxed{1}.\n<answer>2</answer>\nAnswer: 5\n6 apples"
    for options, answer in [
        ({"extract": "boxed"}, "1"),
        ({"extract": "tag"}, "2"),
        ({"extract": "marker"}, "5"),
        ({"extract": "last_line"}, "6"),
        ({"extract": "last_number"}, "6"),
        ({}, "5"),
    ]:
        for wanted in "1256":
            assert scored({"rule": "numeric", **options}, text, wanted) == float(wanted == answer), (
                options,
                wanted,
            )
    assert scored({"rule": "numeric", "extract": "whole"}, text, "6") == 0.0
    assert scored({"extract": "tag"}, "<ANSWER>72</ANSWER>") == 1.0
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
    assert scored("numeric", "72%") == 1.0 and scored("numeric", "72 kg", "72 km") == 0.0


CHOSEN = [
    *("B", "(B)", "b", "B.", "**B**", "Answer: B", "The answer is (B).", "\\boxed{B}", "\\boxed{\\text{B}}"),
    *("option B", "B) Rome", "B. Rome", "B: Rome", "(B) Rome", "Rome", "I weighed them.\nB"),
    *("Answer: B - Rome", "B, of course", "B (not A)", "B, not A", "B is right, A is wrong"),
    *("B. A is not right", "Answer: B\nA is wrong.", "B (Rome)", "B is correct", "B because it is"),
    *("The answer is B since it is a city", "B, I think", "b.", "B; Rome", "B. Rome, a city"),
    *("B is right, as I said", "B. Rich in Vitamin A", "B) is a no-brainer", "B. f(x) = e^x", "B. x = a + c"),
]
NOT_CHOSEN = [
    *("A dog is best", "A, B", "A or B", "A/B/C/D", "(A)(B)(C)(D)", "AB", "not A", "Answer: A or B"),
    *("A. or C", "A and B", "A: Rome", "A. Rome or B.", "A B C D", "", "Answer:", "E", "1", "A) x (B) y"),
    *("Answer: A\nor B", "Answer: A\n\n**or** B", "A, not B but C", "A, not B or C"),
    *("A is wrong, B is right", "a, b", "a) b) c)", "A: wrong. B: right", "A. No, B.", "A is wrong"),
    *("A is not right", "A, not", "A; C", "A, c or d", "A. The answer is C", "A (or C)", "a: b"),
    *("A. Or is it (C)?", "A - B", "A, maybe b"),
]


@pytest.mark.parametrize("text", CHOSEN)
def test_choices(text: str):
    choices = ["A dog", "Rome", "Vitamin A", "All"]
    assert scored("choice", text, "B", choices=choices) == 1.0
    assert scored("choice", text, 1, choices=choices) == 1.0
    assert scored("choice", text, "A", choices=choices) == 0.0


@pytest.mark.parametrize("text", NOT_CHOSEN)
def test_no_choice(text: str):
    assert scored({"rule": "choice", "letters": "ABCD"}, text, "A", choices=["A dog", "Rome"]) == 0.0


@pytest.mark.parametrize(
    "marked", ["\\boxed{%s}", "Answer: %s", "<answer>%s</answer>", "The answer is $\\boxed{%s}$"]
)
def test_of_two_marked_answers_the_last_counts_unless_they_are_a_choice(marked: str):
    first, last = marked % 71, marked % 72
    assert scored("auto", f"{first}. No,\n{last}") == scored("auto", f"It is 144/2 or {last}") == 1.0
    assert scored("auto", f"The answer is 144/2 or \\boxed{{{72}}}") == 1.0
    assert scored("auto", f"For the answer we add or subtract. {last}") == 1.0
    for text in (f"{first} or {last}", f"{first},\nor {last}"):
        assert scored("auto", text) == scored("numeric", text) == 0.0, text
    assert scored("choice", marked % "A" + " or " + marked % "B", "B") == 0.0


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


def test_squad_scores():
    assert scored("em", "The Eiffel Tower!", "eiffel tower") == 1.0
    assert scored("em", "Eiffel", "eiffel tower") == 0.0
    assert scored("em", "The", "A") == 0.0 and scored("em", "...", "!") == 0.0
    for said, right in (("3-4", 34), ("1:30", 130), ("5e-3", "5e3"), ("1,5", 15), ("3+4", 34), ("2(3)", 23)):
        assert scored("em", said, str(right)) == scored("f1", said, str(right)) == 0.0, said
    for said, right in (
        ("1,000,000", "1000000"),
        ("1'000", "1000"),
        ("1939–1945", "1939-1945"),
        ("7, 8", "7 8"),
    ):
        assert scored("em", said, right) == 1.0, said
    assert scored("em", "0,125", "0125") == scored("em", "1,2,3", "123") == 0.0
    assert scored("f1", "the big Eiffel Tower", "Eiffel Tower") == pytest.approx(
        0.8
    )  # 2 of 3 and 2 of 2 words
    assert scored("f1", "Tower tower tower", "Eiffel Tower") == pytest.approx(0.4)
    assert scored("f1", "yes it is", "yes") == 0.0 and scored("f1", "Yes.", "yes") == 1.0
    assert scored("f1", "London", ["Paris", "London England"]) == pytest.approx(2 / 3)
    assert scored("f1", "Rome", "Paris") == 0.0


SIGNS_BEFORE = [
    *("\\boxed{-(72)}", "$-\\boxed{72}$", "It is -\\boxed{72}.", "x = - \\boxed{72}", "−\\boxed{72}"),
]
WORDS_AROUND = ["\\boxed{less than 72}", "\\boxed{72 \\text{ millions}}"]


@pytest.mark.parametrize("rule", ["auto", "numeric", {"rule": "numeric", "extract": "boxed"}])
@pytest.mark.parametrize(
    "text", [*SIGNS_BEFORE, *WORDS_AROUND, "$-\\left(\\boxed{72}\\right)$", "-{\\boxed{72}}"]
)
def test_what_stands_around_a_number_counts(rule: Any, text: str):
    assert scored(rule, text, 72) == 0.0


# rule, right answer, texts that give it, texts that do not
NEAR: list[tuple[Any, Any, tuple[str, ...], tuple[str, ...]]] = [
    ("auto", -72, ("$-\\boxed{72}$",), ()),
    # a dash before a box is no minus
    ("auto", 72, ("- \\boxed{72}", "The sum – \\boxed{72}", "100-\\boxed{72} = 28", "- first\n- \\boxed{72}"), ()),
    # texts that are no numbers keep their zeros
    ("auto", "02139", ("02139", "The zip code is 02139.", "Answer: 02139", "**02139**"),
     ("2139", "002139", "02139 or 02140", "not 02139", "021390", "2,139")),
    ("auto", "0.5", ("0.50",), ()),
    ("auto", "0", ("0",), ()),
    ("numeric", "02139", ("2139",), ()),
    ("normalised", "5", ("5.", "'5'", "(5)", "...5", " 5 ", "5!"), (".5", "(.5)", "$.5", ",5")),
    # contains finds whole numbers only
    ("contains", "5", ("it is 5.", "5", "'5'", "Apollo-5", "1-5", "5 1234", "(5)", "5, 6", "a:5"),
     ("it is .5", "-5", "it is -5", "x=-5", "1/5", "5/7", "x^5", "5^2", "5'000", "5 000", "1'5", "0.5", "55")),
    ("contains", "1945", ("World War II (1939–1945)", "in 1945 500 ships"), ()),
    # a decimal comma, in right answers and in the last number
    *(({"rule": rule, "decimal_comma": True}, answer, (text,), ())
      for rule in ("numeric", "auto")
      for text, answer in [("1.234", "1.234"), ("3,14", "3,14"), ("3,14", "3.14"), ("1.234", 1234), ("3,14", 3.14)]),
    *(({"rule": "numeric", "decimal_comma": True, "extract": "last_number"}, *row)
      for row in [(3.14, ("Das Ergebnis ist 3,14 Meter",), ()), ("1.234,5", ("erst 2, dann 1.234,5",), ()),
                  (1.234, (), ("1.234",))]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "answer", "right", "wrong"), NEAR)
def test_near_misses(rule: Any, answer: Any, right: tuple[str, ...], wrong: tuple[str, ...]):
    for text in right:
        assert scored(rule, text, answer) == 1.0, text
    for text in wrong:
        assert scored(rule, text, answer) == 0.0, text


def test_normalised_keeps_a_decimal_point():
    assert normalise_text(".5") == ".5" and normalise_text("...") == "..." and normalise_text("") == ""


def test_numbers_without_end_are_wrong_and_not_unscored():
    huge = "1" + "0" * 400
    for text, answer in [(huge, 1.5), (f'{{"a": {huge}}}', {"a": 1.5}), (f"[{huge}]", [0.1])]:
        assert scored("json", text, answer) == 0.0
    assert scored("json", huge, 10**400) == 1.0 and scored("numeric", huge, 10**400) == 1.0
    assert scored("json", "1.5", 10**400) == 0.0
    multiple = {"rule": "schema", "schema": {"type": "number", "multipleOf": 0.5}}
    assert scored(multiple, huge, None) in (0.0, 1.0) and scored(multiple, "1.5", None) == 1.0
    deep = {"$defs": {"x": {"items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"}
    assert scored({"rule": "schema", "schema": deep}, "[" * 900 + "]" * 900, None) in (0.0, 1.0)
