"""Inputs of RL-Factory's methods: one finished episode in the shape of verl's DataProto."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.rewards.judge.judges import AskJudge
from TrainingFactory.types import Message, Trajectory

# Methods of an `Env`
RULES, STEPS, PROMPTS = "_compute_score_with_rules", "get_step_reward", "get_prompt_for_reward"
READ_REPLY = "_compute_single_score_with_reward_rollout_wg"
STEP, SCORE, JUDGE_SCORE = "step", "compute_score", "_compute_score_with_reward_rollout_wg"


class Columns(dict[str, Any]):
    """Columns by name, whose error for a missing column lists the available names."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"no {key!r} in the data of an episode. Available: {', '.join(self)}")


class DataItem:
    """One episode: token vectors in `batch`, the columns of its task in `non_tensor_batch`.

    `responses` contains the sampled tokens of all turns and no tool output, so that a reward cannot mistake tool output
    for the model's text. The whole conversation, tools included, is in `non_tensor_batch["messages"]`."""

    def __init__(self, trajectory: Trajectory, is_heldout: bool = False) -> None:
        import torch  # already loaded by training

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
        # Copied because user code may modify it, and all episodes of a group share the task.
        columns, answer = copy.deepcopy((trajectory.task.metadata, trajectory.task.answer))
        reward_column = columns.get("reward_model")
        reward_model = {"ground_truth": answer} | (reward_column if isinstance(reward_column, dict) else {})
        replies = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
        messages = [message_to_dict(message) for message in (*trajectory.prompt, *replies)]
        self.non_tensor_batch = Columns({"data_source": "", "extra_info": {}} | columns)
        self.non_tensor_batch.update(reward_model=reward_model, messages=messages, uid=trajectory.group)
        self.meta_info: dict[str, Any] = {"validate": is_heldout}

    def decode_turns(self, tokenizer: Any) -> list[str]:
        """Return the model's text of each turn."""
        return [tokenizer.decode(turn, skip_special_tokens=True) for turn in self._turns]

    @property
    def scoring_inputs(self) -> tuple[Any, Any, Any]:
        """The task's data_source, ground_truth and extra_info, which the user's scoring methods receive together with a
        text."""
        columns = self.non_tensor_batch
        return columns["data_source"], columns["reward_model"]["ground_truth"], columns["extra_info"]


class EpisodeBatch(list[DataItem]):
    """A batch of one episode: tensors have a leading batch axis of length 1, other columns are arrays of length 1."""

    def __init__(self, data_item: DataItem) -> None:
        import numpy as np

        super().__init__([data_item])
        self.meta_info = data_item.meta_info
        self.batch = Columns({name: tensor.unsqueeze(0) for name, tensor in data_item.batch.items()})
        self.non_tensor_batch = Columns()
        for name, column in data_item.non_tensor_batch.items():
            self.non_tensor_batch[name] = np.empty(1, dtype=object)
            self.non_tensor_batch[name][0] = column

    def add_step_rewards(self, rewards: list[float]) -> None:
        """Add the rewards that `get_step_reward` returned, one for each turn, as the column `tool_use_scores`."""
        import torch

        self[0].batch["tool_use_scores"] = torch.tensor(rewards)
        self.batch["tool_use_scores"] = self[0].batch["tool_use_scores"].unsqueeze(0)


class PromptText(str):
    """Text of a prompt, with the messages that it was built from."""

    messages: list[Message]


class MessageTokenizer:
    """Tokenizer stand-in whose `apply_chat_template` keeps the messages; the run or the judge's server applies its own
    chat template later. Everything else is delegated to the policy's tokenizer, if there is one."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self.prompts: dict[str, PromptText] = {}

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **_: Any) -> PromptText:
        messages = [Message(message["role"], str(message["content"])) for message in conversation]
        text = PromptText("\n\n".join(message.content for message in messages))
        text.messages = messages
        return self.prompts.setdefault(text, text)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class JudgeWorkers:
    """Stand-in for RL-Factory's worker group `reward_rollout_wg`; the config's judge generates the replies. The methods
    block until the judge replies, so call them from a worker thread."""

    world_size = 1

    def __init__(self, ask_judge: AskJudge, tokenizer: MessageTokenizer) -> None:
        self._ask, self._tokenizer, self._loop = ask_judge, tokenizer, asyncio.get_running_loop()

    def score(self, prompts: Sequence[str], read: Callable[[str], float] | None = None) -> list[float]:
        """Return the score that `read` extracts from each judge reply; without it, the judge's own verdict."""

        async def ask_all() -> list[float]:
            return await asyncio.gather(*(self._ask(_to_messages(prompt), read) for prompt in prompts))

        return asyncio.run_coroutine_threadsafe(ask_all(), self._loop).result()

    def generate_sequences(self, data: Any) -> list[Any]:
        """Return one item per row of `data`, with the tokens of the prompt and of the judge's reply. `data.batch` needs
        `input_ids` and `attention_mask`."""
        import torch

        tokenizer = self._tokenizer
        reply_items = []
        for row, mask in zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True):
            prompt_ids = row[mask.bool()]
            replies: list[str] = []
            prompt_text = tokenizer.decode(prompt_ids, skip_special_tokens=True)

            def store_reply(reply: str, replies: list[str] = replies) -> float:
                replies.append(reply)
                return 0.0

            self.score([tokenizer.prompts.get(prompt_text) or prompt_text], store_reply)
            reply_ids = torch.tensor(tokenizer(replies[0], add_special_tokens=False)["input_ids"])
            attention_mask = torch.ones(len(prompt_ids) + len(reply_ids), dtype=torch.long)
            batch = {"prompts": prompt_ids, "responses": reply_ids, "attention_mask": attention_mask}
            reply_items.append(SimpleNamespace(batch=batch))
        return reply_items


def _to_messages(prompt: str) -> list[Message]:
    return prompt.messages if isinstance(prompt, PromptText) else [Message("user", prompt)]
