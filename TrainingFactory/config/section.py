"""Define what every section of the config is made of."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

# Kept as text, so that a config can be written out again; in Python a Path is welcome.
PathText = Annotated[
    str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
]


class Section(BaseModel):
    # strict: no "8" for 8 and no true for 1; what a run used must be what was written.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
