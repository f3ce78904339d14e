"""Promotion by proof: what the gate asks, what is decided, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.evaluation.test_compare import PARITY
from tests.kits.cli import Run
from tests.kits.registry import made_run
from TrainingFactory.apps.reports.comparison_page import make_comparison_page
from TrainingFactory.evaluation.gate import Guard, check_guard
from TrainingFactory.evaluation.records import digest_tasks, make_record, read_records
from TrainingFactory.evaluation.requests import RecordedEvaluation
from TrainingFactory.evaluation.suites import load_suite
from TrainingFactory.models import load_model
from TrainingFactory.promotion.model_registry import ModelRegistry
from TrainingFactory.promotion.promotion import Evaluator, Promotion
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.types import Completion, Message, Reward, ToolResult, Trajectory, Turn

ENTRIES = """
entries:
  - {environment: calculator, count: 64}
  - {name: second, environment: calculator, count: 16, task_seed: 1}
gate:
  round: 16
"""
Won = Callable[[str, str, int], float | None]  # model, entry, number of the task


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRegistry:
    """Four versions, of which the first is the champion."""
    monkeypatch.chdir(tmp_path)
    made_run(Path("runs"), "sft", (1, 2, 3, 4))
    registry = ModelRegistry()
    for step in (1, 2, 3, 4):
        registry.register("agent", f"sft@step-{step}")
    registry.set_alias("agent:1", "champion")
    return registry


def suite(gate: str = "", entries: str = ENTRIES) -> str:
    Path("release.yaml").write_text(entries + gate)
    return "release.yaml"


def scripted(won: Won, played: list[tuple[str, str | None, int]] | None = None) -> Evaluator:
    """Plays by a script, with one tool call an episode; what was played is told as (model, entry, tasks)."""

    def play(name: str, evaluation: RecordedEvaluation) -> None:
        numbers = {task.id: number for number, task in enumerate(evaluation.tasks)}
        ended: list[Trajectory] = []
        for tasks in evaluation.rounds:
            for task in tasks:
                reward = won(name, str(evaluation.request.entry), numbers[task.id])
                turn = Turn([1], Completion([2, 3], [-1.0, -1.0], "stop"), Message("assistant", "x"))
                turn.tool_results = [ToolResult("", ok=name != "agent:4")]
                scored = None if reward is None else Reward(reward)
                ended.append(Trajectory(task, "0", turns=[turn], reward=scored))
            if evaluation.should_stop(ended):
                break
        there = [each.task for each in ended]
        asked = evaluation.conditions.model_copy(update={"tasks": digest_tasks(there), "count": len(there)})
        evaluation.record = make_record(
            ended,
            evaluation.model,
            asked,
            {},
            by="eval",
            scored_by="a script",
            entry=evaluation.request.entry,
        )
        evaluation.request.save_record(evaluation.record)
        evaluation.discard()
        if played is not None:
            played.append((name, evaluation.request.entry, len(there)))

    return play


def third(name: str, entry: str, number: int) -> float:
    """The first and fourth version do a third of the tasks, the second all, the third a few."""
    return float({"agent:1": number % 3 == 0, "agent:3": number % 9 == 0}.get(name, True))


def last(registry: ModelRegistry) -> dict[str, object]:
    return registry.decisions("agent")[-1]


def test_a_better_one_is_promoted_early_and_a_worse_one_refused(registry: ModelRegistry) -> None:
    played: list[tuple[str, str | None, int]] = []
    decision = Promotion(registry, "agent:2", "champion", suite()).run(scripted(third, played))
    assert decision.promoted and decision.text == "the gate holds"
    assert played == [("agent:1", "calculator", 64), ("agent:2", "calculator", 16)]  # decided by one round
    assert str(registry.get("agent@champion")) == "agent:2"
    assert last(registry)["kind"] == "promote" and decision.comparison is not None
    evidence = last(registry)["evidence"]
    assert isinstance(evidence, dict) and evidence["comparison"]["better"]
    assert evidence["records"]["agent:2"] == [registry.evaluations("agent:2")[-1]["id"]]
    played.clear()
    refused = Promotion(registry, "agent:3", "champion", suite()).run(scripted(third, played))
    assert not refused.promoted and refused.comparison is None
    # The champion does everything: nothing can be better, so the challenger is not even asked.
    assert played == [("agent:2", "calculator", 64)]
    assert "agent:2 already solves 64 of 64 tasks" in refused.text and "not_worse" in refused.text
    registry.rollback("agent", "champion")
    assert str(registry.get("agent@champion")) == "agent:1"
    refused = Promotion(registry, "agent:3", "champion", suite()).run(scripted(third, played))
    assert not refused.promoted and "difference -0." in refused.text, refused.text
    assert [name for name, *_ in played] == ["agent:2", "agent:3"]  # the record of agent:1 is there
    assert last(registry)["kind"] == "refuse" and str(registry.get("agent@champion")) == "agent:1"
    assert refused.comparison is not None and refused.comparison.losses


def test_equal_ones_are_not_promoted_unless_not_worse_is_enough(registry: ModelRegistry) -> None:
    def same(name: str, entry: str, number: int) -> float:
        return float(number % 2)

    assert not Promotion(registry, "agent:2", "champion", suite()).run(scripted(same)).promoted
    few = Promotion(registry, "agent:2", "champion", suite("  not_worse: 0.02\n")).run(scripted(same))
    assert not few.promoted and "after 64 of 64 tasks" in few.text  # 64 ties are no proof of that little
    assert (
        Promotion(registry, "agent:2", "champion", suite("  not_worse: 0.1\n")).run(scripted(same)).promoted
    )


def test_what_could_not_be_scored_counts_as_lost(registry: ModelRegistry) -> None:
    def evasive(name: str, entry: str, number: int) -> float | None:
        hard = number % 2 == 0
        return (None if hard else 1.0) if name == "agent:2" else float(not hard)

    decision = Promotion(registry, "agent:2", "champion", suite()).run(scripted(evasive))
    assert not decision.promoted and "difference +0.000" in decision.text


def test_guards(registry: ModelRegistry) -> None:
    guards = """  guards:
    - {metric: tool_success, worse_by: 0.05}
    - {metric: success, entry: second, worse_by: 0.1}
    - {metric: tokens, at_most: 3}
