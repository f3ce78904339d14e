"""Data types of a training step: plain slots dataclasses, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length"]
Status = Literal["done", "max_turns", "truncated", "tool_failure", "error"]


@dataclass(slots=True)
class ToolSpec:
    """A tool as the model sees it. `parameters` is a JSON schema of type object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(slots=True)
class ToolCall:
    """A tool call as the model wrote it. `error` is the reason why the call could not be parsed."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str | None = None


@dataclass(slots=True)
class ToolResult:
    """The result of one tool call. `content` is the text that the model sees, also for failed calls."""

    content: str
    ok: bool = True
    error: str | None = None  # for the logs: schema, timeout, exception, unknown, malformed, unavailable
    cached: bool = False
    seconds: float = 0.0
    # Audio, resources and rejected images in MCP's format; `content` has a placeholder for them.
    attachments: list[dict[str, Any]] = field(default_factory=list)
    id: str = ""  # id of the tool call
    images: list[PlacedImage] = field(default_factory=list)  # in `content`

    def __repr__(self) -> str:
        return _repr_with_images(self)

    def with_content(self, content: str) -> ToolResult:
        """Return a copy of the result with `content` as its text. Every tool call makes such a copy, so this method
        avoids `dataclasses.replace`, which takes five times as long."""
        return ToolResult(
            content, self.ok, self.error, self.cached, self.seconds, self.attachments, self.id, self.images
        )


@dataclass(slots=True, frozen=True, eq=False)
class Image:
    """A picture in a message. `common.images` decodes it from the bytes of a file. Two images are equal if their
    digests are equal."""

    digest: str  # SHA-256 of size and pixels
    width: int
    height: int
    data: bytes = field(repr=False)  # a PNG file with 8-bit RGB pixels, without metadata

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class PlacedImage(NamedTuple):
    """An image of a message, shown before the character at `place` of the message's content."""

    place: int
    image: Image


def _repr_with_images(message: Message | ToolResult) -> str:
    """Return the repr() of a dataclass, without an empty field `images`, because fingerprints hash the repr() and must
    not change for messages without images."""
    names = [item.name for item in fields(message) if item.name != "images" or message.images]
    return f"{type(message).__name__}({', '.join(f'{name}={getattr(message, name)!r}' for name in names)})"


@dataclass(slots=True)
class Message:
    role: Role
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None  # of the tool, on tool messages
    reasoning: str | None = None
    images: list[PlacedImage] = field(default_factory=list)  # ordered by place

    def __repr__(self) -> str:
        return _repr_with_images(self)

    def with_content(self, content: str, images: list[PlacedImage]) -> Message:
        """Return a copy of the message with this content and these images. Every reply is such a copy, so this method
        avoids `dataclasses.replace`, which takes five times as long."""
        return Message(
            self.role, content, self.tool_calls, self.tool_call_id, self.name, self.reasoning, images
        )


@dataclass(slots=True)
class Task:
    """One problem to solve. `prompt` is the user's text, or a conversation that ends before the model's turn."""

    id: str
    prompt: str | list[Message]
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Sampling options of one turn. top_p, top_k and min_p are for evaluation only, because training needs the full
    softmax."""

    temperature: float = 1.0  # 0 is greedy
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # seed and position in the sequence determine every random number of the turn

    def for_turn(self, max_tokens: int, seed: int) -> SamplingParams:
        """Return a copy with the token limit and the seed of one turn. Faster than `dataclasses.replace`."""
        return SamplingParams(
            self.temperature, max_tokens, self.stop_ids, self.top_p, self.top_k, self.min_p, seed
        )


@dataclass(slots=True)
class Completion:
    """Sampled token ids, including a sampled stop token, and the log-prob of each token under the full softmax at the
    sampling temperature (temperature 1 for greedy turns)."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Finish
    policy_version: int = 0  # of the weights that sampled the first token
    # Weight version per token, if the weights changed during the turn. Not in repr(), which fingerprints hash.
    versions: list[int] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")
        if self.versions is not None and len(self.versions) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.versions)} versions")

    @property
    def token_versions(self) -> list[int]:
        """Return the weight version that sampled each token."""
        return self.versions or [self.policy_version] * len(self.token_ids)


@dataclass(slots=True)
class Turn:
    """One sampled message and the environment's replies. prompt_ids of turn n+1 == prompt_ids + completion.token_ids of
    turn n + the tokens that `ChatFormat.extend` adds, unless the conversation was folded (shortened) in between."""

    prompt_ids: list[int]
    completion: Completion
    message: Message
    replies: list[Message] = field(default_factory=list)
    tool_results: list[ToolResult] = field(default_factory=list)
    signals: dict[str, float] = field(default_factory=dict)
    # The rest is not in repr(), which fingerprints of datasets hash.
    # How the conversation was folded just before this turn; None: the prompt continues the turn before.
    fold: str | None = field(default=None, repr=False)
    # The message is a summary of the conversation for the next prompt; the environment does not get it.
    summary: bool = field(default=False, repr=False)
    state: str | None = field(default=None, repr=False)  # the environment's name of its state before the turn
    masked: bool = field(default=False, repr=False)  # a filter excludes the turn from training

    @property
    def sampled_tokens(self) -> int:
        """Return the number of sampled tokens. A turn sampled by an endpoint has no token ids, but a number reported by
        the endpoint."""
        return len(self.completion.token_ids) or int(self.signals.get("endpoint/output_tokens", 0))


