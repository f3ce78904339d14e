"""The wheel stands alone: built from a copy of the checkout and installed where the checkout is not visible."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import urllib.request
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest

import TrainingFactory
from tests.kits.cli import Run
from tests.kits.docs import ROOT

pytest.importorskip("setuptools", reason="needs setuptools to build a wheel: pip install setuptools")
SOURCES = ("TrainingFactory", "configs", "examples", "notebooks", "tools", "docs")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
# In one process, because every start of Python costs more than all of this: copy every starter, read every config.
COPY_ALL = """
import json, pathlib, TrainingFactory
from TrainingFactory.common.starters import STARTER_FOLDERS, copy_starter, find_docs, list_starters
from TrainingFactory.config import load_config
names = {}
for kind in STARTER_FOLDERS:
    names[kind] = [starter.name for starter in list_starters(kind)]
    for starter in list_starters(kind):
        if not all(pathlib.Path(file).exists() for file in starter.files):  # else copied with another one
            copy_starter(starter)
configs = [path for folder in ("configs", "examples") for path in pathlib.Path(folder).rglob("*.yaml")]
for path in (path for path in configs if path.name != "tasks.yaml"):
    files = [tool.config for tool in load_config(path).tools if tool.config]
    assert all(pathlib.Path(file).is_file() or (path.parent / file).is_file() for file in files), path
page = find_docs("FACTORIES.md")
assert pathlib.Path(page).is_file(), page
print(json.dumps({"from": TrainingFactory.__file__, "version": TrainingFactory.__version__, "names": names}))
"""


@dataclass
class Installed:
    """A wheel in an environment of its own, and an empty folder to work in."""

    wheel: Path
    programs: Path
    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
        )

    def tfactory(self, *arguments: str) -> str:
        done = self.run("tfactory", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


def build_wheel(folder: Path) -> Path:
    """Build from a copy: a build leaves folders behind in its source."""
    source = folder / "source"
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in FILES:
        shutil.copy(ROOT / name, source)
    done = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install without pip, which takes longer than the build: unpack, and write the command."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    venv.create(folder / "venv", symlinks=True)
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # The packages of this environment. Its own .pth files are not read, so that an editable install stays unseen.
    (packages / "parent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    programs = folder / "venv" / "bin"
    command = f"#!{programs / 'python'}\nfrom TrainingFactory.cli import main\nmain()\n"
    (programs / "tfactory").write_text(command)
    (programs / "tfactory").chmod(0o755)
    (folder / "empty").mkdir()
    return Installed(wheel, programs, folder / "empty")


def test_every_starter_can_be_copied_into_an_empty_folder(installed: Installed) -> None:
    done = installed.run("python", "-c", COPY_ALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert str(ROOT) not in found["from"] and found["version"] == TrainingFactory.__version__
    configs = [path.stem for path in (ROOT / "configs").rglob("*.yaml")]
    assert sorted(found["names"]["config"]) == sorted(configs)
    examples = {path.stem for path in (ROOT / "examples").glob("[!_]*")}
    assert set(found["names"]["example"]) == examples
    assert set(found["names"]["notebook"]) == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_its_metadata_has_the_version_and_no_dead_links(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
        assert not [name for name in archive.namelist() if name.endswith((".pyc", ".venv"))]
    assert metadata["Version"] == TrainingFactory.__version__
    text = str(metadata.get_payload())
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert "TrainingFactory" in text and not [link for link in targets if not re.match(r"\w+://|#", link)]


@pytest.mark.slow
def test_a_copied_config_trains(installed: Installed) -> None:
    missing = installed.run("tfactory", "train", "short/tiny_sft.yaml")
    assert "tfactory new config tiny_sft --out short/tiny_sft.yaml" in missing.stderr
    installed.tfactory("new", "config", "tiny_sft", "--out", "short/tiny_sft.yaml")
    few = ["training.max_steps=1", "training.eval_every=null"]
    text = installed.tfactory("train", "short/tiny_sft.yaml", *few, "--name", "first")
    assert "finished" in text and (installed.folder / "runs/first/checkpoints/step-000001").is_dir()


@pytest.mark.slow
def test_the_demo_and_the_page(installed: Installed) -> None:
    assert "Full report: runs/demo/report.html" in installed.tfactory("demo")
    page = subprocess.Popen(
        [installed.programs / "tfactory", "ui", "--port", "0"],
        cwd=installed.folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert page.stdout is not None
        address = next(found[0] for line in page.stdout if (found := re.search(r"http://\S+", line)))
        assert b"TrainingFactory" in urllib.request.urlopen(address, timeout=60).read()
    finally:
        page.terminate()
        page.wait()


def test_a_missing_config_names_the_command_that_creates_it(tfactory: Run) -> None:
    status, _, err = tfactory("train", "configs/tiny_sft.yaml")
    assert status == 2 and "tfactory new config tiny_sft" in err and "--out" not in err
    status, _, err = tfactory("doctor", "examples/own_agent/config.yaml")
    assert status == 2 and "tfactory new example own_agent" in err


def test_starters_are_listed_with_a_line_each(tfactory: Run) -> None:
    for kind, name in [("config", "tiny_sft"), ("example", "own_agent"), ("notebook", "demo")]:
        status, out, _ = tfactory("new", kind)
        lines = out.splitlines()
        assert status == 0 and [
            line for line in lines if line.startswith(f"{name} ") and len(line.split()) > 4
        ]


def test_a_starter_comes_with_the_files_that_it_reads_and_overwrites_none(tfactory: Run) -> None:
    status, _, err = tfactory("new", "config", "qwen3_grpo")
    assert status == 0 and "wrote tools/search.json" in err, err
    assert Path("examples/search_server.py").is_file()
    status, _, err = tfactory("new", "example", "search_r1")  # whose corpus is there already
    assert status == 0 and Path("examples/search_r1/train.jsonl").is_file(), err
    Path("configs/qwen3_grpo.yaml").write_text("mine")
    status, _, err = tfactory("new", "config", "qwen3_grpo")
    assert status == 2 and "configs/qwen3_grpo.yaml exists already" in err
    assert Path("configs/qwen3_grpo.yaml").read_text() == "mine"


def test_a_wrong_name_gets_the_nearest_one(tfactory: Run) -> None:
    status, _, err = tfactory("new", "config", "tiny_sfd")
    assert status == 2 and "did you mean tiny_sft?" in err
    status, _, err = tfactory("new", "example", "zebra")
    assert status == 2 and "tfactory new example lists all names" in err
