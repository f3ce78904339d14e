"""What RL-Factory's methods get to see: one finished episode in the shape of verl's DataProto."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from TrainingFactory.openai_form import message_to_dict
from TrainingFactory.types import Message, Trajectory

# Methods of an `Env`
RULES, STEPS, PROMPTS = "_compute_score_with_rules", "get_step_reward", "get_prompt_for_reward"
READ = "_compute_single_score_with_reward_rollout_wg"


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


class JudgePrompt(str):
    """The text that `apply_chat_template` gives for a judge, which remembers the messages that it was made of."""

    messages: list[Message]


class JudgeTokenizer:
    """Stands for the judge's tokenizer, which is at the judge's own end: decodes what the policy has sampled by the
    policy's tokenizer, and keeps messages as they are."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode, self.batch_decode = tokenizer.decode, tokenizer.batch_decode

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **_: Any) -> JudgePrompt:
        messages = [Message(each["role"], str(each["content"])) for each in conversation]
        text = JudgePrompt("\n\n".join(message.content for message in messages))
        text.messages = messages
        return text
