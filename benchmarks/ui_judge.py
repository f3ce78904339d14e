"""Serve two judges that are rules, for the picture of the page Judges: an audit needs something that answers.

    python -m benchmarks.ui_judge --port 8011
    tfactory judge audit --gold runs/labels/demo.jsonl base_url=http://127.0.0.1:8011/v1 model=grounded

`grounded` gives full marks to an answer that stands in the last result of a tool, half to one that stands in an earlier
one. `diligent` counts tool calls and does not look at the answer.
"""

from __future__ import annotations

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MESSAGE = re.compile(r"^\[\d+\] (\w+)", re.M)  # as a conversation is numbered for a judge


def score(model: str, prompt: str) -> int:
    """Return the mark, from 0 to 10."""
    _, *found = MESSAGE.split(prompt)
    said = [(role, text.strip()) for role, text in zip(found[::2], found[1::2], strict=True)]
    results = [text for role, text in said if role == "tool"]
    if model == "diligent":
        return min(10, 5 * len(results))
    answers = [text for role, text in said if role == "assistant"]
    words = re.findall(r"[A-Z]\w+", answers[-1]) if answers else []
    if not words or not results:
        return 0
    return 10 if words[0] in results[-1] else 5 if any(words[0] in each for each in results) else 1


class Judges(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = "\n".join(each["content"] for each in asked["messages"])
        said = f"Score: {score(asked['model'], prompt)}"
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(said) // 4}
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=8011)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Judges).serve_forever()
