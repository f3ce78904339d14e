"""A program with OpenAI's Agents SDK, which calls the responses API."""

import json
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """Weather of a city."""
    return "rain"


task = json.load(sys.stdin)
agent = Agent(name="Weather", instructions="Be brief.", tools=[weather], model="policy")
answer = Runner.run_sync(agent, task["prompt"]).final_output
print(json.dumps({"reward": float(answer == "It is done.")}))
