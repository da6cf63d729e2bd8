"""Who is missing: asked when a transport has failed, since it seldom says.

gloo knows addresses and NCCL not even those: "connection closed by peer" does not tell which rank to look at. A rank
whose call has failed writes down in the group's store what it was doing, or why it gave up, and waits a moment for the
others to do the same. Who says nothing is the rank that all wait for: it has ended, or is somewhere else.

Nothing is written while calls succeed. The store may be gone as well (its host was the rank that ended): then every
other rank is named, and that the store is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

# A failure spreads in milliseconds: the first rank to leave closes its connections to the others.
_GRACE, _PAUSE = 1.0, 0.01
_FAILED = "failed in "


class RollCall:
    """What each rank of a group says about its end.

    Args:
        store: of a group that lives as long as the calls; None where there is none.
        rank: this rank.
        num_ranks: size of the group.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank = store, rank
        self._others = [peer for peer in range(num_ranks) if peer != rank]

    def say(self, text: str) -> None:
        """Leaves word for the others; the first word counts."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None and not self._store.check([self._key(self._rank)]):
                self._store.set(self._key(self._rank), text)

    def missing(self, where: str) -> str:
        """Leaves word that this rank failed at `where`; says in words which ranks are the reason."""
        found: dict[int, str] | None = None

        def ask() -> None:
            nonlocal found
            with contextlib.suppress(RuntimeError):
                found = self._ask(where)

        # A store whose host is gone may never answer; the thread ends with its connection.
        asker = threading.Thread(target=ask, name="ask-ranks", daemon=True)
        asker.start()
        asker.join(_GRACE + 0.5)
        if found is None:
            names = " or ".join(f"rank {peer}" for peer in self._others)
            return f"{names} (the store that could tell which is gone too)"
        silent = [f"rank {peer}" for peer in self._others if peer not in found]
        gave_up = [f"rank {peer}, which {text}" for peer, text in found.items() if not text.startswith(_FAILED)]
        # Others that failed are no reason, unless there is no better one.
        elsewhere = [f"rank {peer}, which {text}" for peer, text in found.items() if text != _FAILED + where]
        return ", ".join(silent + gave_up or elsewhere) or " or ".join(f"rank {peer}" for peer in self._others)

    def _ask(self, where: str) -> dict[int, str] | None:
        if self._store is None:
            return None
        self.say(_FAILED + where)
        end, found = time.monotonic() + _GRACE, dict[int, str]()
        while True:
            for peer in self._others:
                if peer not in found and self._store.check([self._key(peer)]):
                    found[peer] = self._store.get(self._key(peer)).decode()
            if len(found) == len(self._others) or time.monotonic() > end:
                return found
            time.sleep(_PAUSE)

    def _key(self, rank: int) -> str:
        return f"ended/{rank}"
