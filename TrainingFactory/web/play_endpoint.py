"""Playground conversations with a model behind an endpoint. They have messages and token counts, but no token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from TrainingFactory.assembly.endpoint_rollouts import (
    EndpointRun,
    EndpointSampler,
    EndpointStopped,
    TextFormat,
)
from TrainingFactory.common.endpoints.budget import COUNT_FIELDS, SpendingLog
from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.common.endpoints.names import find_endpoint
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.protocols import Environment
from TrainingFactory.tools.endpoints.client import ModelFailure
from TrainingFactory.types import Message, SamplingParams, Trajectory
from TrainingFactory.web.play_conversation import JobArguments, PlayConversation, PlayedAnswer, make_config
from TrainingFactory.web.worker import ProgressCallback

MAX_TOKENS = 1024  # default of an answer: a reasoning model thinks within it
MAX_RAW_REPLIES = 400  # maximum replies of a conversation whose original form is kept
LIMITS = ("max_cost", "max_tokens", "max_requests")
MESSAGES_ONLY_NOTE = (
    "An endpoint returns no token ids and no probabilities, and gets no seed. Edited turns are sent as text."
)
_samplers: dict[str, EndpointSampler] = {}  # endpoint -> its client, which all conversations share


class EndpointConversation(PlayConversation):
    """Conversation with a model behind an endpoint; a file logs its spending."""

    def __init__(self, arguments: JobArguments) -> None:
        super().__init__(TextFormat(), make_config(arguments))
        self._endpoint_name, self._spending_log = arguments["model"], SpendingLog(Path(arguments["spending"]))
        self._raw_replies = dict[tuple[int, str], Any]()  # by position and message

    async def get_sampler(self) -> EndpointSampler:
        """Return the endpoint's client with its current options, because the user can raise the budget."""
        settings, sampler = find_endpoint(self._endpoint_name), _samplers.get(self._endpoint_name)
        if sampler is None or sampler.settings != settings:
            usage = self._spending_log.sum_usage(settings.budget)
            _samplers[self._endpoint_name] = EndpointSampler(settings, usage, self._spending_log.add)
            if sampler is not None:
                await sampler.close()
        return _samplers[self._endpoint_name]

    async def open(self, task_id: str | None) -> None:
        await self.get_sampler()  # raises if the key is missing
        await super().open(task_id)

    def describe_model(self) -> JobArguments:
        sampler = _samplers[self._endpoint_name]
        endpoint, options = sampler.endpoint, sampler.settings.options or {}
        ignored_settings = _find_ignored_settings(sampler)
        notes = [MESSAGES_ONLY_NOTE]
        for name in ignored_settings:
            is_fixed = name != "temperature" or name in options
            reason = "the endpoint's options set it" if is_fixed else f"{sampler.settings.api}'s API has none"
            notes.append(f"The page does not send {name}: {reason}.")
        return {
            "max_length": None, "temperature": self.config.sampling.temperature, "max_tokens": MAX_TOKENS,
            "endpoint": {
                "model": endpoint.model, "host": endpoint.host, "key": endpoint.api_key_env, "notes": notes,
                "ignored": ["seed", *ignored_settings], "spent": _describe_spending(sampler),
            },
        }  # fmt: skip

    async def begin_answer(
        self, history: list[Message], arguments: JobArguments, report: ProgressCallback
    ) -> EndpointAnswer:
        answer = EndpointAnswer(self, await self.get_sampler(), history, arguments, report)
        originals = {i: self._raw_replies.get((i, _make_key(message))) for i, message in enumerate(history)}
        answer.original_messages = {i: original for i, original in originals.items() if original is not None}
        return answer

    def finish_answer(self, answer: PlayedAnswer, history: list[Message]) -> JobArguments:
        assert isinstance(answer, EndpointAnswer)
        messages = list(history)
        for turn in answer.trajectory.turns:
            messages += [turn.message, *turn.replies]
        for position, original in answer.original_messages.items():
            if original is not None and position < len(messages):
                self._raw_replies[position, _make_key(messages[position])] = original
        for key in list(self._raw_replies)[:-MAX_RAW_REPLIES]:
            del self._raw_replies[key]
        return {"spent": _describe_spending(_samplers[self._endpoint_name])}


class EndpointAnswer(PlayedAnswer, EndpointRun):
    """Answer of a model behind an endpoint; finished turns are kept if the endpoint fails."""

    def __init__(
        self,
        conversation: EndpointConversation,
        sampler: EndpointSampler,
        history: list[Message],
        arguments: JobArguments,
        report: ProgressCallback,
    ) -> None:
        params = SamplingParams(temperature=arguments["temperature"], max_tokens=arguments["max_tokens"])
        task, seed = conversation.task, arguments["seed"]
        trajectory = Trajectory(task, "play", seed, list(history), conversation.tool_specs)
        seed_of = conversation.make_seed_function(seed, history)
        super().__init__(conversation.make_episode_settings(params), trajectory, sampler, seed_of)
        self.report_to(arguments, report)

    async def _render_first_prompt(self, environment: Environment) -> list[int]:
        return []  # the trajectory has the conversation, which the environment has seen

    async def _ask(self, messages: Sequence[Message], turn_index: int) -> ModelReply:
        try:
            return await super()._ask(messages, turn_index)
        except EndpointStopped as error:
            raise ModelFailure(str(error), "unavailable") from error


def _find_ignored_settings(sampler: EndpointSampler) -> list[str]:
    """Return the sampling settings that do not change the request to this endpoint."""
    base = ModelRequest([Message("user", "x")], temperature=0.25, max_tokens=2)
    requests = {"temperature": replace(base, temperature=0.75), "max tokens": replace(base, max_tokens=3)}
    make_body = sampler.endpoint.make_body
    return [name for name, request in requests.items() if make_body(request) == make_body(base)]


def _describe_spending(sampler: EndpointSampler) -> JobArguments:
    """Return the total usage and cost of all conversations with the endpoint, and the limits of its budget."""
    usages, budget = sampler.client.counted_usages, sampler.settings.budget
    total_usage: JobArguments = {name: sum(getattr(usage, name) for usage in usages) for name in COUNT_FIELDS}
    total_usage["cost"] = total_usage["cost"] if budget.has_prices else None
    limits = {name: value for name, value in asdict(budget).items() if name in LIMITS and value is not None}
    return total_usage | {"limits": limits}


def _make_key(message: Message) -> str:
    return json.dumps(message_to_dict(message), sort_keys=True)
