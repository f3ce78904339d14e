"""What the executor has to know about a tool beyond its schema."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Count, Positive, ZeroOrMore


@dataclass(slots=True, frozen=True, config=STRICT)
class ToolOptions:
    """Any tool may carry it as `options`; one that does not has these defaults."""

    timeout: Positive | None = None  # seconds for one call; None: the executor's own limit
    # Calls to the ordered tools of one server (or of this process) run one after another, as the model wrote them.
    # Methods of an environment are ordered unless they say otherwise, because they share its state.
    ordered: bool = False
    pure: bool = False  # equal arguments give equal results and leave nothing behind: may be cached, repeated
    # Equal calls since the episode began give equal results: cached by that history. Implies `ordered`.
    stateful: bool = False
    idempotent: bool = False  # a second call does no more than the first: may be repeated after a failure
    retries: ZeroOrMore = 2  # further attempts after a failure, where the tool may be repeated at all
    concurrency: Count | None = None  # calls at the same time, over all episodes
    rate: Positive | None = None  # calls per second, over all episodes, evenly spaced
    server: str = ""  # who answers; its tools share one circuit breaker. "": this process
    version: str = ""  # of the tool; a new one makes what is cached old

    def __post_init__(self) -> None:
        if self.pure and self.stateful:
            raise ValueError("a tool is pure or stateful, not both")

    @property
    def repeatable(self) -> bool:
        return self.pure or self.idempotent
