"""Context folding from `environment.context`, checked before a model is loaded."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from TrainingFactory.common.user_code import load_objects
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.config.schema import ContextSection
from TrainingFactory.rollout.folding import SUMMARY_REQUEST, Folding

DEFAULT_MAX_LENGTH = 4096
KEY = ("environment", "context")
FOLD_KINDS_BY_KEY = {  # keys that only some kinds use
    "keep_turns": ("window", "drop_thoughts", "drop_results"),
    "placeholder": ("drop_results",),
    "summary_tokens": ("summary",),
    "template": ("summary",),
    "function": ("own",),
}


def make_folding(config: TrainingConfig, max_length: int | None = None) -> Folding | None:
    """Return the folding settings of a config; None if folding is off. Raise ConfigError if they cannot work.
    `max_length` is the context of the loaded model; None: no model is loaded yet."""
    context = config.environment.context
    if context is None:
        return None
    problems = [*_check_unused_keys(context), *_check_limits(config, context, max_length)]
    template = SUMMARY_REQUEST if context.template is None else context.template
    function = None
    try:
        if context.template is not None and is_template_file(context.template):
            template = Path(context.template).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        problems.append(Problem((*KEY, "template"), f"cannot be read: {error.strerror}", context.template))
    if not template.strip():
        problems.append(Problem((*KEY, "template"), "is empty; write a text that asks for a summary"))
    if context.fold == "own":
        try:
            function = _load_function(context.function)
        except ValueError as error:
            problems.append(Problem((*KEY, "function"), str(error)))
    if problems:
        raise config.wrong(problems)
    return Folding(
        context.fold,
        context.limit,
        context.keep_turns,
        context.max_folds,
        context.summary_tokens,
        template,
        context.placeholder,
        function,
    )


def is_template_file(template: str) -> bool:
    return template.endswith((".txt", ".md")) and "\n" not in template


def _check_unused_keys(context: ContextSection) -> list[Problem]:
    return [
        Problem((*KEY, key), f"is for fold={' or '.join(fold_kinds)}, but fold is {context.fold}; remove it")
        for key, fold_kinds in FOLD_KINDS_BY_KEY.items()
        if context.fold not in fold_kinds
        and getattr(context, key) != ContextSection.model_fields[key].get_default()
    ]


def _check_limits(config: TrainingConfig, context: ContextSection, max_length: int | None) -> list[Problem]:
    if config.environment.command is not None:
        message = (
            "does not apply to environment.command: your program manages its own history. Remove one of them"
        )
        return [Problem(KEY, message)]
    context_length = max_length or config.model.max_length or DEFAULT_MAX_LENGTH
    reserved_tokens = context.summary_tokens if context.fold == "summary" else 1
    if context.limit + reserved_tokens > context_length:
        note = "" if config.model.max_length else " (its default; set it if the model's context is longer)"
        summary_note = f" with summary_tokens={reserved_tokens}" if context.fold == "summary" else ""
        message = f"must be below model.max_length{summary_note}, which is {context_length}{note}"
        return [Problem((*KEY, "limit"), message, context.limit)]
    return []


def _load_function(name: str | None) -> Any:
    """Import the fold function `FILE.py:NAME`; raise ValueError if it is not a function of one argument."""
    if name is None:
        raise ValueError("is missing: fold=own needs a function, such as fold.py:shorten")
    path, function_name, [function, *other_objects] = load_objects("environment.context.function", name)
    if other_objects or not callable(function) or isinstance(function, type):
        raise ValueError(f"must name one function of {path}, such as {path}:shorten (got {name})")
    try:
        inspect.signature(function).bind([])
    except TypeError:
        raise ValueError(
            f"{path}:{function_name or function.__name__} must take one argument, the messages"
        ) from None
    return function
