"""The same reward as an environment of RL-Factory's: `environment: search_env.py` in place of the `reward` section."""

import re
import string
from collections.abc import Sequence
from typing import Any

from TrainingFactory.integrations.rl_factory import Env


def words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in ("a", "an", "the")]


class SearchEnv(Env):
    def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> list[list[float]]:
        scores: list[list[float]] = []
        for i in range(len(data)):
            found = self._process_data(data_item=data[i], tokenizer=tokenizer)
            said: list[str] = re.findall(r"<answer>(.*?)</answer>", found["response_str"], re.DOTALL)
            targets: list[str] = found["ground_truth"]["target"]
            scores.append([float(bool(said) and any(words(said[-1]) == words(target) for target in targets))])
        return scores

    def get_step_reward(self, responses: Sequence[str], format_score: float = 0.1) -> list[float]:
        rewards: list[float] = []
        for response in responses:
            action, calls = self.tool_manager.parse_response(response_content=response)
            wrong = sum(call["name"] == "<error>" for call in calls)
            rewards.append(float("nan") if action == "answer" else -format_score * wrong / len(calls))
        return rewards
