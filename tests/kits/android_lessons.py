"""Demonstrations of "Turn Wi-Fi on." on a simulated device, and the run that learns from them and then from rewards.

The random policy taps one of the three elements of each of two screens: it succeeds in one of nine episodes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.kits.android import SimulatedDevice
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.envs.android.environment import AndroidEnvironment
from TrainingFactory.envs.android.screen import Screen, parse_screen
from TrainingFactory.types import Message, ToolCall

RANDOM_SUCCESS = 1 / 9
SYSTEM = "Tap."
GOAL = "Turn Wi-Fi on."
OPTIONS = {"tools": ["tap"], "builtin": ["wifi"]}  # the only task and the only tool


def row(rng: random.Random, mistakes: float) -> dict[str, Any]:
    """Return one demonstration; a share `mistakes` of its taps is random."""
    device = SimulatedDevice(rng.randrange(10**9))
    screen = parse_screen(device.dump())
    messages = [Message("system", SYSTEM), Message("user", f"{GOAL}\n\n{screen}")]
    for target in ("Settings", "Wi-Fi"):
        number = place_of(screen, target)
        if number is None or rng.random() < mistakes:
            number = rng.randint(1, 3)
        messages.append(Message("assistant", tool_calls=[ToolCall("tap", {"element": number}, id="c")]))
        device.tap(*screen.elements[number - 1].center)
        screen = parse_screen(device.dump())
        messages.append(Message("tool", str(screen), tool_call_id="c", name="tap"))
    tools = [spec_to_dict(AndroidEnvironment.tap.spec)]
    return {"messages": [message_to_dict(message) for message in messages[:-1]], "tools": tools}


def place_of(screen: Screen, text: str) -> int | None:
    return next((number for number, element in enumerate(screen.elements, 1) if element.text == text), None)


def write_lessons(path: Path, count: int, mistakes: float) -> None:
    rng = random.Random(1)
    lines = [json.dumps(row(rng, mistakes)) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
