"""Compatibility of model families with the engine, the learner and other parts, as `make compat` has measured it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from TrainingFactory.common.options import UnknownNameError, did_you_mean, nearest
from TrainingFactory.models.names import resolve_model_name

COMPATIBILITY_FILE = Path(__file__).with_name("compatibility.json")
# key in the data file -> heading
COLUMN_HEADINGS = {
    "engine": "Engine",
    "learner": "Shared prefixes",
    "lora": "LoRA",
    "quantized": "Quantized",
    "vllm": "vLLM",
    "template": "Chat template",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one check. `status` is works, falls back, rejected, fails, wrong, or "-" if nothing was checked."""

    status: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class FamilySupport:
    key: str
    name: str
    model_type: str  # of config.json
    architecture: str
    released: str  # a checkpoint of the family on the hub
    features: str
    cells: dict[str, Cell]  # by key of COLUMN_HEADINGS

    def iterate_notes(self) -> Iterator[tuple[str, Cell]]:
        """Yield heading and result of each check that has a note."""
        yield from (
            (heading, self.cells[key]) for key, heading in COLUMN_HEADINGS.items() if self.cells[key].note
        )


@dataclass(frozen=True, slots=True)
class Compatibility:
    versions: dict[str, str]  # of the packages that the checks ran with
    families: list[FamilySupport]


@cache
def read_compatibility(path: Path = COMPATIBILITY_FILE) -> Compatibility:
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    families = []
    for row in results["families"]:
        cells = {column: Cell(**row.pop(column)) for column in COLUMN_HEADINGS}
        families.append(FamilySupport(**row, cells=cells))
    return Compatibility(results["versions"], families)


def find_families(name: str) -> list[FamilySupport]:
    """Return the rows of a family key, family name, model type, architecture, checkpoint or model folder."""
    families = read_compatibility().families
    requested_names = {resolve_model_name(name).lower(), *(_read_model_types(Path(name).expanduser()))}
    rows = [family for family in families if requested_names & set(map(str.lower, _list_names(family)))]
    if not rows:
        known_names = sorted({name for family in families for name in (family.key, family.model_type)})
        hint = did_you_mean(nearest(name, known_names, cutoff=0.5)) or f"; families: {', '.join(known_names)}"
        raise UnknownNameError(name, f"No compatibility results for {name!r}{hint}")
    return rows


def _list_names(family: FamilySupport) -> list[str]:
    names = [alias.strip() for alias in family.name.removesuffix("(text)").split(",")]
    return [family.key, family.name, *names, family.model_type, family.architecture, family.released]


def _read_model_types(folder: Path) -> Iterator[str]:
    """Yield the model type in a folder's config.json; for a vision model, also the model type of its text part."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        return
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        sections = [config, config.get("text_config") or {}]
        yield from (str(section["model_type"]).lower() for section in sections if "model_type" in section)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{config_file} is not a model's config: {error}") from error
