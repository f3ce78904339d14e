"""What an audit says: no more than its items allow, why verdicts are missing, and where gold is on another scale."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kits.judge import judging
from tests.services.test_judge_audit import ROWS, audited, command, fair, gold_file, single
from TrainingFactory.services.evaluation.evaluation import wilson
from TrainingFactory.services.judge_audit.gold import load_gold
from TrainingFactory.services.judge_audit.metrics import partial
from TrainingFactory.services.judge_audit.page import audit_page
from TrainingFactory.services.judge_audit.report import Audit, verdict_of

pytestmark = pytest.mark.usefixtures("judge_key")


def test_few_items_are_too_few_to_say(tmp_path: Path):
    found = audited(tmp_path, fair, ROWS[4:8])  # two right ones, two wrong ones, all agreed on
    assert found.kappa == 1 and found.accuracy_low is not None and found.accuracy_low < 0.52
    assert found.kappa_low == pytest.approx((found.accuracy_low - 0.5) / 0.5)
    # chance is 0.5, so kappa is 0.8 at an accuracy of 0.9: 1 / (1 + 3.8415 / n) = 0.9 at n = 34.6
    assert verdict_of(found).startswith(
        "Too few items to say: it agrees with the gold labels on 100% of 4 items (95 % between 51% and 100%), kappa "
        '1.00 but 0.02 at the lower end; about 31 more that agree as well would make it "Can be trusted".'
    )


@pytest.mark.parametrize(
    ("agreed", "items", "words"),
    [
        (34, 34, "Good enough to train on"),
        (35, 35, "Can be trusted"),
        (18, 20, "Too few items to say"),
        (90, 100, "Good enough to train on"),
        (80, 100, "To be used with care"),
        (6, 10, "Not to be trusted"),
    ],
)
def test_the_verdict_goes_by_the_lower_end(agreed: int, items: int, words: str):
    low, high = wilson(agreed, items)
    share = agreed / items
    found = Audit(judged=items, attacked=items, accuracy=share, accuracy_low=low, accuracy_high=high)
    found.chance, found.kappa = 0.5, 2 * share - 1
    assert verdict_of(found).startswith(f"{words}: "), verdict_of(found)


def test_a_length_that_merely_goes_with_the_gold_is_no_bias():
    gold = [1.0, 1, 1, 0, 0, 0]
    lengths = [90.0, 100, 110, 10, 20, 30]
    only_gold = [0.9 if each else 0.1 for each in gold]
    assert partial(only_gold, lengths, gold) is None
    # within each half the value goes up by 0.1 per 10 characters, and by nothing else
    assert partial([0.7, 0.8, 0.9, 0.1, 0.2, 0.3], lengths, gold) == pytest.approx(1)
    assert partial([0.9, 0.8, 0.7, 0.1, 0.2, 0.3], lengths, gold) == pytest.approx(0, abs=1e-9)
    assert partial([], [], []) is None


def test_a_strong_bias_is_in_the_verdict():
    good = Audit(judged=60, attacked=60, accuracy=0.99, accuracy_low=0.95, accuracy_high=1.0)
    good.chance, good.kappa = 0.5, 0.98
    assert verdict_of(good).startswith("Can be trusted")
    biased = verdict_of(replace(good, length_bias=-0.97))
    assert biased.startswith("To be used with care") and "shorter answers are overrated" in biased
    assert verdict_of(replace(good, length_bias=0.4)).startswith("Can be trusted")
    assert "longer answers are overrated" in verdict_of(replace(good, length_bias=0.4))
    assert "overrated" not in verdict_of(replace(good, judged=4, length_bias=-0.97))  # may be chance


def test_gold_on_another_scale_is_told_before_anything_is_spent(tmp_path: Path):
    rows = [{"prompt": "x", "response": "y", "score": score} for score in (0.9, 0.8, 0.1, 0.2)]
    judge = single(base_url="http://127.0.0.1:9/v1", model="big")
    with pytest.raises(ValueError, match=r"no gold score is over 0\.9, but the judge's range is 0 to 10"):
        load_gold(gold_file(tmp_path / "gold.jsonl", rows), judge)
    wide = single(base_url="http://127.0.0.1:9/v1", model="big", verdict_options={"high": 1})
    assert len(load_gold(tmp_path / "gold.jsonl", wide)) == 4
    label = {"prompt": "x", "response": "z", "label": True}
    assert len(load_gold(gold_file(tmp_path / "gold.jsonl", [*rows, label]), judge)) == 5


def test_why_there_are_no_verdicts(tmp_path: Path):
    found = audited(tmp_path, lambda prompt, number: "I like it" if number % 4 else 403, ROWS)
    assert found.failures.keys() == {"unreadable", "error"}
    for text in (verdict_of(found), audit_page(found, "it")):
        assert "mostly: the judge" in text and "I like it" in text


def unused_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def test_a_failed_audit_says_why_and_keeps_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gold, page = str(gold_file(tmp_path / "gold.jsonl", ROWS)), tmp_path / "audit.html"
    port = unused_port()
    address = f"base_url=http://127.0.0.1:{port}/v1"
    given = ["--gold", gold, "--out", str(page), address, "model=big", "retries=0"]
    assert command(*given) == 1
    shown = capsys.readouterr()
    assert f"127.0.0.1:{port} could not be reached" in " ".join(shown.out.split())
    assert not page.exists() and "no page was written" in shown.err
    page.write_text("the good one")
    assert command(*given) == 1
    assert page.read_text() == "the good one" and "earlier audit" in " ".join(capsys.readouterr().err.split())


def test_the_page_is_checked_before_anything_is_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gold = str(gold_file(tmp_path / "gold.jsonl", ROWS))
    with judging(fair) as server:
        for out, text in ((tmp_path, "is a folder"), (tmp_path / "gold.jsonl" / "x.html", "cannot be made")):
            assert command("--gold", gold, "--out", str(out), f"base_url={server.url}", "model=big") == 2
            assert text in " ".join(capsys.readouterr().err.split())
        assert not server.asked


def test_a_folder_that_goes_meanwhile_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gold, page = str(gold_file(tmp_path / "gold.jsonl", ROWS)), tmp_path / "pages" / "audit.html"

    def gone(prompt: str, number: int) -> str:
        with suppress(OSError):  # another request may have done it
            page.parent.rmdir()
        return fair(prompt, number)

    with judging(gone) as server:
        assert command("--gold", gold, "--out", str(page), f"base_url={server.url}", "model=big") == 0
    assert "kappa" in capsys.readouterr().out and page.is_file()


def test_an_audit_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gold, page = str(gold_file(tmp_path / "gold.jsonl", ROWS[:1])), str(tmp_path / "audit.html")
    with judging(fair) as server:
        assert command("--gold", gold, "--out", page, f"base_url={server.url}", "model=big") == 0
    told = capsys.readouterr().err
    assert "judging: 3 judgements" in told
    assert "judgements: 3 of 3, 3 requests, 0 of them repeated" in told


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["budget=3"], "budget must be a valid dictionary or an instance of Budget (got 3)"),
        (["api_key_env=NOT_SET_KEY"], "the environment variable NOT_SET_KEY"),
        (["cache=nowhere/x.sqlite"], "there is no folder nowhere"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    says: str,
):
    monkeypatch.chdir(tmp_path)
    gold = str(gold_file(tmp_path / "gold.jsonl", ROWS))
    with judging(fair) as server:
        assert command("--gold", gold, f"base_url={server.url}", "model=big", *options) == 2
        assert not server.asked
    assert says in " ".join(capsys.readouterr().err.split())