@dataclass(slots=True)
class Reward:
    """The reward of an episode. `steps` has one entry per turn or is empty; `parts` are named values for the logs. A
    reward function may leave out the entries of summary turns, which are then 0."""

    outcome: float
    steps: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Trajectory:
    """One episode. Episodes of the same task in one step share `group`; `member` is the index within the group."""

    task: Task
    group: str
    member: int = 0
    prompt: list[Message] = field(default_factory=list)
    tools: list[ToolSpec] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    status: Status = "done"
    reward: Reward | None = None  # None: not scored, or scoring failed with `error`
    error: str | None = None
    seconds: float = 0.0
    # An episode forked from member `parent` after `fork_turn` turns, which both episodes contain.
    parent: int | None = field(default=None, repr=False)
    fork_turn: int = field(default=0, repr=False)
    role: str | None = field(
        default=None, repr=False
    )  # in self-play; episodes are compared within their role

    @property
    def is_folded(self) -> bool:
        """Return whether the conversation was folded (shortened between turns) and is not continuous."""
        return any(turn.fold is not None or turn.summary for turn in self.turns)

    @property
    def own_turns(self) -> list[Turn]:
        """Return the turns sampled by this episode, without those of the episode from which it was forked."""
        return self.turns[self.fork_turn :]

    @property
    def answer(self) -> str:
        """Return the text of the last turn if the model finished the episode, else ""."""
        return self.turns[-1].message.content if self.status == "done" and self.turns else ""


@dataclass(slots=True)
class Step:
    """The environment's response to one message of the model."""

    replies: list[Message] = field(default_factory=list)
    done: bool = False
    tool_results: list[ToolResult] = field(default_factory=list)
    signals: dict[str, float] = field(default_factory=dict)


_episode_numbers = count()


@dataclass(slots=True)
class Sample:
    """One training row; every list has one entry per token. Only `data/samples.py` builds rows from turns. Two episodes
    that the loss compares share `pair` and are packed together; the one with the higher `label` is preferred."""

    token_ids: list[int]
    loss_mask: list[bool]  # true on trained tokens: all sampled ones, unless the algorithm selects fewer
    logprobs: list[float]  # of the sampler; 0 where the mask is false
    advantages: list[float]
    rewards: list[float]
    policy_version: list[int]
    episode: int = field(default_factory=_episode_numbers.__next__, compare=False)  # same in all of its rows
    pair: int = field(default=-1, compare=False)  # -1: compared with no other episode; becomes `episode`
    label: float = 0.0
    # Precomputed log-probs of the reference model; 0 where the mask is false.
    reference: list[float] | None = None
    # Weight of each trained token in the loss and in all counts of tokens; 0 where the mask is false. None: all 1.
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        self.pair = self.episode if self.pair == -1 else self.pair
        names = ("token_ids", "loss_mask", "logprobs", "advantages", "rewards", "policy_version")
        sizes = {name: len(getattr(self, name)) for name in names}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"the lists of a sample must have equal lengths, got {sizes}")


@dataclass(slots=True)
class Group:
    """The episodes of one task in one step, and their training rows with advantages."""

    number: int  # index within the run: step n has the groups from n * batch_size on
    trajectories: list[Trajectory]
    rows: list[Sample] = field(default_factory=list)
    attempt: int = 0  # number of earlier groups in this slot that gave no signal or were too stale
    position: int = 0  # index of the task in the order of all epochs
    filtered: dict[str, int] = field(default_factory=dict)  # counts of `training.filters`


@dataclass(slots=True, frozen=True)
class Weights:
    """Reference to a published version of the policy's weights."""

    version: int
    folder: str = "shared"  # folder of the weights; shared: sampler and learner use the same tensors
    kind: Literal["full", "adapter"] = "full"
    base: str = ""  # adapter: folder of the frozen base weights
    # Token ids, and the learner's log-probs of all but the first: an engine that loads the weights must reproduce them.
    canary: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """Description of an engine, from which any process can create it. `model` is a folder or hub id. With `pushed`,
    only its config.json is read, and `Engine.load` supplies the weights."""

    kind: str  # native, vllm, or a custom class: package.module:Class
    model: str
    max_length: int
    slots: int = 64
    dtype: str = "auto"
    device: str = "auto"
    pushed: bool = True
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # vLLM engine arguments
    cache_gib: float | None = None  # size of the native engine's KV cache; None: most of the free memory


class SamplersLost(Exception):
    """All samplers have failed and none could be restarted. The run saves a checkpoint and stops."""


class ToolFailure(Exception):
    """The tools of an environment are unavailable. A single failed call is a `ToolResult` with ok=False instead."""
