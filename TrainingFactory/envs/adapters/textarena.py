"""Games of TextArena: `textarena:GuessTheNumber-v0`. The model is one player and answers with text; in games for
several players, the others take random legal actions."""

import contextlib
import importlib
import random
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

REQUIREMENTS = ["textarena==0.7.4"]
MAX_TASKS = 2**31 - 1
MAX_OPPONENT_TURNS = 1000  # between two turns of the model
ACTIONS_PATTERN = re.compile(r"(?:available|valid|legal) (?:moves|actions)[^\[]*((?:\W*\[[^\]\n]+\])+)", re.I)
RANDOM_LOCK = threading.Lock()  # the games draw from the module `random`


class Adapter:
    """Adapter of one game. `args` are the arguments of `textarena.make`, and `players`, `player` (number of the model's
    player) and `opponent`: a list of actions from which the others draw, unless the game lists the legal ones."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self.textarena: Any = importlib.import_module("textarena")
        registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if name not in registry:
            games = [game for game in registry if game.startswith(name.split("-")[0])]
            raise ValueError(f"unknown game textarena:{name} (known: {', '.join(sorted(games or registry))})")
        self.name = name
        # The default wrappers repeat the whole conversation in every observation.
        self.raw_name = f"{name}-raw" if f"{name}-raw" in registry else name
        wrappers = (registry[name].default_wrappers or []) if self.raw_name != name else []
        self.wrappers = [wrapper for wrapper in wrappers if issubclass(wrapper, self.textarena.ActionWrapper)]
        self.arguments = dict(args)
        self.player_id = int(self.arguments.pop("player", 0))
        self.opponent_actions = list(self.arguments.pop("opponent", []))
        players = self.arguments.pop("players", None)
        player_counts = [1, 2, 3, 4, 5, 6] if players is None else [int(players)]
        self.num_players = next((n for n in player_counts if self._is_playable(n, player_counts[-1])), 0)
        if not self.player_id < self.num_players:
            raise ValueError(
                f"environment.options.args.player is {self.player_id} of {self.num_players} players"
            )

    def make_game(self) -> Any:
        try:
            environment = self.textarena.make(self.raw_name, **self.arguments)
            for wrapper in self.wrappers:
                environment = wrapper(environment)
            return environment
        except LookupError as error:
            nltk_folder = f"{sys.prefix}/nltk_data"
            raise ValueError(
                f"textarena:{self.name} needs data of NLTK: {_get_first_line(error)}. Download it: "
                f"{sys.executable} -m nltk.downloader -d {nltk_folder} words averaged_perceptron_tagger_eng"
            ) from error
        except (TypeError, ImportError) as error:
            raise ValueError(f"textarena:{self.name}: {error}") from error

    def _is_playable(self, num_players: int, max_players: int) -> bool:
        environment = self.make_game()
        try:
            environment.reset(num_players=num_players, seed=0)
            return True
        except Exception as error:
            if num_players == max_players:
                raise ValueError(f"textarena:{self.name}: {type(error).__name__}: {error}") from error
            return False

    def describe(self) -> dict[str, Any]:
        return {"actions": "text"}

    def tasks(self, split: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
        """Yield tasks, each with its own seed. The splits have different seeds."""
        first_seed = (2 * seed + (split == "heldout")) * 2**20
        for index in range(count):
            task_seed = (first_seed + index) % MAX_TASKS
            yield {"id": f"{self.name}-{task_seed}", "metadata": {"seed": task_seed}}

    def reset(self, task: dict[str, Any], seed: int) -> "Episode":
        return Episode(self, task.get("metadata", {}).get("seed", seed))


class Episode:
    def __init__(self, adapter: Adapter, seed: int) -> None:
        self._adapter = adapter
        self._opponent_rng = random.Random(f"opponent {seed}")
        self._random_state: Any = random.Random(seed).getstate()
        self._is_done = False
        with self._isolate_random():
            self._environment = adapter.make_game()
            self._environment.reset(num_players=adapter.num_players, seed=seed)
            observation = self._play_opponents()
        self.messages = [{"role": "user", "content": observation}]

    @contextlib.contextmanager
    def _isolate_random(self) -> Iterator[None]:
        """Use the game's own state of Python's `random` inside the block, so that other episodes do not change the
        game's draws."""
        with RANDOM_LOCK:
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._isolate_random():
            self._is_done, _ = self._environment.step(message["content"])
            observation = self._play_opponents()
        if not self._is_done:
            return {"messages": [{"role": "user", "content": observation}], "done": False}
        rewards, infos = self._environment.close()
        reward = float((rewards or {}).get(self._adapter.player_id, 0.0))
        player_info = (infos or {}).get(self._adapter.player_id, {})
        is_invalid = bool(player_info.get("invalid_move"))
        content = "\n".join(filter(None, [observation, str(player_info.get("reason") or "")]))
        return {
            "messages": [{"role": "user", "content": content}] if content else [],
            "done": True,
            "reward": reward,
            "stop_reason": "invalid move" if is_invalid else _describe_outcome(reward),
            "metrics": {"invalid_move": int(is_invalid), "turns": player_info.get("turn_count", 0)},
        }

    def _play_opponents(self) -> str:
        """Play the other players' turns. Return the text that the model's player has received since its last turn."""
        for _ in range(MAX_OPPONENT_TURNS):
            player_id = self._environment.state.current_player_id
            if self._is_done or player_id == self._adapter.player_id:
                return self._read_messages(self._adapter.player_id)
            text = self._read_messages(player_id)
            self._is_done, _ = self._environment.step(self._opponent_rng.choice(self._list_actions(text)))
        raise ValueError(f"the other players took {MAX_OPPONENT_TURNS} turns")

    def _list_actions(self, observation: str) -> list[str]:
        if action_lists := ACTIONS_PATTERN.findall(observation):
            return re.findall(r"\[[^\]\n]+\]", action_lists[-1])
        if self._adapter.opponent_actions:
            return self._adapter.opponent_actions
        raise ValueError(
            f"textarena:{self._adapter.name} does not list legal actions; name those of the other players: "
            "environment.options.args.opponent=[ACTION, ...]"
        )

    def _read_messages(self, player_id: int) -> str:
        """Return the messages that the player has received since the last call, without its own actions."""
        state = self._environment.state
        if player_id == state.current_player_id:
            _, observation = self._environment.get_observation()
        else:  # the game ended in another player's turn
            observation, state.observations[player_id] = state.observations[player_id], []
        if isinstance(observation, str):
            return observation
        lines = []
        for sender, text, _ in observation:
            if sender == self.game_id:
                lines.append(text)
            elif sender != player_id:
                lines.append(f"[{state.role_mapping.get(sender, f'Player {sender}')}] {text}")
        return "\n".join(lines)

    @property
    def game_id(self) -> int:
        return self._adapter.textarena.GAME_ID

    def score(self) -> dict[str, Any]:
        """Return an outcome of 0, because the last step has the whole reward. So an unfinished game earns 0."""
        return {"reward": 0.0}


def _describe_outcome(reward: float) -> str:
    return "won" if reward >= 1 else "lost" if reward <= -1 else "finished"


def _get_first_line(error: Exception) -> str:
    return next((line.strip(" *.") for line in str(error).split("\n") if line.strip(" *.")), "unknown data")
