"""The environment most people write: a system prompt, tools, tasks and a reward in a dozen lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from TrainingFactory.protocols import Episode, Tool, ToolSource
from TrainingFactory.tools import AsyncToolExecutor, FunctionTool
from TrainingFactory.types import Message, Reward, Step, Task


class ToolEnvironment:
    """A conversation about one task in which the model may call tools; it ends when a turn calls none.

    ```python
    class Weather(ToolEnvironment):
        system_prompt = "Look the city up, then answer with the number alone."

        @classmethod
        def tasks(cls, split, seed, count):
            yield Task(id="oslo", prompt="How warm is it in Oslo?", answer="4")

        @tool
        def temperature(self, city: str) -> str:
            "The temperature of a city in degrees Celsius."
            return {"Oslo": "4"}.get(city, "unknown")
    ```

    The tools are the `@tool` members of the class and those handed in. Made for one episode and thrown
    away after it, so state belongs on `self`. What takes time to set up goes into `reset`, not `__init__`.
    """

    system_prompt: ClassVar[str] = ""

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool | ToolSource] = (),
        *,
        timeout: float = 30.0,
        max_output_chars: int = 100_000,
    ) -> None:
        self.task = task
        self.executor = AsyncToolExecutor([*_own_tools(self), *tools], timeout, max_output_chars)
        self.tools: list[Tool] = self.executor.tools

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        """Make `count` tasks of a split ("train" or "heldout"), the same ones for the same seed."""
        raise ValueError(
            f"{cls.__name__} makes no tasks of its own: write its `tasks` method or give a file of tasks"
        )

    async def reset(self) -> list[Message]:
        system = [Message("system", self.system_prompt)] if self.system_prompt else []
        if isinstance(self.task.prompt, str):
            return [*system, Message("user", self.task.prompt)]
        starts_with_system = bool(self.task.prompt) and self.task.prompt[0].role == "system"
        return [*([] if starts_with_system else system), *self.task.prompt]

    async def step(self, message: Message) -> Step:
        calls = message.tool_calls
        if not calls:
            return Step(done=True)
        results = await self.executor.batch_execute(calls)
        replies = [
            Message("tool", result.content, tool_call_id=call.id, name=call.name)
            for call, result in zip(calls, results, strict=True)
        ]
        return Step(replies, tool_results=results)

    def reward(self, episode: Episode) -> Reward | float | Awaitable[Reward | float]:
        """Return 1 if the last message is the task's answer, or what follows `####` in it, else 0."""
        if self.task.answer is None:
            name = type(self).__name__
            raise ValueError(
                f"task {self.task.id} has no answer to compare with: write {name}.reward or give a reward"
            )
        wanted = str(self.task.answer)
        short = wanted.rpartition("####")[2]  # GSM8K has a whole solution before it
        return float(episode.trajectory.answer.strip() in (wanted.strip(), short.strip()))

    reward.quick = True  # type: ignore[attr-defined]  # as `rewards.adapt.called` wants it: not worth a thread

    async def close(self) -> None:
        """Give back what the episode held."""


class ForeignEnvironment(ABC):
    """Is written for another framework: one object for a run, which says what the environments of its episodes are."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Make it as a config names it, with its `environment.options`."""

    @abstractmethod
    def as_environment(self) -> type[ToolEnvironment]: ...


def _own_tools(environment: ToolEnvironment) -> list[FunctionTool]:
    """Return the tools on the class, in the order they were written, base classes first; what a subclass overrides
    with something else is gone."""
    classes = type(environment).__mro__[-2::-1]  # without object
    names = dict.fromkeys(name for cls in classes for name in vars(cls))
    found = ((name, getattr(type(environment), name, None)) for name in names)
    return [getattr(environment, name) for name, member in found if isinstance(member, FunctionTool)]