"""
    played: list[tuple[str, str | None, int]] = []
    made = Promotion(registry, "agent:4", "champion", suite(guards))
    assert made.criteria == [
        "success on calculator: better, with alpha 0.05 (sequential test)",
        "tool_success on calculator: worse than the champion's by at most 0.05",
        "success on second: worse than the champion's by at most 0.1",
        "tokens on calculator: at most 3",
    ]
    decision = made.run(scripted(third, played))
    assert [each.holds for each in decision.checks] == [True, False, True, True]
    assert decision.text.startswith("tool_success on calculator: 0,")
    assert [name for name, entry, _ in played if entry == "second"] == ["agent:1", "agent:4"]
    assert Promotion(registry, "agent:2", "champion", suite(guards)).run(scripted(third)).promoted
    page = make_comparison_page(
        decision.sides, [decision.comparison] if decision.comparison else [], decision
    )
    assert "<b>Refused</b>: tool_success on calculator" in page and "is better than agent:1" in page
    assert not list(Path("runs/rollouts").glob("*.part"))


def test_guards_have_a_direction(registry: ModelRegistry) -> None:
    champion = Promotion(registry, "agent:2", "champion", suite())
    champion.run(scripted(third))
    outcomes = champion.models[0].records[0].outcomes
    longer = [
        each.model_copy(update={"episodes": [e.model_copy(update={"tokens": 9}) for e in each.episodes]})
        for each in outcomes
    ]
    guard = Guard(metric="tokens", worse_by=5)
    assert (
        not check_guard(guard, "main", longer, outcomes).holds
        and check_guard(guard, "main", outcomes, longer).holds
    )
    silent = [
        each.model_copy(update={"episodes": [e.model_copy(update={"tool_calls": 0}) for e in each.episodes]})
        for each in outcomes
    ]
    calls = Guard(metric="tool_success", worse_by=0.1)
    assert (
        not check_guard(calls, "main", silent, outcomes).holds
        and check_guard(calls, "main", silent, silent).holds
    )
    assert not check_guard(Guard(metric="tool_success", at_least=0.1), "main", silent, silent).holds


def test_the_first_one(registry: ModelRegistry) -> None:
    with pytest.raises(ValueError, match=r"there is no agent@staging to compare agent:3 with.*--first"):
        Promotion(registry, "agent:3", "staging", suite())
    made = Promotion(
        registry, "agent:3", "staging", suite("  guards: [{metric: turns, worse_by: 0}]\n"), first=True
    )
    assert len(made.criteria) == 1 and "at_least or at_most" in made.criteria[0]
    guards = "  guards: [{metric: success, at_least: 0.3, worse_by: 0}]\n"
    decision = Promotion(registry, "agent:3", "staging", suite(guards), first=True).run(scripted(third))
    assert not decision.promoted and decision.text.startswith("success on calculator: 0.125; limit:")
    assert Promotion(registry, "agent:2", "staging", suite(guards), first=True).run(scripted(third)).promoted
    assert make_comparison_page(decision.sides, [], decision)


def test_the_champion_changes_meanwhile(registry: ModelRegistry) -> None:
    made = Promotion(registry, "agent:2", "champion", suite())
    registry.set_alias("agent:4", "champion")
    decision = made.run(scripted(third))
    assert not decision.promoted and "from version 1 to 4" in decision.text
    assert last(registry)["kind"] == "refuse" and str(registry.get("agent@champion")) == "agent:4"


MISTAKES: list[tuple[Sequence[str], str]] = [
    (["agent:9"], ":1, :2, :4, @champion"),
    (["agent:3"], "version 3 of agent was deleted"),
    (["agent:2"], "tfactory registry verify agent:2"),
    (["agnt:2"], "there is no registered model 'agnt:2'"),
    (["agent:1"], "agent@champion is already agent:1"),
    (["agent:4", "--first"], "Remove --first"),
    (["agent:4", "--to", "a b"], "alias name 'a b'"),
    (["agent:4", "sampling.temperature=0"], "cannot set sampling.temperature with --suite"),
]


def test_mistakes(registry: ModelRegistry, tfactory: Run) -> None:
    registry.delete("agent:3")
    (registry.get_model_folder(registry.get("agent:2")) / "model.safetensors").write_text("other")
    for arguments, text in MISTAKES:
        status, _, err = tfactory("registry", "promote", *arguments, "--suite", suite())
        assert status == 2 and text in err, err
    assert not [each for each in registry.decisions("agent") if each["kind"] in ("promote", "refuse")]


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        (
            "  entry: sumary\n",
            'calculator, second (got "sumary")',
        ),
        ("  guards: [{metric: turns}]\n", "gate.guards.0: has no limit"),
        ("  margin: 0.1\n", "release.yaml:7: gate.margin"),
        ("  not_worse: -1\n", "release.yaml:7: gate.not_worse"),
    ],
)
def test_mistakes_of_a_gate_are_told_with_file_and_line(tmp_path: Path, gate: str, text: str) -> None:
    path = tmp_path / "release.yaml"
    path.write_text(ENTRIES + gate)
    with pytest.raises(ValueError, match="gate") as error:
        load_suite(str(path))
    assert text in str(error.value).replace(f"{tmp_path}/", ""), error.value


def test_a_suite_without_a_gate(registry: ModelRegistry) -> None:
    with pytest.raises(ValueError, match=r"suite quick has no gate.*`gate:` with entry, not_worse"):
        Promotion(registry, "agent:2", "champion", "quick")


def register(tfactory: Run, *seeds: int) -> None:
    """Register models of random weights as the next versions."""
    for seed in seeds:
        made, folder = load_model("builtin:tiny", seed=seed), f"model-{seed}"
        made.model.save_pretrained(folder)
        made.tokenizer.save_pretrained(folder)
        assert tfactory("registry", "register", "agent", folder)[0] == 0


def test_on_the_command_line(tfactory: Run) -> None:
    Path("parity.py").write_text(PARITY)
    entries = "entries: [{environment: parity.py, count: 24, sampling: {max_tokens: 4}}]\n"
    lenient = "gate: {round: 8, not_worse: 0.8}\n"
    register(tfactory, 1, 2)
    tfactory("registry", "alias", "agent:1", "champion")
    arguments = ("registry", "promote", "agent:2", "--suite", suite(lenient, entries))
    status, out, err = tfactory(*arguments, "--html", "page.html")
    assert status == 0 and "agent:2 is agent@champion now: the gate holds" in out, err
    stated = "success on parity.py: not worse by 0.8"
    assert err.index(stated) < err.index("loading the model") and "after 8 of 24 tasks" in out
    assert "<b>Promoted</b>" in Path("page.html").read_text()
    first, second = read_records(Path("runs/evaluations.jsonl"))
    assert (first.conditions.count, second.conditions.count) == (24, 8)  # no record of all 24
    listed = json.loads(tfactory("registry", "show", "agent:2", "--json")[1])
    assert (
        listed["version"]["evaluations"][-1]["id"] == second.id
        and listed["decisions"][-1]["kind"] == "promote"
    )
    suite("gate: {round: 8}\n", entries)
    assert tfactory("registry", "rollback", "agent")[0] == 0
    status, out, err = tfactory(*arguments)
    assert status == 1 and "agent:2 is refused" in out and "success on parity.py" in out, err
    assert not ModelRegistry().promote("agent:2", "champion", "release.yaml").promoted  # by the same records
    assert "needed: above" in tfactory("registry", "show", "agent")[1]
    assert find_model("agent@champion").version == ModelRegistry().get("agent:1")


def test_eval_of_a_version_is_kept_in_the_registry(tfactory: Run) -> None:
    register(tfactory, 1)
    options = ("--env", "calculator", "--max-tokens", "4", "--json")
    status, out, err = tfactory("eval", "agent:1", "--tasks", "4", *options)
    assert status == 0, err
    [found] = ModelRegistry().evaluations("agent:1")
    assert found["id"] == json.loads(out)["record"]
