"""An agent like the one you may have: the `openai` package, a tool of its own, and nothing of TrainingFactory.

It asks twice side by side, once streamed and once in one piece, looks up what the model asks for, lets the model answer
a third time with the conversation packed up anew, and takes the answer that most agree on. Its last line says what that
was worth: the only line that training needs, and it could come from a reward of TrainingFactory's as well.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from openai import AsyncOpenAI  # pyright: ignore

SYSTEM = {"role": "system", "content": "Look up, then answer."}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ABOUT = {"name": "lookup", "description": "Where somebody lives.", "parameters": NAME}
LOOKUP: Any = {"type": "function", "function": ABOUT}
MOST = 2  # turns of one conversation


@dataclass
class Arguments:
    """What the tool takes. Clients that read a call into a class write it back with all its fields."""

    name: str = ""
    country: str | None = None


class Agent:
    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.client: Any = AsyncOpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY say where and who
        self.model = "gpt-4o-mini"

    def lookup(self, arguments: str) -> str:
        asked = json.loads(arguments).get("name")
        return str(self.task["answer"]) if asked == self.task["metadata"]["name"] else "unknown"

    async def streamed(self, messages: list[Any]) -> dict[str, Any]:
        """Put a message together from its pieces."""
        content, calls = "", dict[int, dict[str, Any]]()
        chunks = await self.client.chat.completions.create(
            model=self.model, messages=messages, tools=[LOOKUP], stream=True, temperature=0.7
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                pieces: list[Any] = choice.delta.tool_calls or []
                for piece in pieces:
                    call = calls.setdefault(
                        piece.index,
                        {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
                    )
                    function: Any = piece.function
                    call["id"] += piece.id or ""
                    call["function"]["name"] += function.name or ""
                    call["function"]["arguments"] += function.arguments or ""
        found: dict[str, Any] = {"role": "assistant", "content": content}
        return found | ({"tool_calls": list(calls.values())} if calls else {})

    async def whole(self, messages: list[Any]) -> dict[str, Any]:
        answer = await self.client.chat.completions.create(
            model=self.model, messages=messages, tools=[LOOKUP]
        )
        return answer.choices[0].message.model_dump(exclude_none=True)

    async def converse(self, ask: Any, normalise: bool = False) -> list[dict[str, Any]]:
        """Let the model call the tool until it answers."""
        messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": self.task["prompt"]}]
        for _ in range(MOST):
            message = await ask(messages)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                function = call["function"]
                found = self.lookup(function["arguments"])
                if normalise:
                    known = {k: v for k, v in json.loads(function["arguments"]).items() if k == "name"}
                    function["arguments"] = json.dumps(asdict(Arguments(**known)))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
        return messages

    async def once_more(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Pack a conversation up: its last answer is left out, and calls get short ids."""
        packed = json.loads(json.dumps(messages))
        while packed and packed[-1]["role"] == "assistant":
            packed.pop()
        short: dict[str, str] = {}
        for message in packed:
            for call in message.get("tool_calls", []):
                call["id"] = short.setdefault(call["id"], f"c{len(short)}")
            if message["role"] == "tool":
                message["tool_call_id"] = short[message["tool_call_id"]]
        return [*packed, await self.whole(packed)]


async def main() -> None:
    agent = Agent(json.load(sys.stdin))
    first, second = await asyncio.gather(
        agent.converse(agent.streamed), agent.converse(agent.whole, normalise=True)
    )
    ended = [first, second, await agent.once_more(first)]
    answers = [messages[-1].get("content") or "" for messages in ended]
    [(answer, votes)] = Counter(answers).most_common(1)
    right = answer == agent.task["answer"]
    print(json.dumps({"reward": float(right), "parts": {"votes": votes / len(answers)}}))


if __name__ == "__main__":
    asyncio.run(main())
