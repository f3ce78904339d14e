"""Environments of verifiers v0 for tests, as a package of its hub would define them: sums in one turn, with a tool, or
guessing a number in several turns."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(kind: str = "single", size: int = 20, own_eval: bool = False) -> vf.Environment:
    rows = [
        {"question": f"{n} + 1 = ?", "answer": str(n + 1), "info": {"number": n}} for n in range(2 * size)
    ]
    datasets: dict[str, Any] = {"dataset": Dataset.from_list(rows[:size])}
    if own_eval:
        datasets["eval_dataset"] = Dataset.from_list(rows[size:])
    parser = vf.Parser()
    rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0], parser=parser)
    shared = {**datasets, "parser": parser, "rubric": rubric, "system_prompt": "Add up."}
    if kind == "group":
        rubric.add_reward_func(best_of_group)
    if kind == "failing":
        rubric.add_reward_func(broken)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=4, **shared)
    if kind == "guess":
        return Guess(max_turns=8, **shared)
    return vf.SingleTurnEnv(**shared)


async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    if b > 100:
        raise OverflowError("too large")
    return str(a + b)


class Guess(vf.MultiTurnEnv):
    """Says whether a guess is too low or too high, until it is right."""

    async def setup_state(self, state: vf.State) -> vf.State:
        state["guesses"] = 0
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        state["guesses"] += 1
        content = str(messages[-1].content)
        if content == "break":
            raise vf.InvalidModelResponseError("the game broke")
        if not content.isdigit():
            return [{"role": "user", "content": "Answer with a number."}]
        difference = int(state["answer"]) - int(content)
        if difference == 0:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return []
        return [{"role": "user", "content": "Higher." if difference > 0 else "Lower."}]

    @vf.stop
    async def gave_up(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == "stop"


def right(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    return float((parser.parse_answer(completion) or "").strip() == answer)


def length(completion: vf.Messages) -> float:
    return float(len(completion))


def best_of_group(completions: list[vf.Messages]) -> list[float]:
    return [0.0 for _ in completions]


def broken(completion: vf.Messages) -> float:
    raise KeyError("score")
