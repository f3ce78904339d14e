"""Playground conversations in the worker process that holds the model; `play.py` sends the jobs. A growing conversation
keeps its sampled tokens; an edited one is tokenized again."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from TrainingFactory.agent_api.conversations import Conversations, RequestNode
from TrainingFactory.agent_api.turns.responses import CHUNK_TOKENS
from TrainingFactory.apps.serving.served import ServedModel, load_served_model, serving_config
from TrainingFactory.apps.views.episodes import episode_view
from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.common.image_parts import openai_content
from TrainingFactory.common.images import moved
from TrainingFactory.common.openai_format import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.common.seeds import turn_seed
from TrainingFactory.common.user_code import as_value_error
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Environment
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.training.dataset import generates_tasks, make_tasks
from TrainingFactory.types import Completion, Message, Task, ToolResult, ToolSpec, Trajectory, Turn
from TrainingFactory.web.worker import ProgressCallback

JobArguments = dict[str, Any]
MAX_TASKS = 50  # maximum tasks of an environment that are offered
MAX_OPEN = 8  # maximum conversations that keep their environment and tools open
MAX_KEPT_TURNS = 400  # maximum sampled turns of a conversation whose tokens are kept
STOP_POLL_SECONDS = 0.1  # seconds between two checks of the stop file
_open: OrderedDict[str, PlayConversation] = OrderedDict()


@lru_cache(1)
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which engines, servers and environments use across jobs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="play", daemon=True).start()
    return loop


def _job(
    work: Callable[[JobArguments, ProgressCallback], Coroutine[Any, Any, JobArguments]],
) -> Callable[[JobArguments, ProgressCallback], JobArguments]:
    return lambda arguments, tell: asyncio.run_coroutine_threadsafe(work(arguments, tell), _loop()).result()


@_job
async def begin(arguments: JobArguments, tell: ProgressCallback) -> JobArguments:
    playing = await _playing(arguments)
    first = [message for message in await playing.renew() if arguments["task"] or message.role == "system"]
    sampling, tasks = playing.config.sampling, playing.tasks
    return {
        "tools": [spec_to_dict(spec) for spec in playing.specs],
        "messages": [message_to_dict(message) for message in first],
        "tasks": [{"id": t.id, "prompt": t.prompt if isinstance(t.prompt, str) else t.prompt[-1].content}
                  for t in tasks],
        "max_length": playing.served.sampler.max_length, "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }  # fmt: skip


@_job
async def say(arguments: JobArguments, tell: ProgressCallback) -> JobArguments:
    playing = await _playing(arguments)
    messages = [message_from_dict(message) for message in arguments["messages"]]
    anew, conversation = await playing.at(messages), list(messages)
    if messages[-1].role == "assistant":  # an edited turn: execute its tool calls now
        conversation += await playing.replies(messages[-1])
    prompt = await asyncio.to_thread(playing.turns.begin, list(conversation), playing.specs)
    run = AnswerRun(playing, prompt, arguments, tell)
    stopped, trajectory = await run.until_stopped(), run.trajectory
    for turn in trajectory.turns:
        node = RequestNode(turn, list(conversation), prompt.tools, "")
        playing.turns.add(node, turn.completion, turn.message, run.session)
        conversation += [turn.message, *turn.replies]
    playing.seen, playing.turns.answered_nodes[:-MAX_KEPT_TURNS] = conversation, []
    num_tokens = len(prompt.turn.prompt_ids) + sum(
        len(turn.completion.token_ids) for turn in trajectory.turns
    )
    folding = playing.served.folding
    # `written`: "extended" if the earlier tokens were reused, else why not. `anew`: the environment was restarted.
    # `unfolded`: the fold limit that the conversation exceeds.
    return {
        "messages": [message_to_dict(message) for message in conversation[len(messages) :]],
        "turns": [turn.model_dump(mode="json") for turn in episode_view(trajectory, 0).turns], "anew": anew,
        "status": "stopped" if stopped else trajectory.status, "error": trajectory.error, "written": prompt.reason,
        "tokens": num_tokens,
        "unfolded": folding.limit if folding is not None and num_tokens > folding.limit else None,
    }  # fmt: skip


async def _playing(arguments: JobArguments) -> PlayConversation:
    """Return the open conversation, or open it if this process does not have it."""
    if (playing := _open.get(arguments["id"])) is None:
        config = serving_config(find_model(arguments["model"], arguments["runs"]), ["sampling.slots=4"])
        # A process has one model, so an earlier conversation has it loaded.
        loaded = [conversation.served for conversation in _open.values()]
        served = loaded[0] if loaded else await asyncio.to_thread(load_served_model, config)
        playing = PlayConversation(served, arguments)
        await playing.open(arguments["task"])
        _open[arguments["id"]] = playing
    while len(_open) > MAX_OPEN:
        await _open.popitem(last=False)[1].close()
    return playing


class PlayConversation:
    """A conversation's environment, tools, and the tokens of its turns."""

    def __init__(self, served: ServedModel, arguments: JobArguments) -> None:
        self.served, self.config, self.turns = served, config_of(arguments), Conversations(served.chat)
        self.task, self.tasks = Task("own-words", ""), list[Task]()
        self.environment: Environment | None = None
        self.seen = list[Message]()  # messages that the environment has processed
        self.specs = list[ToolSpec]()  # tools of the environment
        self._tools = RunTools(self.config, (), None)

    async def open(self, task: str | None) -> None:
        if self.config.environment.command is not None:
            raise ValueError("the playground does not support external programs (environment.command)")
        try:
            self._factory: Any = await self._tools.equip(make_environment(self.config, True))
            if self.config.data.tasks is not None or generates_tasks(self._factory):
                self.tasks = make_tasks(self.config, self._factory)[:MAX_TASKS]
            matching = [candidate for candidate in self.tasks if candidate.id == task]
            if task is not None and not matching:
                raise ValueError(f"no task {task!r} among the first {MAX_TASKS} tasks of the environment")
            # The person's own words replace the prompt of the first task, whose data the environment may need.
            own = [replace(first, id=self.task.id, prompt="") for first in self.tasks[:1]]
            self.task = [*matching, *own, self.task][0]
        except BaseException:
            await self._tools.close()
            raise

    async def renew(self) -> list[Message]:
        """Restart the environment; return its initial messages."""
        await self._leave()
        try:
            self.environment = environment = self._factory(self.task)
            self.seen, self.specs = [], [tool.spec for tool in environment.tools]
            return await environment.reset()
        except Exception as error:  # foreign code
            raise as_value_error(error) from error

    async def at(self, messages: list[Message]) -> bool:
        """Restart the environment if the conversation was edited; return whether earlier tool calls are lost."""
        if self.environment is not None and messages[: len(self.seen)] == self.seen:
            return False
        await self.renew()
        return any(message.role == "tool" for message in messages)

    async def replies(self, message: Message) -> list[Message]:
        """Execute the tool calls of a turn that the user wrote."""
        assert self.environment is not None
        if not message.tool_calls:
            raise ValueError("the last message is the model's and calls no tool; add a message after it")
        cut, most = self.served.chat.truncate, self.config.sampling.max_reply_tokens
        step = await self.environment.step(message)
        contents = [cut(reply.content, most) for reply in step.replies]
        return [
            replace(reply, content=content, images=moved(reply.images, reply.content, content))
            for reply, content in zip(step.replies, contents, strict=True)
        ]

    async def _leave(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            await environment.close()
            if isinstance(environment, ToolEnvironment):
                await environment.executor.close()

    async def close(self) -> None:
        await self._leave()
        await self._tools.close()


class AnswerRun(EpisodeRun):
    """An answer: turns from an existing prompt until one calls no tool. Reports each turn as it is sampled."""

    def __init__(
        self, playing: PlayConversation, node: RequestNode, arguments: JobArguments, tell: ProgressCallback
    ) -> None:
        served, place = playing.served, playing.config.environment
        params = replace(served.defaults, temperature=arguments["temperature"])
        limits = place.max_turns, place.episode_timeout, playing.config.sampling.max_reply_tokens
        rules = EpisodeSettings(lambda _: playing.environment, served.chat, params, None, *limits)  # type: ignore[arg-type]
        trajectory = Trajectory(playing.task, "play", prompt=node.messages, tools=node.tools)
        seed_of = partial(turn_seed, arguments["seed"], 0, "play", len(node.messages))
        super().__init__(rules, trajectory, served.sampler.session(), served.sampler.max_length, seed_of)
        self._ids = node.turn.prompt_ids
        self._most, self._stop = arguments["max_tokens"], Path(arguments["stop"])
        self._tell, self._stepping = tell, False

    async def until_stopped(self) -> bool:
        """Play the turns; return whether the user stopped. A stop cancels tool calls, and keeps the current piece."""
        work = asyncio.ensure_future(self.play())
        while not work.done():
            await asyncio.wait({work}, timeout=STOP_POLL_SECONDS)
            if self._stepping and self._stop.exists():
                work.cancel()
        self.leave()
        return work.cancelled() or work.result() is not None or self._stop.exists()

    async def _render_first_prompt(self, environment: Environment) -> list[int]:
        return self._ids

    async def _sample_completion(
        self, ids: list[int], number: int, max_tokens: int | None = None
    ) -> Completion:
        """Sample a turn in pieces, which give the same tokens as one call, and report each piece."""
        whole, most = Completion([], [], "length"), max(1, min(self._most, self.max_length - len(ids)))
        while whole.finish == "length" and len(whole.token_ids) < most:
            piece = replace(self.rules.params, max_tokens=min(CHUNK_TOKENS, most - len(whole.token_ids)))
            self.rules = replace(self.rules, params=piece)
            more = await super()._sample_completion(ids + whole.token_ids, number)
            sampled, logprobs = whole.token_ids + more.token_ids, whole.logprobs + more.logprobs
            whole = Completion(sampled, logprobs, more.finish, more.policy_version)
            shown = sampled[:-1] if more.finish == "stop" else sampled
            self._tell({"text": self.rules.chat.decode(shown).rstrip("\ufffd")})  # incomplete character
            if self._stop.exists():
                break
        return whole

    async def _step_environment(self, environment: Environment, turn: Turn) -> list[int]:
        for call in turn.message.tool_calls:
            call.id = f"call_{secrets.token_hex(6)}"  # unique in the whole conversation
        self._tell({"message": message_to_dict(turn.message)})
        self._stepping = True
        try:
            return await super()._step_environment(environment, turn)
        finally:
            self._stepping = False
            self._tell({"results": [_result_view(result) for result in turn.tool_results]})


def _result_view(result: ToolResult) -> JobArguments:
    """Return a result as JSON, with its images in the content, as in messages."""
    content = openai_content(Message("tool", result.content, images=result.images))
    return asdict(replace(result, images=[])) | {"content": content}


def config_of(arguments: JobArguments) -> TrainingConfig:
    """Return the config of a conversation: the model's own, with the chosen environment and tools."""
    config = serving_config(find_model(arguments["model"], arguments["runs"]))
    kind, _, name = (arguments["environment"] or "").partition(":")
    changes: JobArguments = {"logging": config.logging.model_copy(update={"output_dir": arguments["runs"]})}
    if kind == "environment":
        changes["environment"] = config.environment.model_copy(update={"environment_id": name})
        changes["data"] = config.data.model_copy(update={"count": MAX_TASKS})
    elif kind == "run":
        run_config = RunFolder(Path(arguments["runs"]) / name).config
        environment = run_config.environment.model_copy(update={"user": None})  # the person is the user
        changes |= {"environment": environment, "tools": run_config.tools, "data": run_config.data}
    return config.model_copy(update=changes)
