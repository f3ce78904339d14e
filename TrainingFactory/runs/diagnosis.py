"""Findings and measurements of `tfactory doctor`, which examines a config before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from TrainingFactory.runs.findings import Finding, Severity

T = TypeVar("T")
SEVERITIES: list[Severity] = ["error", "warning", "note"]
# name of a finding -> remedy; the findings of `runs/finding_rules.py` have their own remedies
FINDING_REMEDIES = {
    "config": "Fix the config as described, then run tfactory doctor again.",
    "ignored": "Remove the option, or change the option that makes it ineffective.",
    "model": "Fix the model section, or choose another model.",
    "calls_not_read": "Remove model.family so that the model's own chat format is used, or register a format: "
    "TrainingFactory.models.register_family.",
    "family_differs": "Remove model.family, unless the model was trained to write calls in that format.",
    "example_call": "Set model.chat_template to a copy of the template with a corrected example.",
    "stop_unreachable": "Use the model's own tokenizer, or a chat template that ends turns with a token.",
    "no_stop": "Raise sampling.max_tokens, or train on demonstrations first, so that turns end.",
    "prompt_too_long": "Raise model.max_length, lower sampling.max_tokens, or shorten prompts and tool lists.",
    "tool_schema": "Fix the schema. Describe in the tool's docstring what it does and when to call it.",
    "mask": "The algorithm or the data is wrong, not the config: inspect the rows of that step.",
    "episodes_fail": "Run the episodes with all errors: tfactory rollout CONFIG.",
    "unscored": "Read the reason. Test the reward function alone, and a judge with tfactory judge audit.",
    "memory": "Use a smaller model, or a device with more memory.",  # no option would save enough
}


@dataclass(slots=True)
class Diagnosis:
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, sentence: str, severity: Severity = "error", remedy: str = "") -> None:
        finding = Finding(name, sentence.rstrip("."), remedy or FINDING_REMEDIES[name], severity)
        if finding not in self.findings:  # one check may run twice: alone, and as part of a larger one
            self.findings.append(finding)

    def check(self, name: str, run_check: Callable[[], T]) -> T | None:
        """Call `run_check` and return its result. On ValueError or OSError, add a finding `name` and return None."""
        try:
            return run_check()
        except (ValueError, OSError) as error:
            self.add(name, str(error))
            return None

    @property
    def sorted_findings(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity))

    @property
    def failed(self) -> bool:
        """Return whether any finding is an error, so that a run would fail."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def as_json(self) -> dict[str, Any]:
        return {"facts": self.facts, "findings": [asdict(finding) for finding in self.sorted_findings]}
