"""Generates the reference of the command line from the commands themselves."""

from __future__ import annotations

import re

from TrainingFactory.cli.app import app

HEAD = """# Command line

Look up every command of `tfactory`, its arguments and its options. `tfactory COMMAND --help` prints the same text, and
[the config reference](config.md) lists the keys that `key=value` arguments set.

"""


def cli_page() -> str:
    generated = app.generate_docs(heading_level=1)
    contents, _, commands = generated.partition("\n## tfactory ")
    index = re.search(r"\*\*Commands\*\*:\n\n(.*?)\n\n\*\*", contents, re.DOTALL)
    assert index, "the page that cyclopts generates has no list of commands"
    return f"{HEAD}{index[1]}\n\n## tfactory {commands}"
