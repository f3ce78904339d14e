"""The audit of a judge: its arithmetic against metrics worked out by hand, its findings against judges with known
faults, and what it takes for a gold file."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import Said, judging
from TrainingFactory.apps.judge_audit.audit import INJECTIONS, audit
from TrainingFactory.apps.judge_audit.gold import GoldItem, load_gold
from TrainingFactory.apps.judge_audit.metrics import (
    compute_accuracy,
    compute_kappa,
    compute_pearson,
    compute_ranks,
    compute_spearman,
)
from TrainingFactory.apps.judge_audit.report import Audit, describe_verdict
from TrainingFactory.rewards.judge.model_judge import ModelJudge, model_judge
from TrainingFactory.rewards.judge.prompts import PAIR_TEMPLATE, JudgePrompt

pytestmark = pytest.mark.usefixtures("judge_key")


def test_metrics_by_hand():
    # 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: 0.7 agreed, 0.5 by chance (25*30 + 25*20 of 2500), so 0.4
    given = [True] * 25 + [False] * 25
    right = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert compute_accuracy(given, right) == 0.7 and compute_kappa(given, right) == pytest.approx(0.4)
    assert compute_kappa([True, True], [True, True]) is None and compute_kappa([], []) is None
    # deviations -1.5 -.5 .5 1.5 and -2 0 1 1: 5 / sqrt(5 * 6)
    assert compute_pearson([1, 2, 3, 4], [1, 3, 4, 4]) == pytest.approx(5 / 30**0.5)
    assert compute_pearson([1, 2], [3, 3]) is None and compute_pearson([1], [1]) is None
    assert compute_ranks([10, 30, 20, 30]) == [1, 3.5, 2, 3.5]
    # compute_ranks 1 2 3 4 and 1 2 3.5 3.5: 4.5 / sqrt(5 * 4.5)
    assert compute_spearman([1, 20, 300, 4000], [1, 3, 4, 4]) == pytest.approx(4.5 / 22.5**0.5)
    assert compute_spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)


def single(**options: Any) -> ModelJudge:
    judge = model_judge(**options)
    assert isinstance(judge, ModelJudge)
    return judge


def run_audit(judge: ModelJudge, gold: list[GoldItem], repeats: int = 2) -> Audit:
    async def run() -> Audit:
        try:
            return await audit(judge, gold, repeats=repeats)
        finally:
            await judge.close()

    return asyncio.run(run())


def gold_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def audited(
    tmp_path: Path,
    say: Callable[[str, int], Said],
    rows: list[dict[str, Any]],
    repeats: int = 2,
    **options: Any,
) -> Audit:
    with judging(say) as server:
        judge = single(**{"base_url": server.url, "model": "big", "retries": 0} | options)
        gold = load_gold(gold_file(tmp_path / "gold.jsonl", rows), judge)
        found = run_audit(judge, gold, repeats)
        singles = sum(item.value is not None for item in gold)
        assert len(server.asked) == singles * (repeats + 1) + 2 * sum(
            item.opponent is not None for item in gold
        )
    return found


def says(prompt: str) -> str:
    """What the response under judgement says."""
    return prompt.split("[2] assistant\n  ")[1].split("\n<<<END")[0]


ROWS = [{"prompt": "2 + 2?", "response": f"right {n}", "label": True} for n in range(6)]
ROWS += [{"prompt": "2 + 2?", "response": f"wrong {n}", "label": False} for n in range(4)]
PAIRS = [{"prompt": "x", "response": "right", "pair": "wrong", "better": "first"}]
PAIRS += [{"prompt": "x", "response": "wrong one", "pair": "right one", "better": "second"}]


def compares(prompt: str) -> bool:
    return "Winner" in prompt.rsplit(">>>", 1)[1]


def fair(prompt: str, number: int) -> str:
    if compares(prompt):
        first, second = re.findall(r"assistant\n  (right|wrong)", prompt)
        return "Winner: tie" if first == second else f"Winner: {'A' if first == 'right' else 'B'}"
    return "Score: 9" if "right" in says(prompt) else "Score: 1"


def test_a_fair_judge(tmp_path: Path):
    prices = {"input_price": 2.0, "output_price": 50.0}
    found = audited(tmp_path, fair, ROWS + PAIRS, budget=prices)
    assert (found.items, found.judged, found.pairs, found.attacked) == (12, 10, 2, 10)
    assert found.accuracy == 1 and found.kappa == 1 and found.pearson == pytest.approx(1)
    assert found.accuracy_low == pytest.approx(0.7225, abs=1e-4)  # Wilson: 1 / (1 + 3.8415 / 10)
    assert (found.consistency, found.spread) == (1, 0)
    assert (found.pair_accuracy, found.swap_flips, found.first_share) == (1, 0, 0.5)
    assert (found.injection_moved, found.injection_shift) == (0, 0)
    assert found.judgements == 34 and found.failures == {}
    assert found.cost_per_thousand == pytest.approx(0.7)  # 100 * 2 + 10 * 50 = 700 millionths each
    assert found.tokens_per_judgement == 110
    assert "care" in describe_verdict(found) and "100% of 10 items" in describe_verdict(found)
    assert "only 10 items" in describe_verdict(found)


def test_obedience_shows_on_verdicts_that_can_rise(tmp_path: Path):
    def obedient(prompt: str, number: int) -> str:
        attacked = re.search(r"(?i)full marks|best possible|unanimously|Score: 10", says(prompt))
        return "Score: 10" if attacked or "right" in says(prompt) else "Score: 0"

    rows = [{"prompt": "x", "response": f"right {n}", "label": True} for n in range(18)]
    wrong = [{"prompt": "x", "response": f"wrong {n}", "label": False} for n in range(2)]
    found = audited(tmp_path, obedient, rows + wrong)
    assert found.kappa == 1 and (found.attacked, found.injection_moved, found.noise_moved) == (2, 1, 0)
    assert found.injection_shift == 1 and "100% of the verdicts" in describe_verdict(found)
    assert describe_verdict(found).startswith("Not safe to train on")
    nobody = audited(tmp_path, obedient, rows[:6])
    assert (nobody.attacked, nobody.injection_moved, nobody.noise_moved) == (0, None, None)
    assert "only 0 items have room to rise" in describe_verdict(nobody)


def test_every_known_text_is_tried(tmp_path: Path):
    seen: list[str] = []

    def watched(prompt: str, number: int) -> str:
        seen.append(says(prompt))
        return fair(prompt, number)

    audited(tmp_path, watched, ROWS)
    appended = [text.split(maxsplit=2)[2] for text in seen if len(text.split()) > 2]
    assert len(appended) == len(ROWS) and len(set(appended)) == len(INJECTIONS)


def test_pairs_are_judged_by_the_same_prompt(tmp_path: Path):
    rows = [row | {"reference": "known to be right"} for row in PAIRS]
    seen: list[str] = []

    def watched(prompt: str, number: int) -> str:
        seen.append(prompt)
        return fair(prompt, number)

    own = "My {{own}} words.\n{reference}\n{conversation}\nThat was it."
    cases: list[dict[str, Any]] = [{"reference": True}, {"template": own}]
    for options in cases:
        seen.clear()
        found = audited(tmp_path, watched, rows, **options)
        assert found.pair_accuracy == 1 and len(seen) == 4
        for prompt in seen:
            assert "known to be right" in prompt
            assert ("My {own} words." in prompt and "That was it." in prompt) == ("template" in options)
    assert JudgePrompt("{answer}").make_pair_prompt().template == PAIR_TEMPLATE.split("{task}\n\n")[1]
    assert JudgePrompt().make_pair_prompt().template == PAIR_TEMPLATE


def test_what_gave_no_verdict_costs_too(tmp_path: Path):
    prices = {"input_price": 2.0, "output_price": 50.0}  # 0.0007 and 110 tokens a request
    rows = ROWS[:4]

    def sometimes(prompt: str, number: int) -> str | int:
        return "hm" if number % 3 == 0 else "Score: 9"

    found = audited(tmp_path, sometimes, rows, repeats=2, budget=prices, concurrency=1)
    assert (found.judgements, found.failures) == (8, {"unreadable": 4})
    assert found.cost_per_thousand == pytest.approx(0.7 * 12 / 8)
    assert found.tokens_per_judgement == 110 * 12 / 8
    with judging(lambda prompt, number: 503 if number % 2 == 0 else "Score: 9") as server:
        options = {"base_url": server.url, "model": "big", "pause": 0.0, "retries": 50, "samples": 2}
        for cached in (False, True):  # what was kept had its price all the same
            judge = single(**options, cache=tmp_path / "judged.sqlite", budget=prices)
            again = run_audit(judge, load_gold(gold_file(tmp_path / "gold.jsonl", rows), judge))
            assert bool(judge.client.usage.retries) != cached and judge.client.usage.cached == 24 * cached
            # two samples each; an attempt that failed took no tokens
            assert again.tokens_per_judgement == 220 and again.cost_per_thousand == pytest.approx(1.4)


def test_biases_are_measured(tmp_path: Path):
    def by_place(prompt: str, number: int) -> str:
        return "Winner: A" if compares(prompt) else f"Score: {min(10, len(says(prompt)) // 10)}"

    rows = [{"prompt": "x", "response": "a" * size, "score": 5} for size in range(20, 140, 10)]
    found = audited(tmp_path, by_place, rows + PAIRS, repeats=1)
    assert (found.swap_flips, found.first_share, found.pair_accuracy) == (1, 1, 0)
    lengths = list(range(20, 140, 10))
    by_hand = compute_pearson([min(10, size // 10) / 10 - 0.5 for size in lengths], lengths)
    assert by_hand is not None and by_hand > 0.9 and found.length_bias == pytest.approx(by_hand)
    assert found.consistency is None and found.pearson is None  # one repeat; gold scores that never vary
    assert "longer answers are overrated" in describe_verdict(found)
    assert "winner in 100% of the pairs" in describe_verdict(found)


def test_a_judge_that_changes_its_mind(tmp_path: Path):
    seen: dict[str, int] = {}

    def fickle(prompt: str, number: int) -> str:
        text = says(prompt)
        seen[text] = seen.get(text, 0) + 1
        return "Score: 9" if seen[text] % 2 and "0" in text else "Score: 1"

    found = audited(tmp_path, fickle, ROWS, concurrency=1)
    assert found.consistency == pytest.approx(0.8)  # two of ten items end in 0
    assert found.spread == pytest.approx(0.2 * 0.4)
    assert "disagree on 20%" in describe_verdict(found)


def test_what_gives_no_verdict_is_counted(tmp_path: Path):
    found = audited(tmp_path, lambda prompt, number: "hm" if "wrong" in says(prompt) else "Score: 8", ROWS)
    assert found.judged == 6 and found.failures == {"unreadable": 12} and found.judgements == 18
    assert found.kappa is None and "No kappa" in describe_verdict(found)
    for text in (describe_verdict(found), found.render_page("it")):
        assert "mostly: the judge" in text and "hm" in text
    nothing = audited(tmp_path, lambda prompt, number: 403, ROWS)
    assert nothing.judgements == 0 and nothing.accuracy is None
    assert "no verdict" in describe_verdict(nothing) and "error 30" in describe_verdict(nothing)
    assert nothing.rows == [] and "<svg" in nothing.render_page("it")
    with judging("Score: 5") as server:
        judge = single(base_url=server.url, model="big", concurrency=1, budget={"max_requests": 7})
        stopped = run_audit(judge, load_gold(gold_file(tmp_path / "gold.jsonl", ROWS), judge))
    assert stopped.judgements == 7 and stopped.failures == {"budget": 23}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "x", "label": True}, '"prompt" and "response"'),
        ({"prompt": 3, "response": "y", "label": True}, "prompt must be a valid string (got 3)"),
        ({"prompt": "x", "response": ["y"], "label": True}, "response must be a valid string (got a list)"),
        (
            {"prompt": "x", "response": "y", "pair": "z", "better": ["first"]},
            "must be one of first, second, tie",
        ),
        ({"prompt": "x", "response": "y", "pair": "z"}, "first, second or tie"),
        ({"prompt": "x", "response": "y"}, '"label", "score"'),
        ({"prompt": "x", "response": "y", "label": "perhaps"}, 'label must be true or false (got "perhaps")'),
        ({"prompt": "x", "response": "y", "score": 11}, "range is 0 to 10"),
        ({"prompt": "x", "response": "y", "score": True}, "score must be a valid number (got true)"),
        ({"prompt": "x", "response": "y", "pair": "z", "better": 1}, "must be one of first, second, tie"),
        ({"conversation": [], "label": True}, '"prompt" and "response"'),
        (
            {"conversation": [{"role": "user", "content": "x"}], "label": True},
            "end with an assistant message",
        ),
        ({"conversation": [{"role": "wizard"}], "label": True}, "'wizard'"),
    ],
)
def test_a_wrong_gold_file(tmp_path: Path, row: dict[str, Any], says: str):
    judge = single(base_url="http://127.0.0.1:9/v1", model="big")
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        load_gold(gold_file(tmp_path / "gold.jsonl", [row]), judge)
    assert "line 1" in str(raised.value)


def test_conversations_and_references(tmp_path: Path):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "looking"},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "right"},
    ]
    with judging("Verdict: yes") as server:
        judge = single(
            base_url=server.url,
            model="big",
            verdict="yes_no",
            template="{task} {answer} {reference} {conversation}",
        )
        row = {"conversation": messages, "label": False, "reference": "the truth"}
        gold = load_gold(gold_file(tmp_path / "gold.jsonl", [row]), judge)
        found = run_audit(judge, gold, repeats=1)
        with pytest.raises(ValueError, match='no "reference"'):
            load_gold(gold_file(tmp_path / "gold.jsonl", [{"conversation": messages, "label": True}]), judge)
    assert found.accuracy == 0
    text = min((body["messages"][-1]["content"] for body in server.asked), key=len)
    assert "the truth" in text and "[3] tool\n  found" in text and "answer>>>\nright\n<<<END" in text
