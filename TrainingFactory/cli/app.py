"""The `tfactory` command line: registration of the commands, error output and exit statuses."""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter

from TrainingFactory import __version__
from TrainingFactory.cli.cluster import cluster
from TrainingFactory.cli.compare import compare
from TrainingFactory.cli.data import data
from TrainingFactory.cli.demo import demo
from TrainingFactory.cli.doctor import doctor
from TrainingFactory.cli.envs import envs
from TrainingFactory.cli.evaluate import evaluate
from TrainingFactory.cli.export import export
from TrainingFactory.cli.factories import factories
from TrainingFactory.cli.hello import hello
from TrainingFactory.cli.import_ import import_
from TrainingFactory.cli.judge import judge
from TrainingFactory.cli.manage_runs import MANAGE_COMMANDS
from TrainingFactory.cli.new import config, env, example, models, notebook
from TrainingFactory.cli.plan import plan
from TrainingFactory.cli.proxy import proxy
from TrainingFactory.cli.recipe import recipe
from TrainingFactory.cli.registry import registry
from TrainingFactory.cli.rollout import rollout
from TrainingFactory.cli.runs import runs
from TrainingFactory.cli.serve import serve
from TrainingFactory.cli.show import INTERRUPTED_STATUS, note, print_error
from TrainingFactory.cli.swift import swift
from TrainingFactory.cli.tools import tools
from TrainingFactory.cli.train import train
from TrainingFactory.cli.ui import ui
from TrainingFactory.cluster.launcher import LAUNCHER_VARIABLES, find_launched_process
from TrainingFactory.common.event_loop import treat_sigterm_as_ctrl_c
from TrainingFactory.common.texts import escape_control
from TrainingFactory.runs.devices import describe_device_failure

FAILED_STATUS = 1
USER_ERROR = 2

app = App(
    name="tfactory",
    help="TrainingFactory: turn a tool set and a reward into a trained agent.",
    version=__version__,
    help_format="markdown",
    result_action="return_value",
    default_parameter=Parameter(negative=""),  # flags have no --no-FLAG counterpart
)
new = App(name="new", help="Create a starter file: an environment, a config, an example or a notebook.")
for starter in (env, config, example, notebook):
    new.command(starter)
for command in MANAGE_COMMANDS:
    runs.command(command)
app.command(evaluate, name="eval")
app.command(compare)
for command in (
    demo, train, doctor, plan, recipe, runs, registry, export, rollout, data, serve, ui, proxy, cluster, new, tools,
    judge, envs, models, import_, swift, factories, hello,
):  # fmt: skip
    app.command(command)


@app.meta.default
def run(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[bool, Parameter(negative="", help="Print the traceback of an error.")] = False,
) -> Any:
    try:
        if not _should_run(tokens):
            return 0
        status = app(tokens)
        sys.stdout.flush()
        return status
    except Exception as error:
        # Expected errors: invalid input (ValueError), files and disks (OSError), failed devices.
        device_error = describe_device_failure(error)
        if device_error is None and not isinstance(error, ValueError | OSError):
            raise
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            # The flush at interpreter exit needs an open file.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED_STATUS
        if debug:
            traceback.print_exc()
        print_error(device_error or str(error))
        return FAILED_STATUS if isinstance(error, OSError) else USER_ERROR
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED_STATUS


def _should_run(tokens: Sequence[str]) -> bool:
    """Return whether this process runs the command: any process if it trains, otherwise only rank 0."""
    process = find_launched_process()
    if process is None or tokens[0:1] == ("train",) or tokens[0:2] == ("runs", "resume"):
        return True
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if process.rank == 0:
        note(
            f"1 of {process.num_processes} processes runs this command; only train and runs resume use all of them"
        )
    return process.rank == 0


class _EscapingFormatter(logging.Formatter):
    """Log formatter that escapes terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control(super().format(record))


def main(arguments: Sequence[str] | None = None) -> None:
    atexit.register(_silence_stderr)  # registered first, therefore called last
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot encode are escaped instead of raising.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if logging.lastResort is not None:  # prints warnings when logging is not configured
        logging.lastResort.setFormatter(_EscapingFormatter())
    with treat_sigterm_as_ctrl_c():
        sys.exit(app.meta(arguments, result_action="return_value"))


def _silence_stderr() -> None:
    """Discard stderr at interpreter exit, so that the command's own error stays the last line on the screen."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout, such as `head`, has closed the pipe."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return bool(poll.poll(0))
