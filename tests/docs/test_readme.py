"""README, the start page and their Chinese versions: programs run as printed, commands parse, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.kits.cli import Run
from tests.kits.docs import ROOT, Page
from TrainingFactory import __version__
from TrainingFactory.config import load_config
from TrainingFactory.data.trajectories import load_trajectories

README = Page("README.md")
START = Page("docs/START.md")
TRANSLATED = {"README.zh.md": README, "docs/zh/START.md": START}
SKILLS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "skills").glob("*/SKILL.md"))
LINKED = [
    "README.md",
    "README.zh.md",
    "docs/START.md",
    "docs/zh/START.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *SKILLS,
]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_the_program_of_the_readme_runs(program: Callable[[str], str], tmp_path: Path) -> None:
    code = README.block("GRPOTrainer(")
    assert len(code.splitlines()) <= 20
    run, reward = program(code).split()[-2:]
    assert float(reward) >= 0 and (tmp_path / run / "checkpoints" / "step-000002").is_dir()
    saved = next(iter(load_trajectories(tmp_path / run / "trajectories.jsonl")))
    assert [spec.name for spec in saved.tools] == ["weather"]


def test_the_environment_runs_as_printed(tfactory: Run) -> None:
    code = START.block("class Weather")
    assert len(code.splitlines()) <= 25
    Path("weather.py").write_text(code, encoding="utf-8")
    program, *arguments = shlex.split(START.block("tfactory rollout weather.py\n").strip())
    assert program == "tfactory"
    status, out, err = tfactory(*arguments)
    assert status == 0 and "How warm is it in Oslo?" in out and "temperature(city)" in out, err
    saved = re.search(r"saved 3 episodes to (\S+)", err)
    assert saved, err
    trajectories = list(load_trajectories(saved[1]))
    assert [trajectory.task.id for trajectory in trajectories] == ["Oslo", "Cairo", "Lima"]
    assert all(trajectory.reward is not None for trajectory in trajectories)


@pytest.mark.parametrize("name", ["README.md", "docs/START.md", "CONTRIBUTING.md", *SKILLS])
def test_every_printed_command_exists(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = Page(name).commands()
    assert commands and {words[1] for words in commands if words[0] == "make"} <= targets
    modules = {words[2] for words in commands if words[:2] == ["python", "-m"]}
    assert all(
        (ROOT / f"{module.replace('.', '/')}.py").is_file() for module in modules if "benchmarks" in module
    )


def test_benchmarks_and_recipes_of_the_result_tables_exist() -> None:
    commands = re.findall(r"\| `([^`]+)` \|$", README.text, re.MULTILINE)
    assert len(commands) >= 7
    benchmarks = [command.split()[2] for command in commands if command.startswith("python -m")]
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in benchmarks)


@pytest.mark.parametrize("name", TRANSLATED)
def test_translations_have_the_same_code_and_figures(name: str) -> None:
    page, original = Page(name), TRANSLATED[name]
    assert [text for kind, text in page.blocks if kind == "python"] == original.of("python")
    assert page.commands() == original.commands()
    figures = re.compile(r"(?<![\d.,])\d+(?:[.,]\d+)+(?!\d)", re.ASCII)
    assert sorted(figures.findall(page.text)) == sorted(figures.findall(original.text))


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_files_and_headings(name: str) -> None:
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), f"{name}: {link}"
        if anchor:
            page = FENCE.sub("", target.read_text(encoding="utf-8"))
            headings = {slug(heading) for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
            explicit = re.findall(r'^<a id="([\w-]+)"></a>$', page, re.MULTILINE)
            assert anchor in headings.union(explicit), f"{name}: {link}"


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_tree_of_the_architecture_page_has_every_folder() -> None:
    text = Page("docs/ARCHITECTURE.md").text
    tree = text[text.index("## The tree") : text.index("Imports point")]
    for path in (ROOT / "TrainingFactory").iterdir():
        if path.name[0] != "_" and (path.is_dir() or path.suffix == ".py"):
            assert path.name in tree, path.name


def test_it_says_where_it_runs_and_what_is_not_supported() -> None:
    text = START.text[START.text.index("## Where it runs") :]
    parts = {part.partition(".**")[0]: part for part in text.split("**", 1)[1].split("\n\n**")}
    for part, words in {
        "GPUs": ("model.device", "lora.enabled", "configs/qwen3_grpo_lora.yaml"),
        "Notebooks": ("train_async", "resume=True"),
        "Real models offline": ("HF_HUB_OFFLINE=1", "GGUF"),
        "On a cluster": ("CLUSTER.md",),
        "Not supported": ("Images", "Android", "TOOLS.md", "JUDGES.md"),
    }.items():
        assert all(word in parts[part] for word in words), part
    load_config(ROOT / "configs/qwen3_grpo_lora.yaml", ["model.quantization=4bit", "lora.enabled=true"])


def test_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SKILLS)
def test_skills_have_name_and_description(name: str) -> None:
    _, front, _ = (ROOT / name).read_text(encoding="utf-8").split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["name"] == Path(name).parent.name and about["description"]


def test_animations_are_small() -> None:
    animations = list((ROOT / "docs" / "assets").glob("demo-*.gif"))
    assert len(animations) == 2 and sum(path.stat().st_size for path in animations) < 2_000_000
