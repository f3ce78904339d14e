"""Playground conversations with a local model. A growing conversation keeps its sampled tokens; an edited one is
tokenized again."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from TrainingFactory.agent_api.conversations import Conversations, RequestNode
from TrainingFactory.agent_api.turns.responses import CHUNK_TOKENS
from TrainingFactory.apps.serving.served import ServedModel
from TrainingFactory.protocols import Environment
from TrainingFactory.types import Completion, Message, Trajectory, Turn
from TrainingFactory.web.play_conversation import JobArguments, PlayConversation, PlayedAnswer, make_config
from TrainingFactory.web.worker import ProgressCallback

MAX_KEPT_TURNS = 400  # maximum sampled turns of a conversation whose tokens are kept


class LocalConversation(PlayConversation):
    """A conversation with a model loaded in this process, with the sampled tokens of its turns."""

    def __init__(self, served_model: ServedModel, arguments: JobArguments) -> None:
        super().__init__(served_model.chat, make_config(arguments))
        self.served_model, self.conversations = served_model, Conversations(served_model.chat)

    def describe_model(self) -> JobArguments:
        sampling = self.config.sampling
        return {
            "max_length": self.served_model.sampler.max_length, "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }  # fmt: skip

    async def begin_answer(
        self, history: list[Message], arguments: JobArguments, report: ProgressCallback
    ) -> LocalAnswer:
        prompt_node = await asyncio.to_thread(self.conversations.make_node, list(history), self.tool_specs)
        return LocalAnswer(self, prompt_node, arguments, report)

    def finish_answer(self, answer: PlayedAnswer, history: list[Message]) -> JobArguments:
        assert isinstance(answer, LocalAnswer)
        prompt_node, messages = answer.prompt_node, list(history)
        turns, folding = answer.trajectory.turns, self.served_model.folding
        for turn in turns:
            node = RequestNode(turn, list(messages), prompt_node.tools, "")
            self.conversations.add_answer(node, turn.completion, turn.message, answer.session)
            messages += [turn.message, *turn.replies]
        self.conversations.answered_nodes[:-MAX_KEPT_TURNS] = []
        num_tokens = len(prompt_node.turn.prompt_ids) + sum(len(turn.completion.token_ids) for turn in turns)
        # `written`: "extended" if the earlier tokens were reused, else why not. `unfolded`: the fold limit that the
        # conversation exceeds.
        return {
            "written": prompt_node.prompt_reason, "tokens": num_tokens,
            "unfolded": folding.limit if folding is not None and num_tokens > folding.limit else None,
        }  # fmt: skip


class LocalAnswer(PlayedAnswer):
    """Answer of a local model to a rendered prompt; each sampled piece of a turn is reported at once."""

    def __init__(
        self, owner: LocalConversation, node: RequestNode, arguments: JobArguments, report: ProgressCallback
    ) -> None:
        model = owner.served_model
        rules = owner.make_episode_settings(replace(model.defaults, temperature=arguments["temperature"]))
        trajectory = Trajectory(owner.task, "play", prompt=node.messages, tools=node.tools)
        seed_of = owner.make_seed_function(arguments["seed"], node.messages)
        super().__init__(rules, trajectory, model.sampler.session(), model.sampler.max_length, seed_of)
        self.prompt_node = node
        self._max_tokens = arguments["max_tokens"]
        self.is_interruptible = False  # while sampling: the current piece is kept
        self.report_to(arguments, report)

    async def _render_first_prompt(self, environment: Environment) -> list[int]:
        return self.prompt_node.turn.prompt_ids

    async def _sample_completion(
        self, ids: list[int], turn_index: int, max_tokens: int | None = None
    ) -> Completion:
        """Sample a turn in pieces, which give the same tokens as one call, and report each piece."""
        reply, limit = Completion([], [], "length"), max(1, min(self._max_tokens, self.max_length - len(ids)))
        while reply.finish == "length" and len(reply.token_ids) < limit:
            params = replace(self.rules.params, max_tokens=min(CHUNK_TOKENS, limit - len(reply.token_ids)))
            self.rules = replace(self.rules, params=params)
            chunk = await super()._sample_completion(ids + reply.token_ids, turn_index)
            sampled_ids, logprobs = reply.token_ids + chunk.token_ids, reply.logprobs + chunk.logprobs
            reply = Completion(sampled_ids, logprobs, chunk.finish, chunk.policy_version)
            shown_ids = sampled_ids[:-1] if chunk.finish == "stop" else sampled_ids
            self.report({"text": self.rules.chat.decode(shown_ids).rstrip("\ufffd")})  # incomplete character
            if self.stop_file.exists():
                break
        return reply

    async def _step_environment(self, environment: Environment, turn: Turn) -> list[int]:
        for call in turn.message.tool_calls:
            call.id = f"call_{secrets.token_hex(6)}"  # unique in the whole conversation
        self.is_interruptible = True
        try:
            return await super()._step_environment(environment, turn)
        finally:
            self.is_interruptible = False
