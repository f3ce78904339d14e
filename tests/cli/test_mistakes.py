"""Mistakes on the command line are answered in words, with status 2, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kits.cli import ENVIRONMENT, Run, python


@pytest.fixture(autouse=True)
def files(tfactory: Run) -> None:
    Path("empty.jsonl").touch()
    Path("bad.jsonl").write_text('{"text": "x"}\n')
    Path("mcp.json").write_text("{")
    Path("small.yaml").write_text(
        "environment: calculator\ntraining: {max_steps: 1, batch_size: 2, group_size: 2}\n"
    )
    Path("two.py").write_text(ENVIRONMENT + "class Other(Mine): pass\n")
    Path("runs/there").mkdir(parents=True)
    Path("runs/there/notes.txt").touch()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rollout"], "no environment is named"),
        (["rollout", "serch"], "did you mean search?"),
        (["rollout", "nothing.py"], "there is no file nothing.py"),
        (["rollout", "nothing.yaml"], "nothing.yaml: file not found"),
        (["rollout", "search", "--model", "./nothing"], "'./nothing'"),
        (
            ["rollout", "search", "--model", "qwen3-4bb"],
            "model.name: there is no such run or model: 'qwen3-4bb'",
        ),
        (["rollout", "search", "model.family=qwen9"], "qwen9"),
        (["rollout", "search", "--split", "test"], "split 'test'"),
        (["rollout", "search", "--tasks", "empty.jsonl"], "empty.jsonl is empty"),
        (["rollout", "search", "--tasks", "nothing.jsonl"], "nothing.jsonl"),
        (["rollout", "search", "--tasks", "-1"], "data.count: must be greater than or equal to 1 (got -1)"),
        (["rollout", "search", "--max-turns", "-1"], "environment.max_turns: must be"),
        (["rollout", "search", "--temperature", "-1"], "sampling.temperature: must be"),
        (["rollout", "search", "smapling.top_p=1"], "did you mean sampling?"),
        (["rollout", "search", "model.max_length=100000000"], "model.max_length"),
        (["rollout", "search", "--out", "empty.jsonl/x.jsonl"], "cannot write"),
        (["rollout", "search", "--out", "."], "is not a regular file"),
        (["rollout", "search", "--bogus", "1"], "--bogus"),
        (["rollout", "search", "--temperature", "warm"], "--temperature"),
        (["rollout", "two.py"], "two.py:Mine, two.py:Other"),
        (["rollout", "two.py:Third"], "'Third'"),
        (["rollout", "two.py:Task"], "is no environment"),
        (["train", "nothing.yaml"], "file not found"),
        (["train", "small.yaml", "learning_rate=0"], "training.learning_rate: must be greater than 0"),
        (["train", "small.yaml", "learning_rate=-1"], "training.learning_rate: must be greater than 0"),
        (["train", "small.yaml", "training.group_size=1"], "2 or more"),
        (["train", "small.yaml", "training.algorithm=dpo"], "training.algorithm=dpo needs a dataset"),
        (["train", "small.yaml", "environment=serch"], "did you mean search?"),
        (["train", "small.yaml", "sampling.top_p=0.9"], "for evaluation"),
        (["train", "small.yaml", "--name", "there"], "run there already exists"),
        (["train", "small.yaml", "--name", "a/b"], "invalid run name"),
        (["train", "small.yaml", "logging.output_dir=small.yaml"], "small.yaml"),
        (["train", "small.yaml", "logging.trackers=[mlflow]"], "pip install 'training-factory[mlflow]'"),
        (["train", "small.yaml", "algorithm=sft", "data.demonstrations=bad.jsonl"], "its columns are: text"),
        (["train", "small.yaml", "data.tasks=bad.jsonl"], 'has no "prompt"; its columns are: text'),
        (["eval", "./nothing", "--env", "search"], "./nothing"),
        (["eval", "runs/nothing"], "there is no such run or model: 'runs/nothing'"),
        (["eval", "builtin:tiny"], "no environment is named"),
        (["eval", "some/model"], "no environment is named"),
        (["eval", "nonsense"], "there is no such run or model: 'nonsense'"),
        (["eval", "qwen3-4bb"], "there is no such run or model: 'qwen3-4bb'; did you mean qwen3-4b?"),
        (["eval", "./nothing"], "there is no such run or model: './nothing'"),
        (["eval", "a", "--model", "b"], "named twice"),
        (["runs", "show", "nothing"], "there is no run 'nothing'"),
        (["runs", "resume", "nothing"], "there is no run 'nothing'"),
        (["runs", "compare", "nothing"], "two runs"),
        (["tools", "list", "--config", "mcp.json"], "mcp.json: cannot read"),
        (["tools", "list", "--config", "mcp.json"], "line 1 column 2"),
        *((["new", "env", name], "cannot name a Python file") for name in ("a b", "1a", "class", "../a", "")),
    ],
)
def test_mistakes_are_answered_in_words(tfactory: Run, arguments: list[str], expected: str) -> None:
    status, out, err = tfactory(*arguments)
    assert status == 2 and expected in " ".join(err.split()), err
    assert "Traceback" not in out + err and not list(Path().rglob("*.part"))
    assert {path.name for path in Path("runs").iterdir()} <= {"there", "rollouts"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def x(:\n", "mine.py:1: invalid syntax"),
        ("x = 1\nx.nothing\n", "mine.py:2: AttributeError"),
        ("import nothing_of_the_kind\n", "mine.py:1: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "mine.py:1: SystemExit"),
        ("x = 1\n", "defines no environment"),
        ("from TrainingFactory.envs import SearchEnvironment\n", "defines no environment"),
        (ENVIRONMENT.replace("return [", "return 1 / 0; ["), "mine.py:8: ZeroDivisionError"),
        (ENVIRONMENT.replace("Task(str(n)", "(str(n)"), "Task objects, not tuple"),
        (ENVIRONMENT.replace("str(n)", "'same'"), "the same id: same"),
        (ENVIRONMENT.replace("return [", "return []; ["), "no tasks for split"),
        (ENVIRONMENT + "    def __init__(self, task): 1 / 0\n", "mine.py:9: ZeroDivisionError"),
        (ENVIRONMENT.replace("'x'", "{1}").replace('"x"', "{1}"), "JSON"),
    ],
)
def test_mistakes_in_a_users_file(tfactory: Run, code: str, expected: str) -> None:
    Path("mine.py").write_text(code)
    status, out, err = tfactory("rollout", "mine.py", "--max-tokens", "2")
    assert status == 2 and expected in err and "Traceback" not in out + err


@pytest.mark.parametrize("screen", ["print", "show.make_console(stderr=False).print"])
def test_a_reader_that_has_seen_enough(tmp_path: Path, screen: str) -> None:
    code = f"from TrainingFactory.cli import app, show; print = {screen}; "
    code += "app.app.command(lambda: [print('word ' * 9_000) for _ in range(9)] and 0, name='long'); "
    run = python(tmp_path, "-c", code + "app.main(['long'])")
    assert run.stdout is not None and run.stderr is not None
    with run:
        run.stdout.read(10)
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 1
