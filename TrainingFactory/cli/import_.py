"""`tfactory import`: translation of other frameworks' configs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from TrainingFactory.cli.show import note

import_ = App(name="import", help="Translate configs of other frameworks.")


@import_.command(name="rl-factory")
def rl_factory(
    script: Path,
    *variables: Annotated[str, Parameter(help="Shell variables set outside the script, as NAME=VALUE.")],
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    """Translate a launch script of RL-Factory to a config. The script is parsed, never executed.

    ```
    tfactory import rl-factory main_grpo.sh -o config.yaml
    tfactory import rl-factory main_grpo.sh MODEL_PATH=Qwen/Qwen3-4B
    ```

    Args:
        script: Shell script that runs `python3 -m verl.trainer.main_ppo key=value ...`.
        output: YAML file to write. Default: print the config. Comments at its end list what was not translated.
        force: Overwrite an existing file.
    """
    from TrainingFactory.integrations.rl_factory.launch_script import read_script
    from TrainingFactory.integrations.rl_factory.translate import Translation

    _check_output(output, force)
    translation = Translation(read_script(script, _parse_variables(variables)))
    _write_config(script, translation.text(), len(translation.notes), output)


@import_.command
def swift(
    source: Path,
    *variables: Annotated[str, Parameter(help="Shell variables set outside the script, as NAME=VALUE.")],
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    """Translate a training of ms-swift to a config. Scripts are parsed, never executed.

    ```
    tfactory import swift run.sh -o config.yaml
    tfactory import swift args.yaml
    tfactory import swift output/v0-20260801-120000
    ```

    Args:
        source: Shell script with `swift rlhf ...` or `swift sft ...`, a YAML or JSON file of arguments, or an output
            folder of ms-swift.
        output: YAML file to write. Default: print the config. Comments at its end list what was not translated.
        force: Overwrite an existing file.
    """
    from TrainingFactory.integrations.swift.importing import SwiftTranslation, read_arguments

    _check_output(output, force)
    translation = SwiftTranslation(source, *read_arguments(source, _parse_variables(variables)))
    _write_config(source, translation.text(), len(translation.notes), output)


def _check_output(output_file: Path | None, force: bool) -> None:
    if output_file is not None and output_file.exists() and not force:
        raise ValueError(f"{output_file} exists already. Choose another file, or overwrite it with --force.")


def _parse_variables(variables: Sequence[str]) -> dict[str, str]:
    if invalid_variables := [variable for variable in variables if "=" not in variable]:
        raise ValueError(f"{invalid_variables[0]!r} is not a variable. Write NAME=VALUE.")
    return dict(variable.split("=", 1) for variable in variables)


def _write_config(source_file: Path, config_text: str, num_notes: int, output_file: Path | None) -> None:
    """Check a translated config, and print it or write it to a file."""
    import yaml

    from TrainingFactory.config import TrainingConfig
    from TrainingFactory.config.loading import ConfigLoader
    from TrainingFactory.data.disk import write_atomically

    try:
        TrainingConfig(**yaml.load(config_text, ConfigLoader))
    except ValueError as error:  # a value of the source is not valid in a config
        raise ValueError(f"{source_file}: {error}") from None
    if output_file is None:
        print(config_text, end="")
        return
    write_atomically(output_file, config_text)
    note(f"wrote {output_file}; {num_notes} comments at its end list what was not translated")
