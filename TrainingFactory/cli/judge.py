"""`tfactory judge`: how far a judge can be trusted."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml
from cyclopts import App, Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.tools import progress

if TYPE_CHECKING:
    from TrainingFactory.rewards.judge.client import JudgeClient

T = TypeVar("T")
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
NO_VERDICT = 1
LINE_EVERY = 30.0  # seconds
TEXTS = ("base_url", "model", "rubric", "template")  # taken as they are; other values are read as YAML

judge = App(name="judge", help="Look at model judges before their verdicts are trained on.")


@judge.command(name="audit")
def audit_judge(
    *options: str,
    gold: Path,
    judge: Path | None = None,
    repeats: Count = 2,
    out: Path = Path("judge-audit.html"),
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Compare a judge with gold labels: agreement, biases, consistency, injections, cost.

    ```
    tfactory judge audit --gold gold.jsonl base_url=http://localhost:8000/v1 model=QwQ-32B api_key_env=null
    tfactory judge audit --gold gold.jsonl --judge judge.yaml samples=3 vote=majority
    ```

    Parameters
    ----------
    options
        Options of the judge as key=value; nested ones as budget.input_price=0.2
    gold
        JSONL: prompt and response (or conversation), with label, score, or pair and better.
    judge
        YAML file with options of the judge: base_url, model, api, rubric, template, verdict, samples, cache, ...
    repeats
        How often every item is judged, to see whether the judge agrees with itself.
    out
        The page with the picture. An audit without a single verdict leaves it as it was.
    as_json
        Print the figures as one JSON object.
    """
    # Imported here, so that help and a wrong flag do not wait for it.
    from TrainingFactory.rewards.model_judge import ModelJudge, model_judge
    from TrainingFactory.services.judge_audit.audit import audit, load_gold, plan
    from TrainingFactory.services.judge_audit.page import audit_page, audit_rows
    from TrainingFactory.services.judge_audit.report import verdict_of
    from TrainingFactory.tools.builtin.making import call_with

    settings = _settings(judge, options)
    made = call_with(model_judge, settings, "the judge")
    try:
        if not isinstance(made, ModelJudge):
            raise ValueError(f"verdict is {settings['verdict']}; an audit needs score, yes_no or json")
        items = load_gold(gold, made)
        _check_page(out)
        total = plan(items, repeats)
        with progress("judging", total, "judgement") as advance:
            waiting = Waiting(total, made.client, advance)
            found = asyncio.run(waiting.until(audit(made, items, repeats=repeats, on_judged=waiting.judged)))
    finally:
        made.close()
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show.columns(("figure", "value", "what it means"), audit_rows(found))
        show.table([("verdict", verdict_of(found))])
    _write(
        out, audit_page(found, f"{settings['model']} at {settings['base_url']}") if found.compared else None
    )
    return 0 if found.compared else NO_VERDICT


class Waiting:
    """Says from time to time how far an audit is: a judge that does not answer is asked again, which takes minutes."""

    def __init__(self, total: int, client: JudgeClient, advance: Callable[[], None]) -> None:
        self.total, self.client, self.advance, self.done = total, client, advance, 0

    def judged(self) -> None:
        self.done += 1
        self.advance()

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        telling = asyncio.create_task(self._tell())
        try:
            return await work
        finally:
            telling.cancel()

    async def _tell(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(LINE_EVERY)
            usage = self.client.usage
            text = f"{self.done} of {self.total} judged after {time.monotonic() - started:.0f} s"
            asked = f"{show.count(usage.requests, 'request')}, {usage.retries} of them repeated"
            show.note(f"{text} ({asked})")


def _check_page(out: Path) -> None:
    """Whether the page can be written, before anything is paid for."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out is {out}, and its folder cannot be made ({error.strerror})") from None
    if out.is_dir():
        raise ValueError(f"--out is {out}, which is a folder; name a file such as {out / 'judge-audit.html'}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ValueError(f"--out is {out}, which cannot be written; name another file")


def _write(out: Path, page: str | None) -> None:
    """None, of an audit that has nothing to show, does not replace the page of one that had."""
    if page is None:
        kept = f"; {out} is that of an earlier audit" if out.exists() else ""
        show.note(f"no page was written, because there is nothing to show{kept}")
        return
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"the page {out} cannot be written ({error.strerror}); the figures stand above"
        ) from None
    show.note(f"the page: {out}")


def _settings(path: Path | None, options: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise ValueError(f"there is no judge file at {path}")
        settings = _yaml(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(settings, dict):
            raise ValueError(f"{path} must hold options of a judge such as base_url and model")
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"{text!r} is not key=value, such as model=QwQ-32B")
        *sections, last = key.split(".")
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"{key}: {section} is a value, not a section")
        place[last] = value if key in TEXTS else _yaml(value, key)
    return settings


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {str(error).splitlines()[0]}") from None
