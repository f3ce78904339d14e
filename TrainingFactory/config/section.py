"""Base class and field types of the config sections."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

# Stored as a string, so that a config can be serialized. In Python, a Path or an object with an id is accepted as well.
PathText = Annotated[str, BeforeValidator(lambda value: _convert_id(value))]


def _convert_id(value: Any) -> Any:
    """Return a path as a string, and the id of an object that comes from another factory."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    object_ids = (getattr(value, name, None) for name in ("dataset_id", "scenario_id", "allocation_id"))
    return next((object_id for object_id in object_ids if object_id is not None), value)


class Section(BaseModel):
    # strict: "8" is not 8 and true is not 1, so that a run uses exactly the values in its config.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
