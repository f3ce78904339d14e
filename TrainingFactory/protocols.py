"""Protocols between the layers of the package. A layer receives objects of sibling or higher layers as one of these
protocols, because it must not import them."""

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
    """The sampler's state of one episode. It keeps the KV cache of a turn for the next turn."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion: ...
    def fork(self) -> SamplingSession:
        """Open a session for an episode that continues the turns of this session. The new session reuses their KV cache
        as long as the sampler holds it. This session may already be closed."""
        ...

    def close(self) -> None: ...


class Sampler(Protocol):
    """Samples tokens with log-probs. May run in another process, so arguments and results are plain data. Cancelling
    the awaiting task cancels the request."""

    @property
    def policy_version(self) -> int: ...
    @property
    def max_length(self) -> int:
        """Return the maximum length of prompt plus completion, in tokens."""
        ...

    def session(self) -> SamplingSession:
        """Open the session of one episode. Call in a fixed order (task, member), before the first await."""
        ...

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion outside any episode."""
        ...

    async def update(self, weights: Weights) -> None:
        """Switch to another version of the weights. Running turns finish with the old version."""

    async def close(self) -> None: ...


class Engine(Protocol):
    """Inference engine in another process or machine, one of a fleet. Arguments and results are plain data. The fleet
    keeps the inputs of every turn, so that it can retry the request on another engine with the same seed."""

    async def start(self) -> dict[str, Any]:
        """Start the engine; afterwards it can sample or `load` weights. Return its description: pid, node, versions,
        vocabulary."""
        ...

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: int = -1
    ) -> Completion: ...
    async def load(self, weights: Weights) -> None:
        """Switch to these weights. Raise an error if they belong to another model or are not finite; the fleet then
        replaces the engine."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens but the first, at temperature 1."""
        ...

    async def close(self) -> None: ...


class ChatFormat(Protocol):
    """Chat template of one model family: renders a conversation to tokens and parses sampled tokens."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def sees_images(self) -> bool:
        """Return whether the model gets the images of messages. If not, replies get placeholder texts for their images,
        and any other message with an image raises ValueError."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the prompt of the first turn, including the assistant header."""
        ...

    def extend(self, turn: Turn, replies: Sequence[Message]) -> list[int]:
        """Return the tokens that follow a sampled turn: the rest of its end marker, the replies, and the next assistant
        header."""
        ...

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        """Parse a turn that was sampled after this prompt, with these tools. Never raises on model output."""
        ...

    def write(
        self,
        message: Message,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
        exact: bool = True,
    ) -> list[int]:
        """Return the tokens of an assistant message as the model would sample it after this prompt, including the stop
        token. With `exact`, raise ValueError if `parse` would not return the same message."""
        ...

    def truncate(self, text: str, max_tokens: int) -> str:
        """Truncate a text to `max_tokens`: keep its beginning and end, with a marker in between."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@runtime_checkable
class Tool(Protocol):
    """A tool that the model calls by name with JSON arguments. `run` is called on the event loop, so blocking code must
    use a thread."""

    @property
    def spec(self) -> ToolSpec: ...
    async def run(self, arguments: dict[str, Any]) -> ToolResult: ...


class ToolSession(Protocol):
    """The tools of one episode. `close` releases their resources (a process, a connection)."""

    @property
    def tools(self) -> Sequence[Tool]: ...
    async def close(self) -> None: ...


@runtime_checkable
class ToolSource(Protocol):
    """Provider of tools with their own lifetime (an MCP server, an interpreter). A run opens it on its event loop and
    closes it at the end. Every episode opens a session; slow setup waits for the first call, so opening is cheap."""

    async def open(self) -> None:
        """Connect to the provider, so that `session` knows its tools. Idempotent."""

    def session(self) -> ToolSession: ...
    async def close(self) -> None:
        """Close the connections of the running event loop."""


class Environment(Protocol):
    """The environment of one episode of one task; closed after the reward has been computed. With an optional method
    `async def fork(self)`, which returns an independent copy in the same state, episodes can branch without replaying
    their steps; `fork = None` excludes an environment from branching. An optional property `state` names the current
    state by a string."""

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
    """Creates environments and their tasks, for example an environment class with a `tasks` method."""

    def __call__(self, task: Task) -> Environment: ...
    def tasks(self, split: str, seed: int, count: int) -> Iterable[Task]: ...


class Episode(Protocol):
    """Input of a reward function: the finished trajectory and the still open environment."""

    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def task(self) -> Task: ...
    @property
    def environment(self) -> Environment: ...
    async def call(self, tool: str, **arguments: Any) -> ToolResult: ...


# A float means Reward(outcome). An exception marks the episode as unscored: it is dropped and counted.
RewardFunction = Callable[[Episode], Reward | float | Awaitable[Reward | float]]
AnyReward = Callable[..., Any]  # with any signature that `rewards.adapt.as_reward` accepts


@runtime_checkable
class GroupReward(Protocol):
    """Scores all episodes of one task in one call. `as_reward` wraps a function that takes `episodes` as one."""

    @property
    def grouped(self) -> bool:
        """Return True if the reward needs the whole group, False if it scores each episode separately."""
        ...

    @property
    def compares(self) -> bool:
        """Return True if rewards are relative within a group; single rewards and means over tasks are meaningless."""
        ...

    async def group(self, episodes: Sequence[Episode]) -> Sequence[Reward | Exception]:
        """Return one entry per episode: its reward, or the exception that prevented it. Raise an error if scoring
        failed for all episodes."""
        ...


class Scorer(Protocol):
    """Scores with a trained reward model. Blocks while it computes; raises if it cannot score."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Reward]: ...


