"""Jobs of the page without a model; a module that imports little, since a process is started for it."""

from __future__ import annotations

import time
from typing import Any


def answer(asked: dict[str, Any], tell: Any) -> dict[str, Any]:
    if asked["job"] == "wrong":
        return {"wrong": "no such model"}
    if asked["job"] == "die":
        raise SystemExit(3)
    if asked["job"] in ("doctor", "sample"):
        tell({"text": "begun"})
        time.sleep(600)
    for number in range(asked["given"]["count"]):
        tell({"number": number})
    return {"ok": {"sum": asked["given"]["count"]}}
