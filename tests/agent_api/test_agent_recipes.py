"""Agents of others: work folders, verifiers, side requests, recipes, and the programs themselves."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.kits.cli import Run
from tests.kits.proxy import PROGRAM, Talker, line, play_program
from TrainingFactory.agent_api.agent_program import AgentProgram
from TrainingFactory.agent_api.agents import AGENT_RECIPES
from TrainingFactory.assembly.rewards import make_reward
from TrainingFactory.assembly.sampler import make_rollouts
from TrainingFactory.config import load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.types import Message, Reward, Task, ToolCall, Trajectory

AGENT_FOLDER = Path(__file__).resolve().parents[2] / ".servers" / "agents"
TASK = Task("t", "Write hi to out.txt.")


def played(folder: Path, code: str, **options: Any) -> tuple[Trajectory, dict[str, float]]:
    """An episode of a program with this code, which starts in a copy of `folder / "template"`."""
    (folder / "agent.py").write_text(PROGRAM + code, encoding="utf-8")
    (folder / "template").mkdir(exist_ok=True)
    (folder / "template" / "notes.txt").write_text("from the template")
    command = shlex.join([sys.executable, "-S", str(folder / "agent.py"), "{prompt}", "{model}"])
    given: dict[str, Any] = {"workspace": str(folder / "template"), "model": "policy"} | options
    [episode], counts = play_program(AgentProgram(command, given), Talker(lambda _: "Rome"), TASK)
    return episode, counts


WRITES = 'ask([say(sys.argv[1])], model=sys.argv[2])\nopen("out.txt", "w").write(open("notes.txt").read())\n'


@pytest.mark.parametrize(
    ("verify", "reward", "error"),
    [
        ("grep -q template out.txt", Reward(1.0), None),
        ("grep -q other out.txt", Reward(0.0), None),
        ('echo {"reward": 0.5}', Reward(0.5), None),
        ("sh -c 'kill -9 $$'", None, "the verifier ended with SIGKILL"),
    ],
)
def test_a_verifier_scores_the_work_folder(
    tmp_path: Path, verify: str, reward: Reward | None, error: str | None
) -> None:
    if verify.startswith("echo"):
        verify = "echo '{\"reward\": 0.5}'"
    episode, _ = played(tmp_path, WRITES, verify=verify)
    assert (episode.status, episode.reward) == ("done", reward)
    assert error is None or error in (episode.error or "")
    assert episode.prompt[0].content == TASK.prompt
    assert not (tmp_path / "template" / "out.txt").exists()  # each episode has a copy


def test_only_the_verifier_gets_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TASK", Task("t", "What is the code?", "Xyzzy", {"solution": "Xyzzy"}))
    keep = (
        WRITES + 'open("seen.txt", "w").write(open(os.environ["TFACTORY_TASK"]).read() + sys.stdin.read())\n'
    )
    assert played(tmp_path, "import os\n" + keep, verify="grep -q Xyzzy seen.txt")[0].reward == Reward(0.0)
    assert played(tmp_path, "import os\n" + keep, verify="grep -q What seen.txt")[0].reward == Reward(1.0)
    verify = """sh -c 'grep -q Xyzzy "$TFACTORY_TASK" && grep -q Xyzzy'"""
    assert played(tmp_path, WRITES, verify=verify)[0].reward == Reward(1.0)


REPEATS_TASK = 'ask([say("a")])\nopen("seen.txt", "w").write(sys.stdin.read())\n' + line(reward=1.0)


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ([], {"id", "prompt", "answer", "metadata"}),
        (["reward.type=rule_based", "reward.options.rule=exact"], {"id", "prompt"}),
        (["reward.parts.a.type=rule_based", "reward.parts.a.options.rule=exact"], {"id", "prompt"}),
        (["reward.parts.a.type=environment"], {"id", "prompt", "answer", "metadata"}),
        (
            ["reward.type=rule_based", "reward.options.rule=exact", "environment.options.columns=[level]"],
            {"id", "prompt", "metadata"},
        ),
    ],
)
def test_a_program_gets_the_answer_only_if_it_scores_itself(
    tmp_path: Path, options: list[str], columns: set[str]
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM + REPEATS_TASK, encoding="utf-8")
    command = shlex.join([sys.executable, "-S", "agent.py"])
    config = load_config(None, [f"environment.command={command}", *options])
    program = AgentProgram(command, {"cwd": str(tmp_path)} | config.environment.options)
    talker = Talker(lambda _: "Rome")

    async def play() -> Trajectory:
        await program.endpoint.open()
        try:
            rollouts = make_rollouts(config, program, talker.chat, reward=RewardClock(make_reward(config)))
            task = Task("t", "Where?", "Rome", {"level": 3, "solution": "Rome"})
            [[episode]] = await rollouts.rollout_batch([task], talker)
            return episode
        finally:
            await program.endpoint.close()

    assert asyncio.run(play()).reward == Reward(1.0, parts=ANY)
    seen = json.loads((tmp_path / "seen.txt").read_text())
    assert seen.keys() == columns
    assert seen.get("metadata", {}).get("level") == (3 if "metadata" in columns else None)
    assert ("solution" in seen.get("metadata", {})) == ("answer" in columns)


def test_requests_for_another_model_are_answered_and_not_trained(tmp_path: Path) -> None:
    code = (
        'assert ask([say("title")], model="small")["choices"][0]["message"]["content"] == "Rome"\n'
        'ask([say("a")], model="policy"); ask([say("title")], model="small"); ask([say("b")])\n'
        'print(json.dumps({"reward": 1}))\n'
    )
    episode, counts = played(tmp_path, code)
    assert (counts["proxy/side"], counts["proxy/turns"], counts["proxy/rows"]) == (2, 2, 2)
    assert [turn.message.content for turn in episode.turns] == ["Rome"] * 2 and episode.reward == Reward(1.0)


def test_a_program_finds_the_endpoint_of_every_dialect(tmp_path: Path) -> None:
    code = (
        "names = 'OPENAI_BASE_URL ANTHROPIC_BASE_URL GOOGLE_GEMINI_BASE_URL STATE'.split()\n"
        "ask([say(json.dumps([os.environ[name] for name in names]))])\n"
        "assert os.environ['ANTHROPIC_API_KEY'] == os.environ['GEMINI_API_KEY'] == os.environ['OPENAI_API_KEY']\n"
        "assert os.listdir(os.environ['STATE']) == []\n"
        'print(json.dumps({"reward": 1}))\n'
    )
    episode, _ = played(tmp_path, code, variables={"STATE": "{home}"})
    openai, anthropic, gemini, state = json.loads(episode.prompt[0].content)
    assert openai == f"{anthropic}/v1" and anthropic == gemini and not Path(state).exists()


def test_a_recipe_sets_the_command_and_keeps_the_config(tmp_path: Path) -> None:
    recipe = AGENT_RECIPES["codex"].list_options()
    options = [key_value(key, value) for key, value in recipe.items()]
    config = load_config(None, [*options, "environment.options.verify=pytest -q"])
    assert config.environment.command == recipe["environment.command"]
    assert config.environment.options == {
        "variables": {"CODEX_HOME": "{home}"}, "model": "policy", "verify": "pytest -q",
    }  # fmt: skip


@pytest.mark.parametrize(("agent", "text"), [("codx", "codx"), ("codex", "npm install -g @openai/codex")])
def test_an_agent_that_is_not_there_is_said(
    tfactory: Run, monkeypatch: pytest.MonkeyPatch, agent: str, text: str
) -> None:
    Path("config.yaml").write_text("model: {name: builtin:tiny}\n")
    monkeypatch.setenv("PATH", "")
    status, _, err = tfactory("train", "config.yaml", "--agent", agent)
    assert status == 2 and text in " ".join(err.split())


COMMAND = "echo hi > out.txt"
# Of each agent: the call that runs a command, and the one that ends its task.
CALLS: dict[str, list[ToolCall]] = {
    "claude-code": [ToolCall("Bash", {"command": COMMAND, "description": "Write"})],
    "codex": [ToolCall("exec_command", {"cmd": COMMAND})],
    "gemini-cli": [ToolCall("run_shell_command", {"command": COMMAND})],
    "mini-swe-agent": [
        ToolCall("bash", {"command": COMMAND}),
        ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ],
}


class LongTalker(Talker):
    max_length = 131_072


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENT_RECIPES)
def test_the_agents_of_others_play_an_episode_token_for_token(
    tmp_path: Path, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [str(AGENT_FOLDER / "bin"), str(AGENT_FOLDER / "node_modules" / ".bin"), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(places))
    recipe = AGENT_RECIPES[agent]
    if shutil.which(recipe.program) is None:
        pytest.skip(f"{agent} is not installed: make agents")
    script = [Message("assistant", "I run it.", [call]) for call in CALLS[agent]]
    said = iter([*script, *[Message("assistant", "It is done.")] * 4])
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "template").mkdir()
    options = {"variables": dict(recipe.variables), "model": "policy", "verify": "grep -qx hi out.txt"}
    options |= {"workspace": str(tmp_path / "template")}
    sampler = LongTalker(lambda prompt: next(said))
    sampler.gate.set()
    [episode], counts = play_program(
        AgentProgram(recipe.command, options), sampler, TASK, episode_timeout=240.0
    )
    assert (episode.status, episode.reward) == ("done", Reward(1.0)), episode.error
    assert [turn.message.content for turn in episode.turns][:1] == ["I run it."]
    assert counts["proxy/extended"] == 1.0 and counts["proxy/rows"] == 1.0, counts


PROGRAMS = [
    "agents_sdk.py",
    "langgraph_agent.py chat",
    "langgraph_agent.py responses",
    "langgraph_agent.py messages",
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_agent_frameworks_continue_the_sampled_tokens(program: str) -> None:
    python, folder = AGENT_FOLDER / "bin" / "python", Path(__file__).parents[1] / "servers" / "agents"
    if not python.exists():
        pytest.skip("the Agents SDK and LangGraph are not installed: make agents")
    call = Message("assistant", "Let me see.", [ToolCall("weather", {"city": "Rome"})])
    sampler = Talker(lambda prompt: "It is done." if "<tool_response>" in prompt else call)
    sampler.gate.set()
    command = f"{shlex.quote(str(python))} {shlex.quote(str(folder))}/{program}"
    [episode], counts = play_program(AgentProgram(command, {}), sampler, TASK, episode_timeout=240.0)
    assert (episode.status, episode.reward) == ("done", Reward(1.0)), episode.error
    assert (counts["proxy/turns"], counts["proxy/extended"], counts["proxy/rows"]) == (2, 1.0, 1), counts
