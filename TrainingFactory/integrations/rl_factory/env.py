"""RL-Factory's `Env`: the class that its users inherit from, and what of it can be kept here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from TrainingFactory.common.options import nearest
from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.integrations.rl_factory.data import (
    JUDGE_SCORE,
    PROMPTS,
    READ,
    RULES,
    SCORE,
    STEP,
    STEPS,
    DataItem,
)
from TrainingFactory.integrations.rl_factory.episode import EnvEpisode, JudgedEpisode
from TrainingFactory.integrations.rl_factory.tool_manager import EpisodeTools
from TrainingFactory.rewards.adapt import as_float

VERIFY, ONE_PROMPT = "verify_tool", "_get_single_prompt_str"
SWITCHES = {"use_verify_tool": VERIFY, "use_process_reward": STEPS}
CALLED = (RULES, STEPS, VERIFY, PROMPTS, ONE_PROMPT, READ, STEP, SCORE, JUDGE_SCORE, "_process_data")
# Options of RL-Factory's `env` that are said elsewhere here.
ELSEWHERE = {
    "name": "environment.environment_id=FILE.py:NAME",
    "config_path": "tools=[{name: ..., config: FILE.pydata}]",
    "mcp_mode": "nothing: the file of the servers says it",
    **dict.fromkeys(("tool_manager", "model_type"), "model.family"),
    "enable_thinking": "model.thinking",
    "tool_name_selected": "the names in tools",
}


class Config(dict[str, Any]):
    """The options of an environment, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self) or "none"
            raise AttributeError(f"environment.options has no {name!r}; it has {known}") from None


