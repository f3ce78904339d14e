"""`tfactory proxy`: an OpenAI-compatible endpoint that records the episodes of agents that you start yourself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Overrides


def proxy(
    config: str, /, *overrides: Overrides, host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8000,
    out: Path = Path("episodes.jsonl"), api_key_env: str | None = None,
    trained_model: str | None = None,
) -> int:  # fmt: skip
    """Serve a config's model through an OpenAI-compatible endpoint that records every token your agent samples.

    Use it for agents that you start yourself; with environment.command set, train, eval and rollout start the agent.
    POST /v1/episodes starts an episode and returns its key, which the agent sends as its API key. POST /v1/reward with
    {"reward": 1.0} and that key ends the episode. See docs/OWN_AGENT.md.

    ```
    tfactory proxy config.yaml --port 9000 model.name=qwen3-4b
    ```

    Args:
        config: Config file (YAML) with a model and optionally sampling, reward, environment.max_turns and
            environment.episode_timeout.
        host: Address to bind. Addresses that other machines can reach require --api-key-env.
        port: Port; 0 picks a free one.
        out: JSONL file to which every finished episode is appended.
        api_key_env: Environment variable that holds the API key required to start episodes.
        trained_model: Record only requests for this model name, such as policy. Requests for another name are answered
            and counted (`side` in /health). By default, requests for any name are recorded.
    """
    from TrainingFactory.assembly.named_files import read_config

    settings = read_config(config, list(overrides))
    from TrainingFactory.apps.proxy.proxy import serve_proxy
    from TrainingFactory.common.http import listen

    api_key = listen.read_api_key(api_key_env)
    is_local = listen.is_loopback(host)
    if not is_local and api_key is None:
        raise ValueError(f"--host {host} lets other machines connect. Require a key: --api-key-env NAME")
    if settings.environment.command is not None:
        show.note("note: environment.command is ignored; only train, eval and rollout start it")
    with listen.bind(host, port) as listener:
        serving = serve_proxy(
            settings, listener, out, api_key, is_local, lambda text: print(text, flush=True), trained_model
        )
        service = asyncio.run(serving)
    show.note(f"stopped: {show.pluralize(service.num_ended, 'episode')}, {service.num_scored} of them scored")
    return 0
