"""An adapter whose environment prints to stdout in every way, and whose methods are async functions."""

import os
import subprocess

REQUIREMENTS: list = []


class Adapter:
    def __init__(self, name, args):
        print("made")

    def describe(self):
        return {"actions": "text"}

    def tasks(self, split, seed, count):
        print("tasks")
        yield {"id": "a"}

    async def reset(self, task, seed):
        return Episode()


class Episode:
    messages = [{"role": "user", "content": "Shout."}]  # noqa: RUF012

    async def step(self, message):
        print('{"id": 3, "result": {}}', flush=True)
        os.write(1, b"directly\n")
        subprocess.run(["echo", "from a subprocess"], check=True)
        return {
            "messages": [{"role": "user", "content": message["content"].upper()}],
            "done": True,
            "reward": 1,
        }
