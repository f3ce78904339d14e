"""A conversation with a model, in the process that has the model: what was sampled stays as it is while it grows, and
what was edited is written anew. `play.py` asks."""

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

from TrainingFactory.agent_api.conversations import Conversations, Node
from TrainingFactory.agent_api.responses import PIECE
from TrainingFactory.apps.serving.served import Served, load_served, served_config
from TrainingFactory.apps.views.episodes import episode_view
from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.common.openai_format import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.common.seeds import turn_seed
from TrainingFactory.common.user_code import told
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Environment
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.rollout.episode import EpisodeRules, EpisodeRun
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.training.dataset import make_tasks, makes_tasks
from TrainingFactory.types import Completion, Message, Task, ToolSpec, Trajectory, Turn
from TrainingFactory.web.worker import Tell

Given = dict[str, Any]
TASKS = 50  # of an environment that are offered
OPEN = 8  # conversations that keep their environment and tools
TURNS = 400  # sampled ones of a conversation whose tokens are kept
LOOK = 0.1  # seconds between two looks whether it shall stop
_open: OrderedDict[str, Playing] = OrderedDict()


@lru_cache(1)
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, which engines, servers and environments belong to from one job to the next."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="play", daemon=True).start()
    return loop


def _job(work: Callable[[Given, Tell], Coroutine[Any, Any, Given]]) -> Callable[[Given, Tell], Given]:
    return lambda given, tell: asyncio.run_coroutine_threadsafe(work(given, tell), _loop()).result()


