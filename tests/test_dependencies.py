"""The core installs beside other versions; only the extra vllm is as narrow as vLLM."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement

from tests.kits.docs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SEEN = {"torch": ["2.11.0", "2.15.0"], "transformers": ["5.17.0", "5.23.0"], "numpy": ["2.3.5", "2.5.2"]}


def requirements(texts: list[str]) -> dict[str, Requirement]:
    return {each.name: each for each in map(Requirement, texts)}


def test_the_core_takes_versions_that_vllm_does_not() -> None:
    core = requirements(PROJECT["dependencies"])
    narrow = requirements(PROJECT["optional-dependencies"]["vllm"])
    for name, versions in SEEN.items():
        assert all(core[name].specifier.contains(version) for version in versions)
        assert not all(narrow[name].specifier.contains(version) for version in versions)


def test_the_exact_versions_fit_both() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    exact = dict(line.split("==") for line in lines if "==" in line and ";" not in line)
    for texts in (PROJECT["dependencies"], PROJECT["optional-dependencies"]["vllm"]):
        for name, wanted in requirements(texts).items():
            assert name not in exact or wanted.specifier.contains(exact[name]), name
