"""A slower link on purpose: what a program does over a network can be measured between devices of one host."""

from __future__ import annotations

from comm_core.backends.base import Backend
from comm_core.runtime.errors import UsageError


class Paced:
    """The part of ElasticBuffer that concerns the pace of its link."""

    _backend: Backend

    @property
    def pace_gbs(self) -> float | None:
        """Bytes that this rank reads from the others at most in each later dispatch and combine, in GB/s (1e9 bytes).

        None, the default, for as fast as the link goes. The kernels wait between rows while they hold their
        multiprocessors, as kernels do that wait for a network. 45 stands for a 400 Gb/s network card. Set it on every
        rank. Backends without kernels have no pace.

        Raises:
            UsageError: setting a number that is not positive, or one where no kernels move the rows.
        """
        pace: float | None = getattr(self._backend, "pace_gbs", None)
        return pace

    @pace_gbs.setter
    def pace_gbs(self, value: float | None) -> None:
        if value is not None and not value > 0:
            raise UsageError(f"pace_gbs = {value}", allowed="a number above 0, or None", fix="pass GB/s")
        if hasattr(self._backend, "pace_gbs"):
            self._backend.pace_gbs = value
        elif value is not None:
            raise UsageError(
                f"pace_gbs = {value} with backend {self._backend.name}",
                allowed="a backend whose kernels move the rows (gpu)",
                fix="leave pace_gbs at None",
            )