@_job
async def begin(given: Given, tell: Tell) -> Given:
    """Load the model, and begin a conversation."""
    playing = await _playing(given)
    first = [each for each in await playing.renew() if given["task"] or each.role == "system"]
    sampling, tasks = playing.config.sampling, playing.tasks
    return {
        "tools": [spec_to_dict(spec) for spec in playing.specs], "messages": [message_to_dict(each) for each in first],
        "tasks": [{"id": t.id, "prompt": t.prompt if isinstance(t.prompt, str) else t.prompt[-1].content}
                  for t in tasks],
        "max_length": playing.served.sampler.max_length, "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }  # fmt: skip


@_job
async def say(given: Given, tell: Tell) -> Given:
    """Answer a conversation."""
    playing, messages = await _playing(given), [message_from_dict(each) for each in given["messages"]]
    anew, said = await playing.at(messages), list(messages)
    if messages[-1].role == "assistant":  # an edited turn, whose calls are made now
        said += await playing.replies(messages[-1])
    begun = await asyncio.to_thread(playing.turns.begin, list(said), playing.specs)
    run = Answer(playing, begun, given, tell)
    stopped, done = await run.until_stopped(), run.trajectory
    for turn in done.turns:
        playing.turns.add(Node(turn, list(said), begun.tools, ""), turn.completion, turn.message, run.session)
        said += [turn.message, *turn.replies]
    playing.seen, playing.turns.answered[:-TURNS] = said, []
    # `written`: extended, as it was token by token, or why it was written anew. `anew`: so was the environment begun.
    return {
        "messages": [message_to_dict(message) for message in said[len(messages) :]],
        "turns": [turn.model_dump(mode="json") for turn in episode_view(done, 0).turns], "anew": anew,
        "status": "stopped" if stopped else done.status, "error": done.error, "written": begun.why,
        "tokens": len(begun.turn.prompt_ids) + sum(len(turn.completion.token_ids) for turn in done.turns),
    }  # fmt: skip


async def _playing(given: Given) -> Playing:
    """Return the conversation, opened anew where this process does not know it."""
    if (found := _open.get(given["id"])) is None:
        config = served_config(find_model(given["model"], given["runs"]), ["sampling.slots=4"])
        # One model a process: it is the one of any conversation before.
        known = [each.served for each in _open.values()] or [await asyncio.to_thread(load_served, config)]
        found = Playing(known[0], given)
        await found.open(given["task"])
        _open[given["id"]] = found
    while len(_open) > OPEN:
        await _open.popitem(last=False)[1].close()
    return found


class Playing:
    """The environment that a conversation is in, and the tokens of its turns."""

    def __init__(self, served: Served, given: Given) -> None:
        self.served, self.config, self.turns = served, config_of(given), Conversations(served.chat)
        self.task, self.tasks = Task("own-words", ""), list[Task]()
        self.environment: Environment | None = None
        self.seen = list[Message]()  # what the environment has gone through
        self.specs = list[ToolSpec]()  # its tools
        self._tools = RunTools(self.config, (), None)

    async def open(self, task: str | None) -> None:
        if self.config.environment.command is not None:
            raise ValueError("this environment is a program of its own, which cannot be played in here")
        try:
            self._factory: Any = await self._tools.equip(make_environment(self.config, True))
            if self.config.data.tasks is not None or makes_tasks(self._factory):
                self.tasks = make_tasks(self.config, self._factory)[:TASKS]
            named = [each for each in self.tasks if each.id == task]
            if task is not None and not named:
                raise ValueError(f"the environment has no task {task!r} among its first {TASKS}")
            self.task = (named or [self.task])[0]
        except BaseException:
            await self._tools.close()
            raise

    async def renew(self) -> list[Message]:
        """Begin the environment anew; return the messages that it begins with."""
        await self._leave()
        try:
            self.environment = made = self._factory(self.task)
            self.seen, self.specs = [], [tool.spec for tool in made.tools]
            return await made.reset()
        except Exception as error:  # foreign code
            raise told(error) from error

    async def at(self, messages: list[Message]) -> bool:
        """Take the environment to where a conversation is; return whether calls in it were not made there."""
        if self.environment is not None and messages[: len(self.seen)] == self.seen:
            return False
        await self.renew()
        return any(message.role == "tool" for message in messages)

    async def replies(self, message: Message) -> list[Message]:
        """Make the calls of a turn that a person wrote."""
        assert self.environment is not None
        if not message.tool_calls:
            raise ValueError("the last turn is the model's, and calls no tool; write something after it")
        cut, most = self.served.chat.cut, self.config.sampling.max_reply_tokens
        step = await self.environment.step(message)
        return [replace(each, content=cut(each.content, most)) for each in step.replies]

    async def _leave(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            await environment.close()
            if isinstance(environment, ToolEnvironment):
                await environment.executor.close()

    async def close(self) -> None:
        await self._leave()
        await self._tools.close()


class Answer(EpisodeRun):
    """The turns of an answer, from a prompt that is there until one calls no tool; told as they come."""

    def __init__(self, playing: Playing, begun: Node, given: Given, tell: Tell) -> None:
        served, place = playing.served, playing.config.environment
        params = replace(served.defaults, temperature=given["temperature"])
        limits = place.max_turns, place.episode_timeout, playing.config.sampling.max_reply_tokens
        rules = EpisodeRules(lambda _: playing.environment, served.chat, params, None, *limits)  # type: ignore[arg-type]
        played = Trajectory(playing.task, "play", prompt=begun.messages, tools=begun.tools)
        seed_of = partial(turn_seed, given["seed"], 0, "play", len(begun.messages))
        super().__init__(rules, played, served.sampler.session(), served.sampler.max_length, seed_of)
        self._ids, self._most, self._stop = begun.turn.prompt_ids, given["max_tokens"], Path(given["stop"])
        self._tell, self._stepping = tell, False

    async def until_stopped(self) -> bool:
        """Play the turns; return whether it was stopped: tools at once, a turn after a piece of it, which is kept."""
        work = asyncio.ensure_future(self.play())
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK)
            if self._stepping and self._stop.exists():
                work.cancel()
        self.leave()
        return work.cancelled() or work.result() is not None or self._stop.exists()

    async def _first_prompt(self, environment: Environment) -> list[int]:
        return self._ids

    async def _sample(self, ids: list[int], number: int) -> Completion:
        """Sample a turn in pieces, which give the tokens of the whole, and tell of each."""
        whole, most = Completion([], [], "length"), max(1, min(self._most, self.max_length - len(ids)))
        while whole.finish == "length" and len(whole.token_ids) < most:
            piece = replace(self.rules.params, max_tokens=min(PIECE, most - len(whole.token_ids)))
            self.rules = replace(self.rules, params=piece)
            more = await super()._sample(ids + whole.token_ids, number)
            sampled, logprobs = whole.token_ids + more.token_ids, whole.logprobs + more.logprobs
            whole = Completion(sampled, logprobs, more.finish, more.policy_version)
            shown = sampled[:-1] if more.finish == "stop" else sampled
            self._tell({"text": self.rules.chat.decode(shown).rstrip("\ufffd")})  # half a character
            if self._stop.exists():
                break
        return whole

    async def _step(self, environment: Environment, turn: Turn) -> list[int]:
        for call in turn.message.tool_calls:
            call.id = f"call_{secrets.token_hex(6)}"  # its own in the whole conversation
        self._tell({"message": message_to_dict(turn.message)})
        self._stepping = True
        try:
            return await super()._step(environment, turn)
        finally:
            self._stepping = False
            self._tell({"results": [asdict(each) for each in turn.tool_results]})


def config_of(given: Given) -> TrainingConfig:
    """Return the config of a conversation: the model's own, with the environment and the tools that are asked for."""
    config = served_config(find_model(given["model"], given["runs"]))
    kind, _, name = (given["environment"] or "").partition(":")
    changes: Given = {"logging": config.logging.model_copy(update={"output_dir": given["runs"]})}
    if kind == "environment":
        changes["environment"] = config.environment.model_copy(update={"environment_id": name})
        changes["data"] = config.data.model_copy(update={"count": TASKS})
    elif kind == "run":
        of = RunFolder(Path(given["runs"]) / name).config
        changes |= {"environment": of.environment, "tools": of.tools, "data": of.data}
    return config.model_copy(update=changes)
