"""Parser for RL-Factory's launch scripts: shell variables and the overrides of the training command. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LINE = re.compile(r"^(?![ \t]*#)(?:.*\\\n)*.*", re.MULTILINE)  # including its backslash continuations
COMMAND_PATTERN = re.compile(r"verl[./]trainer[./]main_(\w*)")
ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|readonly\s+|local\s+)?(\w+)=(.*)", re.DOTALL)
OVERRIDE_PATTERN = re.compile(r"\+{0,2}([A-Za-z_][\w./@]*)=(.*)", re.DOTALL)
STRAY_KEY = re.compile(r"\s*\+{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_\w+)\.[\w.]+=")
# $NAME, ${NAME}, ${NAME:-default}, and what only a shell can evaluate: $(command), `command`, $((1 + 1)), other ${...}
VARIABLE_REGEX = r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\}|\(\(.*?\)\)|\([^)]*\)|\{[^}]*\}|[@*#?$!-])|`[^`]*`"
UNQUOTED_PATTERN = re.compile(rf"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|{VARIABLE_REGEX}""", re.DOTALL)
QUOTED_PATTERN = re.compile(rf"\\.|{VARIABLE_REGEX}", re.DOTALL)
SHELL_ONLY = re.compile("\ue000(.*?)\ue000")  # a value that only the shell knows, between our own markers
COMMAND_END_PATTERN = re.compile(r"\d?>|&?>>?|<|\||;|&")
# Characters; RL-Factory's own scripts have 4,000. Nested ${A:-${B:-... takes quadratic time.
MAX_SCRIPT_CHARS = 16_000
MAX_CHARS = 100_000  # total characters of all expanded variables of one script


@dataclass(slots=True)
class LaunchScript:
    """Training command of a script.

    `overrides` maps keys to values after shell expansion, with markers around parts that only the shell knows;
    `extras` are the remaining words of the command."""

    path: str
    overrides: dict[str, str] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)


def read_script(path: Path, variables: Mapping[str, str]) -> LaunchScript:
    """Parse a script with exactly one training command; `variables` override its own assignments."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if len(text) > MAX_SCRIPT_CHARS:
        raise ValueError(
            f"{path} has {len(text):,} characters; the limit is {MAX_SCRIPT_CHARS:,}. Remove lines that set no options."
        )
    expansion = Expansion(dict(variables))
    commands: list[tuple[int, list[str]]] = []
    line_number, line_start = 1, 0
    for match in LINE.finditer(text):
        line_number, line_start = line_number + text.count("\n", line_start, match.start()), match.start()
        line = match[0].replace("\\\n", "")
        try:
            words = shlex.split(expansion.expand_line(line), comments=True)
        except ValueError as error:
            raise ValueError(f"{path}:{line_number}: invalid shell command: {error}") from None
        if any(map(COMMAND_PATTERN.search, words)):
            commands.append((line_number, words))
        elif STRAY_KEY.match(line):
            raise ValueError(
                f"{path}:{line_number}: {line.split()[0][:80]} belongs to no command. End the line before it with a "
                "backslash and nothing after it."
            )
        elif len(words) <= 2 and (assignment := ASSIGNMENT.fullmatch(" ".join(words))):
            expansion.variables[assignment[1]] = variables.get(assignment[1], assignment[2])
    return _parse_training_command(str(path), commands)


@dataclass(slots=True)
class Expansion:
    """Expands variables outside single quotes and marks variables that are not set. One limit on the expanded
    characters holds for all lines of a script, because a line such as `A=$A$A` doubles a value each time."""

    variables: dict[str, str]
    remaining_chars: int = MAX_CHARS

    def expand_line(self, line: str) -> str:
        return UNQUOTED_PATTERN.sub(self._expand, line)

    def _expand(self, match: re.Match[str]) -> str:
        variable, default = match[1] or match[2], match[3]
        if match[0][0] == '"':
            return QUOTED_PATTERN.sub(self._expand, match[0])
        if match[0][0] in "'\\":
            return match[0]
        if variable is None:
            return "" if match[0] in ("$@", "$*") else "\ue000$(...)\ue000"
        value = self.variables.get(variable)
        if default is not None:
            value = value or self.expand_line(default.strip("\"'"))
        elif value is None:
            value = f"\ue000${{{variable}}}\ue000"
        self.remaining_chars -= len(value)
        if self.remaining_chars < 0:
            raise ValueError(f"variables expand to more than {MAX_CHARS} characters. Use shorter values.")
        return value


def _parse_training_command(path: str, commands: Sequence[tuple[int, list[str]]]) -> LaunchScript:
    """Parse the arguments of the script's training command; a script with several is rejected."""
    trainings = [(line_number, words) for line_number, words in commands if any(map(_is_training, words))]
    if len(trainings) != 1:
        reason = "no command `python3 -m verl.trainer.main_ppo key=value ...`. Use a script of RL-Factory."
        if trainings:
            numbers = ", ".join(str(line_number) for line_number, _ in trainings)
            reason = f"starts {len(trainings)} trainings (lines {numbers}). Keep only one of them in a copy."
        elif commands:
            reason = f"line {commands[0][0]} starts verl, but no training. Only verl.trainer.main_ppo is translated."
        raise ValueError(f"{path}: {reason}")
    [(_, words)] = trainings
    script = LaunchScript(path)
    command_index = next(index for index, argument in enumerate(words) if _is_training(argument))
    for argument in words[command_index + 1 :]:
        if COMMAND_END_PATTERN.match(argument):  # a pipe, a redirection, the next command
            break
        if override := OVERRIDE_PATTERN.fullmatch(argument):
            script.overrides[override[1]] = override[2]
        else:
            script.extras.append(argument)
    if not script.overrides:
        raise ValueError(f"{path}: the training command has no overrides (key=value) to translate")
    return script


def _is_training(argument: str) -> bool:
    match = COMMAND_PATTERN.search(argument)
    return match is not None and "ppo" in match[1]
