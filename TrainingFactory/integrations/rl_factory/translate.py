"""From the overrides of a launch script of RL-Factory to a config of ours, with a comment for all that has no place."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.common.texts import holds_secret
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import ConfigLoader
from TrainingFactory.integrations.rl_factory import keys
from TrainingFactory.integrations.rl_factory.keys import BY_HAND, NONE, NOT_NEEDED
from TrainingFactory.integrations.rl_factory.launch_script import HIDDEN, LaunchScript
from TrainingFactory.tools.mcp.config import read_config

WHOLE = "actor_rollout_ref."


class Translation:
    """`sections` is the config; `notes` has a line for each override that is not in it, and for what is to be done."""

    def __init__(self, script: LaunchScript) -> None:
        self.script, self.folder = script, Path(script.path).parent
        self.sections: dict[str, Any] = {}
        self.notes: list[str] = []
        self._left: dict[str, Any] = {}  # what is not put anywhere yet
        for key, text in script.overrides.items():
            if hidden := HIDDEN.search(text):
                what = f"it depends on {hidden[1]}, which only the shell knows"
                self.notes.append(f"{key}: {BY_HAND}: {what}")
            else:
                self._left[key.removeprefix(WHOLE)] = _value(text)
        for key in [key for key, value in self._left.items() if value is None]:
            self._off(key)
        for step in (self._algorithm, self._data, self._loss, self._environment, self._judge, self._trainer):
            step()
        for key in [*self._left]:
            self._note(key, self._left[key], *keys.reason(key))
        self.notes += [f"{word}: {NOT_NEEDED}: it is no override" for word in script.other]

    def text(self) -> str:
        """Return it as YAML."""
        top = f"# Translated from {self.script.path}. Not taken over, with the reason, are the lines at the end.\n"
        end = "".join(f"# {' '.join(note.split())}\n" for note in self.notes)
        ordered = {name: self.sections[name] for name in TrainingConfig.model_fields if name in self.sections}
        return f"{top}{yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)}{end}"

    def _take(self, key: str, default: Any = None) -> Any:
        """Return a value and count it as used; one that switches something off there is told."""
        value = self._left.get(key, default)
        if key in self._left and (not value or value == -1):
            self._off(key)
            return default
        self._left.pop(key, None)
        return value

    def _off(self, key: str) -> None:
        value = self._left.pop(key)
        self._note(key, value, NOT_NEEDED, "it is off there, and here the default of ours holds")

    def _count(self, key: str, default: int = 0) -> int:
        found = self._take(key, default)
        if not isinstance(found, int):
            raise ValueError(f"{self.script.path}: {key} is {found!r}; it must be a whole number")
        return found

    def _put(self, key: str, value: Any) -> None:
        section, _, name = key.replace("@", self.algorithm).partition(".")
        self.sections.setdefault(section, {})[name] = value

    def _note(self, key: str, value: Any, kind: str, why: str) -> None:
        whole = f"{WHOLE}{key}"
        value = "***" if holds_secret(key.rsplit(".", 1)[-1].lower(), str(value)) else value
        self.notes.append(f"{whole if whole in self.script.overrides else key}={value}: {kind}: {why}")

    def _algorithm(self) -> None:
        named = str(self._take("algorithm.adv_estimator", "gae"))  # verl's default
        self.algorithm, advantage = keys.ESTIMATORS.get(named, ("grpo", ""))
        self._put("training.algorithm", self.algorithm)
        if named not in keys.ESTIMATORS:
            known = ", ".join(keys.ESTIMATORS)
            self._note("algorithm.adv_estimator", named, NONE, f"grpo is taken; known are {known}")
        if advantage == "group":
            self.sections["grpo"] = {"scale_rewards": True, "clip_high": 0.2}  # as there by default
        elif advantage:
            self._put("grpo.advantage", advantage)
        if any(keys.THEIR_CONFIG in word for word in self.script.other):
            self._left = keys.DEFAULTS | self._left
        for key, ours in {**keys.SAME, **keys.ONLY[self.algorithm]}.items():
            if key in self._left:
                self._put(ours, self._left.pop(key))
        if rank := self._take("model.lora_rank"):
            self._put("lora.enabled", True)
            self._put("lora.r", rank)

    def _data(self) -> None:
        for key, ours in {"data.train_files": "data.tasks", "data.val_files": "data.heldout"}.items():
            if files := self._take(key):
                first, *more = files if isinstance(files, list) else [files]
                self._put(ours, first)
                if more:
                    self._note(key, more, BY_HAND, "there is one file; put the rows of all of them together")
        response = self._count("data.max_response_length")
        if response:
            self._put("sampling.max_tokens", response)
        if prompt := self._count("data.max_prompt_length"):
            self._put("model.max_length", prompt + (response or 512))  # verl's default
        size, part = self.sections["training"].get("batch_size"), self._count("actor.ppo_mini_batch_size")
        if part > 0 and isinstance(size, int) and size % part == 0:
            self._put("training.minibatches", size // part)
        elif part:
            self._note("actor.ppo_mini_batch_size", part, BY_HAND, f"it does not divide the batch of {size}")

    def _loss(self) -> None:
        by_loss = self._take("actor.use_kl_loss")
        if by_loss:
            self._put("@.kl", self._left.pop("actor.kl_loss_coef", 0.001))  # verl's default
        elif self.algorithm == "ppo" and self._take("algorithm.use_kl_in_reward"):
            self._put("ppo.kl_in", "reward")
            self._put("ppo.kl", self._left.pop("algorithm.kl_ctrl.kl_coef", 0.001))
        for key, (ours, names) in keys.RENAMED.items():
            if key not in self._left or (key.startswith("actor.kl") and not by_loss):
                continue
            value = self._left.pop(key)
            if value in names and (self.algorithm == "grpo" or not ours.startswith("grpo")):
                self._put(ours, names[value])
            else:
                self._note(key, value, NONE, f"{ours.replace('@', self.algorithm)} knows {', '.join(names)}")
        if self.sections.get("grpo", {}).get("ratio") == "sequence":
            self._put("grpo.normalization", "sequence")
        if clip := self._take("actor.clip_ratio"):  # of ppo it is taken already
            self._put("grpo.clip_low", clip)
            self._put("grpo.clip_high", clip)

    def _environment(self) -> None:
        if name := self._take("env.name"):
            places = (f"{name}.py", f"envs/{name}.py")
            there = next((place for place in places if (self.folder / place).is_file()), None)
            if name == "search" and there is None:  # what theirs rewards
                self.sections["reward"] = {"type": "rule_based", "options": {"rule": "em", "extract": "tag"}}
                self._note("env.name", name, NOT_NEEDED, "its reward is the rule em over <answer> tags")
            else:
                steps = bool(self._left.pop("env.use_process_reward", False))
                self._put("environment.environment_id", there or places[0])
                self._put("environment.options", {"use_process_reward": steps})
                text = "must have your Env, imported from TrainingFactory.integrations.rl_factory"
                self._note("env.name", name, BY_HAND, f"{there or places[0]} {text}")
        if path := self._take("env.config_path"):
            self.sections["tools"] = self._tools(str(path))

    def _tools(self, path: str) -> list[dict[str, str]]:
        try:
            servers, names = read_config(path if Path(path).is_file() else self.folder / path)
        except ValueError:
            why = "it cannot be read from here; name its servers in `tools`"
            self._note("env.config_path", path, BY_HAND, why)
            return [{"name": "tools", "config": path}]
        return [{"name": name, "config": path} for name in (*(each.name for each in servers), *names)]

    def _judge(self) -> None:
        if not self._take("reward_rollout.if_use_reward_rollout"):
            for key in [key for key in self._left if key.startswith("reward_rollout.")]:
                self._note(key, self._left.pop(key), NOT_NEEDED, "the script uses no judge")
            return
        judge: dict[str, Any] = {"model": self._take("reward_rollout.rollout.model_name", "NAME")}
        if (gpus := self._count("reward_rollout.rollout.tensor_model_parallel_size", 1)) > 1:
            judge |= {"engine": "vllm", "gpus": gpus}
        self.sections["reward"] = {"type": "model_judge", "judge": judge}
        if limit := self._take("reward_rollout.rollout.response_length"):
            self.sections["reward"]["options"] = {"options": {"max_tokens": limit}}

    def _trainer(self) -> None:
        loggers = self._take("trainer.logger", [])
        loggers = loggers if isinstance(loggers, list) else [loggers]
        if trackers := [name for name in loggers if name in keys.TRACKERS]:
            self._put("logging.trackers", trackers)
        if others := [name for name in loggers if name not in keys.TRACKERS]:
            text = f"steps are always printed; trackers are {', '.join(keys.TRACKERS)}"
            self._note("trainer.logger", others, NONE, text)
        if "wandb" in trackers and (project := self._take("trainer.project_name")):
            self._put("logging.wandb", {"project": str(project)})
        if every := self._count("trainer.save_freq"):
            self._put("logging.checkpoint_every", every)
        if "heldout" in self.sections.get("data", {}) and (every := self._count("trainer.test_freq")):
            self._put("training.eval_every", every)
        machines = [key for key in ("trainer.n_gpus_per_node", "trainer.nnodes") if key in self._left]
        if machines:
            self._put("compute.num_gpus", prod(self._count(key, 1) for key in machines))
        if self._left.get("rollout.mode") == "async":
            self._put("optimization.async_rollout", bool(self._left.pop("rollout.mode")))


def _value(text: str) -> Any:
    """Read a value as Hydra does, as far as that is YAML."""
    try:
        return yaml.load(text, ConfigLoader)  # a SafeLoader
    except yaml.YAMLError:
        return text
