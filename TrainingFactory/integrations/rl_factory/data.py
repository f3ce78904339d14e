"""What RL-Factory's methods get to see: one finished episode in the shape of verl's DataProto."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.rewards.judge.judges import Ask
from TrainingFactory.types import Message, Trajectory

# Methods of an `Env`
RULES, STEPS, PROMPTS = "_compute_score_with_rules", "get_step_reward", "get_prompt_for_reward"
READ = "_compute_single_score_with_reward_rollout_wg"
STEP, SCORE, JUDGE_SCORE = "step", "compute_score", "_compute_score_with_reward_rollout_wg"


class Columns(dict[str, Any]):
    """Columns by name; one that is not there says which are."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"there is no {key!r} in the data of an episode; there are {', '.join(self)}")


class DataItem:
    """One episode: vectors of tokens in `batch`, its task's columns in `non_tensor_batch`.

    `responses` has what the model sampled, all turns, and nothing that a tool said: whoever decodes it cannot take one
    for the other. The whole conversation, tools included, is in `non_tensor_batch["messages"]`."""

    def __init__(self, trajectory: Trajectory, heldout: bool = False) -> None:
        import torch  # whoever trains has it already

        prompts = torch.tensor(trajectory.turns[0].prompt_ids)
        self._turns = [turn.completion.token_ids for turn in trajectory.turns]
        responses = torch.tensor([token for turn in self._turns for token in turn])
        self.batch = Columns(
            prompts=prompts,
            responses=responses,
            input_ids=torch.cat([prompts, responses]),
            attention_mask=torch.ones(len(prompts) + len(responses), dtype=torch.long),
            loss_mask=torch.ones(len(responses), dtype=torch.long),
        )
        # Code of users writes into it, and the task belongs to the whole group.
        columns, answer = copy.deepcopy((trajectory.task.metadata, trajectory.task.answer))
        known = columns.get("reward_model")
        model = {"ground_truth": answer} | (known if isinstance(known, dict) else {})
        said = [each for turn in trajectory.turns for each in (turn.message, *turn.replies)]
        messages = [message_to_dict(each) for each in (*trajectory.prompt, *said)]
        self.non_tensor_batch = Columns({"data_source": "", "extra_info": {}} | columns)
        self.non_tensor_batch.update(reward_model=model, messages=messages, uid=trajectory.group)
        self.meta_info: dict[str, Any] = {"validate": heldout}

    def texts(self, tokenizer: Any) -> list[str]:
        """Return what the model wrote in each turn."""
        return [tokenizer.decode(turn, skip_special_tokens=True) for turn in self._turns]

    @property
    def about(self) -> tuple[Any, Any, Any]:
        """Return what methods get beside a text: data_source, ground_truth and extra_info."""
        columns = self.non_tensor_batch
        return columns["data_source"], columns["reward_model"]["ground_truth"], columns["extra_info"]


class Data(list[DataItem]):
    """A batch of one episode: tensors have an axis of length 1 in front, other columns are arrays of length 1."""

    def __init__(self, item: DataItem) -> None:
        import numpy as np

        super().__init__([item])
        self.meta_info = item.meta_info
        self.batch = Columns({name: each.unsqueeze(0) for name, each in item.batch.items()})
        self.non_tensor_batch = Columns()
        for name, value in item.non_tensor_batch.items():
            self.non_tensor_batch[name] = np.empty(1, dtype=object)
            self.non_tensor_batch[name][0] = value

    def add_step_rewards(self, earned: list[float]) -> None:
        """Add what `get_step_reward` gave for each turn, under RL-Factory's name."""
        import torch

        self[0].batch["tool_use_scores"] = torch.tensor(earned)
        self.batch["tool_use_scores"] = self[0].batch["tool_use_scores"].unsqueeze(0)


class PromptText(str):
    """The text that `apply_chat_template` gives, which remembers the messages that it was made of."""

    messages: list[Message]


class MessageTokenizer:
    """Stands for a tokenizer where messages stay messages: the run, or the judge's end, writes them by its template.
    The rest is that of the policy's tokenizer, where there is one."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self.prompts: dict[str, PromptText] = {}

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **_: Any) -> PromptText:
        messages = [Message(each["role"], str(each["content"])) for each in conversation]
        text = PromptText("\n\n".join(message.content for message in messages))
        text.messages = messages
        return self.prompts.setdefault(text, text)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class JudgeWorkers:
    """Stands for `reward_rollout_wg`, RL-Factory's worker group: the judge that the config names generates. Its methods
    wait for the judge, so they run on a thread."""

    world_size = 1

    def __init__(self, ask: Ask, tokenizer: MessageTokenizer) -> None:
        self._ask, self._tokenizer, self._loop = ask, tokenizer, asyncio.get_running_loop()

    def score(self, prompts: Sequence[str], read: Callable[[str], float] | None = None) -> list[float]:
        """Return what `read` makes of the reply to each prompt; None: the judge's own verdict."""

        async def ask_all() -> list[float]:
            return await asyncio.gather(*(self._ask(_messages(prompt), read) for prompt in prompts))

        return asyncio.run_coroutine_threadsafe(ask_all(), self._loop).result()

    def generate_sequences(self, data: Any) -> list[Any]:
        """Return items with the tokens of prompts and replies; `data.batch` has `input_ids` and `attention_mask`."""
        import torch

        tokenizer, items = self._tokenizer, []
        for row, mask in zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True):
            asked, replies = row[mask.bool()], list[str]()
            text = tokenizer.decode(asked, skip_special_tokens=True)

            def keep(reply: str, replies: list[str] = replies) -> float:
                replies.append(reply)
                return 0.0

            self.score([tokenizer.prompts.get(text) or text], keep)
            said = torch.tensor(tokenizer(replies[0], add_special_tokens=False)["input_ids"])
            whole = torch.ones(len(asked) + len(said), dtype=torch.long)
            batch = {"prompts": asked, "responses": said, "attention_mask": whole}
            items.append(SimpleNamespace(batch=batch))
        return items


def _messages(prompt: str) -> list[Message]:
    return prompt.messages if isinstance(prompt, PromptText) else [Message("user", prompt)]
