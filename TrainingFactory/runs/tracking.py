"""Progress reports of a run."""

from __future__ import annotations

import sys
from typing import Protocol

from TrainingFactory.common.texts import escape_control, pluralize
from TrainingFactory.types import Trajectory


class Watcher(Protocol):
    """Receiver of a run's progress, which cannot influence the run."""

    def phase(self, name: str) -> None:
        """Announce that a phase begins: load, generate, update, evaluate or checkpoint."""
        ...

    def episode(self, trajectory: Trajectory) -> None: ...
    def step(self, step: int, total: int, metrics: dict[str, float]) -> None: ...
    def say(self, text: str) -> None: ...


class PlainLines:
    """Watcher that prints one line per step to stderr, for logs and scripts."""

    def phase(self, name: str) -> None: ...
    def episode(self, trajectory: Trajectory) -> None: ...

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self.say(f"step {step}/{total}  {format_metrics_line(metrics)}")

    def say(self, text: str) -> None:
        print(escape_control(text), file=sys.stderr, flush=True)


# metric -> its format in a progress line
METRIC_FORMATS = {
    "loss": "loss {:.4f}", "reward": "reward {:.3f}", "accuracy": "accuracy {:.2f}", "tool_success": "tools {:.0%}",
    "eval/success": "held-out {:.3f}", "eval/loss": "held-out loss {:.4f}",
    "eval/accuracy": "held-out accuracy {:.2f}", "tokens_per_second": "{:.0f} tokens/s", "seconds/step": "{:.1f} s",
}  # fmt: skip


def format_metrics_line(metrics: dict[str, float]) -> str:
    fields = [template.format(metrics[name]) for name, template in METRIC_FORMATS.items() if name in metrics]
    if "episodes/unscored" in metrics and "reward" not in metrics:
        fields.insert(0, "no episode could be scored")
    elif "episodes/unscored" in metrics:
        if num_unscored := int(metrics["episodes/unscored"]):
            fields.append(f"{num_unscored} of {int(metrics['episodes'])} unscored")
        if not metrics.get("rows"):
            groups_text = "all groups of scored episodes" if num_unscored else "all groups"
            fields.append(f"equal rewards in {groups_text}, nothing to learn")
    if num_lost := int(metrics.get("episodes/tool_failure", 0)):
        fields.append(f"{pluralize(num_lost, 'episode')} lost to unavailable tools")
    return "  ".join(fields)
