"""`tfactory hello`: run a program of the HelloAgents textbook on TrainingFactory's trainers."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
import typing
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

TASKS_PREFIX = "data.tasks="
# Code blocks of the textbook use these names without importing them.
TYPING_NAMES = ("Any", "Callable", "Dict", "List", "Optional", "Tuple", "Union")


def hello(
    script: Path, /, *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, name="arguments")]
) -> int:
    """Run a program that imports hello_agents, as python SCRIPT.py does.

    TrainingFactory provides RLTrainingTool and hello_agents.rl. Everything else comes from the HelloAgents package if
    it is installed, otherwise from a small substitute.

    ```
    tfactory hello train_math.py
    tfactory hello train_math.py data.tasks=gsm8k/
    ```

    Args:
        script: Python file to run.
        arguments: Arguments for the program (sys.argv). data.tasks=FOLDER sets the folder with GSM8K (train.jsonl,
            test.jsonl) and is not passed on.
    """
    from TrainingFactory.integrations.hello_agents import datasets, shim

    path = script.expanduser()
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    for argument in arguments:
        if argument.startswith(TASKS_PREFIX):
            os.environ[datasets.GSM8K_VARIABLE] = argument.removeprefix(TASKS_PREFIX)
    shim.install()
    old_argv, old_path = sys.argv, list(sys.path)
    sys.argv = [str(path), *(argument for argument in arguments if not argument.startswith(TASKS_PREFIX))]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), {name: getattr(typing, name) for name in TYPING_NAMES}, "__main__")
    except Exception as error:  # the user's code: print the traceback as python does, without our own frames
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return 1
    finally:
        sys.argv, sys.path[:] = old_argv, old_path
    return 0
