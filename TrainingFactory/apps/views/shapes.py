"""Shape what is on disk as the web page and `--json` show it: what the API answers where it only looks.
`model_dump_json` is the one serialiser; numbers that JSON has not (NaN, infinity) become null in it. docs/UI.md says
what is what."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, computed_field

from TrainingFactory.types import Reward

State = Literal["running", "finished", "interrupted", "failed", "killed", "unreadable"]
Sort = Literal["place", "reward", "length", "seconds"]
Number = float | None
Json = dict[str, Any]
Chat = Json  # a message as OpenAI writes it, so that it can be sent on as it is


class Heldout(BaseModel):
    value: float
    low: Number = None  # 95 % interval
    high: Number = None
    step: int
    by: str = "training"  # or: tfactory eval, 64 tasks of search


class RunRow(BaseModel):
    name: str
    state: State
    problem: str | None = None  # what could not be read, and why
    algorithm: str = ""
    model: str = ""
    environment: str | None = None  # or a command, a dataset; conversation: tools or tasks alone
    step: int = 0
    steps: int = 0  # 0: not known
    seconds: float = 0.0
    started: str = ""  # ISO
    updated: float = 0.0  # seconds since 1970
    reward: Number = None
    loss: Number = None
    spark: list[float] = []  # 60 at most, of what `spark_of` names
    spark_of: Literal["reward", "loss"] = "reward"
    tokens_per_second: Number = None
    heldout: Heldout | None = None  # the last success on held-out tasks
    findings: int = 0  # those that are not gone
    tags: dict[str, str] = {}


class RunList(BaseModel):
    runs: list[RunRow]  # the oldest first


class FindingRow(BaseModel):
    name: str
    sentence: str
    remedy: str
    severity: str
    first_step: int
    last_step: int | None = None  # None: it is not gone
    times: int = 1  # that it came; the steps are those of the last time

    @computed_field
    @property
    def when(self) -> str:
        first, last = self.first_step, self.last_step
        again = f", {self.times} times in all" if self.times > 1 else ""
        return (f"since step {first}" if last is None else f"steps {first} to {last}, gone since") + again


class EvaluationRow(BaseModel):
    id: str
    step: int | None
    success: Number
    low: Number  # 95 % interval
    high: Number
    by: str  # eval or training
    suite: str | None  # with its entry: release/search
    environment: str | None
    tasks: int
    time: str


class RunView(BaseModel):
    row: RunRow
    about: Json = {}  # environment.json
    reason: str | None = None  # why it stopped, as status.json says
    checkpoints: list[Json] = []  # name, step, best
    findings: list[FindingRow] = []
    evaluations: list[EvaluationRow] = []
    lineage: list[Json] = []  # name, what, rows: from the base model to what it was started from
    commands: dict[str, str]  # show, stop, resume, report, eval, serve, episodes
    files: list[Json]  # name, bytes
    tools: list[str] = []
    notes: list[str]  # what could not be read


class ConfigView(BaseModel):
    yaml: str
    options: Json  # by dotted key
    changed: list[str]  # keys that differ from their defaults
    problem: str | None = None  # of a config that this version does not take, whose options are not known


class Diff(BaseModel):
    runs: list[str]
    rows: list[Json]  # key, values: one a run, in the order that they were named
    metrics: list[Json]  # the same of the last value of each; null where a run has none


class FilePart(BaseModel):
    offset: int  # to ask from the next time
    start: int = 0  # of an event: the byte that it goes on from
    again: bool  # the file was cut back: this is from its beginning, and replaces what was read before
    more: bool  # there is more already: ask at once


class LogPart(FilePart):
    text: str


class MetricsPart(FilePart):
    unread: int = 0  # lines that are no metrics
    steps: list[int] = []
    times: list[Number] = []  # seconds since 1970
    series: dict[str, list[Number]] = {}  # columns as long as `steps`


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
    next: str | None  # `after` of the next page; None: there is none yet
    bytes_read: int  # of trajectories.jsonl, for this answer
    partial: bool  # not all was looked at, because a request may not read more: ask again
    indexed: int  # bytes of the file that the index knows of
    size: int


class TurnView(BaseModel):
    message: Chat
    replies: list[Chat]
    tool_results: list[Json]  # content, ok, error, cached, seconds, id, and call: the tool's name
    step_reward: Number
    signals: Json
    finish: str
    policy_version: int
    tokens: int


class CreditView(BaseModel):
    measure: Literal["advantage", "weight", "reward"]
    largest: float  # in the step, signs aside: the strongest colour
    note: str
    # pieces: text, ids, logprobs (the sampler's), values (none: not trained), trained, learned (the learner's
    # log-probs; none: not asked for, or not known)
    turns: list[Json]
    left_out: str | None  # why nothing of it is trained


class EpisodeView(BaseModel):
    row: EpisodeRow
    prompt: list[Chat] = []
    turns: list[TurnView] = []
    reward: Reward | None = None
    answer: str = ""  # the last message of the model
    task: Json = {}  # id, prompt, answer, metadata
    tools: list[str] = []
    problem: str | None = None  # what of the line could not be read
    credit: CreditView | None = None  # by the worker


class GroupView(BaseModel):
    step: int
    task: str
    members: list[EpisodeView]
    notes: list[str] = []


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


class VersionView(BaseModel):
    version: VersionRow
    folder: str
    lineage: list[Json]  # as of a run
    commands: list[str]  # that make it again
    decisions: list[Json]  # of the model: kind, alias, number, was, who, created, evidence


class TaskPair(BaseModel):
    task: str
    first: float  # share of the scored episodes that succeeded
    second: float
    flipped: Literal["better", "worse"] | None = None
    episodes: list[EpisodeView | None] = []  # those that tell a flip best, side by side; None: not kept


class ComparisonView(BaseModel):
    tasks: list[TaskPair]  # those that flipped first
    summary: Json  # what `tfactory compare --json` prints: records, difference, p, better, worse, notes


class AuditList(BaseModel):
    audits: list[Json]  # time, judge, gold, rows (metric, value, meaning), and what `judge audit` prints
    left_out: int = 0  # bytes of older ones, of a file that is too long
