"""`tfactory serve`: a model behind an OpenAI-compatible address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Annotated, Any

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.options import places
from TrainingFactory.protocols import Sampler


def serve(
    model: Annotated[str, Parameter(name="model-or-run")],
    /,
    *overrides: str,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8000,
    name: str | None = None,
    queue: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 256,
    api_key_env: str | None = None,
) -> int:
    """Serve a model, or what a run has made, to any OpenAI client: chat completions with tools and streaming.

    The name agent@champion is followed: when it becomes another version, that one answers, and no request is lost.

    ```
    tfactory serve runs/grpo-search-1
    tfactory serve agent@champion
    tfactory serve qwen3-4b --port 9000 sampling.slots=16 model.max_length=8192
    MY_KEY=... tfactory serve qwen3-4b --host 0.0.0.0 --api-key-env MY_KEY
    ```

    Args:
        model: A run (its name or folder; its last checkpoint is taken, or sft@step-40), a checkpoint, a
            registered model (agent, agent:3, agent@champion), the folder of an adapter, or a model.
        overrides: Options of the config, as key=value: model.dtype=bfloat16
        host: The address to serve at; by default programs on this machine only can connect.
        port: 0 picks a free one.
        name: What clients call the model; by default what it is called here.
        queue: Answers that may wait while all slots are in use; more are refused with status 429.
        api_key_env: Environment variable with a key that clients must send as `authorization: Bearer KEY`.
    """
    # Imported here: fastapi, uvicorn, torch and transformers take seconds, and help should not wait for them.
    from TrainingFactory.apps.serving.follow import following
    from TrainingFactory.apps.serving.served import served_config
    from TrainingFactory.apps.serving.server import make_server
    from TrainingFactory.common.http import listen
    from TrainingFactory.resolve.model_names import find_model

    where = places(overrides)
    found = find_model(model, *where)
    config = served_config(found, overrides)
    key = listen.key_from(api_key_env)
    local = listen.is_loopback(host)
    if not local:
        warning = f"warning: --host {host} lets other machines use this model, without encryption"
        show.note(warning if key else f"{warning} and without a key; --api-key-env NAME asks for one")
    with listen.bind(host, port) as bound:
        version = None if found.version is None else str(found.version)
        server = make_server(config, name or model, queue, version, show.note)
        app = server.api(key, local).app
        which = server.name if version in (None, server.name) else f"{server.name} ({version})"
        told = f"serving {which} at {listen.address_of(bound)}/v1 (Ctrl-C stops)"
        follow = following(server, found, overrides, *where, show.note)
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(server), follow:
            asyncio.run(_answer(server.served.sampler, listen.make_server(app).serve([bound]), told))
    show.note("stopped")
    return 0


async def _answer(sampler: Sampler, serving: Coroutine[Any, Any, None], told: str) -> None:
    from TrainingFactory.assembly.fleet import await_engines

    await await_engines(sampler)
    print(told, flush=True)
    await serving
