"""`tfactory data teach`: a teacher plays an environment, and its good episodes become training rows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Count, Flags, Json, Overrides
from TrainingFactory.cli.rollout import split_config_source
from TrainingFactory.config.loading import key_value

if TYPE_CHECKING:
    from TrainingFactory.apps.teach.teaching import Selection, Teaching

NotNegative = Annotated[float, Parameter(validator=validators.Number(gte=0))]
STOPPED_STATUS = 1  # exit status: the budget is spent, or the endpoint failed


@Parameter(name="*")
@dataclass(slots=True)
class Spending:
    """Prices of a teacher, and limits that all runs in the folder share."""

    input_price: NotNegative | None = None
    """Price of a million input tokens, for the cost report and --max-cost."""
    output_price: NotNegative | None = None
    """Price of a million output tokens."""
    max_cost: NotNegative | None = None
    """Stop when the teacher has cost this much. Needs prices."""
    max_total_tokens: NotNegative | None = None
    """Stop after this many input and output tokens of the teacher."""
    max_requests: Count | None = None
    """Stop after this many requests to the teacher."""

    def make_endpoint_options(self) -> dict[str, Any]:
        options = asdict(self)
        return options | {"max_tokens": options.pop("max_total_tokens")}


def teach(
    env: Annotated[str, Parameter(name="env-or-config")], /, *overrides: Overrides, teacher: str, out: Path,
    to: Literal["sft", "rft", "dpo"] = "sft", episodes: Count = 1, min_reward: float | None = None,
    best: Count | None = None, judge: str | None = None, flags: Flags | None = None,
    spending: Spending | None = None, as_json: Json = False,
) -> int:  # fmt: skip
    """Let a teacher model play an environment with its tools, and write its good episodes as training rows.

    The key comes from OPENAI_API_KEY, ANTHROPIC_API_KEY, or GOOGLE_API_KEY or GEMINI_API_KEY. Everything is stored in
    the folder. After an interrupt or a spent budget, the same command continues: no reply is paid twice.

    ```
    tfactory data teach search --teacher openai:teacher@http://127.0.0.1:8010/v1 --out taught --tasks 200
    tfactory data teach weather.py --teacher anthropic:MODEL --out taught --episodes 4 --best 1
    tfactory data teach search --teacher teacher.yaml --out pairs --to dpo --episodes 4 --max-cost 2.5
    tfactory data teach search --teacher gemini:MODEL --out judged --judge openai:MODEL --min-reward 0.7
    ```

    Args:
        env: Environment (a name, or a Python file such as weather.py), or a config file (YAML) that names one.
        teacher: openai:MODEL, anthropic:MODEL or gemini:MODEL, with @URL for another address; or a YAML file with the
            options of an endpoint.
        out: Folder for episodes, rows, recorded replies and the cost report.
        to: Training method of the rows. sft: kept episodes. rft: the same without duplicates. dpo: best and worst
            episode of each task.
        episodes: Episodes per task.
        min_reward: Keep episodes with at least this reward. Default: any reward above 0.
        best: Keep only the N best episodes of each task.
        judge: Model that scores the episodes in place of the environment: a name like that of a teacher.
    """
    # Imported here because it is slow: --help should appear at once.
    from TrainingFactory.apps.teach.teaching import Selection, Teaching
    from TrainingFactory.assembly.named_files import read_config
    from TrainingFactory.common.endpoints.names import find_endpoint

    flags = flags or Flags()
    if flags.model is not None or flags.group_size is not None:
        raise ValueError("--model and --group-size are not for teachers. Use --teacher and --episodes.")
    settings = find_endpoint(teacher, **(spending or Spending()).make_endpoint_options())
    settings.check_key()
    options = [*overrides, *flags.list_overrides(), *_make_judge_options(judge, out)]
    config = read_config(*split_config_source(env, [*options, key_value("model.name", teacher)]))
    teaching = Teaching(config, settings, out, episodes, show.note)
    if teaching.num_finished:
        episodes_text = show.pluralize(teaching.num_finished, "finished episode")
        show.note(f"{teaching.folder} has {episodes_text}, which are not played again")
    return _run_teaching(teaching, Selection(to, min_reward, best), as_json)


def _make_judge_options(judge_name: str | None, folder: Path) -> list[str]:
    """Return the overrides that let a model score the episodes; its replies are recorded too."""
    if judge_name is None:
        return []
    overrides = {"reward.type": "model_judge", "reward.model": judge_name}
    overrides |= {"reward.options": {"cache": str(folder / "judged.sqlite")}}
    return [key_value(key, value) for key, value in overrides.items()]


def _run_teaching(teaching: Teaching, selection: Selection, as_json: bool) -> int:
    """Play the missing episodes, write rows and report of all finished ones, and return the exit status."""
    from TrainingFactory.assembly.endpoint_rollouts import EndpointStopped

    stop_reason, was_interrupted, metrics = None, False, dict[str, float]()
    try:
        with Display(teaching.num_episodes - teaching.num_finished, loads_model=False) as display:
            report = teaching.run(display.episode)
        was_interrupted, metrics = report.interrupted, report.metrics
    except EndpointStopped as error:
        stop_reason = str(error)
    result = teaching.write_rows(selection)
    cost_report = teaching.write_report(result, metrics)
    if as_json:
        print(json.dumps(cost_report))
    else:
        rows = [
            (name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
            for name, value in cost_report.items()
        ]
        rows += [(f"  {reason}", f"{count} skipped") for reason, count in result.dropped.items() if count]
        show.print_table(rows)
    if result.rows:
        path = teaching.folder / "rows.jsonl"
        show.note(
            f"saved {show.pluralize(len(result.rows), 'row')} to {path}; train on them with data.dataset={path}"
        )
    if was_interrupted:
        show.note("interrupted: run the same command again to continue")
        return show.INTERRUPTED_STATUS
    if stop_reason:
        show.print_error(
            f"{stop_reason}. Run the same command again to continue, with a higher limit if a limit stopped it"
        )
        return STOPPED_STATUS
    if not result.rows:
        show.print_error(
            f"no episode became a row of {selection.form}: lower --min-reward, or play more --tasks or --episodes"
        )
        return STOPPED_STATUS
    return 0
