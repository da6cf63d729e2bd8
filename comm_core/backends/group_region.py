"""A region over a torch.distributed group: messages are sends and receives, reading is two all-to-alls.

Nobody can read the memory of another process here. A message is a send that its receiver completes; until then it
stays at its place in the sender's memory. A send counts as given back when it is done: the data have left then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from comm_core.backends.channel import Channel


class GroupRegion:
    """One rank's part of a region of host memory; see `base.Region` for its operations.

    Args:
        channel: private groups of the ranks.
        number: of the region, the same on all ranks and not used before on this channel.
        num_bytes: size of each rank's part.
        num_lanes: lanes of messages between each pair of ranks.
    """

    def __init__(self, channel: Channel, number: int, num_bytes: int, num_lanes: int) -> None:
        self._channel, self.num_bytes = channel, num_bytes
        self._first_tag = number * num_lanes
        self.local = torch.zeros(num_bytes, dtype=torch.uint8)
        # Sends under way of each (lane, receiver), the oldest first; None for those without a byte.
        self._sends: dict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def put(self, where: str, lane: int, peers: Sequence[int], at: int, data: torch.Tensor) -> None:
        """Starts sends of a message, from a copy at its place."""
        self._channel.check_alive()
        place = self.local[at : at + data.numel()]
        if place.data_ptr() != data.data_ptr():
            place.copy_(data)
        for peer in peers:
            self._sends[lane, peer].append(self._send(where, lane, peer, place) if place.numel() else None)

    def take(self, where: str, lane: int, peer: int, at: int, out: torch.Tensor) -> None:
        """Receives the next message of a rank."""
        group, tag = self._channel.control_group, self._first_tag + lane
        if out.numel():
            with self._channel.alone_with(peer, where):
                dist.recv(out, group=group, group_src=peer, tag=tag)

    def release(self, lane: int, peers: Sequence[int]) -> None:
        """Nothing to say: a send that is done has told its sender."""

    def settle(self, where: str, lane: int, peers: Sequence[int], unreleased: int = 0) -> None:
        """Waits for the oldest sends, until few enough are under way."""
        for peer in peers:
            sends = self._sends[lane, peer]
            while len(sends) > unreleased:
                work = sends.popleft()
                if work is not None:
                    with self._channel.alone_with(peer, where):
                        work.wait()

    def read(
        self, op: str, settings: Mapping[str, int], owner: torch.Tensor, row: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sends row numbers to their owners and receives the rows. A call of all ranks."""
        channel = self._channel
        counts = torch.bincount(owner, minlength=channel.num_ranks).tolist()
        said = channel.agree(op, dict(settings), None, owner.shape[0], counts)
        asked_of_me = [line[channel.rank] for line in said.rows]
        order = owner.argsort(stable=True)
        asked = torch.empty(sum(asked_of_me), dtype=torch.int64)
        channel.finish(f"{op} (row numbers)", lambda: channel.all_to_all_host(asked, asked_of_me, row[order], counts))
        if not out.shape[1]:
            return
        table = self.local[: self.num_bytes // out.shape[1] * out.shape[1]].view(-1, out.shape[1])
        rows, arrived = table.index_select(0, asked), torch.empty_like(out)
        channel.finish(f"{op} (rows)", lambda: channel.all_to_all_host(arrived, counts, rows, asked_of_me))
        out[order] = arrived

    def close(self) -> None:
        """Lets go of the memory; sends that nobody received are dropped. Idempotent."""
        self._sends.clear()
        self.local = torch.empty(0, dtype=torch.uint8)

    def _send(self, where: str, lane: int, peer: int, place: torch.Tensor) -> Any:
        with self._channel.alone_with(peer, where):
            return dist.isend(place, group=self._channel.control_group, group_dst=peer, tag=self._first_tag + lane)
