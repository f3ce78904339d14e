"""`tfactory proxy`: the endpoint that keeps an agent's tokens, for agents that you start yourself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.options import Overrides


def proxy(
    config: str,
    /,
    *overrides: Overrides,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8000,
    out: Path = Path("episodes.jsonl"),
    api_key_env: str | None = None,
) -> int:
    """Put an OpenAI-compatible endpoint in front of the model of a config that keeps what your own agent samples.

    With environment.command, train, eval and rollout start your agent; this is for agents that you start. POST
    /v1/episodes begins an episode and gives its key, which the agent sends as its API key; POST /v1/reward with
    {"reward": 1.0} and that key ends it. See docs/OWN_AGENT.md.

    ```
    tfactory proxy config.yaml --port 9000 model.name=qwen3-4b
    ```

    Args:
        config: A YAML file with a model, and as wanted sampling, reward, environment.max_turns and episode_timeout.
        host: The address to serve at; another than this machine's own needs --api-key-env.
        port: 0 picks a free one.
        out: JSONL file to which each episode is added when it has ended.
        api_key_env: Environment variable with a token that is wanted to begin episodes.
    """
    from TrainingFactory.assembly.named_files import read_config

    given = read_config(config, list(overrides))
    from TrainingFactory.apps.proxy.proxy import serve_alone
    from TrainingFactory.common.http import listen

    token, local = listen.key_from(api_key_env), listen.is_loopback(host)
    if not local and token is None:
        raise ValueError(f"--host {host} lets other machines in: name a token with --api-key-env NAME")
    if given.environment.command is not None:
        show.note("note: environment.command is not started here; train, eval and rollout start it")
    with listen.bind(host, port) as bound:
        done = asyncio.run(serve_alone(given, bound, out, token, local, lambda text: print(text, flush=True)))
    show.note(f"stopped: {done.ended} episodes, {done.scored} of them scored")
    return 0