class Objective(Protocol):
    """Loss of a batch, and the inputs that it needs. Torch types are `Any`, to keep this module free of torch."""

    @property
    def needs(self) -> frozenset[str]:
        """Return the required inputs: reference (log-probs of the reference model), precomputed (those log-probs come
        with the rows), old (log-probs of the model before the step), values (of a critic, before each token), critic
        (a separate value model), scores (of a reward model, per token, instead of log-probs), mismatched (answers
        paired with other prompts), lengths (trained tokens of each episode in the step: the loss is a sum over tokens
        and takes an episode whose rows are in several packs)."""
        ...

    def loss(self, batch: Any, /) -> Any: ...


class Algorithm(Objective, Protocol):
    """Objective with credit assignment: turns a group of episodes into training rows."""

    @property
    def refill(self) -> int:
        """Return the maximum number of rounds in which groups without a training signal are replaced. 0: none."""
        ...

    def adjusted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return copies of the episodes with the algorithm's own reward terms added."""
        ...

    def accepted(self, group: Sequence[Trajectory]) -> list[Trajectory] | None:
        """Return the episodes to train on as demonstrations. None: the algorithm compares good and bad episodes."""
        ...

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]: ...
    def prepare(self, batches: Sequence[Any], step: int) -> None:
        """Compute the inputs that depend on all mini-batches of a step."""

    def evaluated(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, with derived metrics added."""
        ...


class Policy(Protocol):
    """Trains a model's weights with an algorithm. May run in other processes, so arguments and results are plain data.
    Callers await every call before the next one."""

    async def step(self, rows: Sequence[Sample], step: int) -> dict[str, float]: ...
    async def evaluate(self, rows: Sequence[Sample], step: int) -> dict[str, float]:
        """Compute the loss over rows without an update."""
        ...

    async def score(self, rows: Sequence[Sample]) -> list[list[float]]:
        """Return the log-probs of the trained tokens of each row, 0 for the other tokens."""
        ...

    async def save(self, folder: str, state: dict[str, Any]) -> None:
        """Write a checkpoint. `load` returns `state`."""

    async def load(self, folder: str) -> dict[str, Any]: ...
    async def publish(self) -> Weights: ...
    async def close(self) -> None: ...


class Tracker(Protocol):
    """Logs the metrics of each step, and the episodes of some steps, to a file, TensorBoard or a server."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def episodes(self, step: int, episodes: Sequence[Trajectory]) -> None: ...
    def close(self) -> None: ...
