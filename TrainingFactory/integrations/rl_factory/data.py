"""What RL-Factory's methods get to see: one finished episode in the shape of verl's DataProto."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from TrainingFactory.openai_form import message_to_dict
from TrainingFactory.types import Message, Trajectory


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
        task = trajectory.task
        # Code of users writes into it, and the task belongs to the whole group.
        columns: dict[str, Any] = copy.deepcopy(task.metadata)
        known = columns.get("reward_model")
        model = known if isinstance(known, dict) else {}
        model.setdefault("ground_truth", copy.deepcopy(task.answer))
        said = [each for turn in trajectory.turns for each in (turn.message, *turn.replies)]
        self.non_tensor_batch = Columns(
            {"data_source": "", "extra_info": {}}
            | columns
            | {
                "reward_model": model,
                "messages": [message_to_dict(each) for each in (*trajectory.prompt, *said)],
                "uid": trajectory.group,
            }
        )
        self.meta_info: dict[str, Any] = {"validate": heldout}

    def texts(self, tokenizer: Any) -> list[str]:
        """Return what the model wrote in each turn."""
        return [tokenizer.decode(turn, skip_special_tokens=True) for turn in self._turns]

    def text(self, tokenizer: Any) -> str:
        return "\n".join(self.texts(tokenizer))

    @property
    def ground_truth(self) -> Any:
        return self.non_tensor_batch["reward_model"]["ground_truth"]

    @property
    def about(self) -> tuple[Any, Any, Any]:
        """Return what methods get beside a text: data_source, ground_truth and extra_info."""
        columns = self.non_tensor_batch
        return columns["data_source"], self.ground_truth, columns["extra_info"]


class Data(Sequence[DataItem]):
    """A batch of one episode: tensors have an axis of length 1 in front, other columns are arrays of length 1."""

    def __init__(self, item: DataItem) -> None:
        import numpy as np

        self.item, self.meta_info = item, item.meta_info
        self.batch = Columns({name: each.unsqueeze(0) for name, each in item.batch.items()})
        self.non_tensor_batch = Columns()
        for name, value in item.non_tensor_batch.items():
            self.non_tensor_batch[name] = np.empty(1, dtype=object)
            self.non_tensor_batch[name][0] = value

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [self.item][index]

    def __iter__(self) -> Iterator[DataItem]:
        yield self.item


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


def judge_messages(prompt: str) -> list[Message]:
    """Return what is sent to a judge for one prompt of the user's."""
    return prompt.messages if isinstance(prompt, JudgePrompt) else [Message("user", prompt)]
