"""`tfactory new`: files to start from."""

from __future__ import annotations

import keyword
from pathlib import Path

from TrainingFactory.cli.show import note

TEMPLATE = '''\
"""An environment for TrainingFactory. Try it: tfactory rollout {name}.py"""

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.tools import tool
from TrainingFactory.types import Task

POPULATION = {{"Oslo": 700_000, "Lima": 10_000_000, "Cairo": 22_000_000}}


class {title}(ToolEnvironment):
    system_prompt = "Look the city up, then answer with the number alone."

    @classmethod
    def tasks(cls, split, seed, count):
        """The problems. `split` is train or heldout; the same seed gives the same tasks."""
        for city, people in list(POPULATION.items())[:count]:
            yield Task(id=city, prompt=f"How many people live in {{city}}?", answer=str(people))

    @tool
    def population(self, city: str) -> str:
        """The number of people in a city."""
        return str(POPULATION.get(city, "unknown"))

    def reward(self, episode):
        """1 for the right answer, a little for having asked."""
        asked = any(turn.message.tool_calls for turn in episode.trajectory.turns)
        return float(episode.trajectory.answer.strip() == self.task.answer) + 0.1 * asked
'''


def env(name: str) -> None:
    """Write NAME.py, an environment with one tool and one reward that runs at once.

    ```
    tfactory new env cities
    tfactory rollout cities.py
    ```

    Parameters
    ----------
    name
        Name of the environment, a Python identifier. An existing file is never overwritten.
    """
    name = name.removesuffix(".py")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot name a Python file: use letters, digits and _, such as my_env")
    path = Path(f"{name}.py")
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if title in ("", "Task", "ToolEnvironment"):  # names that the file uses itself
        title += "Env"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=name, title=title))
    except FileExistsError:
        raise ValueError(f"{path} exists already; choose another name") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    note(f"wrote {path}; try it: tfactory rollout {path}")
