"""The part of `benchmarks.tools` that is about overlap, alone: `python -m benchmarks.tool_overlap`."""

from __future__ import annotations

import json

from benchmarks.tools import CALLS, EPISODES, FUNCTIONS, TOKENS, measure_overlap, report_overlap, report_trl
from benchmarks.tools_trl import measure_trl
from TrainingFactory.models import load_model

if __name__ == "__main__":
    loaded = load_model("builtin:tiny", device="cpu")
    result = report_overlap(measure_overlap(loaded))
    result |= report_trl(measure_trl(loaded, FUNCTIONS, EPISODES, CALLS, TOKENS))
    print("RESULT " + json.dumps(result))
