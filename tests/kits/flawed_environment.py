"""A program that speaks the protocol of docs/ENVIRONMENTS.md, with one flaw that a check must find. Imports nothing of
this project."""

import itertools
import json
import random
import sys

args = {}
open_episodes = set()
count = itertools.count()


def handle(request):
    method, flaw = request["method"], args.get("flaw")
    if method == "version":
        args.update(request["args"])
        return {"protocol": 1, "name": "flawed"}
    if method == "tasks":
        answer = {} if flaw == "no answer" else {"answer": "5"}
        return {"tasks": [{"id": f"t{i}", "prompt": "2 + 3", **answer} for i in range(request["count"])]}
    episode = request["episode"]
    if method == "reset":
        open_episodes.add(episode)
        if flaw == "crowded" and len(open_episodes) > 5:
            raise ValueError("too many episodes")
        prompt = f"question {next(count)}" if flaw == "kept state" else "2 + 3 = ?"
        return {"messages": [{"role": "user", "content": prompt}]}
    if method == "step":
        reply = f"mood {random.random()}" if flaw == "moody" else "ok"
        is_right = request["message"]["content"] == "5"
        reward = random.random() + 1 if flaw == "random reward" and is_right else float(is_right)
        reward = 1.0 if flaw == "generous" else reward
        return {"messages": [{"role": "user", "content": reply}], "done": True, "reward": reward}
    if method == "close":
        open_episodes.discard(episode)
    return {}


for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = {"id": request["id"], "result": handle(request)}
    except ValueError as error:
        answer = {"id": request["id"], "error": {"message": str(error)}}
    print(json.dumps(answer), flush=True)
