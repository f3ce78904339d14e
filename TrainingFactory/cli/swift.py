"""`tfactory swift`: train in our environments with ms-swift."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from TrainingFactory.cli.options import Overrides
from TrainingFactory.cli.show import note

swift = App(name="swift", help="Train in our environments with ms-swift.")


@swift.command
def plugin() -> None:
    """Print the path of the plugin for `swift rlhf --external_plugins`.

    ```
    tfactory swift plugin
    TF_CONFIG=run.yaml swift rlhf --rlhf_type grpo --external_plugins $(tfactory swift plugin) ...
    ```
    """
    from TrainingFactory.integrations.swift import PLUGIN_FILE

    print(PLUGIN_FILE)


@swift.command
def export(
    config: Path,
    /,
    *overrides: Overrides,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    force: bool = False,
) -> None:
    """Write what ms-swift needs to train a config with GRPO: rows.jsonl, config.yaml, args.yaml and run.sh.

    ```
    tfactory swift export run.yaml --output swift-run
    sh swift-run/run.sh --use_vllm true --vllm_mode colocate
    ```

    Args:
        config: Config file with an environment, its tools and its reward.
        output: Folder to write.
        force: Overwrite the files in an existing folder.
    """
    from TrainingFactory.assembly.named_files import read_config
    from TrainingFactory.integrations.swift.exporting import ROWS_FILE, SCRIPT_FILE, export_config

    if output.exists() and not force:
        raise ValueError(
            f"{output} exists already. Choose another folder, or overwrite its files with --force."
        )
    unmapped_options = export_config(read_config(config, overrides), output, note)
    print(f"wrote {output / ROWS_FILE} and {output / SCRIPT_FILE}; train with: sh {output / SCRIPT_FILE}")
    if unmapped_options:
        note(f"no counterpart in ms-swift: {', '.join(unmapped_options)}")
