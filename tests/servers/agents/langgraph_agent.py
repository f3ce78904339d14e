"""A program with LangGraph, through one of three APIs."""

import json
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return "rain"


MODELS = {
    "chat": lambda: ChatOpenAI(model="policy"),
    "responses": lambda: ChatOpenAI(model="policy", use_responses_api=True),
    "messages": lambda: ChatAnthropic(model="policy"),
}
task = json.load(sys.stdin)
agent = create_react_agent(MODELS[sys.argv[1]](), [weather])
messages = agent.invoke({"messages": [("user", task["prompt"])]})["messages"]
print(json.dumps({"reward": float("It is done." in str(messages[-1].content))}))
