"""Define every seam: what a layer needs from a sibling or from above is handed in as one of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from TrainingFactory.types import (
    Completion,
    Message,
    Reward,
    Sample,
    SamplingParams,
    Step,
    Task,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
    Weights,
)


class SamplingSession(Protocol):
    """Keeps, on the sampler's side of one episode, what was computed for a turn for the next one."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion: ...
    def close(self) -> None: ...


class Sampler(Protocol):
    """Turns tokens into tokens and log-probs. A port: it may live in another process; only plain data crosses it.
    Cancelling the awaiting task cancels the request."""

    @property
    def policy_version(self) -> int: ...
    @property
    def max_length(self) -> int:
        """Return the longest prompt and completion together, in tokens."""
        ...

    def session(self) -> SamplingSession:
        """Open the sampler's side of one episode, in a fixed order (task, member) before anything is awaited."""
        ...

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample for one request that belongs to no episode."""
        ...

    async def update(self, weights: Weights) -> None:
        """Go on with another version of the weights. Turns under way end with the old one."""

    async def close(self) -> None: ...


class Engine(Protocol):
    """Samples in another process or on another machine, as one of a fleet. Only plain data crosses it, and the fleet
    keeps what a turn needs, so that another engine can be asked the same with the same seed."""

    async def start(self) -> dict[str, Any]:
        """Be ready to sample, or to `load` weights first; return what to tell: pid, node, versions, vocabulary."""
        ...

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion: ...
    async def load(self, weights: Weights) -> None:
        """Go on with these weights. Raise where they are not the model's or not finite: then the engine is replaced."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs, at temperature 1, of all tokens but the first."""
        ...

    async def close(self) -> None: ...


class ChatFormat(Protocol):
    """Writes and reads a conversation in tokens, as one model family does."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the prompt of a first turn, the assistant's header included."""
        ...

    def extend(self, turn: Turn, replies: Sequence[Message]) -> list[int]:
        """Return what follows a sampled turn: the rest of its end, the replies, the next assistant header."""
        ...

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        """Read a turn that was sampled after this prompt, with these tools; never raises on what a model can write."""
        ...

    def write(
        self,
        message: Message,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
        exact: bool = True,
    ) -> list[int]:
        """Return an assistant message as the model would sample it after this prompt, stop token included. `exact`:
        raise ValueError where `parse` would read it as another message."""
        ...

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the text if it fits into so many tokens, else its beginning and end with the cut marked."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@runtime_checkable
class Tool(Protocol):
    """Is called by name with JSON arguments, on the event loop: code that blocks goes to a thread inside `run`."""

    @property
    def spec(self) -> ToolSpec: ...
    async def run(self, arguments: dict[str, Any]) -> ToolResult: ...


class ToolSession(Protocol):
    """Holds the tools of one episode; `close` gives back what they hold (a process, a connection)."""

    @property
    def tools(self) -> Sequence[Tool]: ...
    async def close(self) -> None: ...


@runtime_checkable
class ToolSource(Protocol):
    """Gives tools with a life of their own (an MCP server, an interpreter). A run opens it on its event loop and closes
    it at its end. Every episode opens a session, which is cheap: what takes time is done at the first call."""

    async def open(self) -> None:
        """Connect, so that `session` knows what tools there are; again does nothing."""

    def session(self) -> ToolSession: ...
    async def close(self) -> None:
        """End what the running loop has open."""


class Environment(Protocol):
    """Lives for one episode of one task, and is closed after its reward is known."""

    @property
    def task(self) -> Task: ...
    @property
    def tools(self) -> Sequence[Tool]: ...
    async def reset(self) -> list[Message]:
        """Return the conversation before the model's first turn."""
        ...

    async def step(self, message: Message) -> Step: ...
    async def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    """Makes environments, and the tasks for them; a class with a `tasks` method is one."""

    def __call__(self, task: Task) -> Environment: ...
    def tasks(self, split: str, seed: int, count: int) -> Iterable[Task]: ...


class Episode(Protocol):
    """Shows a reward the finished trajectory and the still open environment."""

    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def task(self) -> Task: ...
    @property
    def environment(self) -> Environment: ...
    async def call(self, tool: str, **arguments: Any) -> ToolResult: ...


# A float means Reward(outcome). Raising means "could not be scored": the trajectory is dropped and counted.
RewardFunction = Callable[[Episode], Reward | float | Awaitable[Reward | float]]
AnyReward = Callable[..., Any]  # in any of the shapes that `rewards.adapt.as_reward` knows


@runtime_checkable
class GroupReward(Protocol):
    """Scores the episodes of one task in one call; `as_reward` makes one of a function that takes `episodes`."""

    @property
    def grouped(self) -> bool:
        """Tell whether it wants a whole group; else it scores each episode by itself."""
        ...

    @property
    def compares(self) -> bool:
        """Tell whether it rewards by comparison: then one episode alone, or the mean over many, says nothing."""
        ...

    async def group(self, episodes: Sequence[Episode]) -> Sequence[Reward | Exception]:
        """Return one entry per episode, its reward or why there is none; raise where no episode has one."""
        ...


class Scorer(Protocol):
    """Scores by a trained reward model. It blocks while it computes, and raises where it cannot score."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Reward]: ...


class Objective(Protocol):
    """Says what a batch must carry and computes the loss over it. Torch lives behind `Any`."""

    @property
    def needs(self) -> frozenset[str]:
        """Return of: reference, old (log-probs of the reference model, and of the model before the step), precomputed
        (those of the reference come with the rows), values (of a critic, before each token), critic (a model of its
        own), scores (of a reward model, at each token, instead of log-probs), mismatched (answers after the prompts of
        others)."""
        ...

    def loss(self, batch: Any, /) -> Any: ...


class Algorithm(Objective, Protocol):
    """Also assigns credit: from a group of episodes to training rows."""

    @property
    def refill(self) -> int:
        """Return the rounds in which tasks that teach nothing are made up for by others; 0: none."""
        ...

    def adjusted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the group with what the algorithm itself adds to its rewards; the given episodes stay as they are."""
        ...

    def accepted(self, group: Sequence[Trajectory]) -> list[Trajectory] | None:
        """Return those that are learned from as demonstrations; None for one that compares good and bad ones."""
        ...

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]: ...
    def prepare(self, batches: Sequence[Any], step: int) -> None:
        """Fill in what takes all rows of a step (its mini-batches)."""

    def evaluated(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, with what follows from them."""
        ...


class Policy(Protocol):
    """Trains weights, with their algorithm. A port: it may live in other processes; only plain data crosses it. Every
    call is awaited before the next one is made."""

    async def step(self, rows: Sequence[Sample], step: int) -> dict[str, float]: ...
    async def evaluate(self, rows: Sequence[Sample], step: int) -> dict[str, float]:
        """Measure the loss over rows without learning from them."""
        ...

    async def score(self, rows: Sequence[Sample]) -> list[list[float]]:
        """Return the log-probs that the weights give to the trained tokens of each row, 0 for the others."""
        ...

    async def save(self, folder: str, state: dict[str, Any]) -> None:
        """Write a checkpoint; `state` is what `load` gives back."""

    async def load(self, folder: str) -> dict[str, Any]: ...
    async def publish(self) -> Weights: ...
    async def close(self) -> None: ...


class Tracker(Protocol):
    """Takes the metrics of each step somewhere: a file, TensorBoard, a server; and now and then its episodes."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def episodes(self, step: int, episodes: Sequence[Trajectory]) -> None: ...
    def close(self) -> None: ...
