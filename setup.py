"""pyproject.toml has the settings; this file adds what they cannot express to the wheel."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Files beside the package that `tfactory new` copies and error messages refer to (TrainingFactory/common/starters.py).
STARTERS = (
    "configs/**/*.yaml", "configs/*.jinja", "examples/**/*", "notebooks/*.ipynb", "tools/search.json", "docs/**/*.md",
)  # fmt: skip


def starter_files() -> list[Path]:
    paths = sorted(path for pattern in STARTERS for path in ROOT.glob(pattern))
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


class BuildWithStarters(build_py):
    """Copies the starter files into the package. An editable install finds them in the checkout instead."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "TrainingFactory", "starters")
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        for path in starter_files():
            copy = target / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def description() -> str:
    """Return the README without images and links to files, which lead nowhere outside the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    local = r"\((?!\w+://|#)[^)\s]+\)"
    text = re.sub(rf"^!\[[^\]]*\]{local}\n+", "", text, flags=re.MULTILINE)
    text = re.sub(rf"!?\[([^\]]*)\]{local}", r"\1", text)
    return re.sub(r"</?(?:p|picture|source|img)\b[^>]*>\n*", "", text)


setup(
    cmdclass={"build_py": BuildWithStarters},
    long_description=description(),
    long_description_content_type="text/markdown",
)
