"""`tfactory envs` and `tfactory models`: what can be named."""

from __future__ import annotations

from TrainingFactory.cli.show import table


def envs() -> None:
    """List the environments that can be named in a config or on the command line.

    ```
    tfactory envs
    tfactory rollout search
    ```
    """
    from TrainingFactory import catalog

    known = catalog.names("environment")
    table([(name, f"same as {alias}" if alias else "") for name, alias in known.items()])


def models() -> None:
    """List the short names of models; any hub id, local folder or GGUF file works as well.

    ```
    tfactory models
    tfactory rollout search --model qwen3-4b
    ```
    """
    from TrainingFactory.models.names import BUILTIN, SUPPORTED_MODELS, resolve

    table([(BUILTIN, "made on the spot, untrained")] + [(name, resolve(name)) for name in SUPPORTED_MODELS])
