"""`tfactory judge`: how far a judge can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from cyclopts import App

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Count, Json, Where
from TrainingFactory.config.loading import ConfigLoader

NO_VERDICT = 1
TEXTS = ("base_url", "model", "rubric", "template")  # taken as they are; other values are read as YAML

judge = App(name="judge", help="Look at model judges before their verdicts are trained on.")


@judge.command(name="audit")
async def audit_judge(
    *options: str,
    gold: Path,
    judge: Path | None = None,
    repeats: Count = 2,
    out: Path = Path("judge-audit.html"),
    as_json: Json = False,
    where: Where = "runs",
) -> int:
    """Compare a judge with gold labels: agreement, biases, consistency, injections, cost.

    ```
    tfactory judge audit --gold gold.jsonl base_url=http://localhost:8000/v1 model=QwQ-32B api_key_env=null
    tfactory judge audit --gold gold.jsonl --judge judge.yaml samples=3 vote=majority
    ```

    Args:
        options: Options of the judge as key=value; nested ones as budget.input_price=0.2
        gold: JSONL: prompt and response (or conversation), with label, score, or pair and better.
        judge: YAML file with options of the judge: base_url, model, api, rubric, template, samples, ...
        repeats: How often every item is judged, to see whether the judge agrees with itself.
        out: The page with the picture. An audit without a single verdict leaves it as it was.
    """
    # Imported here, so that help and a wrong flag do not wait for it.
    from TrainingFactory.apps.judge_audit.audit import audit
    from TrainingFactory.apps.judge_audit.gold import load_gold
    from TrainingFactory.apps.judge_audit.report import keep_audit, verdict_of
    from TrainingFactory.common.options import make_from
    from TrainingFactory.rewards.judge.model_judge import ModelJudge, model_judge

    made = make_from(model_judge, settings := _settings(judge, options), "a model judge")
    if not isinstance(made, ModelJudge):
        raise ValueError(f"verdict is {settings['verdict']}; an audit needs score, yes_no or json")
    items = load_gold(gold, made)
    out.parent.mkdir(parents=True, exist_ok=True)  # before anything is spent
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file, such as {out / 'audit.html'}")
    usage = made.client.usage
    with Display() as display:

        def judged(total: int) -> None:
            asked = show.count(usage.requests, "request")
            display.advance("judgements", total, f"{asked}, {usage.retries} of them repeated")

        try:
            found = await audit(made, items, repeats=repeats, on_judged=judged)
        finally:
            await made.close()
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show.columns(("metric", "value", "what it means"), found.rows)
        show.table([("verdict", verdict_of(found))])
    if not (found.judged or found.pairs):  # nothing could be held against a gold label
        kept = f"; {out} is that of an earlier audit" if out.exists() else ""
        show.note(f"no page was written, because there is nothing to show{kept}")
        return NO_VERDICT
    show.write_page(out, found.page(name := f"{settings['model']} at {settings['base_url']}"))
    keep_audit(Path(where).expanduser(), found, name, str(gold))
    return 0


def _settings(path: Path | None, options: tuple[str, ...]) -> dict[str, Any]:
    settings = _yaml(path.read_text(encoding="utf-8"), str(path)) if path is not None else {}
    for text in options:
        key, equals, value = text.partition("=")
        section, _, last = key.rpartition(".")
        place = settings.setdefault(section, {}) if section else settings
        if not equals or not isinstance(place, dict):
            raise ValueError(f"{text!r} is not key=value, such as model=QwQ-32B or budget.input_price=0.2")
        place[last] = value if key in TEXTS else _yaml(value, key)
    return settings


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, ConfigLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {str(error).splitlines()[0]}") from None
