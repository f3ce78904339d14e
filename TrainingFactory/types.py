"""Define every data type that flows through a step. Plain slots dataclasses; nothing here imports anything heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length"]
Status = Literal["done", "max_turns", "truncated", "tool_failure", "error"]


@dataclass(slots=True)
class ToolSpec:
    """Says what a model is told about a tool. `parameters` is a JSON schema of type object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(slots=True)
class ToolCall:
    """Holds a call as the model wrote it. A call that could not be read keeps the reason in `error`."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str | None = None


@dataclass(slots=True)
class ToolResult:
    """Holds what came back from one call. `content` is what the model sees, for failures too."""

    content: str
    ok: bool = True
    error: str | None = None  # for the logs: schema, timeout, exception, unknown, malformed, unavailable
    cached: bool = False
    seconds: float = 0.0
    # Images, audio and resources that came with it, as MCP writes them; `content` says that they are there.
    attachments: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""  # of the call that it answers


@dataclass(slots=True)
class Message:
    role: Role
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None  # the tool that answers, on tool messages
    reasoning: str | None = None


@dataclass(slots=True)
class Task:
    """Holds one problem: `prompt` is the user's text, or a whole conversation that ends before the model's turn."""

    id: str
    prompt: str | list[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Says how one turn is sampled. top_p, top_k and min_p are for evaluation: training needs the full softmax."""

    temperature: float = 1.0  # 0 is greedy
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # with the position in the sequence it determines every random number of the turn


@dataclass(slots=True)
class Completion:
    """Holds what was sampled: ids (the stop token included where one was sampled) and one log-prob each, of the full
    softmax at the sampling temperature (at temperature 1 for greedy turns)."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Finish
    policy_version: int = 0  # of the weights that sampled its first token
    # Of each token, where new weights landed within the turn. Not in its text, by which runs know their data.
    versions: list[int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")
        if self.versions is not None and len(self.versions) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.versions)} versions")

    @property
    def token_versions(self) -> list[int]:
        """Return the version of the weights that sampled each token."""
        return self.versions or [self.policy_version] * len(self.token_ids)


@dataclass(slots=True)
class Turn:
    """Holds one sampled message and what the environment answered. prompt_ids of turn n+1 == prompt_ids +
    completion.token_ids of turn n + what `ChatFormat.extend` adds."""

    prompt_ids: list[int]
    completion: Completion
    message: Message
    replies: list[Message] = field(default_factory=list)
    tool_results: list[ToolResult] = field(default_factory=list)
    signals: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Reward:
    """Holds a reward; `steps` has one entry per turn, or none; `parts` are named figures for the logs."""

    outcome: float
    steps: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Trajectory:
    """Holds one episode. `group` names the siblings that share a task in one step, `member` counts them."""

    task: Task
    group: str
    member: int = 0
    prompt: list[Message] = field(default_factory=list)
    tools: list[ToolSpec] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status = "done"
    reward: Reward | None = None  # None: not scored, or scoring failed (then `error` says why)
    error: str | None = None
    seconds: float = 0.0

    @property
    def answer(self) -> str:
        """Return the text of the last turn if the episode came to its own end, else nothing."""
        return self.turns[-1].message.content if self.status == "done" and self.turns else ""


@dataclass(slots=True)
class Step:
    """Holds what an environment answers to one message of the model."""

    replies: list[Message] = field(default_factory=list)
    done: bool = False
    tool_results: list[ToolResult] = field(default_factory=list)
    signals: dict[str, float] = field(default_factory=dict)


_numbers = count()


@dataclass(slots=True)
class Sample:
    """Holds one training row; every list has one entry per token. Made from turns in `data/samples.py` only. Episodes
    that are compared have the same `pair` and are never torn apart; the one with the higher `label` is the better."""

    token_ids: list[int]
    loss_mask: list[bool]  # true on sampled tokens only, and on all of them unless an algorithm wants fewer
    logprobs: list[float]  # of the sampler; 0 where the mask is false
    advantages: list[float]
    rewards: list[float]
    policy_version: list[int]
    episode: int = field(default_factory=_numbers.__next__, compare=False)  # the number of its rows
    pair: int = field(default=-1, compare=False)  # -1: the episode's own number, it is compared with no other
    label: float = 0.0
    # Log-probs of the reference model where they are known beforehand; 0 where the mask is false.
    reference: list[float] | None = None

    def __post_init__(self) -> None:
        self.pair = self.episode if self.pair == -1 else self.pair
        names = ("token_ids", "loss_mask", "logprobs", "advantages", "rewards", "policy_version")
        sizes = {name: len(getattr(self, name)) for name in names}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"a sample needs lists of equal length, got {sizes}")


@dataclass(slots=True)
class Group:
    """Holds the episodes of one task in one step, and what they teach: their training rows, with credit."""

    number: int  # place in the order of the run: step n has those from n * batch_size on
    trajectories: list[Trajectory]
    rows: list[Sample] = field(default_factory=list)
    attempt: int = 0  # those before it taught nothing, or were too old
    place: int = 0  # of its task in the order of all epochs


@dataclass(slots=True, frozen=True)
class Weights:
    """Names a published version of the policy's weights."""

    version: int
    where: str = "shared"  # a folder that holds them; shared: sampler and learner have the same tensors
    kind: Literal["full", "adapter"] = "full"
    base: str = ""  # of an adapter: the folder with the weights under it, which never change
    # A text in tokens, and the log-probs that the learner gives to all of them but the first: who loads the weights
    # must find the same.
    canary: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """Describes an engine so that it can be made anywhere. With `pushed` no weights are read from `model`, a folder or
    a hub id: only its config.json counts, and the weights come by `load`."""

    kind: str  # native, vllm, or the class of another one: package.module:Class
    model: str
    max_length: int
    slots: int = 64
    dtype: str = "auto"
    device: str = "auto"
    pushed: bool = True
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # arguments of vLLM's engine


class SamplersLost(Exception):
    """Says that nothing is left that could sample, nor could be started again: a run saves what it has and stops."""


class ToolFailure(Exception):
    """Says that the tools behind an environment are gone; a call that merely fails is a `ToolResult` with ok=False."""
