"""What is on disk, as the web page and `--json` show it: every answer of the API that only looks is one of these.

`text_of` is the one serialiser: numbers that JSON has not (NaN, infinity) become null."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from TrainingFactory.types import Reward

State = Literal["running", "finished", "interrupted", "failed", "killed", "unreadable"]
Number = float | None
Chat = dict[str, Any]  # a message as OpenAI writes it, so that it can be sent on as it is
Sort = Literal["place", "reward", "length", "seconds"]


def text_of(shape: BaseModel) -> str:
    """Return the JSON of a shape, on one line."""
    return shape.model_dump_json()


# runs


class Heldout(BaseModel):
    """The last success on held-out tasks, with its 95 % interval where it is known."""

    value: float
    low: Number = None
    high: Number = None
    step: int


class RunRow(BaseModel):
    name: str
    state: State
    problem: str | None = None  # what could not be read, and why
    algorithm: str = ""
    model: str = ""
    environment: str | None = None  # or the dataset, where there is no environment
    step: int = 0
    steps: int = 0  # 0: not known
    seconds: float = 0.0
    started: str = ""  # ISO
    updated: float = 0.0  # seconds since 1970
    reward: Number = None
    loss: Number = None
    spark: list[float] = Field(default_factory=list)  # 60 at most, of what `spark_of` names
    spark_of: Literal["reward", "loss"] = "reward"
    tokens_per_second: Number = None
    heldout: Heldout | None = None
    findings: int = 0  # those that are not gone
    tags: dict[str, str] = Field(default_factory=dict)


class RunList(BaseModel):
    runs: list[RunRow]  # the oldest first


class CheckpointRow(BaseModel):
    name: str
    step: int
    best: bool


class FindingRow(BaseModel):
    name: str
    sentence: str
    remedy: str
    severity: str
    first_step: int
    last_step: int | None  # None: it is not gone

    @property
    def when(self) -> str:
        if self.last_step is None:
            return f"since step {self.first_step}"
        return f"steps {self.first_step} to {self.last_step}"

    @property
    def text(self) -> str:
        return f"{self.name}: {self.sentence}. {self.remedy}"


class EvaluationRow(BaseModel):
    id: str
    step: int | None
    success: Number
    low: Number
    high: Number
    by: str  # eval or training
    suite: str | None  # with its entry: release/search
    environment: str | None
    tasks: int
    time: str


class LineageRow(BaseModel):
    name: str
    what: str
    rows: list[tuple[str, str]] = Field(default_factory=list)


class FileRow(BaseModel):
    name: str
    bytes: int


class RunView(BaseModel):
    row: RunRow
    about: dict[str, Any]  # environment.json
    reason: str | None  # why it stopped, as status.json says
    checkpoints: list[CheckpointRow]
    findings: list[FindingRow]
    evaluations: list[EvaluationRow]
    lineage: list[LineageRow]  # from the base model to this run
    commands: dict[str, str]  # show, resume, stop, report, eval, serve, episodes
    files: list[FileRow]
    tools: list[str]
    notes: list[str] = Field(default_factory=list)  # what could not be read


class ConfigView(BaseModel):
    yaml: str
    options: dict[str, Any]  # by dotted key
    changed: list[str]  # keys that differ from their defaults
    problem: str | None = None  # of a config that this version does not take: then options are as written


class DiffRow(BaseModel):
    key: str
    values: list[Any]  # one a run, in the order that they were named


class Diff(BaseModel):
    runs: list[str]
    rows: list[DiffRow]
    metrics: list[DiffRow] = Field(default_factory=list)  # the last value of each; null where a run has none


class MetricsPart(BaseModel):
    """What metrics.jsonl has from a byte on. Columns have the length of `steps`."""

    offset: int  # to ask from the next time
    start: int = 0  # of an event: the byte that it goes on from
    again: bool = (
        False  # the file was cut back: this is from its beginning, and replaces what was read before
    )
    more: bool = False  # there is more already: ask at once
    unread: int = 0  # lines that are no metrics
    steps: list[int]
    times: list[Number]  # seconds since 1970
    series: dict[str, list[Number]]


class LogPart(BaseModel):
    offset: int
    start: int = 0
    again: bool = False
    more: bool = False
    text: str


# episodes


class EpisodeRow(BaseModel):
    number: int  # the line of trajectories.jsonl, from 1
    step: int | None = None  # from 1; None where the group's name has none
    task: str = ""
    group: str = ""
    member: int = 0
    status: str  # done, max_turns, truncated, tool_failure, error; unreadable: the line is no episode
    reward: Number = None  # outcome and steps together; None: it was not scored
    turns: int = 0
    tokens: int = 0  # sampled
    tool_calls: int = 0
    tool_failures: int = 0
    cached: int = 0  # calls that the cache answered
    seconds: float = 0.0
    error: str | None = None


class EpisodePage(BaseModel):
    total: int  # episodes that are known
    matched: int | None  # None: a text is looked for, and not all has been read
    rows: list[EpisodeRow]
    next: str | None  # `after` of the next page; None: this is the last
    bytes_read: int  # of trajectories.jsonl, for this answer
    partial: (
        bool  # with fewer rows than asked for, because so much was read: ask again with `next`, or as before
    )
    indexed: int  # bytes of the file that the index knows of
    size: int


class ResultView(BaseModel):
    content: str
    ok: bool
    error: str | None
    cached: bool
    seconds: float
    call: str  # the tool's name
    id: str  # of the call
    attachments: int = 0


class TurnView(BaseModel):
    message: Chat
    replies: list[Chat]
    tool_results: list[ResultView]
    step_reward: Number
    signals: dict[str, float] = Field(default_factory=dict)
    finish: str
    policy_version: int
    tokens: int


class TaskView(BaseModel):
    id: str
    prompt: list[Chat] = Field(default_factory=list)
    answer: Any = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class PieceView(BaseModel):
    """Sampled tokens that are whole characters together: nearly always one token."""

    text: str
    ids: list[int]
    logprobs: list[float]
    values: list[float]  # one a token; none where they are not trained
    trained: bool


class TurnPieces(BaseModel):
    pieces: list[PieceView]


class CreditView(BaseModel):
    measure: Literal["advantage", "weight", "reward"]
    largest: float  # in the step, signs aside: the strongest colour
    note: str
    turns: list[TurnPieces]
    left_out: str | None  # why nothing of it is trained


class EpisodeView(BaseModel):
    row: EpisodeRow
    prompt: list[Chat] = Field(default_factory=list)
    turns: list[TurnView] = Field(default_factory=list)
    reward: Reward | None = None
    answer: str = ""  # the last message of the model
    task: TaskView
    tools: list[str] = Field(default_factory=list)
    problem: str | None = None  # of a line that is no episode: nothing else is filled
    credit: CreditView | None = None  # by the worker


class GroupView(BaseModel):
    step: int
    task: str
    members: list[EpisodeView]
    notes: list[str] = Field(default_factory=list)


# registry, comparisons, audits


class VersionRow(BaseModel):
    version: str  # agent:3
    model: str
    number: int
    aliases: list[str]
    created: str
    who: str
    description: str
    digest: str
    run: str | None  # that made it
    step: int | None
    base: str | None  # the model under an adapter
    kind: Literal["model", "adapter"]
    tags: dict[str, str]
    evaluations: list[EvaluationRow]


class ModelRow(BaseModel):
    name: str
    versions: list[VersionRow]  # the oldest first
    aliases: dict[str, int]


class ModelList(BaseModel):
    models: list[ModelRow]


class DecisionRow(BaseModel):
    kind: str  # alias, promote, refuse, rollback, unalias, delete
    alias: str | None
    number: int | None
    was: int | None
    who: str
    created: str
    reason: str | None  # why it was refused, or what proved it
    evidence: Any = None


class VersionView(BaseModel):
    version: VersionRow
    folder: str
    lineage: list[LineageRow]
    commands: list[str]  # that make it again
    decisions: list[DecisionRow]


class TaskPair(BaseModel):
    task: str
    first: float  # share of the scored episodes that succeeded
    second: float
    flipped: Literal["better", "worse"] | None
    members: tuple[int, int] | None = None  # the episodes that tell it best
    episodes: tuple[EpisodeView | None, EpisodeView | None] | None = (
        None  # side by side, where they were kept
    )


class ComparisonSummary(BaseModel):
    first: str
    second: str
    records: tuple[str, str]
    environment: str | None
    tasks: int
    difference: float
    low: float
    high: float
    p: float
    better: int
    worse: int
    notes: list[str]


class ComparisonView(BaseModel):
    tasks: list[TaskPair]  # those that flipped first
    summary: ComparisonSummary


class AuditRow(BaseModel):
    name: str
    judge: str
    time: str
    verdict: str
    rows: list[tuple[str, str, str]]  # metric, value, what it means
    items: int
    points: list[tuple[float, float, int]] = Field(default_factory=list)  # gold, judge, length
    problem: str | None = None


class AuditList(BaseModel):
    audits: list[AuditRow]
