"""Inside the real HelloAgents, 0.2.9 and 1.0.0: its own SimpleAgent and ToolRegistry call our tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.hello import completion, tool_call, write_gsm8k
from tests.kits.judge import Said, judging

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
import hello_agents
from hello_agents import HelloAgentsLLM, SimpleAgent, ToolRegistry
from hello_agents.core import LLMConfig
from hello_agents.rl import SFTTrainerWrapper
from hello_agents.tools import Tool
from hello_agents.tools.builtin.rl_training_tool import RLTrainingTool

tool, registry = RLTrainingTool("en"), ToolRegistry()
registry.register_tool(tool)
vague = registry.execute_tool("rl_training", "evaluate my model please")
loaded = registry.execute_tool("rl_training", '{"action": "load_dataset", "max_samples": 2}')
wrong = tool.run({"action": "nothing"})
agent = SimpleAgent("trainer", HelloAgentsLLM(model="fixed", api_key="sk-none-1234", base_url=sys.argv[1]))
agent.add_tool(tool)
said = agent.run("Do it.")
print(json.dumps({
    "version": hello_agents.__version__, "theirs": SimpleAgent.__module__.startswith("hello_agents."),
    "tool": isinstance(tool, Tool), "rl": SFTTrainerWrapper.__module__, "kinds": [type(each).__mro__[-2].__name__
    for each in (vague, loaded)], "vague": json.loads(vague)["status"], "loaded": loaded["dataset_size"],
    "states": [str(getattr(each, "status", None)) for each in (vague, loaded, wrong)],
    "code": (getattr(wrong, "error_info", None) or {}).get("code"), "message": wrong["message"], "said": said,
}))
"""


def call_of(version: str, arguments: dict[str, Any]) -> Said:
    """Ask for the tool as the agents of a version read it: by a mark in the text, or as OpenAI has it."""
    if version.startswith("0."):
        told = ",".join(f"{key}={value}" for key, value in arguments.items())
        return completion({"content": f"[TOOL_CALL:rl_training:{told}]"})
    return tool_call(arguments)


def run(version: str, folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the program with this version on the path; its LLM asks for the tool, and repeats what that said."""
    package = ROOT / ".servers" / f"hello-{version}"
    if not package.is_dir():
        pytest.skip(f"HelloAgents {version} is not installed: make servers")
    (folder / "program.py").write_text(PROGRAM)
    write_gsm8k(folder / "gsm8k")

    def say(prompt: str, number: int) -> Said:
        if number == 0:
            return call_of(version, arguments)
        return completion({"content": "I have asked for it: " + prompt[-900:]})

    path = os.pathsep.join([str(ROOT), str(package)])
    with judging(say) as llm:
        done = subprocess.run(
            [sys.executable, "-m", "TrainingFactory.cli", "hello", "program.py", llm.url, "data.tasks=gsm8k"],
            cwd=folder, env=os.environ | {"PYTHONPATH": path, "TIKTOKEN_CACHE_DIR": str(folder), "no_proxy": "*"},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", [pytest.param("0.2.9", marks=pytest.mark.slow), "1.0.0"])
def test_its_registry_and_agent_call_our_tool(version: str, tmp_path: Path):
    found = run(version, tmp_path, {"action": "load_dataset", "max_samples": 3})
    assert (found["version"], found["theirs"], found["tool"]) == (version, True, True)
    assert found["rl"] == "TrainingFactory.integrations.hello_agents.rl"
    assert (found["vague"], found["loaded"]) == ("plan", 2)
    assert "there is no action nothing" in found["message"]
    assert '"dataset_size": 3' in found["said"]
    if version == "1.0.0":
        assert found["states"] == ["ToolStatus.PARTIAL", "ToolStatus.SUCCESS", "ToolStatus.ERROR"]
        assert found["code"] == "INVALID_PARAM"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.2.9", "1.0.0"])
def test_its_agent_trains(version: str, tmp_path: Path):
    wanted = {"algorithm": "sft", "model_name": "builtin:tiny", "num_epochs": 1, "output_dir": "made"}
    assert '"status": "success"' in run(version, tmp_path, wanted)["said"]
    assert (tmp_path / "made/adapter_config.json").exists()
