"""The calls of benchmarks.tools in TRL's own tool loop: GRPOTrainer with `tools=`.

The same weights really generate the same number of tokens for all rows in every turn; these are then replaced by a
written call, because TRL runs only what it can parse.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def measure_trl(
    loaded: Any, functions: Mapping[str, Callable[..., Any]], episodes: int, calls: int, tokens: int
) -> dict[str, float]:
    """Seconds for each kind of tool."""
    import trl
    from datasets import Dataset
    from transformers.utils import logging

    logging.set_verbosity_error()
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    loaded.tokenizer.chat_template = template.read_text(encoding="utf-8")
    prompts = [[{"role": "user", "content": f"Question number {number}?"}] for number in range(episodes)]
    seconds: dict[str, float] = {}
    for kind in ("instant", *functions):  # the first one warms up
        with tempfile.TemporaryDirectory() as folder:
            config = trl.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=episodes,
                num_generations=8,
                max_completion_length=1024,
                max_tool_calling_iterations=calls,
                use_cpu=True,
                bf16=False,
                report_to=[],
            )
            trainer = trl.GRPOTrainer(
                loaded.model,
                reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
                args=config,
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
                processing_class=loaded.tokenizer,
                tools=[functions[kind]],
            )
            seconds[kind] = _time_loop(trainer, kind, functions[kind], prompts, calls, tokens)
    return seconds


def _time_loop(
    trainer: Any, kind: str, function: Callable[..., Any], prompts: list[Any], calls: int, tokens: int
) -> float:
    """TRL's `_generate`: prompts to tokens, generation, parsing, its tool loop. Only the words are replaced."""
    trainer.generation_config.max_new_tokens = tokens
    trainer.generation_config.eos_token_id = None  # no row ends early
    is_async = asyncio.iscoroutinefunction(function)
    trainer._sync_tool_dicts = [{} if is_async else {kind: function}] * len(prompts)
    trainer._async_tool_dicts = [{kind: function} if is_async else {}] * len(prompts)
    really_generate = trainer._generate_single_turn
    turn = -1

    def generate(*args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        nonlocal turn
        turn += 1
        generated, _ = really_generate(*args, **kwargs)
        assert max(len(ids) for ids in generated) == tokens
        call = json.dumps({"name": kind, "arguments": {"index": turn}})
        text = f"<tool_call>\n{call}\n</tool_call><|im_end|>" if turn < calls else "x<|im_end|>"
        ids = trainer.processing_class.encode(text)
        return [list(ids) for _ in generated], None

    trainer._generate_single_turn = generate
    started = time.perf_counter()
    completions = trainer._generate(prompts)[3]
    elapsed = time.perf_counter() - started
    replies = [m for completion in completions for m in completion if m["role"] == "tool"]
    assert len(replies) == len(prompts) * calls and all(m["content"].startswith("answer") for m in replies)
    return elapsed
