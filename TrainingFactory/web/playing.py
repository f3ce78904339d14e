"""A conversation with a model, in the process that has the model: what is sampled stays as it was sampled while the
conversation grows, and an edited one is written anew. `play.py` asks."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import key_value
from TrainingFactory.openai_form import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.protocols import Environment, SamplingSession
from TrainingFactory.rollout.episode import EpisodeRules, EpisodeRun
from TrainingFactory.seeds import turn_seed
from TrainingFactory.services.build.environment import make_environment
from TrainingFactory.services.build.model_names import find_model
from TrainingFactory.services.build.run_tools import RunTools
from TrainingFactory.services.proxy.conversations import Conversations, Node
from TrainingFactory.services.proxy.program import AgentProgram
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.serving.answers import PIECE
from TrainingFactory.services.serving.served import Served, load_served, served_config
from TrainingFactory.services.training.dataset import make_tasks, makes_tasks
from TrainingFactory.services.views.episodes import episode_view
from TrainingFactory.types import Completion, Message, SamplingParams, Step, Task, ToolSpec, Trajectory
from TrainingFactory.user_code import told

Given = dict[str, Any]
Tell = Callable[[Any], None]
TASKS = 50  # of an environment that are offered
OPEN = 8  # conversations that keep their environment and tools
TURNS = 400  # sampled ones whose tokens are kept
LOOK = 0.1  # seconds between two looks whether it shall stop
WRITTEN = {
    "rewritten": "A turn was edited, so the conversation was written anew for the model.",
    "cut": "An answer was cut before its end, so the conversation was written anew for the model.",
    "template": "The model's template does not write this after an answer, so the conversation was written anew.",
}
_open: OrderedDict[str, Playing] = OrderedDict()


@lru_cache(1)
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, which engines, servers and environments belong to from one job to the next."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="play", daemon=True).start()
    return loop


@lru_cache(1)
def _served(model: str, runs: str) -> Served:
    return load_served(served_config(find_model(model, runs), [key_value("sampling.slots", 4)]))


def begin(given: Given, tell: Tell) -> Given:
    """Load the model, and begin a conversation."""
    return asyncio.run_coroutine_threadsafe(_begin(given), _loop()).result()


def say(given: Given, tell: Tell) -> Given:
    """Answer a conversation."""
    return asyncio.run_coroutine_threadsafe(_say(given, tell), _loop()).result()


async def _begin(given: Given) -> Given:
    playing = await _playing(given)
    served, first = playing.served, await playing.renew()
    own = [message for message in first if playing.task or message.role == "system"]
    defaults = {"temperature": served.defaults.temperature, "max_tokens": playing.config.sampling.max_tokens}
    return {
        "tools": [spec_to_dict(spec) for spec in playing.specs],
        "messages": [message_to_dict(message) for message in own],
        "tasks": [{"id": task.id, "prompt": _brief(task)} for task in playing.tasks],
        "max_length": served.sampler.max_length, "defaults": defaults, "notes": [],
    }  # fmt: skip


async def _say(given: Given, tell: Tell) -> Given:
    playing = await _playing(given)
    messages = [message_from_dict(each) for each in given["messages"]]
    if not messages:
        raise ValueError("the conversation is empty; write something")
    return await Answer(playing, given, tell).write(messages)


async def _playing(given: Given) -> Playing:
    """Return the conversation, opened anew where this process does not know it."""
    if (found := _open.get(given["id"])) is None:
        served = await asyncio.to_thread(_served, given["model"], given["runs"])
        found = _open[given["id"]] = Playing(served, given)
        await found.open()
    _open.move_to_end(given["id"])
    while len(_open) > OPEN:
        await _open.popitem(last=False)[1].close()
    return found


class Playing:
    """The environment that a conversation is in, and the tokens of its turns."""

    def __init__(self, served: Served, given: Given) -> None:
        self.served, self.config, self._wanted = served, _config(given), given["task"]
        self.tools = RunTools(self.config, (), None)
        self.turns = Conversations(served.chat)
        self.tasks: list[Task] = []
        self.task: Task | None = None
        self.environment: Environment | None = None
        self.seen: list[Message] = []  # what the environment has gone through

    async def open(self) -> None:
        factory = make_environment(self.config, True)
        if isinstance(factory, AgentProgram):
            raise ValueError(
                "this environment is a program with an agent of its own, which cannot be played in here"
            )
        self._factory: Any = await self.tools.equip(factory)
        if self.config.data.tasks is not None or makes_tasks(self._factory):
            self.tasks = make_tasks(self.config, self._factory)[:TASKS]
        self.task = next((task for task in self.tasks if task.id == self._wanted), None)
        if self._wanted is not None and self.task is None:
            raise ValueError(f"the environment has no task {self._wanted!r} among its first {TASKS}")

    async def renew(self) -> list[Message]:
        """Begin the environment anew; return the messages that it begins with."""
        await self._leave()
        try:
            self.environment = self._factory(self.task or Task("own-words", ""))
            self.seen = []
            return await self.environment.reset()
        except Exception as error:  # foreign code
            raise told(error) from error

    async def at(self, messages: list[Message]) -> list[str]:
        """Take the environment to where a conversation is; return what a user should know of it."""
        if self.environment is not None and messages[: len(self.seen)] == self.seen:
            return []
        begun = self.environment is not None and bool(self.seen)
        await self.renew()
        if not any(message.role == "tool" for message in messages) or not (begun or self.specs):
            return []
        return ["The environment began anew; calls before this point were not made again."]

    @property
    def specs(self) -> list[ToolSpec]:
        assert self.environment is not None
        return [tool.spec for tool in self.environment.tools]

    async def _leave(self) -> None:
        environment, self.environment = self.environment, None
        if environment is not None:
            await environment.close()
            if (executor := getattr(environment, "executor", None)) is not None:
                await executor.close()

    async def close(self) -> None:
        await self._leave()
        await self.tools.close()


class Answer:
    """One answer: turns of the model and calls of its tools, until a turn calls none, told as they come."""

    def __init__(self, playing: Playing, given: Given, tell: Tell) -> None:
        self.playing, self._given, self._tell, self._stop = playing, given, tell, Path(given["stop"])
        self.task = playing.task or Task("own-words", "")
        self._stepping = False

    @property
    def tools(self) -> Any:
        assert self.playing.environment is not None
        return self.playing.environment.tools

    async def reset(self) -> list[Message]:
        raise AssertionError("it goes on from a conversation")

    async def close(self) -> None:
        """Leave the environment open for the next answer."""

    async def step(self, message: Message) -> Step:
        """Let the environment answer a turn, and tell."""
        assert self.playing.environment is not None
        for call in message.tool_calls:
            call.id = f"call_{secrets.token_hex(6)}"  # of its own in the whole conversation
        self._tell({"message": message_to_dict(message)})
        self._stepping = True
        try:
            step = await self.playing.environment.step(message)
        finally:
            self._stepping = False
        results = [dataclasses.asdict(each) | {"attachments": len(each.attachments)} for each in step.tool_results]
        self._tell({"results": {"message": message_to_dict(message), "results": results}})
        return step

    async def write(self, messages: list[Message]) -> Given:
        playing, served, config = self.playing, self.playing.served, self.playing.config
        notes, first = await playing.at(messages), list[Message]()
        params = dataclasses.replace(
            served.defaults, temperature=self._given["temperature"], max_tokens=self._given["max_tokens"]
        )
        place = config.environment
        rules = EpisodeRules(
            lambda _: self, served.chat, params, None, place.max_turns, place.episode_timeout,
            config.sampling.max_reply_tokens,
        )  # fmt: skip
        if (
            messages[-1].role == "assistant"
        ):  # an edited turn: its calls are made, and the answer goes on from there
            step = await self.step(messages[-1])
            first = [
                dataclasses.replace(m, content=served.chat.cut(m.content, rules.max_reply_tokens))
                for m in step.replies
            ]
            messages = [*messages, *first]
            if not first:
                raise ValueError("the last turn is the model's, and calls no tool; write something after it")
        begun = await asyncio.to_thread(playing.turns.begin, messages, playing.specs)
        seed_of = partial(turn_seed, self._given["seed"], 0, "play", len(messages))
        session = served.sampler.session()
        try:
            run = _Run(rules, begun, _Told(self, session), served.sampler.max_length, seed_of)
            stopped = await self._until_stopped(run)
        finally:
            session.close()
        return self._sum_up(run.trajectory, begun, first, stopped, notes)

    async def _until_stopped(self, run: EpisodeRun) -> bool:
        """Play the turns; return whether it was stopped. A turn that is being sampled ends by itself."""
        work = asyncio.ensure_future(run.play())
        while not work.done():
            await asyncio.wait({work}, timeout=LOOK)
            if self.stopped and self._stepping:
                work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        if not work.cancelled():
            work.result()
        return self.stopped

    @property
    def stopped(self) -> bool:
        return self._stop.exists()

    def heard(self, ids: list[int]) -> None:
        self._tell({"text": self.playing.served.chat.decode(ids).rstrip("\ufffd")})

    def _sum_up(
        self, done: Trajectory, begun: Node, first: list[Message], stopped: bool, notes: list[str]
    ) -> Given:
        said, known = list(begun.messages), self.playing.turns
        for turn in done.turns:
            known.add(Node(turn, list(said), begun.tools, ""), turn.completion, turn.message, None)  # type: ignore[arg-type]
            said += [turn.message, *turn.replies]
        del known.answered[:-TURNS]
        self.playing.seen = said
        view = episode_view(done, 0)
        new = [*first, *said[len(begun.messages) :]]
        return {
            "messages": [message_to_dict(message) for message in new],
            "turns": [turn.model_dump(mode="json") for turn in view.turns],
            "status": "stopped" if stopped else done.status,
            "error": None if stopped else done.error,
            "prompt_tokens": len(begun.turn.prompt_ids),
            "notes": notes + ([WRITTEN[begun.why]] if begun.why in WRITTEN else []),
        }


class _Run(EpisodeRun):
    """Turns that go on from a prompt that is there."""

    def __init__(self, rules: EpisodeRules, begun: Node, *given: Any) -> None:
        played = Trajectory(Task("play", ""), "play", prompt=begun.messages, tools=begun.tools)
        super().__init__(rules, played, *given)
        self._ids = begun.turn.prompt_ids

    async def _first_prompt(self, environment: Environment) -> list[int]:
        return self._ids


class _Told:
    """A session that samples a turn in pieces, which are those of the whole, and tells of each."""

    def __init__(self, answer: Answer, session: SamplingSession) -> None:
        self._answer, self._session, self.close = answer, session, session.close

    async def sample(self, prompt_ids: Any, params: SamplingParams) -> Completion:
        whole, prompt = Completion([], [], "length"), list(prompt_ids)
        while whole.finish == "length" and len(whole.token_ids) < params.max_tokens:
            size = min(PIECE, params.max_tokens - len(whole.token_ids))
            piece = dataclasses.replace(params, max_tokens=size)
            more = await self._session.sample(prompt + whole.token_ids, piece)
            ids, logprobs = whole.token_ids + more.token_ids, whole.logprobs + more.logprobs
            whole = Completion(ids, logprobs, more.finish, more.policy_version)
            self._answer.heard(ids[:-1] if more.finish == "stop" else ids)
            if self._answer.stopped:
                break
        return whole


def _config(given: Given) -> TrainingConfig:
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


def _brief(task: Task) -> str:
    text = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content
    return " ".join(text.split())[:120]
