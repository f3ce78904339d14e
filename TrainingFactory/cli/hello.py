"""`tfactory hello`: a program of the HelloAgents text, on our trainers."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import typing
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

TASKS = "data.tasks="
# The text's own blocks use these without importing them.
NAMES = ("Any", "Callable", "Dict", "List", "Optional", "Tuple", "Union")


def hello(
    script: Path, /, *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, name="arguments")]
) -> int:
    """Run a program that imports hello_agents, as python SCRIPT.py would.

    Its RLTrainingTool and hello_agents.rl are those of TrainingFactory. Everything else comes from the HelloAgents
    package where one is installed, and from a small stand-in where none is.

    ```
    tfactory hello train_math.py
    tfactory hello train_math.py data.tasks=gsm8k/
    ```

    Args:
        script: The program.
        arguments: What it finds in sys.argv; data.tasks=FOLDER names a folder with GSM8K (train.jsonl, test.jsonl).
    """
    from TrainingFactory.integrations.hello_agents import datasets, shim

    path = script.expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    for each in arguments:
        if each.startswith(TASKS):
            os.environ[datasets.GSM8K] = each.removeprefix(TASKS)
    shim.install()
    argv, places = sys.argv, list(sys.path)
    sys.argv = [str(path), *(each for each in arguments if not each.startswith(TASKS))]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), {name: getattr(typing, name) for name in NAMES}, "__main__")
    except Exception as error:  # foreign code; told as python tells it, from the program's own first line on
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, places
    return 0
