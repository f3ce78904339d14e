"""The trainers' keywords: the config's own names and types, and what a type checker makes of them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from TrainingFactory import services
from TrainingFactory.config.names import ALIASES
from TrainingFactory.config.schema import ALGORITHMS, TrainingConfig, sections
from TrainingFactory.trainers.keywords import Keywords, TRLKeywords, homes_of
from TrainingFactory.trainers.trainer import Trainer

TRAINERS = {trainer.algorithm: trainer for trainer in (getattr(services, name) for name in services.__all__)}
POSITIONAL = ["model", "environment"]
# They take objects as well, or other values than the config's own are of use to nobody.
WIDER = {"reward", "tool_cache", "tools", "type", "options", "algorithm", "dataset_id", "environment_id"}


def keywords_of(algorithm: str) -> dict[str, Any]:
    [keywords] = get_args(get_type_hints(TRAINERS[algorithm].__init__)["options"])
    return get_type_hints(keywords)


def plain(hint: Any) -> Any:
    """The set of the plain types that a hint allows; a path may be a Path too."""
    if get_origin(hint) is Annotated:
        return plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*(plain(each) for each in get_args(hint)))
    return frozenset({hint} - {Path})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_config_and_the_keywords_agree(algorithm: str):
    found, known = keywords_of(algorithm), sections()
    own = [name for name in inspect.signature(Trainer).parameters if name != "options"]
    every = [
        *ALIASES,
        *TrainingConfig.model_fields,
        *(key for each in known.values() for key in each.model_fields),
    ]
    wanted = {key for key in every if key.isidentifier() and len(homes_of(key, algorithm)) == 1}
    wanted |= {*own, *TrainingConfig.model_fields, *(alias for alias in ALIASES if "." not in alias)}
    theirs = {*TRLKeywords.__annotations__, *(["beta"] if algorithm == "grpo" else [])} - wanted
    assert set(found) == wanted - {*POSITIONAL} | theirs
    for key in sorted(found.keys() - set(own) - set(TrainingConfig.model_fields) - WIDER - theirs):
        section, name = ALIASES[key].split(".") if key in ALIASES else (homes_of(key, algorithm)[0], key)
        assert plain(found[key]) == plain(known[section].model_fields[name].annotation), key
    signature = inspect.signature(TRAINERS[algorithm])
    assert list(signature.parameters) == [*POSITIONAL, "options"] and set(own) <= {*found, *POSITIONAL}
    assert Keywords.__total__ is False and NoneType in plain(found["max_steps"])


SNIPPET = """\
from TrainingFactory import GRPOTrainer, Task, TrainingConfig, tool

right = GRPOTrainer("builtin:tiny", environment="search", learning_rate=1e-5, kl=0.1, config=TrainingConfig())
GRPOTrainer(lerning_rate=1e-5)
GRPOTrainer(margin=0.1)
GRPOTrainer(schedule="cosin")
reveal_type(right.train().steps)
"""


@pytest.mark.slow
def test_a_type_checker_finds_slips(tmp_path: Path):
    pytest.importorskip("pyright", reason="pyright is not installed")
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    (tmp_path / "pyrightconfig.json").write_text("{}")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    lines = [line.strip() for line in done.stdout.splitlines() if "snippet.py:" in line]
    told = [(int(line.split(":")[1]), line.partition(" - ")[2]) for line in lines]
    assert [(line, text.split(":")[0]) for line, text in told] == [
        (4, "error"),
        (5, "error"),
        (6, "error"),
        (7, "information"),
    ], done.stdout + done.stderr
    assert 'No parameter named "lerning_rate"' in told[0][1] and told[3][1].endswith('is "int"')
