"""Known agent programs: how to start them on a task with the endpoint of an episode (`tfactory train --agent NAME`)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentRecipe:
    """The command and environment variables of an agent, with the placeholders of `environment.command`."""

    program: str
    command: str
    install_command: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def list_options(self) -> dict[str, Any]:
        """Return the config keys that the recipe sets, with their values."""
        return {
            "environment.command": self.command,
            "environment.options.variables": dict(self.variables),
            "environment.options.model": "policy",
        }


# All of them run their tools without asking, in the work folder of an episode, and keep their state in {home}.
AGENT_RECIPES = {
    "claude-code": AgentRecipe(
        "claude",
        "claude -p {prompt} --model {model} --output-format json --dangerously-skip-permissions",
        "npm install -g @anthropic-ai/claude-code",
        {
            "CLAUDE_CONFIG_DIR": "{home}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "side",  # titles and summaries, which are not trained
            "IS_SANDBOX": "1",  # lets root skip permissions
        },
    ),
    "codex": AgentRecipe(
        "codex",
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m {model} "
        "-c model_provider=tfactory -c model_providers.tfactory.name=tfactory "
        "-c model_providers.tfactory.base_url={base_url} -c model_providers.tfactory.wire_api=responses "
        "-c model_providers.tfactory.env_key=OPENAI_API_KEY {prompt}",
        "npm install -g @openai/codex",
        {"CODEX_HOME": "{home}"},
    ),
    "gemini-cli": AgentRecipe(  # reads how to sign in from a file only
        "gemini",
        """sh -c 'mkdir "$GEMINI_CLI_HOME/.gemini" && echo "$SETTINGS" > "$GEMINI_CLI_HOME/.gemini/settings.json" && """
        """exec gemini -m "$0" --yolo -p "$1"' {model} {prompt}""",
        "npm install -g @google/gemini-cli",
        {
            "GEMINI_CLI_HOME": "{home}",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "SETTINGS": '{"security": {"auth": {"selectedType": "gemini-api-key"}}}',
        },
    ),
    "mini-swe-agent": AgentRecipe(
        "mini",
        "mini -m openai/{model} -t {prompt} -y --exit-immediately -o {home}/trajectory.json",
        "pip install mini-swe-agent",
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}",
        },
    ),
}


def find_agent(name: str) -> AgentRecipe:
    """Return an agent's recipe; raise ValueError if it is unknown or not installed."""
    if name not in AGENT_RECIPES:
        raise ValueError(
            f"unknown agent {name!r}; use one of {', '.join(AGENT_RECIPES)}, or set environment.command"
        )
    recipe = AGENT_RECIPES[name]
    if shutil.which(recipe.program) is None:
        raise ValueError(
            f"{recipe.program} of --agent {name} is not on the PATH. Install it: {recipe.install_command}"
        )
    return recipe
