"""A launch script of RL-Factory, read as a text: its variables, and the overrides of its one command. It is not run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LINE = re.compile(r"^(?![ \t]*#)(?:.*\\\n)*.*", re.MULTILINE)  # with those that a backslash carries on
COMMAND = re.compile(r"verl[./]trainer[./]main_(\w*)")
ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|readonly\s+|local\s+)?(\w+)=(.*)", re.DOTALL)
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w./@]*)=(.*)", re.DOTALL)
LOOSE = re.compile(r"\s*\+{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_\w+)\.[\w.]+=")
# $NAME, ${NAME}, ${NAME:-default}, and what only a shell can say: $(command), `command`, $((1 + 1)), other ${...}
VARIABLE = r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\}|\(\(.*?\)\)|\([^)]*\)|\{[^}]*\}|[@*#?$!-])|`[^`]*`"
BARE = re.compile(rf"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|{VARIABLE}""", re.DOTALL)
IN_QUOTES = re.compile(rf"\\.|{VARIABLE}", re.DOTALL)
HIDDEN = re.compile("\ue000(.*?)\ue000")  # a value that only the shell knows, between marks of ours
ENDS = re.compile(r"\d?>|&?>>?|<|\||;|&")
MAX_SCRIPT = (
    16_000  # characters; RL-Factory's own have 4,000. Reading nested ${A:-${B:-... takes quadratic time
)
MAX_EXPANDED = 100_000  # characters that the variables of one script stand for, over all their uses


@dataclass(slots=True)
class LaunchScript:
    """`overrides` are values by key, as the shell would hand them over, with marks around what only it knows; `other`
    are the command's further words."""

    path: str
    overrides: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)


def read_script(path: Path, given: Mapping[str, str]) -> LaunchScript:
    """Read it; `given` are values of variables that are set outside of it. ValueError where it starts no training."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if len(text) > MAX_SCRIPT:
        raise ValueError(
            f"{path} has {len(text):,} characters; at most {MAX_SCRIPT:,} are read. Remove what does not set options"
        )
    variables = Expansion(dict(given))
    commands: list[tuple[int, list[str]]] = []
    number, end = 1, 0
    for found in LINE.finditer(text):
        number, end = number + text.count("\n", end, found.start()), found.start()
        line = found[0].replace("\\\n", "")
        try:
            words = shlex.split(variables.fill(line), comments=True)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: cannot be read as a command: {error}") from None
        if any(map(COMMAND.search, words)):
            commands.append((number, words))
        elif LOOSE.match(line):
            raise ValueError(
                f"{path}:{number}: {line.split()[0][:80]} belongs to no command; the line before it must end in a "
                "backslash, with nothing behind it"
            )
        elif len(words) <= 2 and (set_here := ASSIGNMENT.fullmatch(" ".join(words))):
            variables.known[set_here[1]] = given.get(set_here[1], set_here[2])
    return _overrides(str(path), commands)


@dataclass(slots=True)
class Expansion:
    """Puts values in place of variables, outside single quotes, and marks those that are not set. All lines of a script
    share one limit, because a line such as `A=$A$A` doubles a value each time."""

    known: dict[str, str]
    left: int = MAX_EXPANDED

    def fill(self, line: str) -> str:
        return BARE.sub(self._value, line)

    def _value(self, found: re.Match[str]) -> str:
        name, default = found[1] or found[2], found[3]
        if found[0][0] == '"':
            return IN_QUOTES.sub(self._value, found[0])
        if found[0][0] in "'\\":
            return found[0]
        if name is None:
            return "" if found[0] in ("$@", "$*") else "\ue000$(...)\ue000"
        value = self.known.get(name)
        if default is not None:
            value = value or self.fill(default.strip("\"'"))
        elif value is None:
            value = f"\ue000${{{name}}}\ue000"
        self.left -= len(value)
        if self.left < 0:
            raise ValueError(
                f"its variables expand to more than {MAX_EXPANDED} characters; write shorter values"
            )
        return value


def _overrides(path: str, commands: Sequence[tuple[int, list[str]]]) -> LaunchScript:
    """Read the words of the one command that trains."""
    trains = [(number, words) for number, words in commands if any(map(_is_training, words))]
    if len(trains) != 1:
        why = "has no command `python3 -m verl.trainer.main_ppo key=value ...`; is it one of RL-Factory's scripts?"
        if trains:
            lines = ", ".join(str(number) for number, _ in trains)
            why = f"starts {len(trains)} trainings (lines {lines}); keep one of them in a copy"
        elif commands:
            why = f"line {commands[0][0]} starts verl, but no training: verl.trainer.main_ppo is what is translated"
        raise ValueError(f"{path}: {why}")
    [(_, words)] = trains
    script = LaunchScript(path)
    start = next(place for place, word in enumerate(words) if _is_training(word))
    for word in words[start + 1 :]:
        if ENDS.match(word):  # a pipe, a log file, the next command
            break
        if found := OVERRIDE.fullmatch(word):
            script.overrides[found[1]] = found[2]
        else:
            script.other.append(word)
    if not script.overrides:
        raise ValueError(
            f"{path}: its command has no overrides (key=value), so there is nothing to translate"
        )
    return script


def _is_training(word: str) -> bool:
    found = COMMAND.search(word)
    return found is not None and "ppo" in found[1]
