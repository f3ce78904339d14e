"""Call tags that are tokens without training, as in Qwen2.5-Coder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.untrained_tags import NUM_LAST_ROWS
from TrainingFactory.types import ToolSpec

TAGS = ["<tool_call>", "</tool_call>"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = ToolSpec(
    "add", "Add a number.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)


def saved_model(folder: Path, *, equal_rows: bool, trained_tags: bool) -> Path:
    """Save the built-in model with unused rows, which are those of the tags unless these are trained."""
    loaded = load_model("builtin:tiny", device="cpu")
    model = loaded.model
    model.resize_token_embeddings(len(loaded.tokenizer) + NUM_LAST_ROWS, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        if equal_rows:
            weight[-NUM_LAST_ROWS:] = weight[-1].clone()
        if not trained_tags:
            weight[loaded.tokenizer.convert_tokens_to_ids(TAGS)] = weight[-1].clone()
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def test_untrained_tags_become_normal_tokens(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model", equal_rows=True, trained_tags=False)
    loaded = load_model(str(folder), device="cpu")
    tokenizer = loaded.tokenizer
    assert len(tokenizer.encode(TAGS[0])) > 1
    original = load_model("builtin:tiny", device="cpu").tokenizer
    others = [token for token in original.get_vocab() if token not in TAGS]
    assert tokenizer.convert_tokens_to_ids(others) == original.convert_tokens_to_ids(others)
    assert "not trained on the tokens </tool_call>, <tool_call>" in loaded.notes[0]
    ids = [*tokenizer.encode(CALL), tokenizer.eos_token_id]
    message = chat_format(tokenizer).parse(ids, tools=[TOOL])
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", {"a": 1})]
    tokenizer.save_pretrained(tmp_path / "model")  # as in a checkpoint
    again = load_model(str(folder), device="cpu")
    assert again.notes == () and again.tokenizer.encode(CALL) == tokenizer.encode(CALL)


@pytest.mark.parametrize(("equal_rows", "trained_tags"), [(True, True), (False, True), (False, False)])
def test_other_tags_stay_tokens(tmp_path: Path, equal_rows: bool, trained_tags: bool) -> None:
    folder = saved_model(tmp_path / "model", equal_rows=equal_rows, trained_tags=trained_tags)
    loaded = load_model(str(folder), device="cpu")
    assert len(loaded.tokenizer.encode(TAGS[0])) == 1 and loaded.notes == ()
