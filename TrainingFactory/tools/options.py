"""Execution options of a tool: time-out, ordering, caching, retries and limits."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Count, Positive, ZeroOrMore


@dataclass(slots=True, frozen=True, config=STRICT)
class ToolOptions:
    """Execution options of a tool, read from its attribute `options`; a tool without it gets these defaults."""

    timeout: Positive | None = None  # seconds for one call; None: the executor's default
    # Calls to the ordered tools of one server (or of this process) run one at a time, in the order of the model's text.
    # Methods of an environment are ordered by default, because they share its state.
    ordered: bool = False
    pure: bool = False  # equal arguments give equal results, without side effects: may be cached and retried
    # Equal results after equal calls since the start of the episode: cached by that history. Implies `ordered`.
    stateful: bool = False
    idempotent: bool = False  # repeating a call has no further effect: may be retried after a failure
    retries: ZeroOrMore = 2  # further attempts after a failure, only for pure and idempotent tools
    concurrency: Count | None = None  # maximum concurrent calls, over all episodes
    rate: Positive | None = None  # maximum calls per second, over all episodes, evenly spaced
    server: str = ""  # the server of the tool; its tools share one circuit breaker. "": this process
    version: str = ""  # of the tool; changing it invalidates cached results

    def __post_init__(self) -> None:
        if self.pure and self.stateful:
            raise ValueError("a tool cannot be both pure and stateful; set one of them")

    @property
    def repeatable(self) -> bool:
        return self.pure or self.idempotent
