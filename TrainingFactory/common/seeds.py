"""Seeds derived from where they are used, so that random numbers do not depend on scheduling."""

from __future__ import annotations

import hashlib
import json


def derive_seed(run_seed: int, step: int, task_id: str, member: int, turn: int) -> int:
    """Return a 64-bit seed for one turn: a hash of JSON, so that no two turns hash the same text."""
    seed_text = f"[{run_seed}, {step}, {json.dumps(task_id)}, {member}, {turn}]"
    return int.from_bytes(hashlib.blake2b(seed_text.encode(), digest_size=8).digest(), "big")
