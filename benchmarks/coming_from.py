"""What becomes of programs that were written elsewhere: `python -m benchmarks.coming_from`.

Runs the tests whose ids name a block of a document (`000-9`: the ninth block of document 000, counted over all
languages) and those marked with `program(document, block, what)`, in one process, and prints a table in Markdown:
document, block, what it is, and whether it works or why it is not run. The reasons for
blocks without a test are in this file. The exit status is not 0 if a program fails. docs/COMING_FROM.md has the table.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kits.seeds import Block, blocks

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    "tests/test_seeds.py",
    "tests/integrations",
    "tests/docs/test_coming_from.py",
    "tests/data/test_other_forms.py",
]
BLOCK = re.compile(r"\b(00[012])-(\d+)\b")
DOCUMENTS = {
    "000": "TrainingFactory's README",
    "001": "RL-Factory's README",
    "002": "HelloAgents, RL chapter",
}
# Blocks of the documents that no test can run, and why. `bash` is the reason of all others in that language.
NO_PROGRAM = {
    "000-6": "not a program: the folders of the package",
    "001-1": "not a program: versions of CUDA and packages; `make setup` installs ours",
    "001-2": "not run: installs verl, vLLM and DeepSpeed, which are not needed here",
    "001-3": "not run: the script is not in the document; `tfactory import rl-factory main_grpo.sh` translates it",
    "bash": "not run: installs packages from the network",
}
ORDER = ["failed", "skipped", "passed"]  # the worst of several tests of a block counts


@dataclass(slots=True)
class Row:
    document: str
    block: str
    what: str
    outcome: str = ""
    reason: str = ""

    @property
    def result(self) -> str:
        words = {"passed": "works", "failed": f"FAILS: {self.reason}", "skipped": f"not run: {self.reason}"}
        return words.get(self.outcome) or self.reason or "no test"


@dataclass(slots=True, eq=False)  # pytest keeps its plugins in sets
class Outcomes:
    """Keeps, as a plugin of pytest, what became of the tests of a block or a program."""

    rows: dict[str, Row] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)  # the id of a test -> the key of its row

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if mark := item.get_closest_marker("program"):
                document, block, what = mark.args
                self.tests[item.nodeid] = f"{document}-{block}"
                self.rows.setdefault(f"{document}-{block}", Row(document, block, what))
            elif found := BLOCK.search(item.nodeid.partition("[")[2]):
                self.tests[item.nodeid] = found[0]
                self.rows.setdefault(found[0], Row(DOCUMENTS[found[1]], found[2], ""))
        items[:] = [item for item in items if item.nodeid in self.tests]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.rows.get(self.tests.get(report.nodeid, ""))
        if row is None or (report.when != "call" and report.outcome == "passed"):
            return
        if not row.outcome or ORDER.index(report.outcome) < ORDER.index(row.outcome):
            row.outcome, row.reason = report.outcome, reason_of(report)


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test was skipped or failed, in one line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = getattr(crash, "message", "") or str(report.longrepr or "")
    return text.strip().splitlines()[0][:160] if text.strip() else ""


def what_is(block: Block) -> str:
    """Return the first name that says something in a block: of a class, a function, an import or a call."""
    found = re.search(
        r"^(?:class|def) (\w+)|^from \S+ import \(?\s*(\w+)|^(?:\w+ = )?([\w.]+)\(", block.text, re.M
    )
    name = next((each for each in found.groups() if each), "") if found else ""
    return f"{block.language or 'text'}: `{name}`" if name else block.language or "text"


def table(outcomes: Outcomes, found: Iterable[Block]) -> list[Row]:
    """Return a row for every block of the documents, in their order, then those of the programs."""
    rows = []
    for block in found:
        row = outcomes.rows.pop(str(block), None) or Row(DOCUMENTS[block.document], str(block.number), "")
        row.what = what_is(block)
        if not row.outcome:
            row.reason = NO_PROGRAM.get(str(block), NO_PROGRAM["bash"] if block.language == "bash" else "")
        rows.append(row)
    return [*rows, *sorted(outcomes.rows.values(), key=lambda row: row.document.lower())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", default=TESTS, help="files and folders of tests")
    given = parser.parse_args(arguments)
    there = [name for name in given.tests if (ROOT / name).exists()]
    outcomes = Outcomes()
    options = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    with redirect_stdout(sys.stderr):  # the table alone goes where it can be kept
        status = pytest.main([*options, *(str(ROOT / name) for name in there)], plugins=[outcomes])
    rows = table(outcomes, [block for document in DOCUMENTS for block in blocks(document)])
    print("| document | block | what | result |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.document} | {row.block} | {row.what} | {row.result.replace('|', '/')} |")
    return int(status)  # 1 where a program fails, more where tests could not even be collected


if __name__ == "__main__":
    sys.exit(main())
