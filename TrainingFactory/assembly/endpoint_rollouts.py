"""Episodes of a model behind an endpoint. They hold messages and token counts, but no token ids and no log-probs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

from TrainingFactory.common.endpoints.budget import Usage
from TrainingFactory.common.endpoints.messages import CHARS_PER_TOKEN, ModelReply, ModelRequest
from TrainingFactory.common.endpoints.names import EndpointSettings
from TrainingFactory.common.texts import truncate_middle
from TrainingFactory.protocols import Environment, Sampler
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.tools.endpoints.client import EndpointClient, ModelFailure
from TrainingFactory.types import Completion, Message, SamplingParams, ToolSpec, Trajectory, Turn, Weights

NAMESPACE = "endpoint"  # of metrics and signals
MAX_LENGTH = 2**31  # the endpoint limits its own context


class EndpointStopped(ValueError):
    """Raised when no further request can succeed: the budget is spent, or the endpoint denies access or is down."""


class TextFormat:
    """A chat format without tokens for models behind endpoints, which take messages."""

    stop_ids: tuple[int, ...] = ()
    sees_images = True  # or the endpoint rejects the request

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        return []

    def extend(self, turn: Turn, replies: Sequence[Message]) -> list[int]:
        return []

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        raise _make_token_error()

    def write(
        self,
        message: Message,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
        exact: bool = True,
    ) -> list[int]:
        raise _make_token_error()

    def truncate(self, text: str, max_tokens: int) -> str:
        return truncate_middle(text, max_tokens * CHARS_PER_TOKEN)

    def decode(self, token_ids: Sequence[int]) -> str:
        raise _make_token_error()


class ClosedSession:
    """Placeholder for an episode's sampling session, because an endpoint has none."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        raise _make_token_error()

    def fork(self) -> ClosedSession:
        return self

    def close(self) -> None: ...


class EndpointSampler:
    """The client of a model endpoint, which an endpoint rollout uses instead of a sampler. `usage` is that of
    earlier processes, which counts for the budget. `on_paid_reply` is called with every reply that was not cached."""

    policy_version = 0
    max_length = MAX_LENGTH

    def __init__(
        self,
        settings: EndpointSettings,
        usage: Usage | None = None,
        on_paid_reply: Callable[[ModelReply], None] = lambda _: None,
    ) -> None:
        settings.check_key()
        self.settings, self._on_paid_reply = settings, on_paid_reply
        self.endpoint = settings.make_endpoint()
        self.client = EndpointClient(
            model=self.endpoint, concurrency=settings.concurrency, rate=settings.rate, retries=settings.retries,
            pause=settings.pause, cache=settings.cache, budget=settings.budget, replay=settings.replay,
            earlier_usage=usage,
        )  # fmt: skip

    async def ask(self, request: ModelRequest, seed: int) -> ModelReply:
        """Send a request; raise EndpointStopped if further ones are pointless, ModelFailure if only this one failed.
        `seed` tells samples of equal requests apart in the cache."""

        async def send() -> ModelReply:
            reply = await self.endpoint.ask(request)
            self._on_paid_reply(reply)
            return reply

        body = json.dumps(self.endpoint.make_body(request), sort_keys=True)
        try:
            return await self.client.request((NAMESPACE, self.endpoint.identity, body, f"{seed}"), send)
        except ModelFailure as failure:
            self.client.usage.failures[failure.kind] += 1
            if failure.is_permanent:
                raise EndpointStopped(str(failure)) from failure
            raise

    @property
    def metrics(self) -> dict[str, float]:
        """Return this process's numbers of requests, retries, cached replies and failures."""
        counter_names = ("requests", "retries", "cached")
        counts = {f"{NAMESPACE}/{name}": float(getattr(self.client.usage, name)) for name in counter_names}
        failures = self.client.usage.failures.items()
        return counts | {f"{NAMESPACE}/failed_{kind}": float(count) for kind, count in failures}

    def session(self) -> ClosedSession:
        return ClosedSession()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        raise _make_token_error()

    async def update(self, weights: Weights) -> None:
        raise _make_token_error()

    async def close(self) -> None:
        await self.client.close()


