"""Tensors that need no copy before they are sent: `ElasticBuffer.reserve_symmetric` and `symmetric_memory`.

A backend without such memory takes the same calls and copies as ever, so a program is the same for all.
"""

from __future__ import annotations

import contextlib

from comm_core import validate
from comm_core.backends.base import Backend


class Symmetric:
    """The part of ElasticBuffer that concerns symmetric memory."""

    _backend: Backend

    def _check_open(self) -> None:
        raise NotImplementedError

    def reserve_symmetric(self, num_bytes: int) -> bool:
        """Makes room for symmetric tensors, once a group (collective; the largest number asked for by a rank).

        Args:
            num_bytes: room on each rank, rounded up to 2 MiB. What does not fit later is allocated as usual and copied
                when it is sent.

        Returns:
            False where the backend copies always (`Capabilities.zero_copy`), and nothing is reserved.

        Raises:
            UsageError: not a positive number. UnavailableError: on every rank, where one has not so much memory.
        """
        self._check_open()
        problem = validate.problem_of(lambda: validate.whole("num_bytes", num_bytes))
        if problem is not None:
            self._backend.refuse("barrier", problem)
        if self._backend.capabilities.zero_copy:
            self._backend.reserve(num_bytes)
        return self._backend.capabilities.zero_copy

    def symmetric_memory(self) -> contextlib.AbstractContextManager[None]:
        """Context: what this thread allocates on the device in the block can be sent without being copied first.

            with buffer.symmetric_memory():
                y = grouped_gemm(...)
            out, _, _ = buffer.combine(y, handle)

        They are ordinary tensors; free them before the buffer is closed. A combine or dispatch of one is done, for the
        stream that waits for it, only when all ranks have read it. No difference where the backend copies always.

        Raises:
            UsageError: before `reserve_symmetric`.
        """
        self._check_open()
        return self._backend.symmetric_memory() if self._backend.capabilities.zero_copy else contextlib.nullcontext()
