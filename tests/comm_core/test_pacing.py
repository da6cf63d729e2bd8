"""The pace of a link: refused where no kernels move the rows, handed to the backend that has one."""

from __future__ import annotations

import pytest

from comm_core.pacing import Paced
from comm_core.runtime.errors import UsageError


class _Backend:
    name = "posix"


class _Kernels:
    name = "gpu"
    pace_gbs: float | None = None


def _buffer(backend: object) -> Paced:
    buffer = Paced()
    buffer._backend = backend  # type: ignore[assignment]
    return buffer


def test_a_backend_with_kernels_takes_it() -> None:
    buffer = _buffer(_Kernels())
    assert buffer.pace_gbs is None
    buffer.pace_gbs = 45
    assert buffer.pace_gbs == 45 == buffer._backend.pace_gbs  # type: ignore[attr-defined]
    buffer.pace_gbs = None
    assert buffer.pace_gbs is None
    with pytest.raises(UsageError, match="pace_gbs = 0; allowed: a number above 0"):
        buffer.pace_gbs = 0


def test_others_refuse_it() -> None:
    buffer = _buffer(_Backend())
    buffer.pace_gbs = None
    assert buffer.pace_gbs is None
    with pytest.raises(UsageError, match="with backend posix"):
        buffer.pace_gbs = 45.0
