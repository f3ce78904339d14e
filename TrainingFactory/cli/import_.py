"""`tfactory import`: configs of other programs as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from TrainingFactory.cli.show import note

import_ = App(name="import", help="Translate what was written for another program.")


@import_.command(name="rl-factory")
def rl_factory(
    script: Path,
    *variables: Annotated[str, Parameter(help="Variables that are set outside the script, as NAME=VALUE.")],
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    force: bool = False,
) -> None:
    """Translate a launch script of RL-Factory to a config. The script is read, never run.

    ```
    tfactory import rl-factory main_grpo.sh -o config.yaml
    tfactory import rl-factory main_grpo.sh MODEL_PATH=Qwen/Qwen3-4B
    ```

    Args:
        script: The shell script with `python3 -m verl.trainer.main_ppo key=value ...`.
        output: YAML file to write; without it the config is printed. What is not taken over stands at its end.
        force: Write over the file if it is there.
    """
    import yaml

    from TrainingFactory.config import TrainingConfig
    from TrainingFactory.config.loading import ConfigLoader
    from TrainingFactory.data.disk import write_aside
    from TrainingFactory.integrations.rl_factory.launch_script import read_script
    from TrainingFactory.integrations.rl_factory.translate import Translation

    if output is not None and output.exists() and not force:
        raise ValueError(f"{output} is there already; choose another file, or write over it with --force")
    if wrong := [each for each in variables if "=" not in each]:
        raise ValueError(f"{wrong[0]!r} is no variable; write NAME=VALUE")
    given = dict(each.split("=", 1) for each in variables)
    translation = Translation(read_script(script, given))
    text = translation.text()
    try:
        TrainingConfig(**yaml.load(text, ConfigLoader))
    except ValueError as error:  # the script says what no config can
        raise ValueError(f"{script}: {error}") from None
    if output is None:
        print(text, end="")
        return
    write_aside(output, text)
    note(
        f"wrote {output}; {len(translation.notes)} lines at its end say what is left to do, or left out and why"
    )
