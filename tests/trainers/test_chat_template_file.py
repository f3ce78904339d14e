"""`model.chat_template`: a file that replaces a model's template in the run, its checkpoints and its exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.kits.run import Parity, Quiet, go_on, small
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.assembly.export import export
from TrainingFactory.assembly.named_files import read_config
from TrainingFactory.config import TrainingConfig
from TrainingFactory.evaluation.evaluation import make_sections
from TrainingFactory.evaluation.identity import identify_model
from TrainingFactory.models import load_model
from TrainingFactory.models.tiny import read_builtin_template
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.trainers.trainers import GRPOTrainer
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects

OPENING = "<|im_start|>system\nOur own template.<|im_end|>\n"
OWN = f"{{{{ {OPENING!r} }}}}{read_builtin_template()}"


def prompts(run: RunFolder) -> list[str]:
    chat = build_sampler.make_chat(TrainingConfig(), load_model("builtin:tiny", device="cpu"))
    return [chat.decode(episode.turns[0].prompt_ids) for step in (1, 2) for episode in run.episodes(step)]


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_its_resumption_and_its_export_use_the_file(tmp_path: Path, lora: bool) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    config = small(
        tmp_path,
        model={"chat_template": str(file), "device": "cpu"},
        lora={"enabled": lora, "r": 4},
        training={"max_steps": 2, "batch_size": 1, "group_size": 2},
        logging={"output_dir": str(tmp_path), "checkpoint_every": 1},
    )
    with pytest.raises(RuntimeError):
        Training(
            config, name="run", objects=UserObjects(environment=Parity), watcher=Quiet(fail_at=1)
        ).train()
    run = RunFolder(tmp_path / "run")
    assert run.config.model.chat_template == str(file)
    file.unlink()  # the run has a copy
    assert go_on(run.path).state == "finished"
    assert {text.startswith(OPENING) for text in prompts(run)} == {True}
    done = export("run", tmp_path / "out", merge=lora, runs=tmp_path)
    assert AutoTokenizer.from_pretrained(done.path).chat_template == OWN
    model = make_sections(find_model("run", tmp_path))["model"]
    assert "chat_template" not in model  # the checkpoint contains it
    served = build_sampler.load(TrainingConfig(model=model))
    assert served.tokenizer.chat_template == OWN


def test_the_file_is_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    (tmp_path / "run.yaml").write_text("model:\n  chat_template: own.jinja\n  device: cpu\n")
    config = read_config(tmp_path / "run.yaml")
    assert build_sampler.load(config).tokenizer.chat_template == OWN
    # two models with different templates answer differently, so their evaluations have different identities
    first = identify_model(config.model, "tiny").options["chat_template"]
    (tmp_path / "own.jinja").write_text(OWN + " ")
    assert identify_model(config.model, "tiny").options["chat_template"] != first


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, r"No such file.* path of a Jinja file"),
        ("", "is empty"),
        ("{{ bos_token }}\n{% for m in messages }", r"syntax error in line 2: unexpected '}'. Correct it"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_before_anything_is_loaded(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / "own.jinja").write_text(text)
    (tmp_path / "run.yaml").write_text(f"model:\n  chat_template: {tmp_path / 'own.jinja'}\n")
    with pytest.raises(ValueError, match=rf"run\.yaml:2: model\.chat_template: .*own\.jinja.*{reason}"):
        Training(read_config(tmp_path / "run.yaml", [f"logging.output_dir={tmp_path / 'runs'}"]))
    assert not (tmp_path / "runs").exists()


def test_the_keyword_of_a_trainer(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    trainer = GRPOTrainer(model="tiny", chat_template=tmp_path / "own.jinja")
    assert trainer.config.model.chat_template == str(tmp_path / "own.jinja")
