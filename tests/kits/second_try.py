"""A second try, alone, for the few tests of the suite that failed beside others: `pytest -p tests.kits.second_try`.

Some tests wait for real servers, browsers and processes, and on a machine that is short of processors one of them may
come too late. It is named in the output. A test that fails again, or more failures than `MOST`, fail the suite.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest

MOST = 5
failed: list[str] = []


def without_group(test: str) -> str:
    """Return a test's name without the group that pytest-xdist appends."""
    at = test.rfind("@")
    return test[:at] if at > test.rfind("]") else test


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = without_group(report.nodeid)
    if report.failed and test not in failed:
        failed.append(test)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """After the summary and the end of the other processes, run the failed tests again."""
    yield
    in_suite = not hasattr(session.config, "workerinput")  # not in a process of the suite
    if in_suite and session.exitstatus == pytest.ExitCode.TESTS_FAILED and len(failed) <= MOST:
        print("\nAgain, alone:", *failed, sep="\n  ", flush=True)
        command = [sys.executable, "-m", "pytest", "-m", "", "-n", "0", *failed]
        again = subprocess.run(command, cwd=session.config.rootpath, check=False)
        if again.returncode == 0:
            print("Failed beside others and passed alone:", *failed, sep="\n  ", flush=True)
            session.exitstatus = pytest.ExitCode.OK
