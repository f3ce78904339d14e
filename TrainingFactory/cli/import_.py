"""`tfactory import`: translation of other frameworks' configs."""

from __future__ import annotations

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
    import yaml

    from TrainingFactory.config import TrainingConfig
    from TrainingFactory.config.loading import ConfigLoader
    from TrainingFactory.data.disk import write_atomically
    from TrainingFactory.integrations.rl_factory.launch_script import read_script
    from TrainingFactory.integrations.rl_factory.translate import Translation

    if output is not None and output.exists() and not force:
        raise ValueError(f"{output} exists already. Choose another file, or overwrite it with --force.")
    if invalid := [text for text in variables if "=" not in text]:
        raise ValueError(f"{invalid[0]!r} is not a variable. Write NAME=VALUE.")
    values = dict(text.split("=", 1) for text in variables)
    translation = Translation(read_script(script, values))
    text = translation.text()
    try:
        TrainingConfig(**yaml.load(text, ConfigLoader))
    except ValueError as error:  # a value of the script is not valid in a config
        raise ValueError(f"{script}: {error}") from None
    if output is None:
        print(text, end="")
        return
    write_atomically(output, text)
    note(f"wrote {output}; {len(translation.notes)} comments at its end list what was not translated")
