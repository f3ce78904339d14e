"""Define what every section of the config is made of."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

# Kept as text, so that a config can be written out again; in Python a Path is welcome, and so is what carries an id.
PathText = Annotated[str, BeforeValidator(lambda given: _as_text(given))]


def _as_text(given: Any) -> Any:
    """Return the path as text, and of an object of another factory its id."""
    if isinstance(given, os.PathLike):
        return os.fspath(given)
    ids = (getattr(given, name, None) for name in ("dataset_id", "scenario_id", "allocation_id"))
    return next((name for name in ids if name is not None), given)


class Section(BaseModel):
    # strict: no "8" for 8 and no true for 1; what a run used must be what was written.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
