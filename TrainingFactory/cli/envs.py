"""`tfactory envs`: list environments, and install those of other packages."""

from __future__ import annotations

from cyclopts import App

from TrainingFactory.cli.show import note, table

envs = App(name="envs", help="List environments, and install those of other packages.")
NOTES = {
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
    from TrainingFactory.envs.process.programs import LOCK, adapter_names, environments_folder

    notes = dict(NOTES)
    for name in adapter_names():
        is_installed = (environments_folder() / name / LOCK).is_file()
        notes[f"{name}:"] = "installed" if is_installed else f"install with: tfactory envs add {name}"
    names = catalog.names("environment")
    table([(name, f"alias of {alias}" if alias else notes.get(name, "")) for name, alias in names.items()])


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
    from TrainingFactory.envs.process.programs import install

    install(name, note)
