"""Runs with folding: a run that was broken off resumes to the same bits, a replay trains the same, metrics show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Quiet, assert_same_run, brief, go_on, rows, train
from tests.kits.warm import WARM, Homes
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError
from TrainingFactory.trainers.resolution import validate_config
from TrainingFactory.types import Message, Step

FOLDER = Path(__file__).parent


class Longer(Homes):
    """Goes on for four turns, whatever the model says, so that conversations are folded."""

    turns = 0

    async def step(self, message: Message) -> Step:
        self.turns += 1
        step = await super().step(message)
        return Step(step.replies or [Message("user", "Again?")], self.turns == 4, step.tool_results)

    def reward(self, episode: Any) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float(sum(episode.trajectory.turns[-1].completion.token_ids) % 3)


def config_of(folder: Path, **context: Any) -> TrainingConfig:
    return brief(
        folder,
        model={"name": str(WARM)},
        training={"batch_size": 2, "group_size": 3, "max_steps": 4},
        sampling={"max_tokens": 16},
        environment={
            "max_turns": 5,
            "context": {"fold": "summary", "limit": 200, "summary_tokens": 6} | context,
        },
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folded")
    train(config_of(folder), "whole", environment=Longer)
    return folder / "whole"


def test_a_run_with_folding_resumes_to_the_same_bits(whole: Path) -> None:
    folder = whole.parent
    with pytest.raises(RuntimeError, match="broken off"):
        train(config_of(folder), "broken", Quiet(fail_at=3), environment=Longer)
    assert go_on(folder / "broken", Longer).state == "finished"
    assert_same_run(whole, folder / "broken")


def test_a_limit_below_the_first_prompt_stops_the_run_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"environment.context.limit is 100, but .* has 167 tokens"):
        train(config_of(tmp_path, limit=100), "low", environment=Longer)


def test_metrics_and_records_show_the_folds(whole: Path) -> None:
    metrics = rows(whole / "metrics.jsonl")
    assert all(row["fold/folds"] > 0 and row["fold/rows"] > 1 for row in metrics)
    assert all(0 < row["computed_tokens"] < row["row_tokens"] for row in metrics if row.get("row_tokens"))
    episodes = rows(whole / "trajectories.jsonl")
    turns = [turn for episode in episodes for turn in episode["turns"]]
    assert any(turn.get("summary") for turn in turns) and any(turn.get("fold") == "summary" for turn in turns)


def problem_of(folder: Path, environment: dict[str, Any] | None = None, **context: Any) -> str:
    section = {"max_turns": 5, "context": {"fold": "window", "limit": 150} | context}
    config = brief(
        folder, model={"name": str(WARM), "max_length": 256}, environment=section | (environment or {})
    )
    from TrainingFactory.trainers.resolution import ResolvedConfig
    from TrainingFactory.training.dataset import UserObjects

    with pytest.raises(ConfigError) as raised:
        validate_config(ResolvedConfig(config, config, UserObjects(environment=Longer), None, []))
    return str(raised.value)


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({"limit": 256}, ("environment.context.limit", "model.max_length", "256")),
        ({"fold": "summary", "limit": 200, "summary_tokens": 100}, ("context.limit", "summary_tokens=100")),
        ({"template": "short"}, ("environment.context.template", "fold=summary", "fold is window")),
        (
            {"fold": "summary", "limit": 50, "summary_tokens": 9, "keep_turns": 3},
            ("context.keep_turns", "remove"),
        ),
        ({"fold": "own"}, ("environment.context.function", "is missing")),
        ({"fold": "own", "function": "nowhere.py:shorten"}, ("environment.context.function", "nowhere.py")),
        (
            {"fold": "summary", "limit": 50, "summary_tokens": 9, "template": "none.txt"},
            ("template", "none.txt"),
        ),
    ],
)
def test_wrong_options_are_told_before_a_model_is_loaded(tmp_path: Path, context: Any, words: Any) -> None:
    text = problem_of(tmp_path, **context)
    assert all(word in text for word in words), text


def test_a_program_manages_its_own_history(tmp_path: Path) -> None:
    text = problem_of(tmp_path, {"command": "python agent.py"})
    assert "environment.context" in text and "environment.command" in text


def test_an_own_function_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fold.py"
    path.write_text("def shorten(messages):\n    return messages[:2] + messages[-2:]\n", encoding="utf-8")
    from TrainingFactory.assembly.folding import make_folding

    folding = make_folding(config_of(tmp_path, fold="own", function=f"{path}:shorten", summary_tokens=256))
    assert folding is not None and folding.function is not None
    path.write_text("def shorten():\n    return []\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="one argument"):
        make_folding(config_of(tmp_path, fold="own", function=f"{path}:shorten", summary_tokens=256))
