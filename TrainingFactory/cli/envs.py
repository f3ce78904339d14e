"""`tfactory envs`: list and check environments, and install those of other packages."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import App, Parameter, validators

from TrainingFactory.cli.options import Json, Overrides
from TrainingFactory.cli.show import note, print_columns, print_table

CHECK_FAILED = 1  # exit status
AtLeastOne = Annotated[int, Parameter(validator=validators.Number(gte=1))]
envs = App(name="envs", help="List and check environments, and install those of other packages.")
ENVIRONMENT_NOTES = {
    "reasoning_gym/": "NAME: a dataset of reasoning-gym",
    "bfcl/": "CATEGORY: multi_turn_base, ...",
    "process:": "COMMAND: your own program, such as process:node game.mjs",
}


@envs.default
def list_() -> None:
    """List the environments that configs and commands can name.

    ```
    tfactory envs
    tfactory rollout search
    ```
    """
    from TrainingFactory.common import catalog
    from TrainingFactory.envs.process.programs import LOCK_FILE, find_environments_folder, list_adapters

    notes = dict(ENVIRONMENT_NOTES)
    for name in list_adapters():
        is_installed = (find_environments_folder() / name / LOCK_FILE).is_file()
        notes[f"{name}:"] = "installed" if is_installed else f"install with: tfactory envs add {name}"
    names = catalog.names("environment")
    print_table(
        [(name, f"alias of {alias}" if alias else notes.get(name, "")) for name, alias in names.items()]
    )


@envs.command
def add(name: str) -> None:
    """Install the package of an environment into a virtual environment of its own.

    Versions and hashes are written to requirements.lock in its folder; a second call installs the same files again.

    ```
    tfactory envs add gymnasium
    tfactory rollout gymnasium:FrozenLake-v1
    ```

    Args:
        name: Name of the environment, as before the colon of an environment_id.
    """
    from TrainingFactory.envs.process.programs import install_adapter

    install_adapter(name, note)


@envs.command
def check(
    source: Annotated[str, Parameter(name="env-or-config")], /, *overrides: Overrides, tasks: AtLeastOne = 4,
    episodes: AtLeastOne = 64, reference: str | None = None, as_json: Json = False,
) -> int:  # fmt: skip
    """Check an environment before training.

    Does the reference earn more than junk, is the reward deterministic, does reset restore the initial state, and do
    many episodes run concurrently? Exit status 1: a check failed.

    ```
    tfactory envs check search
    tfactory envs check gymnasium:FrozenLake-v1 --reference walk.py:solve
    tfactory envs check config.yaml --episodes 256 --json
    ```

    Args:
        source: Environment, or a config file (YAML) that names one.
        tasks: Number of tasks that are played with the reference and with junk.
        episodes: Number of concurrent episodes.
        reference: FILE.py:FUNCTION that solves tasks: it gets the messages and the task, and returns the next message.
            Default: the environment's expert, else the answers of the tasks.
    """
    from TrainingFactory.assembly.named_files import read_config
    from TrainingFactory.cli.rollout import split_config_source

    path, options = split_config_source(source, overrides)
    config = read_config(path, options)
    # Imported here because it is slow: --help and config errors should appear at once.
    from TrainingFactory.apps.env_check.check import check_environment

    report = check_environment(config, tasks, episodes, reference)
    if as_json:
        print(json.dumps(report.as_json, indent=1, ensure_ascii=False))
    else:
        print_columns(["", "check", "result"], [(row.status, row.name, row.detail) for row in report.checks])
    return CHECK_FAILED if report.failed else 0
