"""Weights for engines elsewhere: the model's own names, merged without touching it, two versions kept, nothing left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.kits.engine import KINDS, plain_logprobs, tiny
from tests.kits.forks import FORKED, fork
from tests.kits.learner import make_learner
from TrainingFactory.learning.publishing import Publisher
from TrainingFactory.models.saved import check_weights, read_checkpoint_shapes


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    publisher = Publisher(make_learner(model, temperature=0.7))
    model.train()
    weights = publisher.publish(3)
    assert model.training  # as it was
    model.save_pretrained(tmp_path)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (Path(weights.folder), tmp_path))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    check_weights(Path(weights.folder) / "model.safetensors", read_checkpoint_shapes(publisher.model_folder))
    tokens, logprobs = weights.canary
    expected = plain_logprobs(model, [tokens[0]], list(tokens[1:]))  # at temperature 1
    assert logprobs == pytest.approx(expected, abs=1e-4)
    assert weights.canary[0] == publisher.publish(4).canary[0]
    home = Path(weights.folder).parent
    last = publisher.publish(5)
    assert sorted(path.name for path in home.iterdir()) == ["000001-version-4", "000002-version-5", "model"]
    assert (last.kind, last.base, publisher.adapter_rank) == ("full", "", None)
    publisher.close()
    publisher.close()
    assert not home.exists()


ODD: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "embeddings beside it": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "a head": {"modules_to_save": ["lm_head"], "kind": "mha"},
    "some tokens": {"trainable_token_indices": [3, 5]},
    "biases": {"bias": "lora_only", "kind": "gqa_bias"},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_trained_beside_an_adapter_is_merged(name: str) -> None:
    options = dict(ODD[name])
    base = tiny(options.pop("kind", "gqa_tied"))
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **options))
    learner = make_learner(model)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn_like(param))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    publisher = Publisher(learner)
    assert publisher.adapter_rank is None
    weights = publisher.publish(0)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    alone = AutoModelForCausalLM.from_pretrained(weights.folder, config=base.config)
    prompt, tokens = [1, 2, 3], [4, 5, 6, 7]
    expected = plain_logprobs(model, prompt, tokens)
    assert plain_logprobs(alone, prompt, tokens) == pytest.approx(expected, abs=1e-4)
    publisher.close()


def test_a_pure_adapter_goes_as_it_is() -> None:
    model: Any = get_peft_model(
        tiny(), LoraConfig(r=2, rank_pattern={"up_proj": 5}, target_modules="all-linear")
    )
    publisher = Publisher(make_learner(model))
    weights = publisher.publish(1)
    assert (publisher.adapter_rank, weights.kind, weights.base) == (5, "adapter", publisher.model_folder)
    names = {path.name for path in Path(weights.folder).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    base = load_file(Path(weights.base) / "model.safetensors")
    assert all(torch.equal(weight, tiny().state_dict()[name]) for name, weight in base.items())
    publisher.close()
    merged = Publisher(make_learner(model), publish_adapters=False)
    assert merged.publish(1).kind == "full"
    merged.close()


def publish_and_die(told: Path) -> None:
    folder = Path(Publisher(make_learner(tiny())).model_folder)
    assert folder.parent.exists()
    told.write_text(str(folder))
    os.kill(os.getpid(), signal.SIGKILL)


@FORKED
def test_nothing_is_left_of_a_program_that_was_killed(tmp_path: Path) -> None:
    (killed := fork(publish_and_die, tmp_path / "told")).join()
    folder = Path((tmp_path / "told").read_text())
    assert killed.exitcode == -signal.SIGKILL and folder.name
    while folder.parent.exists():  # the suite's own limit ends a test that hangs
        time.sleep(0.05)
