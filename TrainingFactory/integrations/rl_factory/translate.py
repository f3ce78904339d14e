"""From the overrides of a launch script of RL-Factory to a config of ours, with a comment for all that has no place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.integrations.rl_factory import keys
from TrainingFactory.integrations.rl_factory.launch_script import LaunchScript
from TrainingFactory.tools.mcp.config import read_with_names

ORDER = (
    "model", "training", "grpo", "ppo", "environment", "tools", "reward", "data", "sampling", "lora", "optimization",
    "compute", "logging",
)  # fmt: skip
JUDGE_URL = "http://127.0.0.1:8000/v1"


@dataclass
class Translation:
    """`sections` is the config; `notes` has a line for each override that is not in it, and for what is to be done."""

    script: LaunchScript
    sections: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = {key: _value(text) for key, text in self.script.overrides.items()}
        for step in (self._algorithm, self._same, self._data, self._steps, self._loss, self._lora):
            step()
        for step in (self._environment, self._judge, self._trainer):
            step()
        for key, value in self._left.items():
            self._note(key, value, *_reason(key))
        for key, what in self.script.unknown.items():
            self.notes.append(f"{key}: by hand: it depends on {what}, which only the shell knows")
        self.notes += [f"{word}: {keys.NOT_NEEDED}: it is no override" for word in self.script.other]

    def text(self) -> str:
        """Return it as YAML."""
        top = f"# Translated from {self.script.path}. Not taken over, with the reason, are the lines at the end.\n"
        end = "".join(f"# {' '.join(note.split())}\n" for note in self.notes)
        ordered = {name: self.sections[name] for name in ORDER if name in self.sections}
        body = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)
        return f"{top}{body}{end}"

    def _take(self, key: str, default: Any = None) -> Any:
        found = self._left.pop(key, None)
        return default if found is None else found

    def _count(self, key: str, default: int) -> int:
        found = self._take(key, default)
        if not isinstance(found, int):
            raise ValueError(f"{self.script.path}: {key} is {found!r}; it must be a whole number")
        return found

    def _put(self, key: str, value: Any) -> None:
        section, _, name = key.replace("@", self.algorithm).partition(".")
        self.sections.setdefault(section, {})[name] = value

    def _note(self, key: str, value: Any, kind: str, why: str) -> None:
        self.notes.append(f"{key}={value}: {kind}: {why}")

    def _algorithm(self) -> None:
        named = self._take("algorithm.adv_estimator", "gae")  # verl's default
        self.algorithm, advantage = keys.ESTIMATORS.get(str(named), ("grpo", None))
        self._put("training.algorithm", self.algorithm)
        if named not in keys.ESTIMATORS:
            self._note(
                "algorithm.adv_estimator",
                named,
                keys.NONE,
                f"grpo is taken; known are {', '.join(keys.ESTIMATORS)}",
            )
        if advantage:
            self._put("grpo.advantage", advantage)
        if named == "grpo":  # as it is there by default
            self._put("grpo.scale_rewards", True)

    def _same(self) -> None:
        for key, ours in {**keys.SAME, **keys.ONLY[self.algorithm]}.items():
            if (value := self._take(key)) is not None:
                self._put(ours, value)

    def _data(self) -> None:
        files = self._take("data.train_files")
        files = files if isinstance(files, list) else [files] if files else []
        if files:
            self._put("data.tasks", files[0])
        if len(files) > 1:
            self._note(
                "data.train_files",
                files[1:],
                keys.BY_HAND,
                "a run has one file of tasks; put the rows together",
            )
        held = self.sections.get("data", {}).get("heldout")
        if isinstance(held, list):
            self._put("data.heldout", held[0])
            if held[1:]:
                self._note(
                    "data.val_files",
                    held[1:],
                    keys.BY_HAND,
                    "there is one held-out file; put the rows together",
                )
        if prompt := self._count("data.max_prompt_length", 0):
            self._put("model.max_length", prompt + self.sections.get("sampling", {}).get("max_tokens", 512))

    def _steps(self) -> None:
        size, part = (
            self.sections["training"].get("batch_size"),
            self._count(f"{keys.ACTOR}.ppo_mini_batch_size", 0),
        )
        if part > 0 and isinstance(size, int) and size % part == 0:
            self._put("training.minibatches", size // part)
        elif part:
            self._note(
                f"{keys.ACTOR}.ppo_mini_batch_size",
                part,
                keys.BY_HAND,
                f"it does not divide the batch of {size}",
            )

    def _loss(self) -> None:
        weight, kind = self._take(f"{keys.ACTOR}.kl_loss_coef"), self._take(f"{keys.ACTOR}.kl_loss_type")
        if self._take(f"{keys.ACTOR}.use_kl_loss", False):
            self._put("@.kl", 0.001 if weight is None else weight)  # verl's default
            if kind in keys.KL_TYPES:
                self._put("@.kl_estimator", keys.KL_TYPES[kind])
            elif kind is not None:
                self._note(
                    f"{keys.ACTOR}.kl_loss_type", kind, keys.NONE, f"known are {', '.join(keys.KL_TYPES)}"
                )
        elif self.algorithm == "ppo" and self._take("algorithm.use_kl_in_reward", False):
            self._put("ppo.kl", self._take("algorithm.kl_ctrl.kl_coef", 0.001))
            self._put("ppo.kl_in", "reward")
        if (clip := self._take(f"{keys.ACTOR}.clip_ratio")) is not None:
            self._put("grpo.clip_low", clip)
            self._put("grpo.clip_high", clip)
        if self.algorithm == "grpo":
            self._grpo()

    def _grpo(self) -> None:
        self.sections.setdefault("grpo", {}).setdefault("clip_high", 0.2)  # verl's default
        mode = self._take(f"{keys.ACTOR}.loss_agg_mode")
        if mode in keys.AGGREGATION:
            self._put("grpo.normalization", keys.AGGREGATION[mode])
        elif mode is not None:
            self._note(
                f"{keys.ACTOR}.loss_agg_mode", mode, keys.NONE, f"known are {', '.join(keys.AGGREGATION)}"
            )
        loss = self._take(f"{keys.ACTOR}.policy_loss.loss_mode", "vanilla")
        if loss == "gspo":
            self._put("grpo.ratio", "sequence")
            self._put("grpo.normalization", "sequence")
        elif loss != "vanilla":
            self._note(
                f"{keys.ACTOR}.policy_loss.loss_mode", loss, keys.NONE, "grpo.loss_kind is clip or cispo"
            )

    def _lora(self) -> None:
        if rank := self._take(f"{keys.MODEL}.lora_rank"):
            self._put("lora.enabled", True)
            self._put("lora.r", rank)

    def _environment(self) -> None:
        name, steps = self._take(f"{keys.ENV}.name"), self._take(f"{keys.ENV}.use_process_reward", False)
        manager = self._take(f"{keys.ENV}.tool_manager")
        folder = Path(self.script.path).parent
        if name is not None:
            places = (f"{name}.py", f"envs/{name}.py")
            there = next((place for place in places if (folder / place).is_file()), None)
            if there is None and name == "search":  # what theirs rewards
                self._put("reward.type", "rule_based")
                self._put("reward.options", {"rule": "em", "extract": "tag"})
                self._note(
                    f"{keys.ENV}.name", name, keys.NOT_NEEDED, "its reward is the rule em over <answer> tags"
                )
            else:
                self._put("environment.environment_id", there or places[0])
                self._put("environment.options", {"use_process_reward": bool(steps)})
                self.notes.append(
                    f"environment.environment_id: by hand: {there or places[0]} must have your Env, imported from "
                    "TrainingFactory.integrations.rl_factory"
                )
        if manager not in (None, "qwen3", "qwen2_5", "llama3", "adaptive", "centralized_qwen3"):
            self._note(
                f"{keys.ENV}.tool_manager",
                manager,
                keys.BY_HAND,
                "a form of calls is register_family, or model.family",
            )
        elif manager is not None:
            self._note(
                f"{keys.ENV}.tool_manager",
                manager,
                keys.NOT_NEEDED,
                "the chat template shows how calls are written",
            )
        if path := self._take(f"{keys.ENV}.config_path"):
            self.sections["tools"] = self._tools(str(path), folder)

    def _tools(self, path: str, folder: Path) -> list[dict[str, str]]:
        try:
            found = next(each for each in (Path(path), folder / path) if each.is_file())
            servers, names = read_with_names(found)
            listed = [*(server.name for server in servers), *names]
            return [{"name": name, "config": path} for name in listed]
        except (StopIteration, ValueError):
            self.notes.append(
                f"tools: by hand: {path} cannot be read from here; name each of its servers, as in "
                f"[{{name: SERVER, config: {path}}}]"
            )
            return [{"name": "tools", "config": path}]

    def _judge(self) -> None:
        if not self._take(f"{keys.JUDGE}.if_use_reward_rollout", False):
            for key in [key for key in self._left if key.startswith(f"{keys.JUDGE}.")]:
                self._note(key, self._left.pop(key), keys.NOT_NEEDED, "the script uses no judge")
            return
        judge: dict[str, Any] = {
            "type": "model_judge",
            "model": self._take(f"{keys.JUDGE}.rollout.model_name", "keys.MODEL"),
            "options": {"base_url": JUDGE_URL, "api_key_env": None},
        }
        if limit := self._take(f"{keys.JUDGE}.rollout.response_length"):
            judge["options"]["options"] = {"max_tokens": limit}
        rules = self.sections.pop("reward", {"type": "environment"})
        self.sections["reward"] = {"parts": {"judge": judge, "rules": rules}} if "options" in rules else judge
        self.notes.append(
            f"reward: by hand: start the judge, so that it answers at {JUDGE_URL}, or change base_url"
        )

    def _trainer(self) -> None:
        loggers = self._take("trainer.logger", [])
        loggers = loggers if isinstance(loggers, list) else [loggers]
        if trackers := [name for name in loggers if name in keys.TRACKERS]:
            self._put("logging.trackers", trackers)
        if others := [name for name in loggers if name not in (*keys.TRACKERS, "console")]:
            self._note("trainer.logger", others, keys.NONE, f"trackers are {', '.join(keys.TRACKERS)}")
        project = self._take("trainer.project_name")
        if project and "wandb" in trackers:
            self._put("logging.wandb", {"project": str(project)})
        elif project:
            self._note(
                "trainer.project_name", project, keys.NOT_NEEDED, "only W&B has projects: logging.wandb"
            )
        for key, ours in {
            "save_freq": "logging.checkpoint_every",
            "test_freq": "training.eval_every",
        }.items():
            every = self._count(f"trainer.{key}", 0)
            if every > 0 and (key == "save_freq" or "heldout" in self.sections.get("data", {})):
                self._put(ours, every)
            elif every:
                self._note(f"trainer.{key}", every, keys.NOT_NEEDED, "there is always one at the end")
        gpus = self._count("trainer.n_gpus_per_node", 1) * self._count("trainer.nnodes", 1)
        if gpus > 1:
            self._put("compute.num_gpus", gpus)
        if self._take(f"{keys.ROLLOUT}.mode") == "async":
            self._put("optimization.async_rollout", True)


def _value(text: str) -> Any:
    """Read a value as Hydra does, as far as that is YAML."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    try:  # in YAML 1.1 1e-6 is a text
        return float(found) if isinstance(found, str) and found[:1] in "+-.0123456789" else found
    except ValueError:
        return found


def _reason(key: str) -> tuple[str, str]:
    for part, kind, why in keys.REASONS:
        if key.startswith(part) or part in key.split(".", 1)[-1]:
            return kind, why
    return keys.NONE, "it is no option that this translation knows; docs/RL_FACTORY.md lists those"
