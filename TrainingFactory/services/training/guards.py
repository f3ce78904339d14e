"""Steps of which too little could be scored: when a run goes on, when it waits, and when it stops."""

from __future__ import annotations

from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.training.source import Groups

MAX_UNUSABLE = 3  # steps in a row
MAX_WITHOUT_TOOLS = 8  # where a server is down, which may come back: after pauses of 1, 2, 4 ... seconds
LONGEST_PAUSE = 30.0


class Unusable:
    """Counts the steps in a row that cannot be used."""

    def __init__(self, run: RunFolder) -> None:
        self.steps, self._run = 0, run

    def stops(self, groups: Groups, problem: str, last: bool) -> str | None:
        """Why the run should stop at these episodes, which are those of its last step or not; None: it goes on."""
        limit = MAX_WITHOUT_TOOLS if without_tools(groups) else MAX_UNUSABLE
        if self.steps >= limit:
            return f"stopped after {self.steps} steps that cannot be used: {problem}"
        if last and not self._ever_scored(groups):
            return f"nothing was learned, because no episode of the run could be scored: {problem}"
        return None

    def _ever_scored(self, groups: Groups) -> bool:
        now = any(trajectory.reward is not None for group in groups for trajectory in group)
        return now or any("reward" in row for row in self._run.metrics())

    @property
    def pause(self) -> float:
        """Seconds until the next step, where tools are down."""
        return min(2.0 ** (self.steps - 1), LONGEST_PAUSE)


def without_tools(groups: Groups) -> bool:
    return any(trajectory.status == "tool_failure" for group in groups for trajectory in group)
