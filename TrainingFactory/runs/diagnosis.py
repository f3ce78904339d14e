"""Hold what the doctor has found before a run, and what it has measured on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from TrainingFactory.runs.findings import Finding, Severity

T = TypeVar("T")
ORDER: list[Severity] = ["error", "warning", "note"]
# finding of an examination -> what to do; those of the table bring their own
REMEDIES = {
    "config": "Correct what is named, and examine again.",
    "ignored": "Leave the option out, or change what makes it count.",
    "model": "Correct the model section, or take another model.",
    "calls_not_read": "Take the model's own chat family (leave model.family out), or register one: "
    "TrainingFactory.models.register_family.",
    "family_differs": "Leave model.family out, unless the model was trained to write calls in that form.",
    "stop_unreachable": "Take a tokenizer that goes with the model, or a chat template whose turns end with a token.",
    "no_stop": "Raise sampling.max_tokens, or train on demonstrations first, so that turns end.",
    "prompt_too_long": "Raise model.max_length, lower sampling.max_tokens, or shorten prompts and tool lists.",
    "tool_schema": "Correct the schema; say in the description (the docstring) what the tool does and when to call it.",
    "mask": "This is a fault of the algorithm or of the data, not of the config: look at the rows of that step.",
    "episodes_fail": "Play it by hand, with its errors: tfactory rollout CONFIG.",
    "unscored": "Look at the reason; try the reward by itself, and the judge by tfactory judge audit.",
    "memory": "Take a smaller model, or a device with more memory.",  # where no option is left
}


@dataclass(slots=True)
class Diagnosis:
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, sentence: str, severity: Severity = "error", remedy: str = "") -> None:
        finding = Finding(name, sentence.rstrip("."), remedy or REMEDIES[name], severity)
        if finding not in self.findings:  # a part may be tried alone and again with the whole
            self.findings.append(finding)

    def tried(self, name: str, do: Callable[[], T]) -> T | None:
        """Return what the function returns; where it refuses, keep its words as a finding."""
        try:
            return do()
        except (ValueError, OSError) as error:
            self.add(name, str(error))
            return None

    @property
    def sorted(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: ORDER.index(finding.severity))

    @property
    def failed(self) -> bool:
        """Tell whether training cannot go well."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def as_json(self) -> dict[str, Any]:
        return {"facts": self.facts, "findings": [asdict(finding) for finding in self.sorted]}
