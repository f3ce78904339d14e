"""The same reward as an environment of RL-Factory's: `environment: search_env.py` in place of the `reward` section."""

import re
import string

from TrainingFactory.integrations.rl_factory import Env


def words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in ("a", "an", "the")]


class SearchEnv(Env):
    def _compute_score_with_rules(self, data, tokenizer, if_val=False):
        scores = []
        for i in range(len(data)):
            found = self._process_data(data_item=data[i], tokenizer=tokenizer)
            said = re.findall(r"<answer>(.*?)</answer>", found["response_str"], re.DOTALL)
            targets = found["ground_truth"]["target"]
            scores.append([float(bool(said) and any(words(said[-1]) == words(each) for each in targets))])
        return scores

    def get_step_reward(self, responses, format_score=0.1):
        rewards = []
        for response in responses:
            action, calls = self.tool_manager.parse_response(response_content=response)
            wrong = sum(call["name"] == "<error>" for call in calls)
            rewards.append(float("nan") if action == "answer" else -format_score * wrong / len(calls))
        return rewards