class Env(ForeignEnvironment):
    """One object for a run; every episode works on a copy of it, so what a method leaves on `self` is the episode's.

    A method that a subclass writes is called, unless its switch says no: `use_verify_tool`, `use_process_reward`."""

    use_verify_tool: bool | None = None  # None: where its method is written
    use_process_reward: bool | None = None
    verify_timeout = tool_timeout = 30.0  # seconds
    max_prompt_length: int | None = None  # of a judge's prompt, in tokens; the judge's own limit holds
    _tools: EpisodeTools | None = None

    def __init__(self, config: Mapping[str, Any] | None = None, centralized_actor: Any = None) -> None:
        self.config = Config(config or {})
        if centralized_actor is not None:
            raise ValueError("centralized_actor: the run itself calls the tools; leave it out")
        for key, place in ELSEWHERE.items():
            if self.config.get(key) is not None:
                raise ValueError(f"environment.options.{key} is said elsewhere here: {place}")
        for key in ("use_process_reward", "verify_timeout", "tool_timeout", "max_prompt_length"):
            if key in self.config:
                setattr(self, key, self.config[key])

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        for given in ((Config(options),), (Config(options), None)):
            try:
                inspect.signature(cls).bind(*given)
            except TypeError:
                continue
            return cls(*given)
        raise ValueError(
            f"{cls.__name__}{inspect.signature(cls)} cannot be made: RL-Factory's is __init__(self, config) or "
            "__init__(self, config, centralized_actor=None)"
        )

    def as_environment(self) -> type[ToolEnvironment]:
        """Return the class of this run's environments, after a check of what the subclass has written."""
        self._check()
        kind = JudgedEpisode if self._asks_judge else EnvEpisode
        made: Any = type(type(self).__name__, (kind,), {"env": self})
        return made

    def writes(self, method: str) -> bool:
        """Tell whether a subclass has a method of its own."""
        return getattr(type(self), method) is not getattr(Env, method)

    def fits(self, method: str, **more: Any) -> bool:
        """Tell whether a method can be called with what ours needs, and `more`."""
        needs = [each for each in _parameters(method) if each.default is each.empty]
        try:
            inspect.signature(getattr(self, method)).bind(*needs, **more)
        except TypeError:
            return False
        return True

    @property
    def _asks_judge(self) -> bool:
        return any(map(self.writes, (PROMPTS, ONE_PROMPT, JUDGE_SCORE)))

    def uses(self, switch: str) -> bool:
        """Tell whether the method behind a switch is called."""
        given = getattr(self, switch)
        return self.writes(SWITCHES[switch]) if given is None else bool(given)

    @property
    def tool_manager(self) -> EpisodeTools:
        if self._tools is None:
            what = "self.tool_manager has the tools of an episode, and there is none yet"
            raise ValueError(f"{what}: use it in methods")
        return self._tools

    @tool_manager.setter
    def tool_manager(self, value: Any) -> None:
        raise ValueError(
            f"{type(self).__name__} sets a tool_manager of its own ({type(value).__name__}), and the run itself calls "
            "the tools; to read calls in a form of your own, register_family of TrainingFactory.models.families"
        )

    def _check(self) -> None:
        name = type(self).__name__
        for method in dir(type(self)):  # one that is nearly called so would never be called
            if not hasattr(Env, method) and (near := nearest(method, CALLED, 0.85)):
                raise ValueError(f"{name}.{method} is nobody's to call; did you mean {near}?")
        for method in CALLED:
            if not self.fits(method) and not (method == RULES and self.fits(RULES, if_val=False)):
                right = ", ".join(["self", *(each.name for each in _parameters(method))])
                given = inspect.signature(getattr(self, method))
                raise ValueError(
                    f"{name}.{method}{given} has another signature than RL-Factory's: {method}({right})"
                )
        for switch, method in SWITCHES.items():
            if self.uses(switch) and not self.writes(method):
                raise ValueError(f"{name}.{switch} is on, and {name} has no {method} of its own; write it")
        if self.writes(READ) and not self._asks_judge:
            told = f"{name}.{READ} reads what a judge replies, and nothing asks one; write {ONE_PROMPT}"
            raise ValueError(told)
        if not (any(map(self.writes, (RULES, STEPS, SCORE))) or self._asks_judge):
            raise ValueError(f"{name} scores nothing: write {RULES}, {STEPS} or {ONE_PROMPT}")

    # What a subclass writes

    def verify_tool(self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        """Check the model's text; what it returns is `ground_truth["verified_results"]` for the other methods."""
        raise NotImplementedError

    def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
        """Return one list for each item of `data`: the outcome alone, or one number for each turn."""
        return [[0.0] for _ in data]

    def get_step_reward(self, responses: Sequence[str], format_score: float = 0.1) -> Sequence[float]:
        """Return one number for each text of a turn; NaN is none."""
        raise NotImplementedError

    def get_prompt_for_reward(self, reward_tokenizer: Any, data: Any) -> Any:
        """Return a list of prompts for each item of `data`: one, or one for each turn."""
        names, prompts = ("data_source", "response_str", "ground_truth", "extra_info"), []
        for item in data:
            read = self._process_data(item, reward_tokenizer)
            source, text, truth, extra = (read[name] for name in names)
            prompts.append([self._get_single_prompt_str(source, text, truth, extra, reward_tokenizer)])
        return prompts

    def _get_single_prompt_str(
        self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any, reward_tokenizer: Any
    ) -> str:
        """Return the prompt for a judge, a text or what `reward_tokenizer.apply_chat_template` gives."""
        raise NotImplementedError

    def _compute_single_score_with_reward_rollout_wg(
        self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any
    ) -> float:
        """Read the judge's reply, which is `solution_str`."""
        raise NotImplementedError

    # What a subclass writes or calls

    def step(self, responses: Sequence[str], tokenizer: Any = None) -> tuple[list[Any], ...]:
        """Call the tools of each text; return for each what the model sees next, and whether it is done, valid and a
        call of tools."""
        actions, results = self.tool_manager.execute_actions(responses)
        done = [action == "answer" for action in actions]
        prompt = self.tool_manager.get_prompt
        seen = ["" if over else prompt(result) for over, result in zip(done, results, strict=True)]
        return seen, done, [1] * len(done), [int(not over) for over in done]

    def compute_score(
        self, reward_rollout_wg: Any, reward_tokenizer: Any, tokenizer: Any, data: Any, if_val: bool = False,
        use_process_reward: bool = False,
    ) -> Any:  # fmt: skip
        """Return what the judge says where there is one, else what the rules give, after the rewards of the steps."""
        if reward_rollout_wg is not None:
            return self._compute_score_with_reward_rollout_wg(reward_rollout_wg, reward_tokenizer, data)
        scores = self._compute_score_with_rules(data, tokenizer, if_val=if_val)
        if not use_process_reward or if_val:
            return scores
        steps = [
            [value for value in item.batch["tool_use_scores"].tolist() if value == value] for item in data
        ]
        return [[*earned, *score] for earned, score in zip(steps, scores, strict=True)]

    def _compute_score_with_reward_rollout_wg(
        self, reward_rollout_wg: Any, reward_tokenizer: Any, data: Any
    ) -> list[list[float]]:
        """Return for each item what the judge's replies are worth, read by the subclass or as the judge's verdict."""
        scores = []
        for item, prompts in zip(data, self.get_prompt_for_reward(reward_tokenizer, data), strict=True):
            source, truth, extra = item.about
            method = self._compute_single_score_with_reward_rollout_wg
            read = partial(_read_reply, method, source, truth, extra) if self.writes(READ) else None
            scores.append(reward_rollout_wg.score([prompts] if isinstance(prompts, str) else prompts, read))
        return scores

    def _process_data(self, data_item: DataItem, tokenizer: Any) -> dict[str, Any]:
        """Return the texts of prompt and response, and what is known of the task; the response is the model's alone."""
        source, truth, extra = data_item.about
        return {
            "prompt_str": tokenizer.decode(data_item.batch["prompts"], skip_special_tokens=True),
            "response_str": "\n".join(data_item.texts(tokenizer)),
            "ground_truth": truth,
            "data_source": source,
            "extra_info": extra,
        }


def _read_reply(method: Any, source: Any, truth: Any, extra: Any, reply: str) -> float:
    return as_float(method(source, reply, truth, extra), READ)


def _parameters(method: str) -> list[inspect.Parameter]:
    """Return what a method of RL-Factory's takes, besides the object."""
    return [*inspect.signature(getattr(Env, method)).parameters.values()][1:]


class MMEnv(Env):
    """RL-Factory's environment with images, which there is none of here."""

    def __init_subclass__(cls, **options: Any) -> None:
        raise ValueError(
            f"{cls.__name__} inherits from MMEnv: there are no conversations with images here; Env is for texts"
        )
