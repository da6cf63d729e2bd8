"""Ranks for the tests that play a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Ranks of one file alone: what the double tells torch about "musa" stays in a process."""
    pool = Pool()
    yield pool
    pool.close()
