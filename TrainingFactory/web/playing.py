"""Jobs of the playground in the worker process that holds the model; `play.py` sends them."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any

from TrainingFactory.apps.serving.served import load_served_model, make_serving_config
from TrainingFactory.apps.views.episodes import make_episode_view
from TrainingFactory.common.openai_format import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.data.ranking import sum_rewards
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.web.play_conversation import JobArguments, PlayConversation
from TrainingFactory.web.play_endpoint import EndpointConversation
from TrainingFactory.web.play_local import LocalConversation
from TrainingFactory.web.worker import ProgressCallback

MAX_CONVERSATIONS = 8  # maximum conversations that keep their environment and tools open
_conversations: OrderedDict[str, PlayConversation] = OrderedDict()


@lru_cache(1)
def _get_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that engines, servers and environments of this process share across jobs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="play", daemon=True).start()
    return loop


def _make_job(
    run_job: Callable[[JobArguments, ProgressCallback], Coroutine[Any, Any, JobArguments]],
) -> Callable[[JobArguments, ProgressCallback], JobArguments]:
    return lambda arguments, report: asyncio.run_coroutine_threadsafe(
        run_job(arguments, report), _get_loop()
    ).result()


@_make_job
async def begin(arguments: JobArguments, report: ProgressCallback) -> JobArguments:
    conversation = await _open_conversation(arguments)
    prompt = await conversation.restart_environment()
    messages = [message for message in prompt if arguments["task"] or message.role == "system"]
    return {
        "tools": [spec_to_dict(spec) for spec in conversation.tool_specs],
        "messages": [message_to_dict(message) for message in messages],
        "tasks": [{"id": task.id, "prompt": task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content}
                  for task in conversation.tasks],
    } | conversation.describe_model()  # fmt: skip


@_make_job
async def say(arguments: JobArguments, report: ProgressCallback) -> JobArguments:
    conversation = await _open_conversation(arguments)
    messages = [message_from_dict(message) for message in arguments["messages"]]
    was_restarted, history = await conversation.follow_edits(messages), list(messages)
    if messages[-1].role == "assistant":  # an edited turn: execute its tool calls now
        history += await conversation.call_tools(messages[-1])
    answer = await conversation.begin_answer(history, arguments, report)
    was_stopped = await answer.play_until_stopped()
    trajectory, start_index = answer.trajectory, len(history)
    model_facts = conversation.finish_answer(answer, history)
    for turn in trajectory.turns:
        history += [turn.message, *turn.replies]
    conversation.seen_messages = history
    reward, unscored_reason = await conversation.score(answer, start_index, was_stopped)
    # `anew`: the environment was restarted. `unscored`: why scoring failed.
    return {
        "messages": [message_to_dict(message) for message in history[len(messages) :]],
        "turns": [turn.model_dump(mode="json") for turn in make_episode_view(trajectory, 0).turns],
        "anew": was_restarted, "status": "stopped" if was_stopped else trajectory.status, "error": trajectory.error,
        "reward": None if reward is None else sum_rewards(reward), "unscored": unscored_reason,
    } | model_facts  # fmt: skip


async def _open_conversation(arguments: JobArguments) -> PlayConversation:
    """Return the conversation of a job. Open it if it is not open in this process."""
    if (conversation := _conversations.get(arguments["id"])) is None:
        conversation = await _make_conversation(arguments)
        await conversation.open(arguments["task"])
        _conversations[arguments["id"]] = conversation
    while len(_conversations) > MAX_CONVERSATIONS:
        await _conversations.popitem(last=False)[1].close()
    return conversation


async def _make_conversation(arguments: JobArguments) -> PlayConversation:
    if arguments["spending"] is not None:
        return EndpointConversation(arguments)
    config = make_serving_config(find_model(arguments["model"], arguments["runs"]), ["sampling.slots=4"])
    # A process has one model, so an earlier conversation has it loaded.
    models = [item.served_model for item in _conversations.values() if isinstance(item, LocalConversation)]
    served_model = models[0] if models else await asyncio.to_thread(load_served_model, config)
    return LocalConversation(served_model, arguments)
