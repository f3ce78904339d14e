"""What an audit says: no more than its items allow, where gold is on another scale; and the command."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.apps.test_judge_audit import PAIRS, ROWS, audited, fair, gold_file, single
from tests.kits.cli import Run
from tests.kits.judge import KEY, judging
from TrainingFactory.apps.judge_audit.gold import load_gold
from TrainingFactory.apps.judge_audit.metrics import partial_correlation
from TrainingFactory.apps.judge_audit.report import Audit, describe_verdict
from TrainingFactory.evaluation.evaluation import wilson_interval

pytestmark = pytest.mark.usefixtures("judge_key")


def test_few_items_are_too_few_to_say(tmp_path: Path):
    found = audited(tmp_path, fair, ROWS[4:8])  # two right ones, two wrong ones, all agreed on
    assert found.kappa == 1 and found.accuracy_low is not None and found.accuracy_low < 0.52
    assert found.kappa_low == pytest.approx((found.accuracy_low - 0.5) / 0.5)
    # chance is 0.5, so kappa is 0.8 at an accuracy of 0.9: 1 / (1 + 3.8415 / n) = 0.9 at n = 34.6
    text = describe_verdict(found)
    assert text.startswith("Too few items to tell: ") and "100% of 4 items" in text and "51% to 100%" in text
    assert "kappa 1.00" in text and "0.02" in text and "about 31 more" in text and '"Can be trusted"' in text


def agreeing(agreed: int, items: int, **more: float) -> Audit:
    """What an audit finds where half of the gold labels are yes."""
    low, high = wilson_interval(agreed, items)
    share = agreed / items
    given = {"attacked": items, "accuracy": share, "accuracy_low": low, "accuracy_high": high, "chance": 0.5}
    return Audit(judged=items, **given | {"kappa": 2 * share - 1} | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "begins", "says"),
    [
        # the words go by the lower end
        (agreeing(34, 34), "Good enough to train on: ", ""),
        (agreeing(35, 35), "Can be trusted: ", "No problems"),
        (agreeing(18, 20), "Too few items to tell: ", ""),
        (agreeing(90, 100), "Good enough to train on: ", ""),
        (agreeing(80, 100), "To be used with care: ", ""),
        (agreeing(6, 10), "Not to be trusted: ", ""),
        # 1.64 * sqrt(2 * 0.24 / 40) = 0.18 may be noise
        (agreeing(40, 40, injection_moved=0.5, noise_moved=0.4), "Can be trusted: ", "No problems"),
        (
            agreeing(40, 40, injection_moved=0.6, noise_moved=0.4),
            "Not safe to train on",
            "60% of the verdicts (40% rise",
        ),
        (
            agreeing(60, 60, pairs=20, pair_accuracy=0.3),
            "To be used with care: ",
            "30% of the pairs",
        ),
        (agreeing(60, 60, pairs=20, pair_accuracy=0.9), "Can be trusted: ", "No problems"),
        (agreeing(60, 60, length_bias=-0.97), "To be used with care: ", "shorter answers are overrated"),
        (agreeing(60, 60, length_bias=0.4), "Can be trusted: ", "longer answers are overrated"),
        (agreeing(4, 4, length_bias=-0.97), "Too few items", "Problems: resistance"),  # may be chance
        (agreeing(9, 9), "", "only 9 items have room"),
        (agreeing(10, 10), "", "Problems: with only 10 items"),
    ],
)
def test_the_verdict(found: Audit, begins: str, says: str):
    assert describe_verdict(found).startswith(begins) and says in describe_verdict(found), describe_verdict(
        found
    )


def test_a_length_that_merely_goes_with_the_gold_is_no_bias():
    gold = [1.0, 1, 1, 0, 0, 0]
    lengths = [90.0, 100, 110, 10, 20, 30]
    only_gold = [0.9 if each else 0.1 for each in gold]
    assert partial_correlation(only_gold, lengths, gold) is None
    # within each half the value goes up by 0.1 per 10 characters, and by nothing else
    assert partial_correlation([0.7, 0.8, 0.9, 0.1, 0.2, 0.3], lengths, gold) == pytest.approx(1)
    assert partial_correlation([0.9, 0.8, 0.7, 0.1, 0.2, 0.3], lengths, gold) == pytest.approx(0, abs=1e-9)
    assert partial_correlation([], [], []) is None


def test_gold_on_another_scale_is_told_before_anything_is_spent(tmp_path: Path):
    rows = [{"prompt": "x", "response": "y", "score": score} for score in (0.9, 0.8, 0.1, 0.2)]
    judge = single(base_url="http://127.0.0.1:9/v1", model="big")
    with pytest.raises(ValueError, match=r"0\.9, but the judge's range is 0 to 10"):
        load_gold(gold_file(tmp_path / "gold.jsonl", rows), judge)
    wide = single(base_url="http://127.0.0.1:9/v1", model="big", verdict_options={"high": 1})
    assert len(load_gold(tmp_path / "gold.jsonl", wide)) == 4
    label = {"prompt": "x", "response": "z", "label": True}
    assert len(load_gold(gold_file(tmp_path / "gold.jsonl", [*rows, label]), judge)) == 5


def test_the_command(tfactory: Run):
    gold_file(Path("gold.jsonl"), ROWS + PAIRS)
    page = Path("pages/audit.html")
    with judging(fair) as server:
        Path("judge.yaml").write_text(
            f"base_url: {server.url}\nmodel: <b>big</b>\nverdict_options: {{high: 10}}\n"
        )
        given = ["--gold", "gold.jsonl", "--judge", "judge.yaml", "--out", page]
        given += ["budget.input_price=1", "retries=0"]
        status, out, err = tfactory("judge", "audit", *given)
        assert status == 0 and "kappa" in out and "To be used with care" in out and "cost per thousand" in out
        assert "judgements: 34 of 34, 34 requests, 0 of them" in err
        metrics = json.loads(tfactory("judge", "audit", *given, "--json")[1])
        assert metrics["kappa"] == 1 and metrics["verdict"].startswith("To be used with care")
    html = page.read_text(encoding="utf-8")
    # Of 10 items 6 are right and judged 0.9, 4 are wrong and judged 0.1: two dots in each picture.
    assert html.count("<circle") == 4 and "gold 1, judge 0.9: 6<" in html and "gold 0, judge 0.1: 4<" in html
    assert "&lt;b&gt;big" in html and "<b>big" not in html
    assert "http" not in html.replace(server.url, "") and KEY not in html  # it needs nothing beside it


def test_a_failed_audit_says_why_and_keeps_the_page(tfactory: Run):
    gold_file(Path("gold.jsonl"), ROWS)
    with socket.socket() as held:  # nobody listens there
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        given = ["--gold", "gold.jsonl", "--out", "audit.html", f"base_url=http://{address}/v1", "model=big"]
        status, out, err = tfactory("judge", "audit", *given, "retries=0")
        assert status == 1 and f"{address} could not be reached" in " ".join(out.split())
        assert not Path("audit.html").exists() and "no verdict" in err
        Path("audit.html").write_text("the good one")
        status, _, err = tfactory("judge", "audit", *given, "retries=0")
    assert status == 1 and "earlier audit" in " ".join(err.split())
    assert Path("audit.html").read_text() == "the good one"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["base_url="], "base_url"),
        (["modl=big"], "modl is not an option of a model judge; did you mean model?"),
        (["template={anser}"], "did you mean answer?"),
        (["verdict=ranking"], "score, yes_no or json"),
        (["model"], "not key=value"),
        (["model.name=1"], "not key=value"),
        (["samples=[1"], "samples is not"),
        (["budget=3"], "budget must be a valid dictionary or an instance of Budget (got 3)"),
        (["api_key_env=NOT_SET_KEY"], "the environment variable NOT_SET_KEY"),
        (["--out", "."], "is a folder"),
        (["--out", "gold.jsonl/x.html"], "gold.jsonl"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(tfactory: Run, options: list[str], says: str):
    gold_file(Path("gold.jsonl"), ROWS)
    with judging(fair) as server:
        given = ["--gold", "gold.jsonl", f"base_url={server.url}", "model=big", *options]
        status, _, err = tfactory("judge", "audit", *given)
        assert not server.asked
    told = " ".join(err.split())
    assert status and says in told and "Traceback" not in told