class EndpointRun(EpisodeRun):
    """An episode whose turns are replies of a model behind an endpoint."""

    def __init__(
        self, rules: EpisodeSettings, trajectory: Trajectory, sampler: EndpointSampler, *args: Any
    ) -> None:
        super().__init__(rules, trajectory, sampler.session(), sampler.max_length, *args)
        self._sampler = sampler
        self.original_messages: dict[int, Any] = {}  # the endpoint's own forms of its messages, by position

    async def _play_turns(self, environment: Environment) -> None:
        await self._render_first_prompt(environment)
        messages = list(self.trajectory.prompt)
        for turn_index in range(self.rules.max_turns):
            try:
                reply = await self._ask(messages, turn_index)
            except ModelFailure as failure:
                return self._end_episode("error", str(failure))
            self.original_messages[len(messages)] = reply.original
            is_truncated = reply.fault == "cut"
            turn = Turn([], Completion([], [], "length" if is_truncated else "stop"), reply.message)
            self.trajectory.turns.append(turn)
            try:
                if is_truncated:
                    return self._end_episode("truncated", None)
                await self._step_environment(environment, turn)
            finally:  # the step replaces the signals, and ends the episode by an exception
                turn.signals |= self._make_usage_signals(reply)
            messages += [turn.message, *turn.replies]
        return self._end_episode("max_turns", None)

    async def _ask(self, messages: Sequence[Message], turn_index: int) -> ModelReply:
        params, trajectory = self.rules.params, self.trajectory
        request = ModelRequest(
            list(messages), trajectory.tools, trajectory.member, params.temperature, params.max_tokens,
            dict(self.original_messages),
        )  # fmt: skip
        return await self._sampler.ask(request, self.seed_of(turn_index))

    def _make_usage_signals(self, reply: ModelReply) -> dict[str, float]:
        token_counts = {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens}
        budget = self._sampler.client.budget
        amounts = token_counts | ({"cost": budget.price_reply(reply)} if budget.has_prices else {})
        return {f"{NAMESPACE}/{signal}": float(amount) for signal, amount in amounts.items()}


class EndpointRollouts(RolloutEngine):
    """Rollout engine for an `EndpointSampler` that skips the `finished_episodes`, a set of (task id, member)."""

    finished_episodes: AbstractSet[tuple[str, int]] = frozenset()

    async def _run_episode(self, episode: EpisodeRun, gate: asyncio.Semaphore) -> None:
        # A group reward needs whole groups, whose recorded replies cost nothing, so it does not come here.
        if (episode.trajectory.task.id, episode.trajectory.member) not in self.finished_episodes:
            await super()._run_episode(episode, gate)

    def _make_run(self, trajectory: Trajectory, sampler: Sampler, *args: Any) -> EpisodeRun:
        assert isinstance(sampler, EndpointSampler)
        return EndpointRun(self.rules, trajectory, sampler, *args)


def sum_endpoint_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the total tokens and cost of all turns, including turns that an earlier process paid for; empty for models
    without an endpoint."""
    totals: dict[str, float] = {}
    for trajectory in trajectories:
        for turn in trajectory.turns:
            for signal, value in turn.signals.items():
                if signal.startswith(f"{NAMESPACE}/"):
                    totals[signal] = totals.get(signal, 0.0) + value
    return totals


def _make_token_error() -> ValueError:
    return ValueError(
        "an endpoint has no weights and no tokens here. Use it with tfactory eval, compare, rollout or data teach"
    )


def reject_endpoint(endpoint: str) -> NoReturn:
    raise ValueError(
        f"{endpoint} is an endpoint, which has no weights here to train or serve. Use it with tfactory eval, compare, "
        "rollout or data teach, or name a model"
    )
