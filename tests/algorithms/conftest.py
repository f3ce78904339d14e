"""Episodes that several algorithms learn from."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl and heldout.jsonl: lookups and guesses in `Homes`."""
    from tests.kits.preference import write_episodes

    folder = tmp_path_factory.mktemp("recorded")
    for split, count in (("train", 96), ("heldout", 24)):
        write_episodes(folder / f"{split}.jsonl", split, count)
    return folder
