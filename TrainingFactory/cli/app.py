"""The `tfactory` command: its commands, and what users see when something goes wrong."""

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
from TrainingFactory.cli.evaluate import evaluate
from TrainingFactory.cli.export import export
from TrainingFactory.cli.factories import factories
from TrainingFactory.cli.hello import hello
from TrainingFactory.cli.import_ import import_
from TrainingFactory.cli.judge import judge
from TrainingFactory.cli.new import env, envs, models
from TrainingFactory.cli.plan import plan
from TrainingFactory.cli.proxy import proxy
from TrainingFactory.cli.recipe import recipe
from TrainingFactory.cli.registry import registry
from TrainingFactory.cli.rollout import rollout
from TrainingFactory.cli.runs import runs
from TrainingFactory.cli.serve import serve
from TrainingFactory.cli.show import INTERRUPTED, fail, note
from TrainingFactory.cli.tools import tools
from TrainingFactory.cli.train import train
from TrainingFactory.cli.ui import ui
from TrainingFactory.cluster.launcher import LAUNCHER, launched
from TrainingFactory.common.event_loop import sigterm_as_ctrl_c
from TrainingFactory.common.texts import clean
from TrainingFactory.runs.devices import device_failure

FAILED = 1
USER_ERROR = 2

app = App(
    name="tfactory",
    help="TrainingFactory: turn a tool set and a reward into a trained agent.",
    version=__version__,
    help_format="markdown",
    result_action="return_value",
    default_parameter=Parameter(negative=""),  # a flag is given or not; there is no --no-flag
)
new = App(name="new", help="Write a file to start from.")
new.command(env)
app.command(evaluate, name="eval")
app.command(compare)
for command in (
    demo,
    train,
    doctor,
    plan,
    recipe,
    runs,
    registry,
    export,
    rollout,
    data,
    serve,
    ui,
    proxy,
    cluster,
    new,
    tools,
    judge,
    envs,
    models,
    import_,
    factories,
    hello,
):
    app.command(command)


@app.meta.default
def run(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[bool, Parameter(negative="", help="Show the traceback of an error.")] = False,
) -> Any:
    try:
        if not _runs_here(tokens):
            return 0
        status = app(tokens)
        sys.stdout.flush()
        return status
    except Exception as error:  # a user's mistake, told in the text; a full disk; a device that failed
        told = device_failure(error)
        if told is None and not isinstance(error, ValueError | OSError):
            raise
        if isinstance(error, BrokenPipeError) and _unread():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
            return FAILED
        if debug:
            traceback.print_exc()
        fail(told or str(error))
        return FAILED if isinstance(error, OSError) else USER_ERROR
    except KeyboardInterrupt:
        fail("interrupted")
        return INTERRUPTED


def _runs_here(tokens: Sequence[str]) -> bool:
    """Tell whether this process runs the command: of those that a launcher has started all train, one does the rest."""
    there = launched()
    if there is None or tokens[0:1] == ("train",) or tokens[0:2] == ("runs", "resume"):
        return True
    for name in LAUNCHER:
        os.environ.pop(name, None)
    if there.rank == 0:
        note(f"one of {there.count} processes runs this: only train and runs resume use all of them")
    return there.rank == 0


class _Cleaned(logging.Formatter):
    """Keeps what a terminal would obey out of what is logged."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def main(arguments: Sequence[str] | None = None) -> None:
    atexit.register(_end_stderr)  # first: it is called after all others
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its number instead of a crash.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if logging.lastResort is not None:  # what prints warnings where nobody has set up anything else
        logging.lastResort.setFormatter(_Cleaned())
    with sigterm_as_ctrl_c():
        sys.exit(app.meta(arguments, result_action="return_value"))


def _end_stderr() -> None:
    """Discard what libraries write while the interpreter ends, such as a list of leaked objects: the run's own error
    stays the last thing on the screen."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _unread() -> bool:
    """Tell whether nobody reads our output any more: `head` has seen enough."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return bool(output.poll(0))
