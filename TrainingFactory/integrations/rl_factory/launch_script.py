"""A launch script of RL-Factory, read as a text: its variables, and the overrides of its one command. It is not run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMAND = re.compile(r"verl[./]trainer[./]main_\w*(?:\.py)?")
TRAINS = re.compile(r"main_\w*ppo(?:\.py)?")
ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|readonly\s+|local\s+)?(\w+)=(.*)", re.DOTALL)
OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@]*\.[\w./@]+|[A-Za-z_]\w*)=(.*)", re.DOTALL)
LOOSE = re.compile(r"\+{0,2}(?:data|actor_rollout_ref|algorithm|trainer|critic|reward_\w+)\.[\w.]+=")
# $NAME, ${NAME}, ${NAME:-default}, and what only a shell can say: $(command), `command`, $((1 + 1)), other ${...}
VARIABLE = re.compile(
    r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\}|(\(\(.*?\)\)|\([^)]*\)|\{[^}]*\}|[@*#?$!-]))|(`[^`]*`)", re.DOTALL
)
HIDDEN = re.compile("\ue000(.*?)\ue000")  # a value that only the shell knows, between marks of ours
QUOTED = re.compile(r"'[^']*'|\\.", re.DOTALL)  # where a $ is a $
ENDS = re.compile(r"(?:\d?>|&?>>?|<|\||;|&)")


@dataclass(slots=True)
class LaunchScript:
    """`overrides` are values by key, as the shell would hand them over; `unknown` says of a key what its value hangs on
    that only a shell knows; `other` are the command's further words."""

    path: str
    overrides: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)


def read_script(path: Path, given: Mapping[str, str] | None = None) -> LaunchScript:
    """Read it; `given` are values of variables that are set outside of it. ValueError where it starts no training."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    script, known = LaunchScript(str(path)), dict(given or {})
    commands: list[tuple[int, list[str]]] = []
    for number, line in _lines(text):
        try:
            words = shlex.split(_filled(line, known), comments=True)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: cannot be read as a command: {error}") from None
        if any(COMMAND.search(word) for word in words):
            commands.append((number, words))
        elif LOOSE.match(line.strip()):
            raise ValueError(
                f"{path}:{number}: {line.split()[0][:80]} belongs to no command; the line before it must end in a "
                "backslash, with nothing behind it"
            )
        elif len(words) <= 2 and (found := ASSIGNMENT.fullmatch(" ".join(words))):
            known[found[1]] = (given or {}).get(found[1], found[2])
    _take(script, commands)
    return script


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield commands with the number of their first line: those that a backslash carries on are one."""
    started, so_far = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        started = started or number
        if line.lstrip().startswith("#") and not so_far:
            started = 0
            continue
        if line.endswith("\\"):
            so_far += line[:-1]
            continue
        yield started, so_far + line
        started, so_far = 0, ""
    if so_far:
        yield started, so_far


def _filled(line: str, known: Mapping[str, str]) -> str:
    """Put values in place of variables, outside single quotes. What is not known is marked."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[2], found[3]
        if name is None:
            return "" if found[0] in ("$@", "$*") else "\ue000$(...)\ue000"
        if default is not None:
            return known.get(name) or _filled(default.strip("\"'"), known)
        return known.get(name, f"\ue000${{{name}}}\ue000")

    parts: list[str] = []
    end = 0
    for quoted in QUOTED.finditer(line):
        # An apostrophe between double quotes opens nothing.
        if line[: quoted.start()].replace('\\"', "").count('"') % 2 and quoted[0][0] == "'":
            continue
        parts += [VARIABLE.sub(value, line[end : quoted.start()]), quoted[0]]
        end = quoted.end()
    return "".join([*parts, VARIABLE.sub(value, line[end:])])


def _take(script: LaunchScript, commands: list[tuple[int, list[str]]]) -> None:
    trains = [(number, words) for number, words in commands if any(map(_is_training, words))]
    if len(trains) != 1:
        if trains:
            lines = ", ".join(str(number) for number, _ in trains)
            why = f"starts {len(trains)} trainings (lines {lines}); keep one of them in a copy"
        elif commands:
            why = f"line {commands[0][0]} starts verl, but no training: verl.trainer.main_ppo is what is translated"
        else:
            why = "has no command `python3 -m verl.trainer.main_ppo key=value ...`; is it one of RL-Factory's scripts?"
        raise ValueError(f"{script.path}: {why}")
    [(_, words)] = trains
    start = next(place for place, word in enumerate(words) if _is_training(word))
    for word in words[start + 1 :]:
        if ENDS.match(word):  # a pipe, a log file, the next command
            break
        found = OVERRIDE.fullmatch(word)
        if found is None or found[1] == "~" or word.startswith("-"):
            script.other.append(word)
        elif hidden := HIDDEN.search(found[3]):
            script.unknown[found[2]] = hidden[1]
            script.overrides.pop(found[2], None)
        else:
            script.overrides[found[2]] = found[3]
            script.unknown.pop(found[2], None)
    if not script.overrides:
        what = ", ".join(sorted(set(script.unknown.values())))
        why = f"every override depends on {what}; write it as NAME=VALUE behind the script"
        none = "its command has no overrides (key=value), so there is nothing to translate"
        raise ValueError(f"{script.path}: {why if what else none}")


def _is_training(word: str) -> bool:
    found = COMMAND.search(word)
    return found is not None and TRAINS.search(found[0]) is not None
