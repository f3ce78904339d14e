"""RL-Factory's base class `Env` for environments, implemented on TrainingFactory's runs."""

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
    READ_REPLY,
    RULES,
    SCORE,
    STEP,
    STEPS,
    DataItem,
)
from TrainingFactory.integrations.rl_factory.episode import EnvEpisode, JudgedEpisode
from TrainingFactory.integrations.rl_factory.tool_manager import EpisodeTools
from TrainingFactory.rewards.adapt import as_finite

VERIFY, ONE_PROMPT = "verify_tool", "_get_single_prompt_str"
SWITCH_METHODS = {"use_verify_tool": VERIFY, "use_process_reward": STEPS}
METHODS = (RULES, STEPS, VERIFY, PROMPTS, ONE_PROMPT, READ_REPLY, STEP, SCORE, JUDGE_SCORE, "_process_data")
# RL-Factory's `env` options that our config sets elsewhere.
REPLACEMENT_KEYS = {
    "name": "environment.environment_id=FILE.py:NAME",
    "config_path": "tools=[{name: ..., config: FILE.pydata}]",
    "mcp_mode": "the transport of each server in the mcpServers file",
    **dict.fromkeys(("tool_manager", "model_type"), "model.family"),
    "enable_thinking": "model.thinking",
    "tool_name_selected": "the names in tools",
}


