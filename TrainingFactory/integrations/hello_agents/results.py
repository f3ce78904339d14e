"""A result that is both things the textbook takes it for: JSON text, and something to look up keys in."""

from __future__ import annotations

import json
from collections.abc import ItemsView, KeysView
from typing import Any


class Result(str):
    """Holds a mapping as its JSON text: `json.loads(result)` and `result["output_dir"]` give the same values."""

    data: dict[str, Any]

    def __new__(cls, data: dict[str, Any]) -> Result:
        made = super().__new__(cls, json.dumps(data, ensure_ascii=False, indent=2))
        made.data = data
        return made

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def keys(self) -> KeysView[str]:
        return self.data.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.data.items()
