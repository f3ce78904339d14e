"""Servers of the real OpenEnv for tests: `python openenv_server.py guess|one|tools PORT` prints its port (0: any). Run
by the interpreter of the folder openenv of the servers."""

import random
import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

HIGHEST = 15


class Guess(Action):
    text: str


class Hint(Observation):
    text: str


class GuessEnvironment(Environment):
    """The model guesses a number from 1 to 15."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._guesses = 0

    def reset(self, seed=None, episode_id=None, **_):
        self._number = random.Random(f"openenv {seed}").randint(1, HIGHEST)
        self._guesses = 0
        return Hint(text=f"Guess a number from 1 to {HIGHEST}.")

    def step(self, action, timeout_s=None, **_):
        self._guesses += 1
        metadata = {"guesses": self._guesses}
        try:
            guess = int(action.text.split()[-1])
        except (ValueError, IndexError):
            return Hint(text="Answer with a number.", metadata=metadata)
        if guess == self._number:
            return Hint(text="Right.", done=True, reward=1.0, metadata=metadata)
        return Hint(text="Higher." if guess < self._number else "Lower.", metadata=metadata)

    @property
    def state(self):
        return State(step_count=self._guesses)


class OneGuess(GuessEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = False


class Shelf(MCPEnvironment):
    """The model reads and adds up prices with MCP tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("shelf")

        @server.tool
        def price(name: str) -> int:
            """Price of an article."""
            return self._prices[name]

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        self._prices = {"tea": random.Random(f"price {seed}").randint(1, 9)}
        return Observation(metadata={"articles": 1})

    def step(self, action, timeout_s=None, **_):
        return self._rewarded(super().step(action))

    async def step_async(self, action, timeout_s=None, **_):
        return self._rewarded(await super().step_async(action))

    def _rewarded(self, observation):
        if isinstance(observation, CallToolObservation) and observation.error is None:
            observation.reward, observation.done = 1.0, True
        return observation

    def _step_impl(self, action, timeout_s=None, **_):
        raise NotImplementedError

    @property
    def state(self):
        return State()


APPS = {
    "guess": (GuessEnvironment, Guess, Hint, 256),
    "one": (OneGuess, Guess, Hint, 1),
    "tools": (Shelf, CallToolAction, CallToolObservation, 64),
}


if __name__ == "__main__":
    environment, action, observation, sessions = APPS[sys.argv[1]]
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=sessions)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[2])))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
