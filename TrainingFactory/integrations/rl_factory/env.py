"""RL-Factory's `Env`: the class that its users inherit from, and what of it can be kept here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Self

from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.integrations.rl_factory.data import DataItem
from TrainingFactory.integrations.rl_factory.episode import EnvEpisode, JudgedEpisode, takes_if_val
from TrainingFactory.integrations.rl_factory.tool_manager import EpisodeTools

RULES, STEPS, VERIFY = "_compute_score_with_rules", "get_step_reward", "verify_tool"
PROMPTS, ONE_PROMPT = "get_prompt_for_reward", "_get_single_prompt_str"
READ = "_compute_single_score_with_reward_rollout_wg"
# How each method is called; the first also with `if_val`, which older tutorials do not have.
TAKES = {
    RULES: ("data", "tokenizer"),
    STEPS: ("responses",),
    VERIFY: ("data_source", "solution_str", "ground_truth", "extra_info"),
    PROMPTS: ("reward_tokenizer", "data"),
    ONE_PROMPT: ("data_source", "solution_str", "ground_truth", "extra_info", "reward_tokenizer"),
    READ: ("data_source", "solution_str", "ground_truth", "extra_info"),
    "_process_data": ("data_item", "tokenizer"),
}
# What only works inside RL-Factory's own loop -> what to write instead.
REFUSED = {
    "step": "the run itself calls the tools; an environment with a step of its own inherits from ToolEnvironment",
    "compute_score": f"rules, steps and judge are added up here; write {RULES}, {STEPS} or {ONE_PROMPT}",
    "_compute_score_with_reward_rollout_wg": "there is no worker group to generate with: a judge answers at an "
    f"endpoint (reward.type=model_judge); write {ONE_PROMPT} and, to read its reply, {READ}",
    "get_step_reward_with_tool": f"write {STEPS}",
}
# Options of RL-Factory's `env` that are said elsewhere here.
ELSEWHERE = {
    "name": "environment.environment_id=FILE.py:NAME",
    "config_path": "tools=[{name: ..., config: FILE.pydata}]",
    "mcp_mode": "nothing: the file of the servers says it",
    "tool_manager": "model.family",
    "model_type": "model.family",
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

    use_verify_tool: bool | None = None  # None: where verify_tool is written
    use_process_reward: bool | None = None  # None: where get_step_reward is written
    verify_timeout: float = 30.0  # seconds
    tool_timeout: float = 30.0  # seconds
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
        parameters = list(inspect.signature(cls).parameters.values())
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = sum(each.default is each.empty and each.kind not in several for each in parameters)
        if not parameters or needed > 2:
            raise ValueError(
                f"{cls.__name__}{inspect.signature(cls)} cannot be made: RL-Factory's is __init__(self, config) or "
                "__init__(self, config, centralized_actor=None)"
            )
        return cls(Config(options), *[None] * (needed - 1))

    def as_environment(self) -> type[ToolEnvironment]:
        """Return the class of this run's environments, after a check of what the subclass has written."""
        self._check()
        kind = JudgedEpisode if self.writes(PROMPTS) or self.writes(ONE_PROMPT) else EnvEpisode
        made: Any = type(type(self).__name__, (kind,), {"env": self})
        return made

    def writes(self, method: str) -> bool:
        """Tell whether a subclass has a method of its own."""
        return getattr(type(self), method) is not getattr(Env, method)

    @property
    def verifies(self) -> bool:
        return self.writes(VERIFY) if self.use_verify_tool is None else bool(self.use_verify_tool)

    @property
    def rewards_steps(self) -> bool:
        return self.writes(STEPS) if self.use_process_reward is None else bool(self.use_process_reward)

    @property
    def scores(self) -> bool:
        """Tell whether it has a reward of its own, beside what it asks a judge."""
        return self.writes(RULES) or self.rewards_steps

    @property
    def tool_manager(self) -> EpisodeTools:
        if self._tools is None:
            raise ValueError(
                "self.tool_manager has the tools of an episode, and there is none yet: use it in methods"
            )
        return self._tools

    @tool_manager.setter
    def tool_manager(self, value: Any) -> None:
        raise ValueError(
            f"{type(self).__name__} sets a tool_manager of its own ({type(value).__name__}), and the run itself calls "
            "the tools; to read calls in a form of your own, register_family of TrainingFactory.models.families"
        )

    def _check(self) -> None:
        name = type(self).__name__
        for method, instead in REFUSED.items():
            if hasattr(type(self), method):
                raise ValueError(f"{name}.{method} cannot be honoured: {instead}")
        for method, names in TAKES.items():
            signature = inspect.signature(getattr(self, method))
            try:
                signature.bind(
                    *names, **({"if_val": False} if method == RULES and takes_if_val(signature) else {})
                )
            except TypeError:
                right = ", ".join((*names, "if_val=False") if method == RULES else names)
                raise ValueError(
                    f"{name}.{method}{signature} has another signature than RL-Factory's: {method}(self, {right})"
                ) from None
        switches = {VERIFY: self.verifies, STEPS: self.rewards_steps}
        for method, on in switches.items():
            if on and not self.writes(method):
                switch = "use_verify_tool" if method == VERIFY else "use_process_reward"
                raise ValueError(f"{name}.{switch} is on, and {name} has no {method} of its own; write it")
        if self.writes(READ) and not (self.writes(PROMPTS) or self.writes(ONE_PROMPT)):
            raise ValueError(
                f"{name}.{READ} reads what a judge replies, and nothing asks one; write {ONE_PROMPT}"
            )
        if not any(map(self.writes, (RULES, STEPS, PROMPTS, ONE_PROMPT))):
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
        prompts = []
        for item in data:
            read = self._process_data(item, reward_tokenizer)
            given = {key: read[key] for key in ("data_source", "ground_truth", "extra_info")}
            prompts.append(
                [
                    self._get_single_prompt_str(
                        solution_str=read["response_str"], reward_tokenizer=reward_tokenizer, **given
                    )
                ]
            )
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

    # What a subclass calls

    def _process_data(self, data_item: DataItem, tokenizer: Any) -> dict[str, Any]:
        """Return the texts of prompt and response, and what is known of the task; the response is the model's alone."""
        columns = data_item.non_tensor_batch
        return {
            "prompt_str": tokenizer.decode(data_item.batch["prompts"], skip_special_tokens=True),
            "response_str": data_item.text(tokenizer),
            "ground_truth": data_item.ground_truth,
            "data_source": columns["data_source"],
            "extra_info": columns["extra_info"],
        }


class MMEnv(Env):
    """RL-Factory's environment with images, which there is none of here."""

    def __init_subclass__(cls, **options: Any) -> None:
        raise ValueError(
            f"{cls.__name__} inherits from MMEnv: there are no conversations with images here; Env is for texts"
        )
