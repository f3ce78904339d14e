"""Translation of an RL-Factory launch script to a config, with comments for everything that has no counterpart."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.common.texts import holds_secret
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import ConfigLoader
from TrainingFactory.integrations.rl_factory import keys
from TrainingFactory.integrations.rl_factory.keys import BY_HAND, NO_COUNTERPART, NOT_NEEDED
from TrainingFactory.integrations.rl_factory.launch_script import SHELL_ONLY, LaunchScript
from TrainingFactory.tools.mcp.config import read_config

KEY_PREFIX = "actor_rollout_ref."


class Translation:
    """Config (`sections`) of a translated script, and `notes` on overrides to translate by hand or drop."""

    def __init__(self, script: LaunchScript) -> None:
        self.script, self.folder = script, Path(script.path).parent
        self.sections: dict[str, Any] = {}
        self.notes: list[str] = []
        self._overrides: dict[str, Any] = {}  # overrides that are not translated yet
        for key, text in script.overrides.items():
            if shell_syntax := SHELL_ONLY.search(text):
                self.notes.append(
                    f"{key}: {BY_HAND}: it depends on {shell_syntax[1]}, which only the shell knows"
                )
            else:
                self._overrides[key.removeprefix(KEY_PREFIX)] = _parse_value(text)
        for key in [key for key, value in self._overrides.items() if value is None]:
            self._skip_disabled(key)
        self._translate_algorithm()
        self._translate_data()
        self._translate_loss()
        self._translate_environment()
        self._translate_judge()
        self._translate_trainer()
        for key in [*self._overrides]:
            self._note(key, self._overrides[key], *keys.find_reason(key))
        self.notes += [f"{argument}: {NOT_NEEDED}: it is not an override" for argument in script.extras]

    def text(self) -> str:
        """Return the config as YAML, with the notes as comments at its end."""
        header = f"# Translated from {self.script.path}. Comments at the end list what was not translated, and why.\n"
        footer = "".join(f"# {' '.join(note.split())}\n" for note in self.notes)
        sections = {
            name: self.sections[name] for name in TrainingConfig.model_fields if name in self.sections
        }
        return f"{header}{yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)}{footer}"

    def _pop_override(self, key: str, default: Any = None) -> Any:
        """Remove an override from the remaining ones and return its value. If the value disables its feature, add a
        note and return `default`."""
        value = self._overrides.get(key, default)
        if key in self._overrides and (not value or value == -1):
            self._skip_disabled(key)
            return default
        self._overrides.pop(key, None)
        return value

    def _skip_disabled(self, key: str) -> None:
        value = self._overrides.pop(key)
        self._note(key, value, NOT_NEEDED, "it is off in the script, and our default applies")

    def _pop_int(self, key: str, default: int = 0) -> int:
        value = self._pop_override(key, default)
        if not isinstance(value, int):
            raise ValueError(f"{self.script.path}: {key} is {value!r}; it must be an integer")
        return value

    def _set_key(self, key: str, value: Any) -> None:
        section, _, name = key.replace("@", self.algorithm).partition(".")
        self.sections.setdefault(section, {})[name] = value

    def _note(self, key: str, value: Any, status: str, reason: str) -> None:
        value = "***" if holds_secret(key.rsplit(".", 1)[-1].lower(), str(value)) else value
        prefix = KEY_PREFIX if f"{KEY_PREFIX}{key}" in self.script.overrides else ""
        self.notes.append(f"{prefix}{key}={value}: {status}: {reason}")

    def _translate_algorithm(self) -> None:
        estimator = str(self._pop_override("algorithm.adv_estimator", "gae"))  # verl's default
        self.algorithm, advantage_name = keys.ALGORITHM_BY_ESTIMATOR.get(estimator, ("grpo", ""))
        self._set_key("training.algorithm", self.algorithm)
        if estimator not in keys.ALGORITHM_BY_ESTIMATOR:
            reason = f"grpo is used instead; known: {', '.join(keys.ALGORITHM_BY_ESTIMATOR)}"
            self._note("algorithm.adv_estimator", estimator, NO_COUNTERPART, reason)
        if advantage_name == "group":
            self.sections["grpo"] = {"scale_rewards": True, "clip_high": 0.2}  # verl's defaults
        elif advantage_name:
            self._set_key("grpo.advantage", advantage_name)
        if any(keys.RL_FACTORY_CONFIG in argument for argument in self.script.extras):
            self._overrides = keys.DEFAULTS | self._overrides
        for key, config_key in {**keys.UNCHANGED_KEYS, **keys.KEYS_BY_ALGORITHM[self.algorithm]}.items():
            if key in self._overrides:
                self._set_key(config_key, self._overrides.pop(key))
        if lora_rank := self._pop_override("model.lora_rank"):
            self._set_key("lora.enabled", True)
            self._set_key("lora.r", lora_rank)

    def _translate_data(self) -> None:
        for key, config_key in {"data.train_files": "data.tasks", "data.val_files": "data.heldout"}.items():
            if files := self._pop_override(key):
                first_file, *ignored_files = files if isinstance(files, list) else [files]
                self._set_key(config_key, first_file)
                if ignored_files:
                    self._note(
                        key, ignored_files, BY_HAND, "only one file is supported; merge the rows of all files"
                    )
        max_response_tokens = self._pop_int("data.max_response_length")
        if max_response_tokens:
            self._set_key("sampling.max_tokens", max_response_tokens)
        if prompt_size := self._pop_int("data.max_prompt_length"):
            self._set_key("model.max_length", prompt_size + (max_response_tokens or 512))  # verl's default
        batch_size = self.sections["training"].get("batch_size")
        minibatch_size = self._pop_int("actor.ppo_mini_batch_size")
        if minibatch_size > 0 and isinstance(batch_size, int) and batch_size % minibatch_size == 0:
            self._set_key("training.minibatches", batch_size // minibatch_size)
        elif minibatch_size:
            reason = f"it does not divide the batch size of {batch_size}"
            self._note("actor.ppo_mini_batch_size", minibatch_size, BY_HAND, reason)

    def _translate_loss(self) -> None:
        uses_kl_loss = self._pop_override("actor.use_kl_loss")
        if uses_kl_loss:
            self._set_key("@.kl", self._overrides.pop("actor.kl_loss_coef", 0.001))  # verl's default
        elif self.algorithm == "ppo" and self._pop_override("algorithm.use_kl_in_reward"):
            self._set_key("ppo.kl_in", "reward")
            self._set_key("ppo.kl", self._overrides.pop("algorithm.kl_ctrl.kl_coef", 0.001))
        for key, (config_key, translations) in keys.RENAMED_VALUES.items():
            if key not in self._overrides or (key.startswith("actor.kl") and not uses_kl_loss):
                continue
            value = self._overrides.pop(key)
            if value in translations and (self.algorithm == "grpo" or not config_key.startswith("grpo")):
                self._set_key(config_key, translations[value])
            else:
                reason = f"{config_key.replace('@', self.algorithm)} supports {', '.join(translations)}"
                self._note(key, value, NO_COUNTERPART, reason)
        if self.sections.get("grpo", {}).get("ratio") == "sequence":
            self._set_key("grpo.normalization", "sequence")
        if clip_ratio := self._pop_override("actor.clip_ratio"):  # for ppo it is translated already
            self._set_key("grpo.clip_low", clip_ratio)
            self._set_key("grpo.clip_high", clip_ratio)

    def _translate_environment(self) -> None:
        if name := self._pop_override("env.name"):
            candidates = (f"{name}.py", f"envs/{name}.py")
            existing_file = next((path for path in candidates if (self.folder / path).is_file()), None)
            if name == "search" and existing_file is None:  # RL-Factory's own search environment
                self.sections["reward"] = {"type": "rule_based", "options": {"rule": "em", "extract": "tag"}}
                self._note("env.name", name, NOT_NEEDED, "its reward is the rule em on <answer> tags")
            elif name in keys.IMAGE_ENVIRONMENTS and existing_file is None:
                self._note("env.name", name, NO_COUNTERPART, keys.NO_IMAGES)
            else:
                path = existing_file or candidates[0]
                uses_step_rewards = bool(self._overrides.pop("env.use_process_reward", False))
                self._set_key("environment.environment_id", path)
                self._set_key("environment.options", {"use_process_reward": uses_step_rewards})
                name_hint = "must define your Env, imported from TrainingFactory.integrations.rl_factory"
                self._note("env.name", name, BY_HAND, f"{path} {name_hint}")
        if path := self._pop_override("env.config_path"):
            self.sections["tools"] = self._translate_tools(str(path))

    def _translate_tools(self, path: str) -> list[dict[str, str]]:
        try:
            servers, names = read_config(path if Path(path).is_file() else self.folder / path)
        except ValueError:
            self._note("env.config_path", path, BY_HAND, "the file cannot be read; list servers in `tools`")
            return [{"name": "tools", "config": path}]
        return [{"name": name, "config": path} for name in (*(server.name for server in servers), *names)]

    def _translate_judge(self) -> None:
        if not self._pop_override("reward_rollout.if_use_reward_rollout"):
            for key in [key for key in self._overrides if key.startswith("reward_rollout.")]:
                self._note(key, self._overrides.pop(key), NOT_NEEDED, "the script uses no judge")
            return
        judge: dict[str, Any] = {"model": self._pop_override("reward_rollout.rollout.model_name", "NAME")}
        if (num_gpus := self._pop_int("reward_rollout.rollout.tensor_model_parallel_size", 1)) > 1:
            judge |= {"engine": "vllm", "gpus": num_gpus}
        self.sections["reward"] = {"type": "model_judge", "judge": judge}
        if max_tokens := self._pop_override("reward_rollout.rollout.response_length"):
            self.sections["reward"]["options"] = {"options": {"max_tokens": max_tokens}}

    def _translate_trainer(self) -> None:
        loggers = self._pop_override("trainer.logger", [])
        loggers = loggers if isinstance(loggers, list) else [loggers]
        if trackers := [name for name in loggers if name in keys.TRACKER_NAMES]:
            self._set_key("logging.trackers", trackers)
        if unsupported_loggers := [name for name in loggers if name not in keys.TRACKER_NAMES]:
            reason = f"steps are always printed; trackers are {', '.join(keys.TRACKER_NAMES)}"
            self._note("trainer.logger", unsupported_loggers, NO_COUNTERPART, reason)
        if "wandb" in trackers and (project := self._pop_override("trainer.project_name")):
            self._set_key("logging.wandb", {"project": str(project)})
        if save_interval := self._pop_int("trainer.save_freq"):
            self._set_key("logging.checkpoint_every", save_interval)
        if "heldout" in self.sections.get("data", {}) and (interval := self._pop_int("trainer.test_freq")):
            self._set_key("training.eval_every", interval)
        gpu_keys = [key for key in ("trainer.n_gpus_per_node", "trainer.nnodes") if key in self._overrides]
        if gpu_keys:
            self._set_key("compute.num_gpus", prod(self._pop_int(key, 1) for key in gpu_keys))
        if self._overrides.get("rollout.mode") == "async":
            self._set_key("optimization.async_rollout", bool(self._overrides.pop("rollout.mode")))


def _parse_value(text: str) -> Any:
    """Parse a value as YAML, which covers Hydra's syntax for overrides; other texts stay as they are."""
    try:
        return yaml.load(text, ConfigLoader)  # a SafeLoader
    except yaml.YAMLError:
        return text
