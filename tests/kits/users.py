"""Simulated users: orders whose number only the user knows, with a scripted user and a scripted agent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.kits.rollout import call_text
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.tools import tool
from TrainingFactory.types import Task

STOP = "###STOP###"


class Orders(ToolEnvironment):
    """The state of an order, whose number only the user knows."""

    system_prompt = "You answer questions about orders."

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        for number in range(count):
            details = {"goal": f"You want to know where order {40 + number} is.", "persona": "a clerk"}
            yield Task(f"order-{number}", "Where is my order?", "shipped", details)

    @tool
    def state(self, order: int) -> str:
        """The state of an order."""
        return "shipped" if f"order {order} " in self.task.metadata["goal"] else "unknown"

    def reward(self, episode: Any) -> float:
        """Ask, look up, tell: the whole conversation decides."""
        replies = [reply for turn in episode.trajectory.turns for reply in turn.replies]
        asked = any(reply.role == "user" and "order" in reply.content for reply in replies)
        looked_up = any(reply.role == "tool" and reply.content == "shipped" for reply in replies)
        return float(asked and looked_up and "shipped" in episode.trajectory.answer)


def obliging(prompt: str, number: int) -> str:
    """A user who tells its order's number when asked for it, and leaves with the answer."""
    last = prompt.rsplit("\n", 1)[-1]
    if "shipped" in last:
        return f"Thanks! {STOP}"
    order = re.findall(r"order (\d+)", prompt)[0]
    return f"It is order {order}." if "number" in last else "I want to know where my order is."


def agent(session: int, turn: int, prompt: str) -> str:
    """Ask for the number, look it up, tell."""
    order = re.findall(r"It is order (\d+)", prompt)
    return [
        "What is its number?",
        call_text("state", order=int(order[0])) if order else "?",
        "It is shipped.",
    ][turn]


def config_of(url: str, **user: Any) -> TrainingConfig:
    options = {"pause": 0.001, "api_key_env": None} | user.pop("options", {})
    section = {"model": f"openai:user@{url}", "options": options} | user
    return TrainingConfig(environment={"user": section})
