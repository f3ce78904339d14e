"""A page of the documentation, and what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from TrainingFactory.cli.app import app
from TrainingFactory.config import load_config

ROOT = Path(__file__).resolve().parents[2]


class Page:
    def __init__(self, name: str) -> None:
        self.text = (ROOT / name).read_text(encoding="utf-8")
        self.blocks = re.findall(r"^```(\w+)\n(.*?)^```", self.text, re.MULTILINE | re.DOTALL)

    def block(self, containing: str) -> str:
        [found] = [text for _, text in self.blocks if containing in text]
        return found

    def of(self, kind: str) -> list[str]:
        return [text for found, text in self.blocks if found == kind]

    def commands(self) -> list[list[str]]:
        """Return the words of every printed command, those of `tfactory` checked, with the configs they name."""
        lines = [line for text in self.of("bash") for line in text.replace("\\\n", " ").splitlines()]
        commands = [words for line in lines if (words := shlex.split(line, comments=True))]
        for words in commands:
            if words[0] == "tfactory":
                app.parse_args(words[1:], exit_on_error=False, print_error=False)
            for word in words:
                if word.startswith("configs/"):
                    load_config(ROOT / word, [word for word in words if "=" in word])
        return commands
