"""docs/DIALECTS.md: its table is what the checks find."""

from __future__ import annotations

import pytest

from tests.kits.dialect_page import PAGE, check_dialects, page_with, table
from tests.kits.dialects import needs_sdks


@pytest.mark.slow
@needs_sdks
def test_the_table_is_what_the_official_sdks_find() -> None:
    results = check_dialects()
    assert all(works for row in results.values() for works in row.values()), results
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with(table(results), page)
