"""Key random numbers by where they are used, so that they do not depend on who came first."""

from __future__ import annotations

import hashlib
import json


def turn_seed(run_seed: int, step: int, task: str, member: int, turn: int) -> int:
    """Return 64 bits for one turn. The fields are written as JSON, so that no two turns spell the same text."""
    text = f"[{run_seed}, {step}, {json.dumps(task)}, {member}, {turn}]"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
