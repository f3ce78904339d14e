"""Self-play: one policy plays both roles of a game. Each role is an episode of its own, with its own conversation,
tokens and reward; the roles take turns."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeGuard

from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.protocols import Episode
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.types import Message, Reward, Step, Task, ToolFailure


class SelfPlayEnvironment(ABC):
    """One game of two roles. The first of `roles` moves first. Every game gets a new instance, so keep state on `self`.

    ```python
    class Haggle(SelfPlayEnvironment):
        roles = ("buyer", "seller")

        @classmethod
        def tasks(cls, split, seed, count):
            yield Task(id="lamp", prompt="A lamp, worth 10 to the seller and 20 to the buyer.")

        def opening(self, role):
            return [Message("user", f"You are the {role}. {self.task.prompt} Write a price.")]

        def move(self, role, text):
            ...  # return what the other role reads, or None if the game is over

        def rewards(self):
            return {"buyer": 20 - self.price, "seller": self.price - 10}
    ```

    A turn without a tool call is a move. `role_tools` may give a role tools of its own. `forfeited` names the role
    whose message was cut at a length limit before the game was over."""

    roles: ClassVar[tuple[str, str]]
    forfeited: str | None = None

    def __init__(self, task: Task) -> None:
        self.task = task

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        """Generate `count` tasks of a split ("train" or "heldout"). The same seed must give the same tasks."""
        raise ValueError(f"{cls.__name__} generates no tasks; implement `tasks` or set data.tasks to a file")

    @abstractmethod
    def opening(self, role: str) -> Sequence[Message]:
        """Return the conversation before the role's first turn. The second role also reads the first role's move."""

    @abstractmethod
    def move(self, role: str, text: str) -> str | None:
        """Make a role's move. Return the text that the other role reads before its turn; None if the game is over."""

    @abstractmethod
    def rewards(self) -> Mapping[str, Reward | float]:
        """Return the reward of each role. The game is over, forfeited, or stopped at environment.max_turns."""

    def role_tools(self, role: str) -> Sequence[Any]:
        """Return the tools that this role may call."""
        return ()

    @property
    def tools(self) -> Sequence[Any]:
        """Return the tools of both roles, for checks before training."""
        tools_by_name: dict[str, Any] = {}
        for role in self.roles:
            tools_by_name |= {tool.spec.name: tool for tool in AsyncToolExecutor(self.role_tools(role)).tools}
        return list(tools_by_name.values())

    async def reset(self) -> list[Message]:
        raise ValueError(
            f"{type(self).__name__} is played by two roles: use it with tfactory train, eval or rollout"
        )

    async def close(self) -> None:  # noqa: B027 - games without resources need not define it
        """Release the resources of the game, after both roles have their rewards."""


class Match:
    """The state of a game between two episodes, and the role whose turn it is. The episode that starts first creates
    the game."""

    def __init__(self, game_class: type[SelfPlayEnvironment]) -> None:
        self._game_class = game_class
        self._game: SelfPlayEnvironment | None = None
        self._role_to_move = game_class.roles[0]
        self._pending_text = ""  # what the role to move reads
        self._turn_condition = asyncio.Condition()
        self._num_seats = len(game_class.roles)
        self.is_over = False
        self._failed_role: str | None = None  # role whose episode failed

    def create_seat(self, role: str, task: Task) -> RoleSeat:
        """Return the environment of a role. Create the game if it does not exist yet."""
        if self._game is None:
            self._game = self._game_class(task)
        return RoleSeat(task, self, role)

    @property
    def game(self) -> SelfPlayEnvironment:
        assert self._game is not None
        return self._game

    async def wait_for_turn(self, role: str) -> str | None:
        """Wait until it is the role's turn. Return the text that the role reads before its move; None if the game is
        over."""
        async with self._turn_condition:
            await self._turn_condition.wait_for(lambda: self.is_over or self._role_to_move == role)
        if self._failed_role is not None:
            raise ToolFailure(f"the episode of the other role, {self._failed_role}, failed")
        return None if self.is_over else self._pending_text

    async def move(self, role: str, text: str) -> None:
        if self.is_over:  # the other role's episode has ended
            return
        reply = self.game.move(role, text)
        if reply is None:
            await self.end_game()
            return
        if not isinstance(reply, str):
            raise TypeError(f"{type(self.game).__name__}.move must return a text or None, not {reply!r:.60}")
        first_role, second_role = self.game.roles
        self._role_to_move, self._pending_text = second_role if role == first_role else first_role, reply
        async with self._turn_condition:
            self._turn_condition.notify_all()

    async def end_game(self, *, forfeited_role: str | None = None, failed_role: str | None = None) -> None:
        """End the game, unless it is over."""
        if not self.is_over:
            self.is_over, self._failed_role, self.game.forfeited = True, failed_role, forfeited_role
        async with self._turn_condition:
            self._turn_condition.notify_all()

    async def leave(self, role: str) -> None:
        """Leave the game. This ends it, because the other episode cannot continue alone. The last episode to leave
        closes it."""
        await self.end_game(failed_role=role)
        self._num_seats -= 1
        if not self._num_seats:
            await self.game.close()


class RoleSeat(ToolEnvironment):
    """Environment of one role's episode in a match."""

    fork = None

    def __init__(self, task: Task, match: Match, role: str) -> None:
        super().__init__(task, match.game.role_tools(role))
        self._match, self.role = match, role

    async def reset(self) -> list[Message]:
        reply = await self._match.wait_for_turn(self.role)
        if reply is None:
            raise ValueError(f"the game was over before the first turn of {self.role}")
        messages = list(self._match.game.opening(self.role))
        if not reply:
            return messages
        if messages and messages[-1].role == "user":  # many templates reject two user messages in a row
            return [*messages[:-1], replace(messages[-1], content=f"{messages[-1].content}\n\n{reply}")]
        return [*messages, Message("user", reply)]

    async def step(self, message: Message) -> Step:
        if message.tool_calls:
            return await super().step(message)
        await self._match.move(self.role, message.content)
        reply = await self._match.wait_for_turn(self.role)
        return Step(done=True) if reply is None else Step([Message("user", reply)])

    async def reward(self, episode: Episode) -> Reward | float:
        """End the game, because the other role may still wait for a move that this episode can no longer make. Return
        the role's reward."""
        is_truncated = episode.trajectory.status == "truncated"
        await self._match.end_game(forfeited_role=self.role if is_truncated else None)
        rewards = self._match.game.rewards()
        if self.role not in rewards:
            raise ValueError(f"{type(self._match.game).__name__}.rewards has no reward for {self.role}")
        return rewards[self.role]

    async def close(self) -> None:
        await self._match.leave(self.role)


def is_self_play(environment: Any) -> TypeGuard[type[SelfPlayEnvironment]]:
    return isinstance(environment, type) and issubclass(environment, SelfPlayEnvironment)
