"""Base class of tool environments: a system prompt, tools, tasks and a reward in a dozen lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from TrainingFactory.protocols import Episode, Tool, ToolSource
from TrainingFactory.tools import AsyncToolExecutor, FunctionTool
from TrainingFactory.tools.replies import make_tool_messages
from TrainingFactory.types import Message, Reward, Step, Task


class ToolEnvironment:
    """A conversation about one task in which the model may call tools. It ends when a turn calls none.

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

    The tools are the `@tool` members of the class and those passed in. Every episode gets a new instance, so keep state
    on `self`. Put slow setup into `reset`, not `__init__`. `timeout` is in seconds per tool call. A property `state`
    may name the current state by a string; `grpo.state_groups` compares turns in the same state.

    With `training.branching`, an environment whose tools are all pure is copied by making another one. Define
    `async def fork(self)` to copy one with state: make another with `type(self)(self.task)` and copy the state to it.
    Without `fork`, the steps are repeated in another one; `fork = None` excludes the environment from branching.
    """

    system_prompt: ClassVar[str] = ""
    shows_images: ClassVar[bool] = (
        False  # its messages or tools show images; `model.vision: null` asks for it
    )

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool | ToolSource] = (),
        *,
        timeout: float = 30.0,
        max_output_chars: int = 100_000,
    ) -> None:
        self.task = task
        self.executor = AsyncToolExecutor([*_list_member_tools(self), *tools], timeout, max_output_chars)
        self.tools: list[Tool] = self.executor.tools

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        """Generate `count` tasks of a split ("train" or "heldout"). The same seed must give the same tasks."""
        raise ValueError(f"{cls.__name__} generates no tasks; implement `tasks` or set data.tasks to a file")

    async def reset(self) -> list[Message]:
        system_messages = [Message("system", self.system_prompt)] if self.system_prompt else []
        if isinstance(self.task.prompt, str):
            return [*system_messages, Message("user", self.task.prompt)]
        starts_with_system = bool(self.task.prompt) and self.task.prompt[0].role == "system"
        return [*([] if starts_with_system else system_messages), *self.task.prompt]

    async def step(self, message: Message) -> Step:
        calls = message.tool_calls
        if not calls:
            return Step(done=True)
        results = await self.executor.batch_execute(calls)
        return Step(make_tool_messages(calls, results), tool_results=results)

    def reward(self, episode: Episode) -> Reward | float | Awaitable[Reward | float]:
        """Return 1 if the last message equals the task's answer, or the part of it after `####`, else 0."""
        if self.task.answer is None:
            class_name = type(self).__name__
            raise ValueError(
                f"task {self.task.id} has no answer; implement {class_name}.reward or set another reward"
            )
        answer = str(self.task.answer)
        short_answer = answer.rpartition("####")[2]  # GSM8K answers have the solution before it
        return float(episode.trajectory.answer.strip() in (answer.strip(), short_answer.strip()))

    reward.runs_inline = True  # type: ignore[attr-defined]  # for `rewards.adapt.call_function`

    async def close(self) -> None:
        """Release the resources of the episode."""


class ForeignEnvironment(ABC):
    """Adapter of another framework's environment: one object per run that provides the class of the environments."""

    @classmethod
    @abstractmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Create the adapter from the config's `environment.options`."""

    @abstractmethod
    def as_environment(self) -> type[ToolEnvironment]: ...


def _list_member_tools(environment: ToolEnvironment) -> list[FunctionTool]:
    """Return the `@tool` members in definition order, base classes first, without tools that a subclass overrides with
    another kind of member."""
    classes = type(environment).__mro__[-2::-1]  # without object
    member_names = dict.fromkeys(name for cls in classes for name in vars(cls))
    members = ((name, getattr(type(environment), name, None)) for name in member_names)
    return [getattr(environment, name) for name, member in members if isinstance(member, FunctionTool)]
