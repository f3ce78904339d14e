"""Response models of the read-only web API, also printed by `--json`. `model_dump_json` is the only serialiser; it
writes NaN and infinity as null. docs/UI.md describes the fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, computed_field

from TrainingFactory.types import Reward

RunState = Literal["running", "finished", "interrupted", "failed", "killed", "unreadable"]
SortOrder = Literal["place", "reward", "length", "seconds"]
Number = float | None
Json = dict[str, Any]
ChatMessage = Json  # a message in OpenAI's format


class Heldout(BaseModel):
    value: float
    low: Number = None  # 95 % interval
    high: Number = None
    step: int
    by: str = "training"  # or such as: tfactory eval, 64 tasks of search


class RunRow(BaseModel):
    name: str
    state: RunState
    problem: str | None = None  # first unreadable file, and why
    algorithm: str = ""
    model: str = ""
    environment: str | None = None  # or a command or dataset; "conversation": only tools or tasks
    step: int = 0
    steps: int = 0  # 0: unknown
    seconds: float = 0.0
    started: str = ""  # ISO
    updated: float = 0.0  # seconds since 1970
    reward: Number = None
    loss: Number = None
    spark: list[float] = []  # at most 60 values of the metric `spark_of`
    spark_of: Literal["reward", "loss"] = "reward"
    tokens_per_second: Number = None
    heldout: Heldout | None = None  # last success rate on held-out tasks
    findings: int = 0  # open findings
    seed: int | None = None
    options: Json = {}  # options that differ from their defaults, by dotted key, without those of the section logging
    archived: bool = False
    tags: dict[str, str] = {}  # a tag without a value: ""
    note: str = ""


class RunList(BaseModel):
    runs: list[RunRow]  # the oldest first


class FindingRow(BaseModel):
    name: str
    sentence: str
    remedy: str
    severity: str
    first_step: int
    last_step: int | None = None  # None: still open
    times: int = 1  # number of occurrences; the steps are those of the last one

    @computed_field
    @property
    def when(self) -> str:
        first, last = self.first_step, self.last_step
        count_note = f", {self.times} times in total" if self.times > 1 else ""
        return (f"since step {first}" if last is None else f"steps {first} to {last}, resolved") + count_note


class EvaluationRow(BaseModel):
    id: str
    step: int | None
    success: Number
    low: Number  # 95 % interval
    high: Number
    by: str  # eval or training
    suite: str | None  # with its entry, such as release/search
    environment: str | None
    tasks: int
    time: str


class RunView(BaseModel):
    row: RunRow
    about: Json = {}  # environment.json
    reason: str | None = None  # why it stopped, from status.json
    checkpoints: list[Json] = []  # name, step, best
    findings: list[FindingRow] = []
    evaluations: list[EvaluationRow] = []
    lineage: list[Json] = []  # name, what, rows: from the base model to the run's initial model
    commands: dict[str, str]  # show, stop, resume, report, eval, serve, episodes
    files: list[Json]  # name, bytes
    tools: list[str] = []
    notes: list[str]  # files that could not be read, and why


class ConfigView(BaseModel):
    yaml: str
    options: Json  # by dotted key
    changed: list[str]  # keys that differ from their defaults
    problem: str | None = None  # why this version cannot load the config; `options` is empty then


class RunDiff(BaseModel):
    runs: list[str]
    rows: list[Json]  # key, values: one per run, in the requested order
    metrics: list[Json]  # key, values: the last value of each metric; null if a run has none


class FilePart(BaseModel):
    offset: int  # `after` of the next request
    start: int = 0  # of an event: the byte at which the part starts
    again: bool  # the file was truncated: the part starts at byte 0 and replaces everything read before
    more: bool  # more data is available: request it at once


class LogPart(FilePart):
    text: str


class MetricsPart(FilePart):
    unread: int = 0  # invalid lines
    steps: list[int] = []
    times: list[Number] = []  # seconds since 1970
    series: dict[str, list[Number]] = {}  # columns as long as `steps`


class EpisodeRow(BaseModel):
    number: int  # line of trajectories.jsonl, from 1
    step: int | None = None  # from 1; None if the group's name has no step
    task: str = ""
    group: str = ""
    member: int = 0
    status: str  # done, max_turns, truncated, tool_failure, error; unreadable: the line is invalid
    reward: Number = None  # outcome plus step rewards; None: not scored
    turns: int = 0
    tokens: int = 0  # sampled
    tool_calls: int = 0
    tool_failures: int = 0
    cached: int = 0  # tool calls answered from the cache
    seconds: float = 0.0
    error: str | None = None
    parent: int | None = None  # member that it was forked from
    fork_turn: int = 0  # turns that it shares with its parent


class EpisodePage(BaseModel):
    total: int  # indexed episodes
    matched: int | None  # None: a text search that has not read all episodes
    rows: list[EpisodeRow]
    next: str | None  # `after` of the next page; None: no further page
    bytes_read: int  # of trajectories.jsonl, for this response
    partial: bool  # the request reached its read limit: repeat it to continue
    indexed: int  # indexed bytes of the file
    size: int


class TurnView(BaseModel):
    message: ChatMessage
    replies: list[ChatMessage]
    tool_results: list[Json]  # content, ok, error, cached, seconds, id, call (name of the tool)
    step_reward: Number
    signals: Json
    finish: str
    policy_version: int
    tokens: int
    fold: str | None = None  # how the conversation was folded just before this turn
    prompt_tokens: int | None = None  # of a folded prompt
    summary: bool = False


class CreditView(BaseModel):
    measure: Literal["advantage", "weight", "reward"]
    largest: float  # largest absolute value in the step: the strongest colour
    note: str
    # pieces: text, ids, logprobs (the sampler's), values (empty: not trained), trained, learned (the learner's
    # log-probs; empty: not requested or not available)
    turns: list[Json]
    left_out: str | None  # why no token of the episode is trained


class EpisodeView(BaseModel):
    row: EpisodeRow
    prompt: list[ChatMessage] = []
    turns: list[TurnView] = []
    reward: Reward | None = None
    answer: str = ""  # the model's last message
    task: Json = {}  # id, prompt, answer, metadata
    tools: list[str] = []
    thousandths: list[str] = []  # tools whose points x, y are in thousandths of an image, not in pixels
    problem: str | None = None  # unreadable parts of the line
    credit: CreditView | None = None  # computed by the worker process
    tree: list[EpisodeRow] = []  # all episodes of its group, if some of them were forked


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
    run: str | None  # the run that trained it
    step: int | None
    base: str | None  # base model of an adapter
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
    lineage: list[Json]  # as in RunView
    commands: list[str]  # commands that reproduce it
    decisions: list[Json]  # decisions on the model: kind, alias, number, was, who, created, evidence


class TaskPair(BaseModel):
    task: str
    first: float  # share of the scored episodes that succeeded
    second: float
    flipped: Literal["better", "worse"] | None = None
    episodes: list[EpisodeView | None] = []  # the most telling episode of each side; None: not recorded


class ComparisonView(BaseModel):
    tasks: list[TaskPair]  # flipped tasks first
    summary: Json  # output of `tfactory compare --json`: records, difference, p, better, worse, notes


class AuditList(BaseModel):
    audits: list[Json]  # time, judge, gold, rows (metric, value, meaning), output of `judge audit --json`
    left_out: int = 0  # bytes of older audits that were not read, because the file is too long