class EnvOptions(dict[str, Any]):
    """Options of an environment, readable as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            names = ", ".join(self) or "none"
            raise AttributeError(f"environment.options has no {name!r}. Available: {names}") from None


class Env(ForeignEnvironment):
    """Base class of a user's environment. A run has one object; every episode gets a shallow copy, so attributes that a
    method sets on `self` belong to the episode.

    The run calls the methods that a subclass overrides. If `use_verify_tool` or `use_process_reward` is false, it does
    not call the method that belongs to this switch.
    """

    use_verify_tool: bool | None = None  # None: on if the subclass overrides the method
    use_process_reward: bool | None = None
    verify_timeout = tool_timeout = 30.0  # seconds
    max_prompt_length: int | None = None  # accepted and ignored: the judge's own limit applies
    _tools: EpisodeTools | None = None

    def __init__(self, config: Mapping[str, Any] | None = None, centralized_actor: Any = None) -> None:
        self.config = EnvOptions(config or {})
        if centralized_actor is not None:
            raise ValueError("centralized_actor is not supported: the run itself calls the tools. Remove it.")
        for key, replacement in REPLACEMENT_KEYS.items():
            if self.config.get(key) is not None:
                raise ValueError(f"environment.options.{key} is not supported. Set instead: {replacement}")
        for key in ("use_process_reward", "verify_timeout", "tool_timeout", "max_prompt_length"):
            if key in self.config:
                setattr(self, key, self.config[key])

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        for arguments in ((EnvOptions(options),), (EnvOptions(options), None)):
            try:
                inspect.signature(cls).bind(*arguments)
            except TypeError:
                continue
            return cls(*arguments)
        raise ValueError(
            f"{cls.__name__}{inspect.signature(cls)} has an unknown signature. Use __init__(self, config) or "
            "__init__(self, config, centralized_actor=None)."
        )

    def as_environment(self) -> type[ToolEnvironment]:
        """Check the subclass and return the environment class of this run."""
        self._check_methods()
        base_class = JudgedEpisode if self._asks_judge else EnvEpisode
        environment: Any = type(type(self).__name__, (base_class,), {"env": self})
        return environment

    def overrides(self, method: str) -> bool:
        """Return whether the subclass overrides the method named `method`."""
        return getattr(type(self), method) is not getattr(Env, method)

    def accepts(self, method: str, **options: Any) -> bool:
        """Return whether a method accepts the base class's required arguments and the keywords `options`."""
        required = [parameter for parameter in _list_params(method) if parameter.default is parameter.empty]
        try:
            inspect.signature(getattr(self, method)).bind(*required, **options)
        except TypeError:
            return False
        return True

    @property
    def _asks_judge(self) -> bool:
        return any(map(self.overrides, (PROMPTS, ONE_PROMPT, JUDGE_SCORE)))

    def is_enabled(self, switch_name: str) -> bool:
        """Return whether the method that belongs to a switch, such as `use_verify_tool`, is called."""
        setting = getattr(self, switch_name)
        return self.overrides(SWITCH_METHODS[switch_name]) if setting is None else bool(setting)

    @property
    def tool_manager(self) -> EpisodeTools:
        """The tools of the current episode."""
        if self._tools is None:
            raise ValueError("self.tool_manager exists only during an episode. Use it in methods.")
        return self._tools

    @tool_manager.setter
    def tool_manager(self, value: Any) -> None:
        raise ValueError(
            f"{type(self).__name__} sets its own tool_manager ({type(value).__name__}), but the run itself calls the "
            "tools. To parse another format of tool calls, use register_family of TrainingFactory.models.families."
        )

    def _check_methods(self) -> None:
        name = type(self).__name__
        for method in dir(type(self)):  # a misspelled method would silently never be called
            if not hasattr(Env, method) and (closest_method := nearest(method, METHODS, 0.85)):
                raise ValueError(f"{name}.{method} is never called; did you mean {closest_method}?")
        for method in METHODS:
            if not self.accepts(method) and not (method == RULES and self.accepts(RULES, if_val=False)):
                parameters = ", ".join(["self", *(parameter.name for parameter in _list_params(method))])
                signature = inspect.signature(getattr(self, method))
                raise ValueError(
                    f"{name}.{method}{signature} has a wrong signature. Use {method}({parameters})."
                )
        for switch, method in SWITCH_METHODS.items():
            if self.is_enabled(switch) and not self.overrides(method):
                raise ValueError(f"{name}.{switch} is on, but {name} does not define {method}. Define it.")
        if self.overrides(READ_REPLY) and not self._asks_judge:
            raise ValueError(
                f"{name}.{READ_REPLY} reads judge replies, but no judge is asked. Define {ONE_PROMPT}"
            )
        if not (any(map(self.overrides, (RULES, STEPS, SCORE))) or self._asks_judge):
            raise ValueError(f"{name} computes no reward. Define {RULES}, {STEPS} or {ONE_PROMPT}.")

    # Methods for subclasses to override

    def verify_tool(self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
        """Verify the model's text; the caller stores the result in `ground_truth["verified_results"]`."""
        raise NotImplementedError

    def _compute_score_with_rules(self, data: Any, tokenizer: Any, if_val: bool = False) -> Any:
        """Return one list for each item of `data`. It holds only the outcome reward, or one reward for each turn."""
        return [[0.0] for _ in data]

    def get_step_reward(self, responses: Sequence[str], format_score: float = 0.1) -> Sequence[float]:
        """Return one reward for each text of a turn; NaN: no reward."""
        raise NotImplementedError

    def get_prompt_for_reward(self, reward_tokenizer: Any, data: Any) -> Any:
        """Return a list of judge prompts for each item of `data`: one for the episode, or one per turn."""
        input_names = ("data_source", "response_str", "ground_truth", "extra_info")
        prompts = []
        for item in data:
            inputs = self._process_data(item, reward_tokenizer)
            source, text, truth, extra = (inputs[name] for name in input_names)
            prompts.append([self._get_single_prompt_str(source, text, truth, extra, reward_tokenizer)])
        return prompts

    def _get_single_prompt_str(
        self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any, reward_tokenizer: Any
    ) -> str:
        """Return the judge prompt: a text, or the result of `reward_tokenizer.apply_chat_template`."""
        raise NotImplementedError

    def _compute_single_score_with_reward_rollout_wg(
        self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any
    ) -> float:
        """Return the score in the judge's reply `solution_str`."""
        raise NotImplementedError

    # Methods for subclasses to override or call

    def step(self, responses: Sequence[str], tokenizer: Any = None) -> tuple[list[Any], ...]:
        """Call the tools of each text. Return four lists with one entry per text: next_obs, dones, valid_action and
        is_tool."""
        actions, results = self.tool_manager.execute_actions(responses)
        dones = [action == "answer" for action in actions]
        render = self.tool_manager.get_prompt
        next_obs = ["" if is_done else render(result) for is_done, result in zip(dones, results, strict=True)]
        return next_obs, dones, [1] * len(dones), [int(not is_done) for is_done in dones]

    def compute_score(
        self, reward_rollout_wg: Any, reward_tokenizer: Any, tokenizer: Any, data: Any, if_val: bool = False,
        use_process_reward: bool = False,
    ) -> Any:  # fmt: skip
        """Return the judge's scores if there is a judge, else the step rewards followed by the scores of the rules."""
        if reward_rollout_wg is not None:
            return self._compute_score_with_reward_rollout_wg(reward_rollout_wg, reward_tokenizer, data)
        scores = self._compute_score_with_rules(data, tokenizer, if_val=if_val)
        if not use_process_reward or if_val:
            return scores
        columns = [item.batch["tool_use_scores"].tolist() for item in data]
        step_rewards = [[value for value in column if value == value] for column in columns]  # without NaN
        return [[*rewards, *score] for rewards, score in zip(step_rewards, scores, strict=True)]

    def _compute_score_with_reward_rollout_wg(
        self, reward_rollout_wg: Any, reward_tokenizer: Any, data: Any
    ) -> list[list[float]]:
        """Return the scores of the judge's replies for each item. A subclass's method reads the score from a reply;
        without one, the score is the judge's verdict."""
        scores = []
        for item, prompts in zip(data, self.get_prompt_for_reward(reward_tokenizer, data), strict=True):
            source, truth, extra = item.scoring_inputs
            method = self._compute_single_score_with_reward_rollout_wg
            parse = partial(_read_reply, method, source, truth, extra) if self.overrides(READ_REPLY) else None
            scores.append(reward_rollout_wg.score([prompts] if isinstance(prompts, str) else prompts, parse))
        return scores

    def _process_data(self, data_item: DataItem, tokenizer: Any) -> dict[str, Any]:
        """Return the texts of prompt and response, and the task's columns. The response has no tool output."""
        data_source, truth, extra_info = data_item.scoring_inputs
        return {
            "prompt_str": tokenizer.decode(data_item.batch["prompts"], skip_special_tokens=True),
            "response_str": "\n".join(data_item.decode_turns(tokenizer)),
            "ground_truth": truth,
            "data_source": data_source,
            "extra_info": extra_info,
        }


def _read_reply(method: Any, data_source: Any, truth: Any, extra_info: Any, reply: str) -> float:
    return as_finite(method(data_source, reply, truth, extra_info), READ_REPLY)


def _list_params(method: str) -> list[inspect.Parameter]:
    """Return the parameters of a method of `Env`, without `self`."""
    return [*inspect.signature(getattr(Env, method)).parameters.values()][1:]


class MMEnv(Env):
    """Unsupported: RL-Factory's environment with images."""

    def __init_subclass__(cls, **options: Any) -> None:
        raise ValueError(
            f"{cls.__name__} inherits from MMEnv, whose tools return images: images are not supported in environments "
            "of RL-Factory. Inherit from Env and return texts."
        )
