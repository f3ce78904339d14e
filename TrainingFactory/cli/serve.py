"""`tfactory serve`: serve a model through an OpenAI-compatible API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any

from cyclopts import Parameter, validators

from TrainingFactory.cli import show
from TrainingFactory.cli.options import get_storage_paths
from TrainingFactory.protocols import Sampler


def serve(
    model: Annotated[str | None, Parameter(name="model-or-run")] = None, /, *overrides: str, host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8000, name: str | None = None,
    queue: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 256, api_key_env: str | None = None,
    reward: str | None = None,
) -> int:  # fmt: skip
    """Serve a model or a run through an OpenAI-compatible API: chat completions with tools and streaming.

    A registry alias such as agent@champion is followed: when it moves to another version, the server swaps the weights
    without dropping a request.

    ```
    tfactory serve runs/grpo-search-1
    tfactory serve agent@champion
    tfactory serve qwen3-4b --port 9000 sampling.slots=16 model.max_length=8192
    MY_KEY=... tfactory serve qwen3-4b --host 0.0.0.0 --api-key-env MY_KEY
    tfactory serve --reward run.yaml --port 9001
    ```

    Args:
        model: Run name or folder (its last checkpoint; sft@step-40 selects another), checkpoint, registered model
            (agent, agent:3, agent@champion), adapter folder, or model name.
        overrides: Config overrides as key=value, such as model.dtype=bfloat16.
        host: Address to bind. Default: only this machine can connect.
        port: Port; 0 picks a free one.
        name: Model name that clients send. Default: the name given here.
        queue: Maximum number of requests that wait while all slots are busy; further ones get HTTP status 429.
        api_key_env: Environment variable with the key that clients must send as `authorization: Bearer KEY`.
        reward: Config file whose reward is served in place of a model, for Gemini's reinforcement tuning: POST example
            and response, get the reward.
    """
    # Imported here because fastapi, uvicorn, torch and transformers take seconds: --help should appear at once.
    from TrainingFactory.apps.serving.follow import follow_alias
    from TrainingFactory.apps.serving.served import make_serving_config
    from TrainingFactory.apps.serving.server import make_server
    from TrainingFactory.common.http import listen
    from TrainingFactory.resolve.model_names import find_model

    if reward is not None:
        return _serve_reward(reward, [*([model] if model else []), *overrides], host, port, api_key_env)
    if model is None:
        raise ValueError(
            "name a model or a run: tfactory serve runs/NAME. For a reward: tfactory serve --reward CONFIG"
        )
    storage_paths = get_storage_paths(overrides)
    resolved_model = find_model(model, *storage_paths)
    config = make_serving_config(resolved_model, overrides)
    api_key = listen.read_api_key(api_key_env)
    is_local = _check_host(host, api_key, "model")
    with listen.bind(host, port) as listener:
        version = None if resolved_model.version is None else str(resolved_model.version)
        server = make_server(config, name or model, queue, version, show.note)
        app = server.make_api(api_key, is_local).app
        full_name = server.name if version in (None, server.name) else f"{server.name} ({version})"
        ready_text = f"serving {full_name} at {listen.format_url(listener)}/v1 (Ctrl-C stops)"
        follower = follow_alias(server, resolved_model, overrides, *storage_paths, show.note)
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(server), follower:
            asyncio.run(_serve(server.model.sampler, listen.make_server(app).serve([listener]), ready_text))
    show.note("stopped")
    return 0


async def _serve(sampler: Sampler, serving: Coroutine[Any, Any, None], ready_text: str) -> None:
    """Print `ready_text` when the engines are up, then serve requests."""
    from TrainingFactory.assembly.fleet import await_engines

    await await_engines(sampler)
    print(ready_text, flush=True)
    await serving


def _check_host(host: str, api_key: str | None, server_name: str) -> bool:
    """Return whether only this machine can connect; warn if others can."""
    from TrainingFactory.common.http import listen

    is_local = listen.is_loopback(host)
    if not is_local:
        warning = f"warning: --host {host} lets other machines use this {server_name}, without encryption"
        show.note(warning if api_key else f"{warning} and without a key; require one with --api-key-env NAME")
    return is_local


def _serve_reward(path: str, overrides: Sequence[str], host: str, port: int, api_key_env: str | None) -> int:
    """Serve the reward of a config until Ctrl-C."""
    from TrainingFactory.apps.scoring.reward_service import RewardService
    from TrainingFactory.assembly.named_files import read_config
    from TrainingFactory.common.http import listen

    if models := [override for override in overrides if "=" not in override]:
        raise ValueError(f"--reward serves a reward, not the model {models[0]}. Leave the model out.")
    service = RewardService(read_config(path, overrides), show.note)
    api_key = listen.read_api_key(api_key_env)
    app = service.make_api(api_key, _check_host(host, api_key, "reward")).app

    async def run(serving: Coroutine[Any, Any, None], ready_text: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await service.open(stack)
            print(ready_text, flush=True)
            await serving

    with listen.bind(host, port) as listener, contextlib.suppress(KeyboardInterrupt):
        ready_text = f"serving {service.name} as a reward at {listen.format_url(listener)}/ (Ctrl-C stops)"
        asyncio.run(run(listen.make_server(app).serve([listener]), ready_text))
    show.note("stopped")
    return 0
