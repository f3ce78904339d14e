"""`tfactory proxy`: a stand-alone agent endpoint. HTTP calls begin and reward episodes; each is saved when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from TrainingFactory.agent_api.agent_endpoint import AgentEndpoint, EpisodeRequests, make_key
from TrainingFactory.agent_api.agent_program import ProgramFailed, ProgramRun, SelfScoredEpisode
from TrainingFactory.assembly import rewards as build_rewards
from TrainingFactory.assembly.fleet import await_engines, get_max_open_episodes, join_cluster
from TrainingFactory.assembly.sampler import make_rollouts, make_sampler
from TrainingFactory.common.http import listen
from TrainingFactory.common.http.api import ApiError, HandlerResult
from TrainingFactory.common.seeds import derive_seed
from TrainingFactory.common.texts import describe
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Sampler
from TrainingFactory.resolve.factories import resolve_ids
from TrainingFactory.resolve.model_names import with_resolved_model
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Trajectory

MAX_OPEN_EPISODES = 1000  # maximum concurrent episodes


class EpisodeRequest(BaseModel):
    """Body of `POST /v1/episodes`: the task as a row of a task file, and an optional key chosen by the caller."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    task: dict[str, Any] = Field(default_factory=dict)
    key: Annotated[str, Field(pattern=r"^[\x21-\x7e]{16,200}$")] = Field(default_factory=make_key)


class RemoteEpisode(SelfScoredEpisode):
    """Episode that an HTTP client plays with the episode's key until it posts a reward."""

    async def run_client(self, requests: EpisodeRequests) -> None:
        await requests.reward_reported.wait()
        self.reported_reward = requests.reported_reward
        if self.reported_reward is None:
            raise ProgramFailed("the proxy stopped before a reward was posted")


class Proxy:
    """Server of episodes for HTTP clients, which appends each finished episode to `out`. It answers but does not record
    requests for another model than `trained_model`; None: it records all requests."""

    def __init__(
        self, rollouts: RolloutEngine, sampler: Sampler, output_file: Path, trained_model: str | None = None
    ) -> None:
        if rollouts.group_reward is not None:
            raise ValueError("this reward compares the episodes of a group; the proxy needs another reward")
        self.endpoint = AgentEndpoint(trained_model)
        self._rules, self._seed = rollouts.rules, rollouts.seed
        self._sampler, self._output_file = sampler, output_file
        self._episode_tasks: set[asyncio.Task[None]] = set()
        self.num_started = self.num_ended = self.num_scored = 0

    def make_app(self, token: str | None = None, is_local: bool = True) -> Any:
        """Return the ASGI app; with a `token`, only clients that send it can begin episodes."""
        api = self.endpoint.make_api(token, is_local)
        api.post("/v1/episodes", self.begin_episode)
        api.get(
            "/health",
            lambda: {"begun": self.num_started, "ended": self.num_ended} | self.endpoint.event_counts,
        )
        return api.app

    async def begin_episode(self, body: bytes) -> HandlerResult:
        """Begin an episode; return its key."""
        try:
            request = EpisodeRequest.model_validate_json(body)
            [task] = load_tasks([{"id": f"episode-{self.num_started}", "prompt": "none"} | request.task])
        except ValueError as error:
            raise ApiError(f"invalid episode request: {error}", "body") from None
        open_episodes, index = self.endpoint.open_episodes, self.num_started
        if request.key in open_episodes or len(open_episodes) >= MAX_OPEN_EPISODES:
            problem = f"an open episode already has this key, or {MAX_OPEN_EPISODES} episodes are open"
            raise ApiError(problem, "key", status=409, code="conflict")
        self.num_started += 1
        key = request.key
        rules = replace(self._rules, make_environment=lambda task: RemoteEpisode(task, self.endpoint, key))
        trajectory = Trajectory(task, group=f"proxy/{task.id}", member=index)
        run = ProgramRun(
            rules, trajectory, self._sampler, partial(derive_seed, self._seed, 0, task.id, index)
        )
        episode_task = asyncio.create_task(self._play(run))
        self._episode_tasks.add(episode_task)
        episode_task.add_done_callback(self._episode_tasks.discard)
        while request.key not in open_episodes and not episode_task.done():
            await asyncio.sleep(0)
        return {"key": request.key, "task": task.id}

    async def close(self) -> None:
        """End the open episodes and save them as failed."""
        for requests in self.endpoint.open_episodes.values():
            requests.reward_reported.set()
        await asyncio.gather(*self._episode_tasks, return_exceptions=True)

    async def _play(self, run: ProgramRun) -> None:
        try:
            await run.run()
        except Exception as error:  # a sampler error: other episodes may still succeed
            run.trajectory.status, run.trajectory.error = "error", f"sampling failed: {describe(error)}"
        finally:
            run.close_session()
        self.num_ended += 1
        self.num_scored += run.trajectory.reward is not None
        save_trajectories(self._output_file, [run.trajectory], append=True)


async def serve_proxy(
    config: TrainingConfig,
    server_socket: Any,
    output_file: Path,
    token: str | None,
    is_local: bool,
    notify: Callable[[str], None],
    trained_model: str | None = None,
) -> Proxy:
    """Serve the proxy until Ctrl-C; return it, with its counts of episodes."""
    config = with_resolved_model(resolve_ids(config, notify))
    async with AsyncExitStack() as stack:
        await join_cluster(config, stack)
        chat, sampler = await in_thread(make_sampler, config, get_max_open_episodes(config))
        stack.push_async_callback(sampler.close)
        await await_engines(sampler)
        reward = build_rewards.make_reward(config)
        await build_rewards.open_reward(reward, stack, notify)
        rollouts = make_rollouts(config, ToolEnvironment, chat, reward=reward)
        proxy = Proxy(rollouts, sampler, output_file, trained_model)
        stack.push_async_callback(proxy.close)
        address = f"{listen.format_url(server_socket)}/v1"
        notify(
            f"proxy at {address} (POST {address}/episodes begins an episode; Ctrl-C stops); saving to {output_file}"
        )
        await listen.make_server(proxy.make_app(token, is_local)).serve([server_socket])
    return proxy
