"""`tfactory judge`: audit of model judges against gold labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from cyclopts import App

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Count, Json, RunsFolder
from TrainingFactory.config.loading import ConfigLoader

NO_VERDICT_STATUS = 1
TEXT_OPTIONS = ("base_url", "model", "rubric", "template")  # plain strings; others are parsed as YAML

judge = App(name="judge", help="Audit model judges before you train on their verdicts.")


@judge.command(name="audit")
async def audit_judge(
    *options: str, gold: Path, judge: Path | None = None, repeats: Count = 2, out: Path = Path("judge-audit.html"),
    as_json: Json = False, runs_folder: RunsFolder = "runs",
) -> int:  # fmt: skip
    """Compare a judge with gold labels: agreement, biases, consistency, resistance to injection, and cost.

    ```
    tfactory judge audit --gold gold.jsonl base_url=http://localhost:8000/v1 model=QwQ-32B api_key_env=null
    tfactory judge audit --gold gold.jsonl --judge judge.yaml samples=3 vote=majority
    ```

    Args:
        options: Judge options as key=value; nested ones as budget.input_price=0.2.
        gold: JSONL file: prompt and response (or conversation), with label, score, or pair and better.
        judge: YAML file with judge options: base_url, model, api, rubric, template, samples, ...
        repeats: Number of times each item is judged, to measure self-consistency.
        out: HTML report to write; left unchanged if the judge gave no verdict at all.
    """
    # Imported here because it is slow: --help and invalid options should be answered at once.
    from TrainingFactory.apps.judge_audit.audit import audit
    from TrainingFactory.apps.judge_audit.gold import load_gold
    from TrainingFactory.apps.judge_audit.report import describe_verdict, save_audit
    from TrainingFactory.common.options import make_from
    from TrainingFactory.rewards.judge.model_judge import ModelJudge, model_judge

    settings = _read_settings(judge, options)
    judge_model = make_from(model_judge, settings, "a model judge")
    if not isinstance(judge_model, ModelJudge):
        raise ValueError(f"verdict={settings['verdict']} cannot be audited. Use score, yes_no or json.")
    gold_items = load_gold(gold, judge_model)
    out.parent.mkdir(parents=True, exist_ok=True)  # fail before any request is paid for
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder. Name a file, such as {out / 'audit.html'}.")
    usage = judge_model.client.usage
    with Display() as display:

        def on_judged(num_total: int) -> None:
            requests = show.pluralize(usage.requests, "request")
            display.advance("judgements", num_total, f"{requests}, {usage.retries} of them retries")

        try:
            result = await audit(judge_model, gold_items, repeats=repeats, on_judged=on_judged)
        finally:
            await judge_model.close()
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        show.print_columns(("metric", "value", "meaning"), result.rows)
        show.print_table([("verdict", describe_verdict(result))])
    if not (result.judged or result.pairs):  # no verdict can be compared with a gold label
        earlier_note = f"; {out} is from an earlier audit" if out.exists() else ""
        show.note(f"no report written, because the judge gave no verdict{earlier_note}")
        return NO_VERDICT_STATUS
    judge_title = f"{settings['model']} at {settings['base_url']}"
    show.write_page(out, result.render_page(judge_title))
    save_audit(Path(runs_folder).expanduser(), result, judge_title, str(gold))
    return 0


def _read_settings(path: Path | None, options: tuple[str, ...]) -> dict[str, Any]:
    settings = _parse_yaml(path.read_text(encoding="utf-8"), str(path)) if path is not None else {}
    for option in options:
        key, separator, value = option.partition("=")
        section, _, name = key.rpartition(".")
        section_settings = settings.setdefault(section, {}) if section else settings
        if not separator or not isinstance(section_settings, dict):
            raise ValueError(f"{option!r} is not key=value, such as model=QwQ-32B or budget.input_price=0.2")
        section_settings[name] = value if key in TEXT_OPTIONS else _parse_yaml(value, key)
    return settings


def _parse_yaml(text: str, location: str) -> Any:
    try:
        return yaml.load(text, ConfigLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{location} is not valid YAML: {str(error).splitlines()[0]}") from None
