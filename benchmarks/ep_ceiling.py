"""What the link gives: the best of plain 16-byte stores into the next rank, all ranks at once, over numbers of SMs.

The kernel is comm_core/kernels/ceiling.cuh. Reads from the next rank stand beside the stores, as the operations read.
What was moved is compared before anything is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import ep_data
from benchmarks.ep_timing import Timer, gathered
from comm_core import ElasticBuffer
from comm_core.kernels import library as abi
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError

COUNTS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """GB/s into, and out of, the next rank by the number of SMs."""

    stores: dict[int, float]
    reads: dict[int, float]

    @property
    def gbs(self) -> float:
        """The best of stores: the ceiling."""
        return max(self.stores.values())


def measure(buffer: ElasticBuffer, timer: Timer, num_bytes: int, counts: tuple[int, ...]) -> Ceiling:
    """Both tables. Collective; uses the ring of the ranks, which nobody uses between operations.

    Raises:
        CommError: on every rank, where a byte did not arrive on one.
    """
    channel: Any = buffer._backend._channel  # type: ignore[attr-defined]
    num_bytes = num_bytes // 16 * 16
    channel.make_room(abi.RING, num_bytes, "barrier", {})
    following = (buffer.rank + 1) % buffer.num_ranks
    far, near = channel.memory.base(abi.RING, following), channel.memory.base(abi.RING)
    mine = ep_data.draw_bytes(num_bytes, buffer.rank, buffer.device)
    sms = sorted({min(count, channel.num_sms) for count in (*counts, channel.num_sms)})

    def move(to: int, source: int, count: int) -> None:
        stream = devices.raw_stream(devices.current_stream(buffer.device))
        channel.library.ceiling(to, source, num_bytes, count, stream)

    _check(buffer, mine, move, far, near)
    found = []
    back = torch.empty_like(mine)
    for to, source in ((far, mine.data_ptr()), (back.data_ptr(), far)):
        rates = {}
        for count in sms:
            took, _ = timer.series(lambda to=to, source=source, count=count: move(to, source, count))  # type: ignore[misc]
            rates[count] = num_bytes / took / 1e3
        found.append(rates)
    return Ceiling(*found)


def _check(buffer: ElasticBuffer, mine: torch.Tensor, move: Any, far: int, near: int) -> None:
    """Stores come where they are meant to, and reads bring back what the stores left."""
    num_bytes = mine.nbytes
    came, back = torch.full_like(mine, 0xA5), torch.full_like(mine, 0xA5)
    buffer.barrier()
    move(far, mine.data_ptr(), 7)
    buffer.barrier()
    move(came.data_ptr(), near, 7)
    move(back.data_ptr(), far, 7)
    before = (buffer.rank - 1) % buffer.num_ranks
    wanted = ep_data.draw_bytes(num_bytes, before, buffer.device)
    good = [torch.equal(came, wanted), torch.equal(back, mine)]
    buffer.barrier()
    answers = gathered(good)
    if not all(map(all, answers)):
        raise CommError(
            f"plain copies of {num_bytes} bytes between ranks are wrong; (stores, reads) by rank: {answers}"
        )
