"""A program that speaks the protocol of docs/ENVIRONMENTS.md and does what the model's message says. It imports nothing
of this project."""

import json
import os
import signal
import sys
import threading
import time

args = {}
turns = {}
FAILURES = {"fail": ValueError("the board is full"), "lose": ConnectionError("the server is gone")}


def answer(number, **fields):
    line = json.dumps({"id": number, **fields}) + "\n"
    os.write(1, line.encode()) if len(line) < 4096 else sys.stdout.write(line)
    sys.stdout.flush()


def read(path):
    try:
        with open(path, "rb") as file:
            return "read " + file.read(2000).decode(errors="replace")
    except OSError as error:
        return "denied " + str(error)


def step(episode, message):
    turns[episode] += 1
    word, _, rest = message["content"].partition(" ")
    replies, more = [], {}
    for call in message["tool_calls"]:
        content = json.dumps(call["arguments"])
        replies.append({"role": "tool", "content": content, "tool_call_id": call["id"]})
    if word == "pid":
        replies = [{"role": "user", "content": str(os.getpid())}]
    elif word == "environ":
        replies = [{"role": "user", "content": json.dumps(dict(os.environ))}]
    elif word == "read":
        replies = [{"role": "user", "content": read(rest)}]
    elif word == "large":
        replies = [{"role": "user", "content": "x" * (9 * 2**20)}]
    elif word == "die":
        sys.stderr.write("out of cheese\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "sleep":
        time.sleep(float(rest))
    elif word in FAILURES:
        raise FAILURES[word]
    elif word == "win":
        more = {"done": True, "reward": 1.0, "stop_reason": "won", "metrics": {"turns": turns[episode]}}
    elif word == "earn":
        more = {"reward": float(rest)}
    elif "json" in message:
        replies = [{"role": "user", "content": json.dumps(message["json"])}]
    return {"messages": replies, **more}


def handle(request):
    method = request["method"]
    if method == "version":
        args.update(request["args"])
        return {"protocol": args.get("protocol", 1), "name": "test", **args.get("describe", {})}
    if method == "tasks":
        return {"tasks": [{"id": f"t{i}", "prompt": "Do.", "answer": i} for i in range(request["count"])]}
    episode = request["episode"]
    if method == "reset":
        turns[episode] = 0
        if args.pop("lose_first_reset", False):
            raise ConnectionError("no server")
        if len(turns) == args.get("die_at_reset"):
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            "messages": [{"role": "user", "content": f"task {request['task']['id']} seed {request['seed']}"}]
        }
    if method == "step":
        return step(episode, request["message"])
    if method == "score":
        return args.get("score", {})
    turns.pop(episode, None)
    return {}


def work(request):
    try:
        answer(request["id"], result=handle(request))
    except ValueError as error:
        answer(request["id"], error={"message": str(error)})
    except ConnectionError as error:
        answer(request["id"], error={"message": str(error), "lost": True})


signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("a line that is no answer", flush=True)
for line in sys.stdin:
    threading.Thread(target=work, args=(json.loads(line),), daemon=True).start()
if args.get("stubborn"):
    time.sleep(1000)
