"""From the overrides of a launch script of RL-Factory to a config of ours, with a comment for all that has no place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.integrations.rl_factory import keys
from TrainingFactory.integrations.rl_factory.keys import BY_HAND, NONE, NOT_NEEDED
from TrainingFactory.integrations.rl_factory.launch_script import LaunchScript
from TrainingFactory.texts import holds_secret
from TrainingFactory.tools.mcp.config import read_with_names

ORDER = (
    "model", "training", "grpo", "ppo", "environment", "tools", "reward", "data", "sampling", "lora", "optimization",
    "compute", "logging",
)  # fmt: skip
WHOLE = "actor_rollout_ref."
JUDGE_URL = "http://127.0.0.1:8000/v1"


@dataclass
class Translation:
    """`sections` is the config; `notes` has a line for each override that is not in it, and for what is to be done."""

    script: LaunchScript
    sections: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.script.overrides
        self._left = {key.removeprefix(WHOLE): _value(text) for key, text in given.items()}
        for step in (self._algorithm, self._data, self._loss, self._environment, self._judge, self._trainer):
            step()
        for key, value in list(self._left.items()):
            self._note(key, value, *keys.reason(key))
        for key, what in self.script.unknown.items():
            self.notes.append(f"{key}: {BY_HAND}: it depends on {what}, which only the shell knows")
        self.notes += [f"{word}: {NOT_NEEDED}: it is no override" for word in self.script.other]

    def text(self) -> str:
        """Return it as YAML."""
        top = f"# Translated from {self.script.path}. Not taken over, with the reason, are the lines at the end.\n"
        end = "".join(f"# {' '.join(note.split())}\n" for note in self.notes)
        ordered = {name: self.sections[name] for name in ORDER if name in self.sections}
        return f"{top}{yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)}{end}"

    def _take(self, key: str, default: Any = None) -> Any:
        found = self._left.pop(key, None)
        return default if found is None else found

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
            if (value := self._take(key)) is not None:
                self._put(ours, value)
        if rank := self._count("model.lora_rank"):
            self.sections.setdefault("lora", {}).update(enabled=True, r=rank)

    def _data(self) -> None:
        for key, ours in {"data.train_files": "data.tasks", "data.val_files": "data.heldout"}.items():
            files = self._take(key, [])
            first, *more = files if isinstance(files, list) and files else [files]
            if first:
                self._put(ours, first)
            if more:
                self._note(key, more, BY_HAND, "there is one file; put the rows of all of them together")
        if prompt := self._count("data.max_prompt_length"):
            self._put("model.max_length", prompt + self.sections.get("sampling", {}).get("max_tokens", 512))
        size, part = self.sections["training"].get("batch_size"), self._count("actor.ppo_mini_batch_size")
        if part > 0 and isinstance(size, int) and size % part == 0:
            self._put("training.minibatches", size // part)
        elif part:
            self._note("actor.ppo_mini_batch_size", part, BY_HAND, f"it does not divide the batch of {size}")

    def _loss(self) -> None:
        if self._take("actor.use_kl_loss", False):
            self._put("@.kl", self._take("actor.kl_loss_coef", 0.001))  # verl's default
        else:
            for key in self._left.keys() & {"actor.kl_loss_coef", "actor.kl_loss_type"}:
                self._note(key, self._left.pop(key), NOT_NEEDED, "actor.use_kl_loss is off")
            if self.algorithm == "ppo" and self._take("algorithm.use_kl_in_reward", False):
                self.sections["ppo"] = self.sections.get("ppo", {}) | {"kl_in": "reward"}
                self._put("ppo.kl", self._take("algorithm.kl_ctrl.kl_coef", 0.001))
        for key, (ours, names) in keys.RENAMED.items():
            value = self._take(key)
            if value in names and (self.algorithm == "grpo" or not ours.startswith("grpo")):
                self._put(ours, names[value])
            elif value is not None:
                self._note(key, value, NONE, f"{ours.replace('@', self.algorithm)} knows {', '.join(names)}")
        if self.sections.get("grpo", {}).get("ratio") == "sequence":
            self._put("grpo.normalization", "sequence")
        if (clip := self._take("actor.clip_ratio")) is not None:  # of ppo it is taken already
            self.sections["grpo"] = self.sections.get("grpo", {}) | {"clip_low": clip, "clip_high": clip}

    def _environment(self) -> None:
        name, steps = self._take("env.name"), self._take("env.use_process_reward", False)
        folder = Path(self.script.path).parent
        places = (f"{name}.py", f"envs/{name}.py")
        there = next((place for place in places if (folder / place).is_file()), None)
        if name == "search" and there is None:  # what theirs rewards
            self.sections["reward"] = {"type": "rule_based", "options": {"rule": "em", "extract": "tag"}}
            self._note("env.name", name, NOT_NEEDED, "its reward is the rule em over <answer> tags")
        elif name is not None:
            self._put("environment.environment_id", there or places[0])
            self._put("environment.options", {"use_process_reward": bool(steps)})
            text = "must have your Env, imported from TrainingFactory.integrations.rl_factory"
            self._note("env.name", name, BY_HAND, f"{there or places[0]} {text}")
        if path := self._take("env.config_path"):
            self.sections["tools"] = self._tools(str(path), folder)

    def _tools(self, path: str, folder: Path) -> list[dict[str, str]]:
        try:
            servers, names = read_with_names(path if Path(path).is_file() else folder / path)
            return [{"name": name, "config": path} for name in (*(each.name for each in servers), *names)]
        except ValueError:
            self._note(
                "env.config_path", path, BY_HAND, "it cannot be read from here; name its servers in `tools`"
            )
            return [{"name": "tools", "config": path}]

    def _judge(self) -> None:
        if not self._take("reward_rollout.if_use_reward_rollout", False):
            for key in [key for key in self._left if key.startswith("reward_rollout.")]:
                self._note(key, self._left.pop(key), NOT_NEEDED, "the script uses no judge")
            return
        options: dict[str, Any] = {"base_url": JUDGE_URL, "api_key_env": None}
        if limit := self._count("reward_rollout.rollout.response_length"):
            options["options"] = {"max_tokens": limit}
        model = self._take("reward_rollout.rollout.model_name", "NAME")
        self.sections["reward"] = {"type": "model_judge", "model": model, "options": options}
        self.notes.append(
            f"reward: {BY_HAND}: start the judge, so that it answers at {JUDGE_URL}, or change that"
        )

    def _trainer(self) -> None:
        loggers = self._take("trainer.logger", [])
        loggers = loggers if isinstance(loggers, list) else [loggers]
        if trackers := [name for name in loggers if name in keys.TRACKERS]:
            self._put("logging.trackers", trackers)
        if others := [name for name in loggers if name not in (*keys.TRACKERS, "console")]:
            self._note("trainer.logger", others, NONE, f"trackers are {', '.join(keys.TRACKERS)}")
        if project := self._take("trainer.project_name"):
            if "wandb" in trackers:
                self._put("logging.wandb", {"project": str(project)})
            else:
                self._note("trainer.project_name", project, NOT_NEEDED, "only W&B has projects")
        measured = "heldout" in self.sections.get("data", {})
        places = {"save_freq": "logging.checkpoint_every"} | (
            {"test_freq": "training.eval_every"} if measured else {}
        )
        for key, ours in places.items():
            if (every := self._count(f"trainer.{key}")) > 0:
                self._put(ours, every)
        gpus = self._count("trainer.n_gpus_per_node", 1) * self._count("trainer.nnodes", 1)
        if gpus > 1:
            self._put("compute.num_gpus", gpus)
        if self._take("rollout.mode") == "async":
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
